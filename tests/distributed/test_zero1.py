"""An optimizer that ranks divide: the bits of the whole one, and each state held once."""

from collections import Counter
from unittest import mock

import pytest
import sharding as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from multipack.parallel import zero1
from multipack.parallel.fsdp import synchronizing
from multipack.parallel.materialize import check_equal
from multipack.parallel.zero1 import ShardedOptimizer, assign_owners


def _two_groups(parameters):
    """AdamW whose biases and norms learn at twice the rate and do not decay."""
    matrices = [each for each in parameters.values() if each.dim() > 1]
    rest = [each for each in parameters.values() if each.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr_scale": 2.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def _trained(world, kind, updates, model, steps=3):
    call = DistributedDataParallel(model)
    when = synchronizing(call)
    for step in range(steps):
        packs, targets = tiny.packs_of_step(step, world.size, 2)
        for number, each in enumerate(packs[world.rank]):
            with when(number == 1):
                (call(each) * (world.size / targets)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in updates.param_groups:
            group["lr"] = 1e-3 / (1 + step) * group.get("lr_scale", 1.0)
        updates.step()
        updates.zero_grad()


def _equal(world, kind, bucket_bytes):
    """Divided and whole optimizers of the same gradients; bytes of their states; who owns what."""
    with mock.patch.object(zero1, "BUCKET_BYTES", bucket_bytes):
        return _compared(world, kind)


def _compared(world, kind):
    models, optimizers = [], []
    for divides in (False, True):
        model = tiny.fresh(kind)
        model.positions.weight.requires_grad_(False) if kind == "gpt" else None
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if divides:
            updates = ShardedOptimizer(_two_groups, trained, tiny.mesh_of(dp_replicate=world.size))
        else:
            updates = _two_groups(trained)
        _trained(world, kind, updates, model)
        models.append(model)
        optimizers.append(updates)
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two), name
    check_equal(dict(models[1].named_parameters()), world)
    names = {each: name for name, each in models[1].named_parameters()}
    owned = {names[each] for each in optimizers[1].state}
    assert owned == {name for name, rank in optimizers[1].owners.items() if rank == world.rank}
    of_whole = {
        name: optimizers[0].state[each] for name, each in models[0].named_parameters() if each.requires_grad
    }
    for each, slots in optimizers[1].state.items():
        for slot, value in slots.items():
            assert torch.equal(value, of_whole[names[each]][slot]), (names[each], slot)
    return sorted(owned), sorted(of_whole)


@pytest.mark.parametrize(
    ("size", "kind", "bucket_bytes"),
    [
        (2, "gpt", 6000),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((4, "llama", 6000), (2, "gpt", 64 * 2**20), (4, "llama", 64 * 2**20))
        ),
    ],
)
def test_a_divided_optimizer_gives_the_bits_of_the_whole_one(pools, size, kind, bucket_bytes):
    outcomes = pools(size).run(_equal, kind, bucket_bytes)
    owned = [name for names, _ in outcomes for name in names]
    assert sorted(owned) == outcomes[0][1]


def _counted(world):
    model = tiny.fresh("llama")
    updates = ShardedOptimizer(
        _two_groups, dict(model.named_parameters()), tiny.mesh_of(dp_replicate=world.size)
    )
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    with tiny.Communication() as seen:
        updates.step()
    assert all(each.grad is not None for each in model.parameters())
    return dict(seen.calls), dict(seen.elements)


def test_a_step_sends_every_parameter_once(pools):
    parameters = sum(each.numel() for each in tiny.on_meta("llama").parameters())
    for calls, elements in pools(4).run(_counted):
        assert calls == {"broadcast": 4}
        assert elements == {"broadcast": parameters}


@given(st.lists(st.integers(0, 10**6), max_size=60), st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_no_rank_owns_more_than_the_mean_and_the_largest(sizes, ranks):
    owners = assign_owners({f"{number}": size for number, size in enumerate(sizes)}, ranks)
    assert set(owners) == {f"{number}" for number in range(len(sizes))}
    loads = Counter(dict.fromkeys(range(ranks), 0))
    for name, rank in owners.items():
        assert 0 <= rank < ranks
        loads[rank] += sizes[int(name)]
    assert max(loads.values()) <= sum(sizes) / ranks + max(sizes, default=0)
