"""The functions of verl, OpenRLHF and TRL that divide rollouts, with this balancer inside."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from multipack.integrations import openrlhf, verl

RNG = np.random.default_rng(0)


class Batch(dict):
    """A TensorDict as far as verl's function needs it."""

    def __getitem__(self, key):
        return (
            super().__getitem__(key) if isinstance(key, str) else Batch({k: v[key] for k, v in self.items()})
        )


def batch_of(lengths, width=64):
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return Batch(input_ids=torch.arange(len(lengths))[:, None].expand(-1, width), attention_mask=mask)


def each_once(parts, count):
    assert all(parts)
    assert sorted(index for part in parts for index in part) == list(range(count))


@pytest.mark.parametrize("module", [verl, openrlhf])
def test_partitions_by_their_name_and_arguments(module):
    assert module.get_seqlen_balanced_partitions([3, 3, 3, 0], 4, equal_size=False) == [[0], [1], [2], [3]]
    lengths = RNG.integers(1, 4000, 512).tolist()
    for equal_size in (False, True):
        parts = module.get_seqlen_balanced_partitions(
            seqlen_list=lengths, k_partitions=16, equal_size=equal_size
        )
        each_once(parts, 512)
        assert parts == [sorted(part) for part in parts]
        sums = [sum(lengths[index] for index in part) for part in parts]
        assert max(sums) <= 1.0002 * sum(sums) / 16
        assert not equal_size or {len(part) for part in parts} == {32}
    with pytest.raises(ValueError, match="3 items cannot be divided among 4 ranks"):
        module.get_seqlen_balanced_partitions([1, 2, 3], 4, False)


def test_verl_groups_stay_together_also_where_they_are_not_adjacent():
    uids = ["a", "b", "a", "c", "b", "c", "d"]
    parts = verl.get_group_balanced_partitions([5, 9, 5, 7, 1, 2, 8], uids, 2)
    each_once(parts, 7)
    assert not {uids[index] for index in parts[0]} & {uids[index] for index in parts[1]}


