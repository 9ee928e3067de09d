"""Streams and ranks: any number of them shares a step; those with shards of their own end together."""

import itertools
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def _positions(told_steps):
    return [position for each in told_steps for position in each[1]]


@CASES
@given(st.integers(0, 40), st.data())
def test_any_number_of_ranks_sees_the_same_documents(start, data):
    sync = data.draw(st.sampled_from(["micro", "step", "pipeline"]))
    made = stream(packs_per_step=6)
    for step in itertools.islice(made, start % 7, start % 7 + 2):
        for world in range(1, 7):
            dealt = step.deal(world, sync)
            assert len(dealt) == world * -(-6 // world)
            assert sorted(dealt.order.tolist()) == list(range(len(step)))
            assert dealt.totals(step.lengths).max() <= 256
    with pytest.raises(ValueError, match="7 ranks cannot share"):
        step.deal(7, sync)


class Meeting:
    """An all-reduce between threads."""

    def __init__(self, world, reduce):
        self.barrier, self.values, self.reduce = threading.Barrier(world, timeout=20), [0] * world, reduce
        self.calls = 0

    def of(self, rank):
        def agree(value):
            self.values[rank] = value
            self.barrier.wait()
            result = self.reduce(self.values)
            self.calls += rank == 0
            self.barrier.wait()
            return result

        return agree


def together(made, each=lambda rank, step: told(step), stop=None):
    """Iterate the streams of all ranks at once, in threads."""
    results, errors = [[] for _ in made], []

    def run(rank):
        try:
            for step in itertools.islice(made[rank], stop):
                results[rank].append(each(rank, step))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    return results


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([min, max]), st.integers(1, 4), st.integers(0, 400), st.integers(1, 4))
def test_ranks_end_together(reduce, world, count, lookahead):
    shards = [LENGTHS[:count][rank::world] for rank in range(world)]
    shards[0] = np.concatenate([shards[0], LENGTHS[:50]])  # of unequal length
    meeting = Meeting(world, reduce)
    made = [stream(shard, lookahead=lookahead, agree=meeting.of(rank)) for rank, shard in enumerate(shards)]
    results = together(made)
    alone = [[told(step) for step in stream(shard, lookahead=lookahead)] for shard in shards]
    steps = reduce(len(each) for each in alone)
    assert [len(each) for each in results] == [steps] * world
    assert meeting.calls <= steps + 1
    for rank, (own, result) in enumerate(zip(alone, results, strict=True)):
        assert result[: len(own)] == own[:steps]
        for empty in result[len(own) :]:
            assert empty[1] == []
            assert empty[6] == 0
            assert len(empty[4]) == 5
        missed = _positions(own[steps:])
        assert set(made[rank].left.tolist()) <= set(missed)
        unread = range(made[rank].position, len(shards[rank]))
        assert sorted([*made[rank].left.tolist(), *unread]) == sorted(missed)


@pytest.mark.parametrize("reduce", [min, max])
@pytest.mark.parametrize("stop", [1, 6, 10, 19])
def test_sharded_readers_resume_in_agreement(reduce, stop):
    def ranks():
        meeting = Meeting(3, reduce)
        return [
            PackStream(
                LENGTHS[: 700 + 1],
                length=None,
                shard=(rank, 3),
                agree=meeting.of(rank),
                lookahead=3,
                **OPTIONS,
            )
            for rank in range(3)
        ]

    whole = together(ranks())
    assert len({len(each) for each in whole}) == 1
    seen = [position for each in whole for position in _positions(each)]
    assert len(seen) == len(set(seen))
    assert reduce is min or len(seen) == 701
    assert all(position % 3 == rank for rank in range(3) for position in _positions(whole[rank]))
    first = ranks()
    head = together(first, stop=stop)
    second = ranks()
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(through_json(old.state_dict()))
    rest = together(second)
    assert [a + b for a, b in zip(head, rest, strict=True)] == whole


def test_shards_read_every_document_once():
    for kind in (LENGTHS, [np.array([n]) for n in LENGTHS[:400]], np.split(LENGTHS, [1, 5, 900])):
        total = len(LENGTHS) if kind is not None and len(kind) != 400 else 400
        seen = [p for rank in range(3) for step in stream(kind, shard=(rank, 3)) for p in step.positions]
        assert sorted(seen) == list(range(total))
    documents = ["x" * n for n in LENGTHS[:400]]
    parts = [PackStream(documents, shard=(rank, 3), **OPTIONS) for rank in range(3)]
    assert sorted(p for part in parts for step in part for p in step.positions) == list(range(400))
    assert all(part.position == 400 for part in parts)
