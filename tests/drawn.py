"""Lengths and options for the properties of plans, drawn."""

import numpy as np
from hypothesis import strategies as st

from multipack.planning.cost import CostModel
from multipack.shapes import SHAPES

COSTS = [
    None,
    SHAPES["gpt2"],
    CostModel(None, linear=3, quadratic=1),
    CostModel(None, linear=9, quadratic=1, sliding=2, window=40),
    CostModel(None, linear=1, quadratic=0),
]


@st.composite
def problems(draw, tails=("keep",)):
    """Lengths and options, from ones to documents that fill a pack, alone or several to the last token."""
    capacity = draw(st.integers(1, 300))
    shortest = draw(st.sampled_from([1, 1, max(1, capacity // 3), capacity // 2 + 1]))
    lengths = draw(st.lists(st.integers(min(shortest, capacity), capacity), min_size=1, max_size=90))
    if draw(st.sampled_from([False, False, True])):
        pieces = [np.diff([0, *sorted({length % capacity for length in lengths[i : i + 5]} - {0}), capacity])
                  for i in range(0, len(lengths), 5)]  # fmt: skip
        lengths = np.concatenate(pieces)
    options = {
        "capacity": capacity,
        "packs_per_step": draw(st.integers(1, 6)),
        "window": draw(st.integers(1, 5)),
        "order": draw(st.sampled_from(["shuffled", "given"])),
        "tail": draw(st.sampled_from(tails)),
        "balance": draw(st.sampled_from(["cost", "joint", "tokens"])),
        "seed": draw(st.integers(0, 3)),
        "budget": draw(st.one_of(st.none(), st.integers(1, capacity))),
        "max_documents": draw(st.one_of(st.none(), st.integers(1, 4))),
        "group": draw(st.booleans()),
        "cost": draw(st.sampled_from(COSTS)),
    }
    return np.array(lengths), options
