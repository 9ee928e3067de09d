"""The promise of the window: whatever the lengths and options, no document is passed over by more than two blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning import epoch
from multipack.planning.block import Rules
from multipack.planning.order import permutation
from multipack.planning.packing import pack
from multipack.planning.plan import plan
from multipack.planning.stream import PackStream

CASES = settings(deadline=None, max_examples=100)


def longest_wait(steps):
    """Most steps between the first that trained an entry at the same or a later place, and an entry's own.

    Args:
        steps: for each step, its entries' places in the sequence.
    """
    reached = np.maximum.accumulate([places.max() for places in steps])
    return max(int((step - np.searchsorted(reached, places)).max()) for step, places in enumerate(steps))


def promised(window):
    return 3 * max(window, 2) - 1


def places(made):
    """For each step of a plan, its entries' places; of a document that occurs twice, the earlier place comes first."""
    own = np.arange(len(made.lengths))
    own = permutation(made.seed, made.epoch, len(own)) if made.options.order == "shuffled" else own
    sequence = np.concatenate([made.carried_in, own])
    at = {}
    for place, document in enumerate(sequence.tolist()):
        at.setdefault(document, []).append(place)
    found = np.array([at[document].pop(0) for document in made.order.tolist()])
    ends = made.pack_offsets[made.step_offsets]
    return [found[begin:end] for begin, end in itertools.pairwise(ends)]


