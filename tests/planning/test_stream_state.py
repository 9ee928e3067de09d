"""Places in a stream: resuming is exact anywhere, and what cannot be resumed is refused with the reason."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multipack
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


def _positions(told_steps):
    return [position for each in told_steps for position in each[1]]


@CASES
@given(problems(), st.data())
def test_resuming_anywhere_is_exact(problem, data):
    lengths, options = problem
    kind = data.draw(st.sampled_from(["array", "chunks", "items", "function", "kept items"]))
    documents = [[7] * length for length in lengths]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    remaining = iter(documents)

    def made():
        if kind == "array":
            return PackStream(np.array(lengths, dtype=np.int64), length=None, **options)
        if kind == "chunks":
            return PackStream(np.split(np.array(lengths, dtype=np.int64), cuts), length=None, **options)
        if kind == "function":
            return PackStream(lambda start: iter(documents[start:]), **options)
        return PackStream(documents, **options)

    whole = [told(step) for step in made()]
    stops = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=1, max_size=3)))
    state, got = None, []
    for stop in [*stops, len(whole) + 1]:
        part = PackStream(remaining, resume="items", **options) if kind == "kept items" else made()
        if state is not None:
            part.load_state_dict(state)
            assert through_json(part.state_dict()) == state
        fresh = itertools.islice(part, stop - len(got)) if stop > len(got) else []
        got += [told(step) for step in fresh]
        state = through_json(part.state_dict())
        if kind == "kept items":  # the next process gets an iterator that nobody has read
            remaining = iter(list(remaining))
    assert got == whole
    assert part.left.tolist() == sorted(
        set(range(len(lengths))) - set(_positions(whole)) - set(part.dropped.first)
    )
    again = made() if kind != "kept items" else PackStream(remaining, resume="items", **options)
    again.load_state_dict(state)
    assert list(again) == []
    assert again.left.tolist() == part.left.tolist()


def test_states_are_those_of_what_was_yielded():
    ahead = list(itertools.islice(stream(), 9))  # a loader that prefetches
    whole = [told(step) for step in stream()]
    for step in ahead:
        after, before = stream(), stream()
        after.load_state_dict(through_json(step.state_dict()))
        before.load_state_dict(through_json(step.state_dict(before=True)))
        assert told(next(iter(before))) == whole[step.number]
        assert [told(each) for each in after] == whole[step.number + 1 :]


def test_a_stream_goes_on_after_a_break():
    made = stream()
    halves = [told(step) for step in itertools.islice(made, 7)]
    halves += [told(step) for step in made]
    assert halves == [told(step) for step in stream()]


def test_numbers_of_numpy_are_plain_in_a_state():
    made = stream(
        capacity=np.int64(256), packs_per_step=np.int32(4), max_documents=np.int64(9), lookahead=np.int8(2)
    )
    next(iter(made))
    assert through_json(made.state_dict())["options"]["lookahead"] == 2


class Failing:
    """A source that raises once, at a position."""

    def __init__(self, at):
        self.at, self.failed = at, False

    def __iter__(self):
        for position, length in enumerate(LENGTHS.tolist()):
            if position == self.at and not self.failed:
                self.failed = True
                raise OSError("connection lost")
            yield [1] * length


@pytest.mark.parametrize("at", [0, 3, 500, 2999])
def test_what_a_source_raises_loses_nothing(at):
    documents = [[1] * length for length in LENGTHS.tolist()]
    whole = [told(step) for step in PackStream(documents, **OPTIONS)]
    made, got = PackStream(Failing(at), **OPTIONS), []
    with pytest.raises(OSError, match="connection lost"):
        got.extend(told(step) for step in made)
    state = through_json(made.state_dict())
    rest = [told(step) for step in made]  # the same stream goes on
    assert got + rest == whole
    other = PackStream(documents, **OPTIONS)
    other.load_state_dict(state)
    assert [told(step) for step in other] == rest
    generator = PackStream(iter(Failing(at)), **OPTIONS)
    with pytest.raises(OSError, match="connection lost"):
        list(generator)
    with pytest.raises(ValueError, match="an iterator that raised an error, and cannot be read again"):
        list(generator)


def test_a_length_that_raises_is_asked_again():
    asked = []

    def length(item):
        asked.append(item)
        if len(asked) == 2:
            raise RuntimeError("busy")
        return len(item)

    made = PackStream(iter(["a", "bb", "ccc"]), length=length, **OPTIONS)
    with pytest.raises(RuntimeError, match="busy"):
        list(made)
    (step,) = made
    assert sorted(step.items.tolist()) == ["a", "bb", "ccc"]
    with pytest.raises(ValueError, match=r"length must return .*gave 1\.5 for the str at position 0"):
        list(PackStream(["a"], length=lambda item: 1.5, **OPTIONS))


def test_targets_that_raise_are_asked_again():
    asked = []

    def targets(positions):
        asked.append(len(positions))
        if len(asked) == 1:
            raise RuntimeError("busy")
        return LENGTHS[positions] - 1

    made = stream(iter([LENGTHS[:300], LENGTHS[300:500]]), targets=targets)
    with pytest.raises(RuntimeError, match="busy"):
        list(made)
    assert sorted(p for step in made for p in step.positions) == list(range(500))
    made = stream(iter([[5], ["a"], [6]]))
    for _ in range(2):  # what is no chunk is not passed over
        with pytest.raises(ValueError, match=r"at position 1 the source gives \['a'\]"):
            list(made)


class Stateful:
    """A source that knows its own place, as data sets of other libraries do."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < len(LENGTHS):
            self.place += 1
            yield [self.place - 1] * int(LENGTHS[self.place - 1])

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_a_source_with_a_state_of_its_own():
    whole = [told(step) for step in PackStream(Stateful(), resume="items", **OPTIONS)]
    made = PackStream(Stateful(), resume="items", **OPTIONS)
    head = [told(step) for step in itertools.islice(made, 10)]
    state = through_json(made.state_dict())
    assert state["source"]["place"] == state["position"]
    other = PackStream(Stateful(), resume="items", **OPTIONS)
    other.load_state_dict(state)
    assert head + [told(step) for step in other] == whole


