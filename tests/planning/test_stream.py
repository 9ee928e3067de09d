"""Streams: every document once or named, full steps, exact resumption, refusals by name."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import problems
from growing import Rows
from multipack.planning.plan import plan
from multipack.planning.stream import PackStream

LENGTHS = np.random.default_rng(3).lognormal(3.5, 1.0, 2000).clip(1, 256).astype(int).tolist()
OPTIONS = {"capacity": 256, "packs_per_step": 4}


def stream(documents=LENGTHS, **options):
    return PackStream(documents, **{"length": int, **OPTIONS, **options})


def described(step):
    """Everything that a step holds, for comparisons."""
    dealt = step.deal(min(2, len(step.packs)))
    arrays = (step.positions, step.packs.offsets, dealt.order, dealt.offsets, step.lengths)
    return step.number, step.denominator, step.items, *(array.tolist() for array in arrays)


def through_json(state):
    return json.loads(json.dumps(state))


@settings(deadline=None, max_examples=15)
@given(problems(["keep", "drop"]))
def test_every_document_once_or_named(problem):
    lengths, options = problem
    capacity = options["capacity"]
    made = PackStream((["x"] * length for length in lengths), **options)
    seen = []
    for number, step in enumerate(made):
        packs = step.packs
        assert step.number == number
        assert 1 <= len(packs) <= options["packs_per_step"]
        assert 1 <= packs.sizes().min() <= packs.sizes().max() <= made.most_documents
        assert packs.sizes().max() <= (options["max_documents"] or capacity)
        assert packs.totals(lengths[step.positions]).max() <= capacity
        assert [len(item) for item in step.items] == step.lengths.tolist()
        assert step.targets == step.denominator == step.tokens - len(step)
        for ranks in {1, options["packs_per_step"] // 2 or 1, options["packs_per_step"]}:
            dealt = step.deal(ranks)
            assert sorted(dealt.order.tolist()) == list(range(len(step)))
            assert len(dealt) % ranks == 0
            assert dealt.totals(lengths[step.positions]).max() <= capacity
        seen += step.positions.tolist()
    assert sorted([*seen, *made.left.tolist()]) == list(range(len(lengths)))
    assert made.position == len(lengths)
    assert options["tail"] == "drop" or not len(made.left)


class Several:
    """An iterable that is neither a sequence nor an iterator, and has no state."""

    def __init__(self, documents):
        self.documents = documents

    def __iter__(self):
        yield from self.documents


@settings(deadline=None, max_examples=15)
@given(problems(["keep", "drop"]), st.data())
def test_resuming_anywhere_is_exact(problem, data):
    lengths, options = problem
    documents = [[7] * length for length in lengths]
    sources = {
        "list": lambda: documents,
        "iterable": lambda: Several(documents),
        "stateful": lambda: Rows(documents),
    }
    source = sources[data.draw(st.sampled_from(sorted(sources)))]
    whole = [described(step) for step in PackStream(source(), **options)]
    made, steps = PackStream(source(), **options), []
    while len(steps) < len(whole):
        more = data.draw(st.integers(1, 1 + len(whole) // 3))
        steps += [described(step) for step in itertools.islice(made, more)]
        state = through_json(made.state_dict())
        made = PackStream(source(), **options)
        made.load_state_dict(state)
        assert made.step == len(steps)
    assert steps == whole


class Failing(Rows):
    """Raises once before each of these positions."""

    def __init__(self, positions):
        super().__init__(LENGTHS)
        self.positions = set(positions)

    def __iter__(self):
        for item in super().__iter__():
            if self.next - 1 in self.positions:
                self.positions.remove(self.next - 1)
                raise OSError("away")
            yield item


def test_a_step_knows_its_own_state_however_far_the_stream_was_read():
    steps = list(stream())
    whole = [described(step) for step in steps]
    for number in (0, 3, 4, len(steps) - 2):
        made = stream()
        made.load_state_dict(through_json(steps[number].state_dict()))
        assert described(next(iter(made))) == whole[number + 1]


def test_a_source_that_raises_is_read_again_from_the_position():
    made, steps, errors = stream(Failing([100, 500, 1999])), [], 0
    while made.position < len(LENGTHS):
        try:
            for step in made:
                steps.append(described(step))
        except OSError:
            errors += 1
    assert errors == 3
    assert steps == [described(step) for step in stream()]


def test_steps_are_as_full_as_a_plan_and_nobody_waits_long():
    made = stream(window=4)
    steps = list(made)
    planned = plan(LENGTHS, **OPTIONS, tail="carry")
    assert len(steps) <= planned.num_steps + 2
    filled = [step.tokens / (4 * 256) for step in steps[:-12]]
    assert np.mean(filled) >= 0.99
    assert min(filled) >= 0.85
    latest = np.maximum.accumulate([step.positions.max() for step in steps])
    waits = [step.number - np.searchsorted(latest, step.positions.min()) for step in steps]
    assert 0 < max(waits) <= 8


def test_epochs():
    made = stream()
    first = [described(step) for step in made]
    assert [described(step) for step in made] == first  # begins again
    made.set_epoch(1)
    second = [described(step) for step in made]
    assert second != first
    assert sorted(p for step in second for p in step[3]) == list(range(len(LENGTHS)))


def test_targets_and_loss_weighting():
    documents = [{"length": length, "targets": length // 3} for length in LENGTHS]
    options = {"length": lambda item: item["length"], "targets": lambda item: item["targets"]}
    steps = list(PackStream(documents, **options, **OPTIONS))
    assert sum(step.denominator for step in steps) == sum(item["targets"] for item in documents)
    steps = list(PackStream(documents, **options, **OPTIONS, loss_weighting="document"))
    assert sum(step.denominator for step in steps) == sum(item["targets"] > 0 for item in documents)


def test_an_iterator_is_read_once():
    made = stream(iter(LENGTHS))
    list(made)
    with pytest.raises(ValueError, match="documents is an iterator"):
        list(made)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"windw": 3}, TypeError, "did you mean window"),
        ({"tail": "carry"}, ValueError, "keep or drop"),
        ({"seed": 0.5}, ValueError, "seed"),
        ({"loss_weighting": "words"}, ValueError, "loss_weighting='words'"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        stream(**options)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([3, 0], {}, "tokens of document 1 of the source .* got 0"),
        ([3, 300], {}, "document 1 of the source has 300 tokens, but a pack holds 256"),
        ([3], {"length": lambda item: 1.5}, "got 1.5"),
        ([3], {"targets": lambda item: 3}, "targets of document 0 .* must be at most 2, got 3"),
    ],
)
def test_documents_are_checked(documents, options, message):
    with pytest.raises(ValueError, match=message):
        list(stream(documents, **options))


def test_states_are_checked():
    made = stream()
    next(iter(made))
    state = through_json(made.state_dict())
    with pytest.raises(ValueError, match="capacity from 256 to 512"):
        stream(capacity=512).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks rows"):
        stream().load_state_dict({key: value for key, value in state.items() if key != "rows"})
    row = state["rows"][0]
    for change in (
        {"rows": [[0, 0, 0, 5]]},
        {"rows": [[1]]},
        {"rows": {"positions": 2}},
        {"rows": [row, row]},
        {"rows": [[0.5, *row[1:]]]},
        {"position": 2**63 - 1},
        {"ended": 1},
        {"deferred": 10**6},
        {"window": 2**40},
        {"window": -1},
        {"options": 3},
    ):
        with pytest.raises(ValueError, match="the saved stream state"):
            stream().load_state_dict(state | change)
    with pytest.raises(ValueError, match="99 steps were taken from a window of 4"):
        stream().load_state_dict(state | {"taken": 99})
    for nothing in (None, 3, [], "state"):
        with pytest.raises(ValueError, match="the saved stream state"):
            stream().load_state_dict(nothing)
    arrays = PackStream([np.zeros(5), np.zeros(7)], **OPTIONS)
    next(iter(arrays))
    with pytest.raises(ValueError, match="not plain data"):
        arrays.state_dict()