@st.composite
def problems(draw):
    """Lengths of which few share a pack, or none with any other; and options."""
    capacity = draw(st.integers(5, 400))
    count = draw(st.integers(1, 300))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    low, high = draw(
        st.sampled_from([(0, 1), (1 / 4, 1 / 2), (1 / 3, 1), (1 / 2, 1), (0, 1 / 2), (0, 1 / 8)])
    )
    lengths = random.integers(int(low * capacity), int(high * capacity) + 1, count)
    longs = random.random(count) < draw(st.sampled_from([0.0, 0.0, 0.1, 0.6]))
    options = {
        "capacity": capacity,
        "packs_per_step": draw(st.integers(1, 4)),
        "order": draw(st.sampled_from(["shuffled", "given"])),
        "seed": draw(st.integers(0, 9)),
        "budget": draw(st.sampled_from([None, None, capacity // 2 + 1])),
        "max_documents": draw(st.sampled_from([None, None, 2, 4])),
        "group": draw(st.booleans()),
    }
    return np.where(longs, capacity - capacity // 50, lengths).clip(1, capacity), options


@CASES
@given(problems(), st.integers(1, 5), st.sampled_from(["keep", "drop", "carry"]), st.data())
def test_nobody_is_passed_over_by_more_than_two_blocks(problem, window, tail, data):
    lengths, options = problem
    full = options["packs_per_step"] * options["capacity"]
    if tail != "keep" and lengths.sum() < full:
        tail = "keep"
    carried = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=20))
    made = plan(lengths, **options, window=window, tail=tail, carried=carried)
    assert longest_wait(places(made)) <= promised(window)


@CASES
@given(problems(), st.integers(1, 5), st.floats(0, 1))
def test_a_fixed_number_of_steps_keeps_the_promise_of_the_window_that_it_took(problem, window, share):
    lengths, options = problem
    packs = len(pack(lengths, options["capacity"], "best_fit", options["max_documents"]))
    least = min(-(-packs // options["packs_per_step"]), len(lengths))
    steps = least + int(share * (len(lengths) - least))
    made = plan(lengths, **options, window=window, steps=steps)
    assert made.num_steps == steps
    assert longest_wait(places(made)) <= promised(made.window)


@CASES
@given(problems(), st.integers(1, 4), st.sampled_from(["keep", "drop"]))
def test_streams_keep_it_too(problem, lookahead, tail):
    lengths, options = problem
    stream = PackStream(lengths, length=None, lookahead=lookahead, tail=tail, **options)
    steps = [step.positions for step in stream if len(step)]
    assert not steps or longest_wait(steps) <= promised(lookahead)


@pytest.mark.parametrize(("window", "longest", "steps"), [(1, 2, 985), (4, 11, 860), (16, 47, 815)])
def test_one_pack_a_step(window, longest, steps):
    """Half of the documents exclude each other, and a run of them longer than a block still keeps no one waiting."""
    lengths = np.random.default_rng(7).integers(1, 8193, 1500)
    made = plan(lengths, capacity=8192, packs_per_step=1, window=window)
    assert longest_wait(places(made)) <= longest
    assert made.num_steps <= steps


@pytest.mark.parametrize("window", [1, 2, 4])
def test_few_documents_a_pack(window):
    """Where documents wait so that others make packs alike, they do not wait for longer."""
    random = np.random.default_rng(7)
    lengths = np.where(random.random(1500) < 0.5, 2048, random.integers(64, 2048, 1500))
    for packs in (1, 4):
        made = plan(lengths, capacity=8192, packs_per_step=packs, window=window)
        assert longest_wait(places(made)) <= promised(window)


def test_it_is_kept_by_what_a_block_takes(monkeypatch):
    """Without a look at the blocks that follow, the same documents wait for longer."""
    lengths = np.random.default_rng(7).integers(1, 8193, 1500)
    monkeypatch.setattr(epoch, "fits", lambda *_: True)
    made = plan(lengths, capacity=8192, packs_per_step=1, window=2)
    assert longest_wait(places(made)) > promised(2)


def one_block(lengths, waiting, old, packs, steps, **changes):
    """The lengths that one step trains, and the queue after it; the first entries wait, and so many of them are old."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    options = {"capacity": 100, "packs_per_step": packs, "step_tokens": 100 * packs, "max_documents": 9}
    rules = Rules(
        **(options | changes),
        price=lambda x: 500 * x + x * x,
        group=True,
        full=False,
        shuffled=True,
        seed=0,
        epoch=0,
    )
    begin = epoch.Progress(next=waiting, old=old, waiting=np.arange(waiting))
    entries, pack_sizes, _, after = epoch.block(ends, None, rules, begin, steps, 1, 1)
    totals = np.add.reduceat(np.array(lengths)[entries], np.cumsum(pack_sizes) - pack_sizes)
    assert totals.max() <= 100
    return sorted(np.array(lengths)[entries].tolist()), after


def test_what_is_old_fits_though_few_tokens_are_aimed_at():
    """A block whose share of the tokens is less than what must have its place now takes all of that."""
    trained, after = one_block([40, 40, 40, 10, 10], 3, 3, packs=2, steps=2, step_tokens=60)
    assert trained[-3:] == [40, 40, 40]
    assert after.waiting_old == 0


def test_what_is_old_fits_though_the_usual_ways_find_no_room():
    """Packs of 280 of 300 tokens, which neither spreading nor best fit in the order of waiting finds."""
    trained, after = one_block([21, 67, 47, 25, 15, 41, 64, 90, 90, 90], 7, 7, packs=3, steps=2)
    assert trained == [15, 21, 25, 41, 47, 64, 67]
    assert after.waiting_old == 0


def test_what_waits_is_placed_so_that_the_rest_fits():
    """60 alone would leave 140 tokens to a pack of 100; with the 40 it leaves 50 and 50."""
    trained, after = one_block([60, 50, 50, 40, 90, 90, 90, 90], 4, 0, packs=1, steps=5)
    assert trained == [40, 60]
    assert after.waiting[: after.waiting_old].tolist() == [1, 2]


@pytest.mark.parametrize(("seed", "window"), [(12, 2), (30, 3)])
def test_the_last_blocks_as_one(seed, window):
    """Where the last two blocks are cut again as one, those that two had passed over stand in its first steps."""
    random = np.random.default_rng(seed)
    lengths = np.where(random.random(70) < 0.5, 98, random.integers(3, 9, 70))
    made = plan(lengths, capacity=100, packs_per_step=2, window=window, seed=seed)
    assert longest_wait(places(made)) <= promised(window)
