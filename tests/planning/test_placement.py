"""Placements of a pack on context ranks: complete, within slots, even, and no slower than a ring or Ulysses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multipack.planning.cost import CostModel
from multipack.planning.placement import Placing, Prices, head_tail, place
from multipack.planning.placement_report import measure_context
from multipack.shapes import SHAPES

LLAMA = SHAPES["llama-8b"]
COST = CostModel.from_shape(LLAMA)
STEEP = CostModel(None, linear=50)


def held(placement):
    """Rank of every token of every document; −1 for a token in no piece."""
    ranks = [np.full(length, -1) for length in placement.lengths]
    pieces = zip(placement.document, placement.rank, placement.start, placement.stop, strict=True)
    for document, rank, start, stop in pieces:
        assert start < stop
        assert (ranks[document][start:stop] == -1).all(), "two pieces hold a token"
        ranks[document][start:stop] = rank
    return ranks


def exchanged(placement):
    """Tokens that each rank sends and receives, token by token."""
    sent, received = np.zeros(placement.ranks, int), np.zeros(placement.ranks, int)
    for tokens in held(placement):
        for rank in np.unique(tokens):
            needed = np.flatnonzero(tokens == rank)[-1] + 1
            others = tokens[:needed][tokens[:needed] != rank]
            received[rank] += len(others)
            np.add.at(sent, others, 1)
    return sent, received


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 120), max_size=14),
    ranks=st.integers(1, 9),
    more=st.sampled_from([0, 0, 1, 7, 40]),
    key=st.sampled_from([0, 3, 1000]),
    ring=st.booleans(),
)
@example(lengths=[], ranks=3, more=0, key=0, ring=False)
@example(lengths=[1], ranks=9, more=0, key=0, ring=True)
@example(lengths=[90, 90, 90], ranks=9, more=0, key=0, ring=False)
@example(lengths=[7] * 9, ranks=2, more=0, key=3, ring=False)  # full, and no document fits beside
def test_every_token_is_on_one_rank_within_its_slots(lengths, ranks, more, key, ring):
    slots = -(-sum(lengths) // ranks) + more
    found = head_tail(lengths, ranks, slots) if ring else place(lengths, STEEP, ranks, slots, Prices(key))
    tokens = held(found)
    assert all((each >= 0).all() for each in tokens)
    assert (found.tokens <= slots).all()
    assert found.costs(STEEP).sum() == (STEEP.cost(lengths).sum() if lengths else 0)
    sent, received = exchanged(found)
    assert found.sent.tolist() == sent.tolist()
    assert found.received.tolist() == received.tolist()
    again = place(lengths, STEEP, ranks, slots, Prices(key))
    assert ring or found.rank.tolist() == again.rank.tolist()
    for each in [] if ring or key else tokens:  # from both ends inwards, in one order of ranks
        turns = [rank for place_, rank in enumerate(each) if place_ == 0 or each[place_ - 1] != rank]
        middle = turns[: len(turns) // 2 + 1]
        assert len(set(middle)) == len(middle)


def test_short_documents_stay_whole_and_long_ones_have_as_many_ranks_as_they_cost():
    cost = CostModel(None, linear=400)
    placement = place([1500, *[100] * 446], cost, 8, 8192, Prices(200))
    assert (np.bincount(placement.document)[1:] == 1).all()
    costs = placement.costs(cost, 8192)
    assert costs.max() < 1.02 * costs.mean()
    assert (
        len(np.unique(placement.rank[placement.document == 0])) == 3
    )  # its attention is that of 2.7 ranks; no power of two


def mix(slots, share, shortest, longest, seed=0):
    """Documents of a supervised mix that fill these slots: lognormal, and a share of long ones."""
    draw, lengths, left = np.random.default_rng(seed), [], slots
    while left:
        is_long = draw.random() < share
        length = draw.integers(shortest, longest + 1) if is_long else draw.lognormal(6.5, 1.0)
        lengths.append(min(max(int(length), 8), left))
        left -= lengths[-1]
    return draw.permutation(lengths)


@pytest.mark.parametrize(("share", "shortest", "longest"), [(0.0011, 16384, 65536), (0.02, 65536, 131072)])
def test_ranks_of_a_whole_step_are_even(share, shortest, longest):
    lengths = mix(64 * 8192, share, shortest, longest)
    costs = place(lengths, COST, 64, 8192).costs(COST)
    assert costs.max() <= 1.10 * costs.mean()


@pytest.mark.parametrize("flops_per_byte", [1333, 20_000])
def test_no_pack_is_slower_than_with_a_ring_or_ulysses(flops_per_byte):
    packs = [mix(65536, 0.02, 8192, 65536, seed) for seed in range(4)] + [np.array([65536])]
    placing = Placing(COST, 8, Prices.of(LLAMA, 8, flops_per_byte=flops_per_byte))
    for pack in packs:
        found = {each.method: each for each in measure_context([pack], placing, 65536, LLAMA)}
        assert found["auto"].time <= 1.003 * min(found["ring"].time, found["ulysses"].time)
        assert found["planned"].time <= 1.003 * found["ring"].time
    window = replace(LLAMA, window=4096)
    only = Placing(CostModel.from_shape(window), 8, Prices.of(window, 8))
    assert [each.method for each in measure_context(packs, only, 65536, window)] == ["ulysses"]


def test_ulysses_is_chosen_where_it_is_cheaper():
    prices = Prices.of(LLAMA, 8)
    assert Placing(COST, 8, prices)([65536], 65536) is None
    assert Placing(COST, 8, replace(prices, token=None))([65536], 65536) is not None
    assert Placing(COST, 8, prices)([512] * 128, 65536).sent.max() == 0
    assert Prices.of(LLAMA, 64).token is None, "64 ranks cannot divide 32 heads"


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(ValueError, match=r"17 tokens do not fit into 2 ranks of 8 slots: use at least 9"):
        place([17], COST, 2, 8)
    with pytest.raises(ValueError, match=r"model\.window=8 .*context_method=ulysses"):
        place([17], CostModel(None, 1, sliding=1, window=8), 2, 9)
