"""Items of documents that share their beginnings: complete, as large as planned, and the same after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multipack.data.packs.collate import PackedCollator
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import Document
from multipack.data.views.prefix_tree import PrefixTree
from multipack.data.views.shared_prefixes import FlatTokens, SharedPrefixes
from multipack.planning.cost import CostModel
from multipack.planning.options import PlanOptions
from multipack.planning.report import report
from multipack.shapes import ModelShape

SHAPE = ModelShape(layers=4, window=24, window_layers=2, d_model=8, heads=2, d_ff=8, vocabulary_size=90)


def corpus(count: int = 160) -> list[np.ndarray[Any, Any]]:
    """Documents with one of three system prompts; groups of four have a question in common as well."""
    random = np.random.default_rng(1)
    systems = [random.integers(0, 90, size) for size in (40, 24, 0)]
    made = []
    for number in range(count // 4):
        question = random.integers(0, 90, random.integers(3, 30))
        for _ in range(4):
            answer = random.integers(0, 90, random.integers(1, 40))
            made.append(np.concatenate([systems[number % 3], question, answer]))
    return made


DOCUMENTS = corpus()
LENGTHS = np.array([len(each) for each in DOCUMENTS])
GROUPS = np.arange(len(DOCUMENTS)) // 4


def options(**changes: Any) -> PlanOptions:
    return PlanOptions(**{"capacity": 512, "packs_per_step": 4, "window": 2, **changes})


def source(groups: bool = False, **changes: Any) -> SharedPrefixes:
    return SharedPrefixes(
        FlatTokens.of(DOCUMENTS),
        groups=GROUPS if groups else None,
        options=options(**changes),
        min_prefix=8,
        window=24,
    )


def sampler(groups: bool = False, rank: int = 0, world: int = 1, **changes: Any) -> PackedBatchSampler:
    made = options(**changes)
    cost = CostModel.from_shape(SHAPE)
    return PackedBatchSampler(
        source(groups, **changes), options=made, rank=rank, world_size=world, seed=3, cost=cost
    )


@pytest.mark.parametrize("groups", [False, True])
def test_slots_and_costs_of_items_are_those_of_their_trees(groups: bool) -> None:
    items = source(groups).items(seed=1, epoch=2)
    assert sorted(items.members.order.tolist()) == list(range(len(DOCUMENTS)))
    assert sorted(items.member_places.tolist()) == list(range(len(DOCUMENTS)))
    cost = CostModel.from_shape(SHAPE)
    found = cost.cost(items.slots, items.pairs)
    for number, members in enumerate(items.members):
        tree = PrefixTree.of([DOCUMENTS[member] for member in members], 8)
        assert items.slots[number] == tree.num_slots <= 512
        places = np.concatenate(
            [np.arange(at, at + size) + 1 for at, size in zip(tree.start, tree.length, strict=True)]
        )
        seen = cost.quadratic * places + cost.sliding * np.minimum(places, 24)
        assert found[number] == cost.linear * tree.num_slots + 2 * seen.sum()
        if groups:
            assert len(set(GROUPS[members])) == 1
    assert items.slots.sum() < 0.9 * LENGTHS.sum()
    assert items.least_slots <= items.slots.sum()


@pytest.mark.parametrize(("groups", "tail"), [(False, "carry"), (True, "keep"), (False, "drop")])
def test_every_epoch_has_each_document_once_whatever_the_ranks(groups: bool, tail: str) -> None:
    alone = sampler(groups, tail=tail)
    ranks = [sampler(groups, rank, 2, tail=tail) for rank in range(2)]
    collate = PackedCollator.of(alone)
    trained: list[int] = []
    for epoch in range(3):
        for each in (alone, *ranks):
            each.set_epoch(epoch)
        packs = list(alone)
        plan = alone.plan
        documents = np.concatenate([plan.documents(step) for step in range(plan.num_steps)]).tolist()
        assert sorted(number for pack in packs for number in pack) == sorted(documents)
        both = [number for each in ranks for pack in each for number in pack]
        assert sorted(both) == sorted(documents)
        left = [*plan.dropped.tolist(), *plan.carried.tolist()]
        assert sorted(documents + left) == sorted([*range(len(DOCUMENTS)), *plan.carried_in.tolist()])
        trained += documents
        for step in range(plan.num_steps):
            assert plan.targets(step) == plan.denominator(step) == sum(LENGTHS[plan.documents(step)] - 1)
        for pack in packs:
            spans = [np.array([[0, LENGTHS[number]]]) for number in pack]
            batch = collate(
                [Document(DOCUMENTS[n].astype(np.uint16), s) for n, s in zip(pack, spans, strict=True)]
            )
            assert batch.num_slots <= 512
            assert batch.num_tokens == LENGTHS[pack].sum()
    if tail == "carry":
        assert sorted(trained + alone.plan.carried.tolist()) == sorted([*range(len(DOCUMENTS))] * 3)


def test_packs_of_documents_that_share_nothing_are_those_without_sharing() -> None:
    tokens = [np.append(number, each) for number, each in enumerate(DOCUMENTS)]
    made = options()
    for rank in range(2):
        given: dict[str, Any] = {"options": made, "rank": rank, "world_size": 2, "seed": 3}
        alone = PackedBatchSampler(LENGTHS + 1, **given)
        shared = PackedBatchSampler(
            SharedPrefixes(FlatTokens.of(tokens), groups=None, options=made, min_prefix=8), **given
        )
        for epoch in range(2):
            alone.set_epoch(epoch)
            shared.set_epoch(epoch)
            assert list(shared) == list(alone)


def test_a_resumed_sampler_continues_exactly() -> None:
    first = sampler(tail="carry")
    first.set_epoch(1)
    packs = list(first)
    begun, other = sampler(tail="carry"), sampler(tail="carry")
    begun.set_epoch(1)
    iterator = iter(begun)
    taken = [next(iterator) for _ in range(4)]
    other.load_state_dict(begun.state_dict())
    assert [*taken, *other] == packs
    with pytest.raises(ValueError, match="belongs to another plan"):
        sampler(groups=True, tail="carry").load_state_dict(begun.state_dict())


def test_the_order_is_kept_as_windows_promise_and_epochs_differ() -> None:
    made = sampler(order="given").plan
    assert made.min_prefix is not None
    found = report(made)
    assert found.displacement_max <= 2 * made.window
    assert found.documents == len(DOCUMENTS)
    assert found.tokens == LENGTHS.sum()
    assert found.minimum_slots <= found.slots < LENGTHS.sum()
    assert found.minimum_packs <= found.packs
    shuffled = sampler()
    before = [shuffled.plan.documents(step).tolist() for step in range(shuffled.steps_per_epoch)]
    shuffled.set_epoch(1)
    assert before != [shuffled.plan.documents(step).tolist() for step in range(shuffled.steps_per_epoch)]


def test_a_group_larger_than_a_pack_is_cut_and_options_are_refused() -> None:
    tokens = FlatTokens.of([[1] * 20 + [number, 7, 8] for number in range(10)])
    made = SharedPrefixes(tokens, groups=[5] * 10, options=options(capacity=30), min_prefix=8).items()
    assert made.slots.max() <= 30
    assert len(made.slots) == 4  # 20 shared tokens and three of each document
    with pytest.raises(ValueError, match=r"plan\.max_documents=3"):
        source(max_documents=3)
    with pytest.raises(ValueError, match="groups must be 10 numbers"):
        SharedPrefixes(tokens, groups=[1], options=options())
