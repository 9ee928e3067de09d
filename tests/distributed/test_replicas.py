"""Replicas: equal from the start and after loading, by hashes; gradients are synchronized once a step."""

import gc

import pytest
import sharding as tiny
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from multipack.parallel.build import replicate
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ParallelConfig

STEPS, MICRO_BATCHES = 2, 2


def engine_of(world, words, seed):
    return tiny.engine_of(world, ParallelConfig(**words), tiny.LLAMA, micro_batches=MICRO_BATCHES, seed=seed)


def train(engine, steps):
    for step in range(steps):
        packs, targets = tiny.packs_of_step(step, engine.mesh.data_size, MICRO_BATCHES)
        engine.forward_backward(packs[engine.mesh.data_rank], targets)
        engine.clip(1.0)
        engine.step(1e-3)
        yield engine.check_replicas()


def synchronized(world, words):
    """Reductions of buckets that DDP made in some steps, how many buckets there are, and hashes from the start on."""
    engine = engine_of(world, words, 100 + world.rank)  # replicas would start apart
    buckets = []

    def counting(state, bucket):
        buckets.append(bucket.index())
        return allreduce_hook(state, bucket)

    engine._call.register_comm_hook(engine.mesh.axis("dp_replicate").get_group(), counting)
    hashes = [engine.check_replicas(), *train(engine, STEPS)]
    del engine  # the hook is Python: it must be gone before the process group that would call it
    gc.collect()
    return len(buckets), len(set(buckets)), hashes


@pytest.mark.parametrize(
    "words", [pytest.param({}, marks=pytest.mark.slow), {"data": "zero1"}, {"context": 2}], ids=str
)
def test_gradients_synchronize_once_a_step_and_replicas_start_equal(pools, words):
    found = pools(2).run(synchronized, words)
    for reductions, buckets, hashes in found:
        assert reductions == STEPS * buckets > 0
        assert hashes == found[0][2]
        assert len(set(hashes)) == STEPS + 1  # and it is not one hash for all


def loaded(world, words):
    """Errors if a rank loads another state than the others or changes its own, and whether hashes come back."""
    engine, told = engine_of(world, words, 5), []
    own, *_ = train(engine, 1)
    saved = {group: {} for group in engine.state()}
    for group, tensors in engine.state().items():
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            saved[group][name] = whole.detach().clone()
    name = "norm.weight"
    for group, key in (("model", name), ("optimizer", f"{name}.exp_avg")):
        other = {each: dict(tensors) for each, tensors in saved.items()}
        if world.rank == 1:
            other[group][key] = other[group][key] + 1
        try:
            engine.load_state(tiny.Whole(other))
        except RuntimeError as error:
            told.append(str(error))
    engine.load_state(tiny.Whole(saved))
    again = engine.check_replicas()
    if world.rank == 1:
        with torch.no_grad():
            local = engine.parameters[name]
            (local.to_local() if hasattr(local, "to_local") else local)[0] += 1
    try:
        engine.check_replicas()
    except RuntimeError as error:
        told.append(str(error))
    return told, own == again


@pytest.mark.parametrize("words", [{}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_rank_that_holds_other_values_is_named_on_loading_too(pools, words):
    for told, same in pools(2).run(loaded, words):
        assert same
        pieces = ("model.norm.weight", "optimizer.norm.weight.exp_avg", "model.norm.weight")
        for message, piece in zip(told, pieces, strict=True):
            assert message.startswith(f"ranks [1] hold another {piece} than rank 0 (1 tensors in all)")


def where_gradients_are(world):
    """Addresses of an engine's gradients before and after each of three micro-batches, in two steps."""
    model = tiny.fresh("llama")
    mesh = build_mesh(ParallelConfig(), world)
    call = replicate(model, mesh.axis("dp_replicate"))
    engine = ModelEngine([model], tiny.adamw(model.parameters()), mesh, call=call)
    found = []

    def look(_=None):
        found.append([each.grad.data_ptr() for each in model.parameters()])

    for step in range(4):
        if step == 2:  # in the second step DDP rebuilds its buckets, in the order in which gradients came
            found.clear()
        if step:
            look()
            assert not any(each.grad.any() for each in model.parameters())
        packs, targets = tiny.packs_of_step(step, world.size, 3)
        engine.forward_backward(packs[world.rank], targets, look)
        look()
        engine.step(1e-3)
    return found


def test_gradients_of_replicas_stay_in_their_buckets(pools):
    for found in pools(2).run(where_gradients_are):
        assert all(each == found[0] for each in found)