def test_items_in_a_state_are_plain_data():
    made = PackStream(iter([np.zeros(3), np.zeros(4)]), resume="items", **OPTIONS)
    iterator = iter(made)
    next(iterator)
    made.state_dict()  # nothing is in flight any more
    made = PackStream(iter([(1, 2)] * 5000), resume="items", **OPTIONS)
    next(iter(made))
    with pytest.raises(ValueError, match=r"position .* holds a tuple"):
        made.state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 300}, "capacity was 256 and is 300"),
        ({"lookahead": 5, "seed": 9}, "lookahead was 4 and is 5, seed was 0 and is 9"),
        ({"shard": (1, 2)}, "belong to their shard"),
        ({"targets": lambda positions: LENGTHS[positions] - 1}, "targets was False and is True"),
        ({"cost": multipack.SHAPES["tiny"]}, "cost was"),
        ({"length": len}, "documents was 'lengths' and is 'items'"),
    ],
)
def test_states_of_other_streams_are_refused(changes, message):
    made = stream()
    next(iter(made))
    with pytest.raises(ValueError, match=message):
        stream(**changes).load_state_dict(through_json(made.state_dict()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("queue"), "lacks queue"),
        (lambda s: s.update(step=-1), "step must be a whole number"),
        (lambda s: s.update(ended=1), "ended must be true or false"),
        (lambda s: s["packs"].pop(), "contradicts itself"),
        (lambda s: s["planned"]["lengths"].pop(), "lists of different lengths"),
        (lambda s: s["planned"].update(positions=[0.5] * len(s["planned"]["lengths"])), "whole numbers"),
        (lambda s: s["queue"].pop("lengths"), "queue needs positions, lengths"),
        (lambda s: s.update(waiting=10**6), "contradicts itself"),
        (lambda s: s.update(options=3), "options must be a dictionary"),
        (lambda s: s["planned"].update(lengths=[256] * len(s["planned"]["lengths"])), "contradicts itself"),
    ],
)
def test_damaged_states_are_refused(damage, message):
    made = stream()
    next(iter(made))
    state = through_json(made.state_dict())
    damage(state)
    with pytest.raises(ValueError, match=message):
        stream().load_state_dict(state)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_source_that_changed_is_refused(chunked):
    made = stream()
    next(iter(made))
    state = made.state_dict()
    position = state["planned"]["positions"][0]
    other = LENGTHS.copy()
    other[position] += 1
    changed = stream(np.split(other, [10, 900]) if chunked else other)
    changed.load_state_dict(state)
    with pytest.raises(ValueError, match=rf"position {position} of the source has .* the source has changed"):
        list(changed)
    short = stream(LENGTHS[:20])
    short.load_state_dict(state)
    with pytest.raises(ValueError, match="the source ends after 20 documents"):
        list(short)
    items = PackStream(["x" * n for n in LENGTHS], **OPTIONS)
    next(iter(items))
    for documents, message in (
        (["x" * n for n in other], "the source has changed"),
        (["x" * n for n in LENGTHS[:2]], "the source ends after 2"),
    ):
        again = PackStream(documents, **OPTIONS)
        again.load_state_dict(items.state_dict())
        with pytest.raises(ValueError, match=message):
            list(again)