@pytest.mark.parametrize("balanced", [False, True])
def test_verl_micro_batches_hold_the_limit(balanced):
    batch = batch_of([7] * 8)
    made, indices = verl.rearrange_micro_batches(batch, 8, use_dynamic_bsz_balance=balanced)
    each_once(indices, 8)
    assert [part["attention_mask"].sum().item() for part in made] == [7] * 8
    assert [part["input_ids"][:, 0].tolist() for part in made] == indices
    lengths = RNG.integers(1, 64, 100)
    made, indices = verl.rearrange_micro_batches(
        batch_of(lengths.tolist()), max_token_len=128, min_num_micro_batch=3, num_batches_divided_by=4
    )
    each_once(indices, 100)
    assert len(made) % 4 == 0
    assert max(lengths[own].sum() for own in indices) <= 128
    loads = [int(verl.WORKLOAD.cost(lengths[own]).sum()) for own in indices]
    assert loads == sorted(loads[: len(loads) // 2]) + sorted(loads[len(loads) // 2 :], reverse=True)
    workload = 24_576 * lengths + lengths**2
    assert (verl.WORKLOAD.cost(lengths) == workload).all()


def test_verl_nested_batches():
    ids = torch.nested.nested_tensor([torch.ones(n) for n in (3, 9, 4, 8)], layout=torch.jagged)
    rows = {"input_ids": ids}
    batch = type(
        "Nested", (), {"__getitem__": lambda _, key: rows[key] if isinstance(key, str) else key.tolist()}
    )()
    made, indices = verl.rearrange_micro_batches(batch, 12)
    each_once(indices, 4)
    assert made == indices
    assert len(indices) == 2


@pytest.mark.parametrize("balanced", [False, True])
def test_verl_groups_of_consecutive_sequences_stay_in_one_micro_batch(balanced):
    lengths = RNG.integers(1, 60, 96)
    for size in (1, 2, 3):
        made, indices = verl.rearrange_micro_batches(
            batch_of(lengths.tolist()), 200, None, 2, True, None, balanced, force_group_size=size
        )
        each_once(indices, 96)
        assert len(made) % 2 == 0
        assert max(lengths[own].sum() for own in indices) <= 200
        for own in indices:
            assert own == sorted(own)
            assert [number // size for number in own[::size]] == sorted({number // size for number in own})
            assert len(own) % size == 0
    for size, budget, message in ((5, 200, "multiple of force_group_size=5"), (2, 60, "group of .* tokens")):
        with pytest.raises(ValueError, match=message):
            verl.rearrange_micro_batches(batch_of(lengths.tolist()), budget, force_group_size=size)
    with pytest.raises(ValueError, match="2 groups on a rank cannot fill 3 micro-batches"):
        verl.rearrange_micro_batches(batch_of([1] * 4), 9, min_num_micro_batch=3, force_group_size=2)


def test_verl_arguments_are_those_of_its_engine():
    """verl 0.9.1 gives every argument after the batch by name (workers/engine/utils.py)."""
    import inspect

    parameters = inspect.signature(verl.rearrange_micro_batches).parameters
    defaults = {name: each.default for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY}
    assert defaults == {
        "batch": inspect.Parameter.empty,
        "max_token_len": inspect.Parameter.empty,
        "dp_group": None,
        "num_batches_divided_by": None,
        "same_micro_num_in_dp": True,
        "min_num_micro_batch": None,
        "use_dynamic_bsz_balance": True,
        "force_group_size": 1,
    }


def other_rank(monkeypatch, longest, fewest, groups):
    """A second rank of the process group that has these numbers."""
    from torch import distributed

    def all_reduce(values, op, group):
        assert (op, group) == (distributed.ReduceOp.MIN, "dp")
        values.copy_(torch.minimum(values, torch.tensor([-longest, -fewest, groups, 1])))

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)


def test_verl_ranks_agree_on_the_number_and_on_errors(monkeypatch):
    batch = batch_of([7, 3, 2, 2])
    other_rank(monkeypatch, longest=8, fewest=3, groups=4)
    assert len(verl.rearrange_micro_batches(batch, 8, "dp")[0]) == 3
    assert len(verl.rearrange_micro_batches(batch, 8, "dp", same_micro_num_in_dp=False)[0]) == 2
    other_rank(monkeypatch, longest=9, fewest=1, groups=4)
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit into max_token_len=8"):
        verl.rearrange_micro_batches(batch, 8, "dp")
    other_rank(monkeypatch, longest=8, fewest=3, groups=2)
    with pytest.raises(ValueError, match="2 sequences on a rank cannot fill 3 micro-batches"):
        verl.rearrange_micro_batches(batch, 8, "dp")


def test_verl_without_a_group_communicates_with_nobody(monkeypatch):
    other_rank(monkeypatch, longest=9, fewest=3, groups=2)
    assert len(verl.rearrange_micro_batches(batch_of([7, 3, 2, 2]), 8)[0]) == 2


def test_openrlhf_micro_batches_hold_the_limit_if_it_is_given():
    lengths = [5, 3, 7, 2, 6]
    assert openrlhf.get_minimum_num_micro_batch_size(lengths, 5, 2, 1) == 3
    parts = openrlhf.get_seqlen_balanced_partitions(lengths, 3, False, max_tokens=10)
    each_once(parts, 5)
    assert max(sum(lengths[index] for index in part) for part in parts) <= 10
    with pytest.raises(ValueError, match="max_tokens=10 do not hold all sequences; use 3 parts"):
        openrlhf.get_seqlen_balanced_partitions(lengths, 2, False, max_tokens=10)


class TreeRow:
    """TRL's row without shared beginnings."""

    def __init__(self):
        self.samples, self.tokens, self.trained, self.load = [], [], 0, 0

    def add(self, sample):
        self.samples.append(sample)
        self.tokens += sample["input_ids"]
        self.load += len(sample["input_ids"]) ** 2


class Source:
    """TRL's batchers, which give these micro-batches: for each row the lengths of its rollouts, one a group."""

    def __init__(self, dataset, num_processes, token_budget=None, metrics=None):
        self.dataset, self.num_processes, self.token_budget = dataset, num_processes, token_budget

    def __iter__(self):
        samples = list(self.dataset)
        rows = [TreeRow() for _ in range(self.num_processes)]
        for number, sample in enumerate(samples):
            rows[number % self.num_processes].add(sample)
        yield rows


def rollouts(lengths):
    return [{"input_ids": [0] * length, "group_id": number} for number, length in enumerate(lengths)]


@pytest.fixture
def batchers(monkeypatch):
    names = ["trl", "trl.experimental", "trl.experimental.async_grpo"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    host = SimpleNamespace(TreeRow=TreeRow, FixedCountBatcher=Source, TokenBudgetBatcher=Source)
    sys.modules[names[-1]].async_grpo_trainer = host
    monkeypatch.delitem(sys.modules, "multipack.integrations.trl_batchers", raising=False)
    yield importlib.import_module("multipack.integrations.trl_batchers")
    sys.modules.pop("multipack.integrations.trl_batchers", None)


@pytest.mark.parametrize("name", ["FixedCountBatcher", "TokenBudgetBatcher"])
def test_trl_rows_have_equal_costs_and_lose_no_rollout(batchers, name):
    lengths = [9, 1, 8, 2, 7, 3, 9, 1]
    words = ({"token_budget": 25, "metrics": {}},) if name == "TokenBudgetBatcher" else ({},)
    (rows,) = getattr(batchers, name)(rollouts(lengths), 2, **words[0])
    assert sorted(sample["group_id"] for row in rows for sample in row.samples) == list(range(8))
    assert max(row.load for row in rows) <= 1.05 * sum(length**2 for length in lengths) / 2
    assert max(len(row.tokens) for row in rows) <= 25


def test_older_trl_is_refused_by_name(batchers):
    del sys.modules["trl.experimental.async_grpo"].async_grpo_trainer.TreeRow
    sys.modules.pop("multipack.integrations.trl_batchers")
    with pytest.raises(ImportError, match=r"needs TRL 1\.16 or later: pip install"):
        importlib.import_module("multipack.integrations.trl_batchers")


def test_trl_does_not_drop_long_rollouts(batchers):
    with pytest.raises(ValueError, match="a rollout of 9 tokens does not fit into token_budget=8; raise"):
        list(batchers.TokenBudgetBatcher(rollouts([3, 9]), 1, 8, {}))
