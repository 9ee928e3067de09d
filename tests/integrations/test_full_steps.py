"""Full steps: no empty pack, every document once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.integrations.host_sampler import full_steps
from multipack.planning.options import PlanOptions
from multipack.planning.packing import pack


def packs_of(made):
    """The non-empty packs of each step, as dealt to one rank each."""
    return [
        [documents for documents in made.deal(step, made.packs_per_step) if len(documents)]
        for step in range(made.num_steps)
    ]


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


@settings(deadline=None, max_examples=60)
@given(problems(), st.booleans())
def test_steps_are_full_if_there_are_enough_documents(problem, drop_last):
    lengths, options = problem
    packs = options.packs_per_step
    plan = full_steps(lengths, options, drop_last=drop_last)
    made = packs_of(plan)
    held = [documents for step in made for documents in step]
    assert len(made) >= 1
    assert all(len(documents) <= (options.max_documents or 60) for documents in held)
    assert all(lengths[documents].sum() <= options.capacity for documents in held)
    assert sorted(np.concatenate([*held, plan.dropped]).tolist()) == list(range(len(lengths)))
    assert all(len(step) == packs for step in made[:-1])
    is_full = plan.num_documents >= plan.num_steps * packs
    assert is_full == (len(made[-1]) == packs)
    fewest = len(pack(lengths, options.capacity, max_documents=options.max_documents or None))
    if drop_last:
        assert len(held) <= max(fewest, packs) or fewest % packs == 0
    else:
        assert plan.dropped.size == 0
        assert is_full or len(lengths) < packs * -(-fewest // packs)
    again = full_steps(lengths, options, drop_last=drop_last, steps=plan.num_steps)
    assert again.num_steps == plan.num_steps


def test_no_step_is_made_that_would_lack_documents():
    """401 documents fit into 400 packs, but only if the two short ones, far apart in order, share one."""
    lengths = np.full(401, 60)
    lengths[[0, 300]] = 45
    plan = full_steps(lengths, PlanOptions(capacity=100, packs_per_step=8, window=1, order="given"))
    assert (plan.num_steps, plan.num_documents) == (50, 401)
    assert all(len(step) == 8 for step in packs_of(plan))


def test_dropped_documents_fill_empty_packs_first():
    """One document per pack: a long one takes the tokens of a step, but two ranks need two documents."""
    options = PlanOptions(capacity=4, packs_per_step=2, window=1, order="given", max_documents=1)
    plan = full_steps(np.array([1, 4, 1, 1, 1]), options, drop_last=True)
    assert [len(step) for step in packs_of(plan)] == [2, 2]
    assert plan.num_documents + plan.dropped.size == 5
