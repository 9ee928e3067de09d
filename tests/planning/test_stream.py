"""Streams: every document once or named, memory bounded, steps as full and as near to the order as a plan's."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning import epoch, stream_blocks
from multipack.planning.plan import plan
from multipack.planning.report import minimum_steps
from multipack.planning.source import NAMED
from multipack.planning.stream import PackStream

CASES = settings(deadline=None, max_examples=60)
LENGTHS = np.random.default_rng(3).lognormal(3.5, 1.0, 3000).clip(1, 256).astype(np.int64)
OPTIONS = {"capacity": 256, "packs_per_step": 4}


def stream(documents=LENGTHS, **options):
    options.setdefault("length", None)
    return PackStream(documents, **(OPTIONS | options))


def told(step):
    """Everything that a step says, for comparisons."""
    dealt = step.deal(2)
    return (
        step.number,
        step.positions.tolist(),
        step.packs.offsets.tolist(),
        dealt.order.tolist(),
        dealt.offsets.tolist(),
        step.lengths.tolist(),
        step.denominator,
        [str(item) for item in step.items],
    )


def through_json(state):
    return json.loads(json.dumps(state))


@st.composite
def problems(draw):
    """Lengths and options, from ones to documents that fill a pack, some beyond it."""
    capacity = draw(st.integers(1, 200))
    shortest = draw(st.sampled_from([1, 1, max(1, capacity // 3), capacity // 2 + 1]))
    longest = draw(st.sampled_from([capacity, capacity, capacity + 20]))
    count = draw(st.sampled_from([0, 1, 5, 120, 120]))
    lengths = draw(
        st.lists(st.integers(min(shortest, capacity), longest), min_size=count, max_size=2 * count)
    )
    options = {
        "capacity": capacity,
        "packs_per_step": draw(st.integers(2, 5)),
        "lookahead": draw(st.integers(1, 4)),
        "order": draw(st.sampled_from(["shuffled", "given"])),
        "tail": draw(st.sampled_from(["keep", "drop"])),
        "balance": draw(st.sampled_from(["cost", "joint", "tokens"])),
        "seed": draw(st.integers(0, 3)),
        "budget": draw(st.one_of(st.none(), st.integers(1, capacity))),
        "max_documents": draw(st.one_of(st.none(), st.integers(1, 4))),
        "max_in_flight": draw(st.one_of(st.none(), st.integers(1, 40))),
        "align": draw(st.integers(1, min(3, capacity))),
        "overlong": "drop",
    }
    return lengths, options


class Counted:
    """An iterable that counts what was taken from it."""

    def __init__(self, lengths):
        self.lengths, self.taken = lengths, 0

    def __iter__(self):
        self.taken = 0
        for length in self.lengths:
            self.taken += 1
            yield "x" * length


@CASES
@given(problems())
def test_every_document_once_or_named_and_memory_bounded(problem):
    lengths, options = problem
    align, capacity = options["align"], options["capacity"]
    source = Counted(lengths)
    made = PackStream(source, **options)
    slots = -(-np.array(lengths, dtype=np.int64) // align) * align
    seen = []
    for number, step in enumerate(made):
        assert step.number == number
        packs = step.packs
        assert 1 <= len(packs) <= options["packs_per_step"]
        assert packs.sizes().min() >= 1
        assert packs.sizes().max() <= made.most_documents
        assert packs.sizes().max() <= (options["max_documents"] or capacity)
        assert packs.totals(slots[step.positions]).max() <= capacity
        if len(step) >= options["packs_per_step"]:
            assert len(packs) == options["packs_per_step"] or packs.sizes().max() == 1
        assert [len(item) for item in step.items] == step.lengths.tolist()
        assert step.targets == step.denominator == step.tokens - len(step)
        seen += step.positions.tolist()
        held = source.taken - made.dropped.documents - len(seen)
        assert held == made.in_flight
        assert held + len(step) <= made.most_in_flight
    too_long = np.flatnonzero(slots > capacity)
    assert made.dropped.first == tuple(too_long.tolist())
    assert (made.dropped.documents, made.dropped.tokens) == (
        len(too_long),
        sum(lengths[i] for i in too_long),
    )
    assert sorted([*seen, *made.left.tolist(), *too_long.tolist()]) == list(range(len(lengths)))
    assert made.position == len(lengths)
    assert options["tail"] == "drop" or not len(made.left)
    assert made.in_flight == len(made.left)


@CASES
@given(problems(), st.data())
def test_chunks_and_items_make_no_difference(problem, data):
    lengths, options = problem
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    array = np.array(lengths, dtype=np.int32)
    documents = [("a",) * length for length in lengths]
    ways = [
        PackStream(array, length=None, **options),
        PackStream(np.split(array, cuts), length=None, **options),
        PackStream(list(lengths), length=None, **options),
        PackStream((length for length in lengths), length=None, **options),
        PackStream(documents, **options),
        PackStream(lengths, length=lambda item: item, **options),
    ]
    results = [[told(step)[:-1] for step in made] for made in ways]
    assert all(result == results[0] for result in results)
    assert len({(made.dropped, made.position, tuple(made.left)) for made in ways}) == 1


def test_steps_of_a_stream_are_as_full_as_those_of_a_plan():
    made = stream()
    steps = list(made)
    fewest = minimum_steps(LENGTHS, 256, 4)
    assert len(steps) <= fewest + 2
    assert len(steps) <= plan(LENGTHS, **OPTIONS).num_steps + 1
    filled = [step.tokens / 1024 for step in steps]
    assert np.mean(filled[:-8]) > 0.998
    assert min(filled[:-8]) > 0.97
    assert made.short_steps == 0


@pytest.mark.parametrize("lookahead", [1, 4])
def test_documents_keep_near_their_place(lookahead):
    for order in ("given", "shuffled"):
        steps = list(stream(lookahead=lookahead, order=order))
        at = np.concatenate([np.full(len(step), step.number) for step in steps])
        positions = np.concatenate([step.positions for step in steps])
        natural = np.cumsum(LENGTHS) / 1024
        assert (np.abs(at - natural[positions]) <= 3 * lookahead + 1).all()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_what_waited_for_two_blocks_goes_first(lookahead, monkeypatch):
    begun = []

    def block(*arguments):
        begun.append(arguments[3])  # where the queue stands: what is old is placed first
        return epoch.block(*arguments)

    monkeypatch.setattr(stream_blocks, "block", block)
    # Documents of 60 % cannot share a pack, so that a block finds room for half of those that it looks at.
    lengths = np.resize([154, 20, 154, 60, 154, 154, 77], 900)
    made, before, longest, passed = stream(lengths, lookahead=lookahead), set(), {}, [(0, 0)]
    for step in made:
        if step.number % lookahead:
            continue
        state = step.state_dict()
        queue, waiting = state["queue"]["positions"], state["waiting"]
        if state["ended"]:
            break
        assert queue[:waiting] == sorted(queue[:waiting])
        assert set(queue[: state["old"]]) == set(queue[:waiting]) & before
        before = set(queue[:waiting])
        passed.append((state["old"], waiting))
        for position in before:
            longest[position] = longest.get(position, 0) + 1
    assert [(state.old, state.next) for state in begun] == passed[: len(begun)]
    assert max(old for old, _ in passed) > 0
    assert len(longest) > 100
    assert max(longest.values()) <= 3


def test_orders_seeds_and_epochs():
    def positions(**options):
        epoch = options.pop("epoch", 0)
        made = stream(**options)
        made.set_epoch(epoch)
        return [step.positions.tolist() for step in made]

    assert positions() == positions()
    assert positions() != positions(seed=1)
    assert positions() != positions(epoch=1)
    assert positions(order="given") == positions(order="given", seed=1, epoch=2)
    made = stream()
    first = [step.positions.tolist() for step in made]
    assert [step.positions.tolist() for step in made] == first == positions()
    made.set_epoch(1)
    assert (made.step, made.epoch, made.in_flight) == (0, 1, 0)
    head = [step.positions.tolist() for step in itertools.islice(made, 5)]
    made.set_epoch(1)  # changes nothing
    assert head + [step.positions.tolist() for step in made] == positions(epoch=1)


def test_empty_and_single():
    for documents in ([], np.empty(0, dtype=np.int64), iter([]), [[]], [np.empty(0, dtype=np.int64)]):
        made = stream(documents)
        assert list(made) == []
        assert made.in_flight == 0
    (step,) = stream([5])
    assert (len(step), step.tokens, step.targets, len(step.packs)) == (1, 5, 4, 1)
    assert len(step.deal(4)) == 4
    (step,) = PackStream(["hello"], **OPTIONS)
    assert step.items.tolist() == ["hello"]
    made = stream([5], tail="drop")
    assert list(made) == []
    assert made.left.tolist() == [0]


def test_few_documents_in_flight():
    made = stream(np.ones(5000, dtype=np.int64), max_in_flight=100, lookahead=2)
    steps = list(made)
    assert made.most_in_flight == 100
    assert [len(step) for step in steps] == [100] * 50
    assert made.short_steps == 50
    roomy = stream(max_in_flight=90, lookahead=8)
    steps = list(roomy)
    assert roomy.short_steps == 0
    assert len(steps) <= minimum_steps(LENGTHS, 256, 4) + 3


@pytest.mark.parametrize("align", [1, 4])
def test_a_document_that_does_not_fit_is_named(align):
    lengths = [10, 20, 300, 30]
    for made in (
        stream(lengths, align=align),
        PackStream(["x" * n for n in lengths], align=align, **OPTIONS),
    ):
        for _ in range(2):  # it is not passed over by asking again
            with pytest.raises(ValueError, match=r"position 2 of the source has 300 tokens.*overlong='drop'"):
                list(made)
        assert made.step == 0
    for made in (stream([10, 0, 3]), PackStream(["a", "", "b"], **OPTIONS)):
        with pytest.raises(ValueError, match=r"at least 1 token.*position 1"):
            list(made)


def test_endless_overlong_documents_take_no_memory():
    made = PackStream(itertools.chain(["x" * 300] * (NAMED + 500), ["ok"]), overlong="drop", **OPTIONS)
    (step,) = made
    assert step.positions.tolist() == [NAMED + 500]
    assert made.dropped.documents == NAMED + 500
    assert len(made.dropped.first) == NAMED
    assert made.dropped.tokens == 300 * (NAMED + 500)


def test_targets_and_weighting():
    counts = np.arange(3000) % LENGTHS
    sums = {"token": counts.sum(), "document": np.count_nonzero(counts)}
    for weighting, total in sums.items():
        made = stream(targets=lambda positions: counts[positions], loss_weighting=weighting)
        steps = list(made)
        assert sum(step.denominator for step in steps) == total
        assert sum(step.targets for step in steps) == counts.sum()
    items = [
        {"tokens": [0] * int(length), "targets": int(n)} for length, n in zip(LENGTHS, counts, strict=True)
    ]
    made = PackStream(
        items, length=lambda item: len(item["tokens"]), targets=lambda item: item["targets"], **OPTIONS
    )
    head = list(itertools.islice(made, 5))
    other = PackStream(
        items, length=lambda item: len(item["tokens"]), targets=lambda item: item["targets"], **OPTIONS
    )
    other.load_state_dict(through_json(made.state_dict()))
    rest = sum(step.targets for step in other)
    assert sum(step.targets for step in head) + rest == counts.sum()
    with pytest.raises(ValueError, match=r"targets gave 5 for the document of 5 tokens at position 1"):
        list(stream([6, 5], targets=lambda positions: np.array([5, 5])))
    with pytest.raises(ValueError, match="targets must return whole numbers"):
        list(PackStream(["abc"], targets=lambda item: 0.5, **OPTIONS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity must be a whole number of at least 1"),
        ({"lookahead": 0}, "lookahead must be a whole number of at least 1"),
        ({"packs_per_step": 0}, "packs_per_step"),
        ({"max_in_flight": 0}, "max_in_flight must be"),
        ({"tail": "carry"}, "tail='carry' is unknown; choose one of keep, drop"),
        ({"overlong": "split"}, "overlong='split' is unknown"),
        ({"resume": "no"}, "resume='no' is unknown"),
        ({"resume": "items"}, "with length=None the source gives lengths only"),
        ({"shard": (2, 2)}, "outside its world"),
        ({"shard": 2}, r"shard must be a pair \(rank, world\)"),
        ({"align": 512}, "align=512 exceeds"),
        ({"budget": 300}, "budget=300"),
        ({"seed": 0.5}, "seed must be an integer"),
        ({"loss_weighting": "words"}, "loss_weighting='words' is unknown"),
        ({"documents": 5}, "documents must be an iterable"),
        ({"capacity": 1 << 40}, "exceeds the largest supported"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        stream(**options)


def test_what_is_no_length_is_refused():
    for documents in (["ab"], [[1, 2], [1.5]], [np.zeros((2, 2), dtype=int)], [[[1], [2, 3]]]):
        with pytest.raises(ValueError, match="length=None takes"):
            list(stream(documents))
    once = stream(iter([5, 6]))
    assert len(list(once)) == 1
    with pytest.raises(ValueError, match="an iterator that was read before"):
        list(once)
