"""Full steps: no empty pack, every document once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.integrations.full_steps import full_steps
from multipack.planning.options import PlanOptions
from multipack.planning.packing import pack


@st.composite
def problems(draw):
    capacity = draw(st.integers(1, 120))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    options = PlanOptions(
        capacity=capacity,
        packs_per_step=draw(st.integers(1, 6)),
        window=2,
        order=draw(st.sampled_from(["given", "shuffled"])),
        max_documents=draw(st.sampled_from([0, 1, 4])),
    )
    return np.array(lengths), options


@settings(deadline=None, max_examples=80)
@given(problems(), st.booleans())
def test_steps_are_full_if_there_are_enough_documents(problem, drop_last):
    lengths, options = problem
    packs = options.packs_per_step
    steps = full_steps(lengths, options, drop_last=drop_last)
    made = [steps[step] for step in range(len(steps))]
    held = [documents for step in made for documents in step]
    assert len(made) >= 1
    assert all(0 < len(documents) <= (options.max_documents or 60) for documents in held)
    assert all(lengths[documents].sum() <= options.capacity for documents in held)
    assert sorted(np.concatenate([*held, steps.left]).tolist()) == list(range(len(lengths)))
    assert all(len(step) == packs for step in made[:-1])
    assert steps.is_full == (len(made[-1]) == packs)
    assert steps.tokens == lengths[np.concatenate(held)].sum()
    fewest = len(pack(lengths, options.capacity, max_documents=options.max_documents or None))
    if drop_last:
        assert len(held) <= max(fewest, packs) or fewest % packs == 0
    else:
        assert steps.left.size == 0
        assert steps.is_full or len(lengths) < packs * -(-fewest // packs)
    again = full_steps(lengths, options, drop_last=drop_last, steps=len(steps))
    assert len(again) == len(steps)


def options_of(capacity, packs, window, **more):
    return PlanOptions(capacity=capacity, packs_per_step=packs, window=window, order="given", **more)


def test_no_step_is_made_that_would_lack_documents():
    """401 documents fit into 400 packs, but only if the two short ones, far apart in order, share one."""
    lengths = np.full(401, 60)
    lengths[[0, 300]] = 45
    steps = full_steps(lengths, options_of(100, 8, 1))
    assert (len(steps), steps.is_full, steps.left.size) == (50, True, 0)


def test_documents_that_are_left_fill_empty_packs_first():
    """One document per pack: a long one takes the tokens of a step, but two ranks need two documents."""
    lengths = np.array([1, 4, 1, 1, 1])
    steps = full_steps(lengths, options_of(4, 2, 1, max_documents=1), drop_last=True)
    assert [len(steps[step]) for step in range(len(steps))] == [2, 2]
    assert steps.tokens + lengths[steps.left].sum() == 8
