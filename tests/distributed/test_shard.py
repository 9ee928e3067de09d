"""ZeRO 2 and 3, HSDP and groups of one rank: the collectives they cost, and their precision.

That they train as one process does is in test_parity.py.
"""

import pytest
import sharding as tiny
import torch
from torch.distributed.tensor import DTensor

from multipack.parallel.fsdp import shard, synchronizing
from multipack.parallel.materialize import materialize


def _mesh_of(world, stage):
    """Over all ranks, as the stage wants it."""
    if stage in ("zero2", "zero3"):
        return tiny.mesh_of(dp_shard=world.size, tp=1)["dp_shard"]
    groups = world.size if stage == "groups of one" else 2
    mesh = tiny.mesh_of(dp_replicate=groups, dp_shard=world.size // groups, tp=1)
    return mesh["dp_replicate", "dp_shard"]


def _sharded(world, kind, stage, **options):
    model = tiny.on_meta(kind)
    shard(model, _mesh_of(world, stage), reshard=stage != "zero2", **options)
    materialize([model], tiny.drawn(kind), tiny.whole_shapes(kind), world)
    return model


def _counted(world, stage, micro_batches, keep):
    """Collectives of the second step, and the numbers that they moved."""
    model = _sharded(world, "llama", stage)
    updates = torch.optim.SGD(model.parameters(), lr=0.01)
    when = synchronizing(model, keep=keep)
    tiny.together(world, model, model, updates, 1, when, micro_batches)
    packs, targets = tiny.packs_of_step(1, world.size, micro_batches)
    with tiny.Communication() as seen:
        for number, each in enumerate(packs[world.rank]):
            with when(number == micro_batches - 1):
                (model(each) / targets).backward()
    return dict(seen.calls), dict(seen.elements)


@pytest.mark.parametrize(
    ("stage", "keep", "gathers", "gathered"),
    # A step of 3 micro-batches over 3 blocks and what is outside of them; gathered in Ψ and, outside of blocks, Ω.
    [
        pytest.param("zero2", True, 4, (1, 0), marks=pytest.mark.slow),
        pytest.param("zero2", False, 3 * 4, (3, 0), marks=pytest.mark.slow),
        ("zero3", False, 3 * (2 * 3 + 1), (6, -3)),
        pytest.param("hsdp", False, 3 * (2 * 3 + 1), (6, -3), marks=pytest.mark.slow),
    ],
)
def test_shards_reduce_every_micro_batch_and_sum_over_groups_once(pools, stage, keep, gathers, gathered):
    model = tiny.on_meta("llama")
    parameters = sum(each.numel() for each in model.parameters())
    outside = parameters - sum(each.numel() for each in model.blocks.parameters())
    for calls, elements in pools(4).run(_counted, stage, 3, keep):
        moved = {
            "allgather": gathered[0] * parameters + gathered[1] * outside,
            "reduce_scatter": 3 * parameters,
        }
        expected = {"allgather": gathers, "reduce_scatter": 3 * 4}
        if stage == "hsdp":
            expected["allreduce"], moved["allreduce"] = 4, parameters // 2
        assert calls == expected
        assert elements == moved


def test_groups_of_one_rank_reduce_once_a_step_and_gather_nothing(pools):
    parameters = sum(each.numel() for each in tiny.on_meta("llama").parameters())
    for calls, elements in pools(2).run(_counted, "groups of one", 3, False):
        assert calls == {"allreduce": 4}
        assert elements == {"allreduce": parameters}


def _in_bfloat16(world, kind, stage):
    """Relative errors of loss and gradient, and the dtypes of what a block was given and computed with."""
    model = _sharded(world, kind, stage, dtype=torch.bfloat16)
    packs, targets = tiny.packs_of_step(0, world.size)
    seen = {}

    def look(attention, given, output):
        rotation = given[2]
        seen["tables"] = None if rotation is None else str(rotation[0].dtype)
        seen["weights"] = str(attention.query.weight.dtype)
        seen["stream"] = str(output.dtype)

    model.get_submodule("blocks.1.attention").register_forward_hook(look)
    loss = model(packs[world.rank][0]) * (world.size / targets)
    loss.backward()
    seen["gradient"] = str({each.grad.dtype for each in model.parameters()})
    reference = tiny.fresh(kind)
    expected = sum(reference(own[0]) for own in packs) / targets
    expected.backward()
    total = world.sum([float(loss.detach())])[0] / world.size
    exact = [each.grad for each in reference.parameters()]
    found = [each.grad.full_tensor() for each in model.parameters()]
    error = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    error = (error / sum(float(each.square().sum()) for each in exact)) ** 0.5
    return seen, abs(total / float(expected.detach()) - 1), error


@pytest.mark.parametrize(
    ("kind", "stage"), [("gpt", "zero3"), ("llama", "zero2"), ("llama", "groups of one")]
)
def test_bfloat16_is_gathered_and_float32_reduced(pools, kind, stage):
    for seen, of_loss, of_gradient in pools(2).run(_in_bfloat16, kind, stage):
        assert seen["weights"] == seen["stream"] == "torch.bfloat16"
        assert seen["tables"] == (None if kind == "gpt" else "torch.float32")
        assert seen["gradient"] == "{torch.float32}"
        assert of_loss < 2e-3
        assert 1e-3 < of_gradient < 3e-2  # bfloat16 has 8 bits: each rounding is up to 2**-9 = 2e-3


def _evaluated(world, stage):
    """Whether anything is whole after an evaluation, and whether training goes on as without it."""
    losses = []
    for evaluates in (False, True):
        model = _sharded(world, "llama", stage)
        updates, when = tiny.adamw(model.parameters()), synchronizing(model, keep=stage == "zero2")
        if evaluates:
            model.eval()
            with torch.no_grad():
                model(tiny.pack(7))
            assert all(isinstance(each, DTensor) for each in model.parameters())
            model.train()
        losses.append(tiny.together(world, model, model, updates, 2, when))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_an_evaluation_leaves_nothing_whole(pools, stage):
    pools(2).run(_evaluated, stage)
