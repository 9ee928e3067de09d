"""Predicted bytes against those that torch holds: one process, the real decoder, both families."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.launch.memory_model import (
    kept_by_block,
    memory,
    parameters_around,
    parameters_of,
    parameters_of_block,
    saved_by_block,
    saved_by_loss,
)
from multipack.models.decoder import PARALLEL_PLAN, Decoder
from multipack.models.recompute import recompute_blocks
from multipack.parallel import stages
from multipack.parallel.parallel_config import ParallelConfig
from multipack.shapes import SHAPES, ModelShape

LLAMA = ModelShape(
    layers=4, heads=4, kv_heads=2, d_model=64, d_ff=224, vocabulary_size=300, tied=False, context=512
)
GPT = ModelShape(
    layers=2,
    heads=4,
    d_model=64,
    d_ff=256,
    vocabulary_size=300,
    positions="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    context=512,
)
FAMILIES = {
    "llama": LLAMA,
    "llama, tied, wide heads, dropout": dataclasses.replace(LLAMA, tied=True, head_dim=24, dropout=0.1),
    "llama, large vocabulary": dataclasses.replace(LLAMA, layers=2, vocabulary_size=3000),
    "gpt": GPT,
    "gpt, dropout": dataclasses.replace(GPT, layers=3, dropout=0.1),
}
SLOTS = 512
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
RECOMPUTE = ("none", "selective", "full")


class Held(TorchDispatchMode):
    """Bytes of all storages that operations made and that are still alive: now, and the most so far."""

    def __init__(self, known=()):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive, self.peak = {}, 0

    @property
    def now(self):
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        return sum(size for _, size in self.alive.values())  # few, in a small model

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        self.now  # noqa: B018  # forget what is gone: its address may be used again
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)
        return made


def batch():
    rng = np.random.default_rng(0)
    lengths = (200, 100, 84, 50, 78)
    documents = [Document(rng.integers(0, 300, length), np.array([[0, length]])) for length in lengths]
    return PackedCollator(max_documents=8, max_seqlen=SLOTS, pad_to=None, pad_id=0)(documents)


def decoder(shape, recompute="none"):
    torch.manual_seed(0)
    model = Decoder(shape)
    recompute_blocks(model, recompute)
    return model


def loss_of(model, dtype):
    with torch.autocast("cpu", DTYPES[dtype] or torch.bfloat16, enabled=DTYPES[dtype] is not None):
        return model(batch())


def predicted(shape, dtype, recompute, micro_batches=1):
    return memory(shape, ParallelConfig(), 1, SLOTS, dtype, recompute, micro_batches, "cpu")


# --- parameters, gradients, optimizer state -----------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "gpt2", "gpt2-xl", "llama-1b", "llama-8b", "qwen2.5-0.5b"])
def test_parameters_are_those_of_the_decoder(name):
    shape = SHAPES[name].with_vocabulary(SHAPES[name].vocabulary_size or 1000)
    with torch.device("meta"):
        assert parameters_of(shape) == Decoder(shape).parameter_count()


@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_state_is_what_is_held_after_a_step(shape):
    model = decoder(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, "fp32").backward()
    optimizer.step()
    found = predicted(shape, "bf16", "none")
    assert found.parameters == sum(each.nbytes for each in model.parameters())
    assert found.gradients == sum(each.grad.nbytes for each in model.parameters())
    moments = [value for slots in optimizer.state.values() for value in slots.values() if value.dim()]
    assert found.optimizer == sum(each.nbytes for each in moments)


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_tensor_parallel_divides_what_its_plan_divides(shape, tensor):
    shape = dataclasses.replace(shape, kv_heads=4)
    kinds = {pattern.replace(".*.", ".0."): kind for pattern, kind in PARALLEL_PLAN.items()}
    block = around = 0
    for name, parameter in decoder(shape).named_parameters():
        module, _, own = name.rpartition(".")
        kind = kinds.get(module)
        if module.startswith("blocks.") and not module.startswith("blocks.0."):
            continue
        divided = kind in ("column", "vocabulary") or (kind == "row" and own == "weight")
        size = parameter.numel() // (tensor if divided else 1)
        block, around = (
            block + size * module.startswith("blocks."),
            around + size * (not module.startswith("blocks.")),
        )
    assert parameters_of_block(shape, tensor) == block
    assert parameters_around(shape, None, tensor) == around


def test_zero1_deals_whole_tensors():
    shape = SHAPES["gpt2"]
    shares = [memory(shape, ParallelConfig(data="zero1"), ranks, 1024).optimizer for ranks in (2, 4, 64)]
    assert shares == [8 * (parameters_of(shape) // 2), 8 * 50_257 * 768, 8 * 50_257 * 768]


def test_replicas_have_buckets_for_gradients_all_the_time():
    alone, two = (memory(LLAMA, ParallelConfig(), ranks, SLOTS) for ranks in (1, 2))
    assert two.instants["loss"] - alone.instants["loss"] == two.gradients == alone.gradients
    assert two.instants["step"] == alone.instants["step"]


def test_parallelism_without_shards_computes_under_autocast():
    """Parameters stay float32 where `fully_shard` divides them among one rank, and so does what blocks add up."""
    shape = dataclasses.replace(LLAMA, kv_heads=4)
    for words in ({"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}):
        plain, shards = (
            memory(shape, ParallelConfig(data=data, **words), 8, SLOTS, micro_batches=2)
            for data in ("ddp", "zero2")
        )
        assert plain.copies > 0 == shards.copies
        if "pipeline" in words:
            assert plain.gathered == plain.parameters
        assert plain.activations > shards.activations


def test_offload_keeps_shards_on_the_host():
    there = memory(LLAMA, ParallelConfig(data="zero3"), 4, SLOTS)
    gone = memory(LLAMA, ParallelConfig(data="zero3", offload="cpu"), 4, SLOTS)
    assert gone.state == 0
    assert gone.host == there.state
    assert there.peak - gone.peak == pytest.approx(there.parameters + there.optimizer, abs=8)


# --- activations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_saved_bytes_are_those_that_autograd_is_given(shape, dtype, recompute):
    model = decoder(shape, recompute)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage  # kept, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model, dtype)
    found = predicted(shape, dtype, recompute)
    wanted = found.activations + found.loss + (found.weights if recompute == "none" else 0)
    assert wanted == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=0.1)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_saved_bytes_are_those_that_stay_after_the_forward_pass(shape, dtype, recompute):
    """What a checkpoint keeps by itself is counted too, which hooks on saved tensors do not see."""
    model = decoder(shape, recompute)
    with Held(model.parameters()) as held:
        loss = loss_of(model, dtype)
    found = predicted(shape, dtype, recompute)
    wanted = found.activations + found.loss + (found.weights if recompute == "none" else 0)
    assert wanted == pytest.approx(held.now, rel=0.04)
    assert loss.requires_grad


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [LLAMA, FAMILIES["llama, large vocabulary"], GPT], ids=["a", "b", "c"])
def test_the_peak_is_predicted(shape, dtype, recompute, micro_batches):
    model = decoder(shape, recompute)
    if micro_batches > 1:
        loss_of(model, dtype).backward()
    known = [*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None)]
    with Held(known) as held:
        loss_of(model, dtype).backward()
    found = predicted(shape, dtype, recompute, micro_batches)
    before = found.parameters + found.optimizer + (found.gradients if micro_batches > 1 else 0)
    passes = {name: size for name, size in found.instants.items() if name != "step"}
    assert max(passes.values()) - before == pytest.approx(held.peak, rel=0.15)


def test_a_counted_block_says_what_it_saves():
    shape, usual = dataclasses.replace(LLAMA, kv_heads=4), ParallelConfig()
    slots, d, f = 128, shape.d_model, shape.d_ff
    saved = saved_by_block(shape, usual, slots, "bf16")
    assert saved["residual"] == 2 * slots * d * 4
    assert saved["feed-forward"] == 4 * slots * f * 2
    assert saved["heads"] == 3 * slots * d * 2
    kept = [sum(kept_by_block(shape, usual, slots, "bf16", kind).values()) for kind in RECOMPUTE]
    assert kept[0] == sum(saved.values())
    assert kept[0] > kept[1] > kept[2] == slots * d * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_axes_divide_activations(dtype):
    shape, slots = dataclasses.replace(LLAMA, kv_heads=4), 256
    whole = saved_by_block(shape, ParallelConfig(tensor=2), slots, dtype)
    more = saved_by_block(shape, ParallelConfig(tensor=4), slots, dtype)
    assert {name for name in whole if more[name] == whole[name]} == {"projected"}  # gathered
    assert all(2 * more[name] == whole[name] for name in whole if name != "projected")
    one = memory(shape, ParallelConfig(context=1), 4, SLOTS, dtype)
    ring = memory(shape, ParallelConfig(context=4, context_method="ring"), 4, SLOTS, dtype)
    assert 4 * ring.activations == one.activations
    ulysses = memory(shape, ParallelConfig(context=4), 4, SLOTS, dtype)
    assert ring.activations < ulysses.activations < 1.2 * ring.activations
    assert saved_by_loss(shape, slots, 4, dtype)["output matrix"] == 300 // 4 * 64 * 4


# --- pipelines ----------------------------------------------------------------------------------------


def test_schedules_hold_as_many_micro_batches_as_they_must():
    shape = dataclasses.replace(LLAMA, layers=16)
    flights = {
        schedule: [
            part.in_flight
            for part in stages.parts_of_ranks(shape, ParallelConfig(pipeline=4, schedule=schedule), 8)
        ]
        for schedule in ("gpipe", "1f1b", "interleaved")
    }
    assert flights == {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1], "interleaved": [5.5, 4.5, 3.5, 2.5]}
    held = [
        memory(shape, ParallelConfig(pipeline=4, schedule=schedule), 4, SLOTS, "fp32", "none", 8).peak
        for schedule in ("1f1b", "interleaved", "gpipe")
    ]
    assert held == sorted(held)
