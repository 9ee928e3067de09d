"""A stream as a data set: each rank its share, places inside a step, and torch's loader."""

import itertools
import json

import numpy as np
import pytest
from torch.utils.data import DataLoader

from multipack.data.batch import IGNORE
from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.data.loader import PackedStreamDataset
from multipack.planning.stream import PackStream

LENGTHS = np.random.default_rng(5).lognormal(3.0, 0.9, 400).clip(1, 120).astype(int)
DOCUMENTS = [Document(np.full(n, i, dtype=np.uint16), np.array([[0, n]])) for i, n in enumerate(LENGTHS)]
OPTIONS = {"capacity": 128, "packs_per_step": 6}


def stream(numbers=range(400), **options):
    return PackStream(numbers, length=lambda number: int(LENGTHS[number]), **(OPTIONS | options))


def names(micro_batch):
    """Which documents a micro-batch holds, and what it knows of its step."""
    return list(micro_batch.batch), *micro_batch[1:]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("sync", ["micro", "step"])
def test_each_rank_takes_its_share(world, sync):
    ranks = [
        list(PackedStreamDataset(stream(), rank=rank, world_size=world, sync=sync)) for rank in range(world)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    micro_batches = -(-6 // world)
    seen = []
    for row in zip(*ranks, strict=True):
        assert len({(each.step, each.micro_batch, each.denominator) for each in row}) == 1
        assert {each.micro_batches for each in row} == {micro_batches}
        assert all(LENGTHS[each.batch].sum() <= 128 for each in row)
        seen += [number for each in row for number in names(each)[0]]
    assert sorted(seen) == list(range(400))
    totals = {}
    for each in itertools.chain(*ranks):
        targets = sum(int((DOCUMENTS[n].shifted_targets() != IGNORE).sum()) for n in each.batch)
        totals[each.step] = totals.get(each.step, 0) + targets
    assert totals == {each.step: each.denominator for each in ranks[0]}


@pytest.mark.parametrize("workers", [0, 1])
def test_torch_loads_batches(workers):
    made = stream()
    collator = PackedCollator.of(made, pad_to=128)
    data_set = PackedStreamDataset(
        made, lambda numbers: collator([DOCUMENTS[n] for n in numbers]), rank=1, world_size=4
    )
    loader = DataLoader(data_set, batch_size=None, num_workers=workers)
    rows = list(loader)
    plain = list(PackedStreamDataset(stream(), rank=1, world_size=4))
    assert [tuple(row[1:]) for row in rows] == [tuple(row[1:]) for row in plain]
    assert [row.batch.num_documents for row in rows] == [len(row.batch) for row in plain]
    assert {row.batch.num_slots for row in rows} == {128}
    assert {row.batch.cu_seqlens.shape for row in rows} == {(128 + 2,)}


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 7, 24])
def test_places_inside_a_step_are_exact(stop):
    def made():
        return PackedStreamDataset(stream(), rank=1, world_size=2)

    whole = [names(each) for each in made()]
    first = made()
    head = [names(each) for each in itertools.islice(first, stop)]
    state = json.loads(json.dumps(first.state_dict()))
    second = made()
    second.load_state_dict(state)
    assert json.loads(json.dumps(second.state_dict())) == state
    assert head + [names(each) for each in second] == whole
    assert head + [names(each) for each in first] == whole  # the same data set goes on, too
    other = PackedStreamDataset(stream(), rank=0, world_size=3)
    if stop % 3:
        with pytest.raises(ValueError, match="the saved position is inside a step"):
            other.load_state_dict(state)
    else:  # three ranks go on between two steps, with the documents that are left
        parts = []
        for rank in range(3):
            other = PackedStreamDataset(stream(), rank=rank, world_size=3)
            other.load_state_dict(state)
            parts += [number for each in other for number in names(each)[0]]
        done = itertools.islice(stream(), stop // 3)
        assert sorted([*parts, *(p for step in done for p in step.positions)]) == list(range(400))


def test_an_iterator_goes_on_inside_a_step():
    made = PackedStreamDataset(stream(iter(range(400))), world_size=2)
    whole = [names(each) for each in PackedStreamDataset(stream(), world_size=2)]
    head = [names(each) for each in itertools.islice(made, 4)]
    assert head + [names(each) for each in made] == whole


def test_epochs_differ_and_setting_the_current_one_changes_nothing():
    made = PackedStreamDataset(stream())
    first = [names(each) for each in made]
    assert [names(each) for each in made] == first
    made.set_epoch(1)
    second = [names(each) for each in itertools.islice(made, 3)]
    made.set_epoch(1)
    second += [names(each) for each in made]
    assert second != first
    assert sorted(n for each in second for n in each[0]) == list(range(400))


def test_impossible_worlds_states_and_workers_are_refused():
    def read(workers=0, **options):
        return list(
            DataLoader(PackedStreamDataset(stream(), **options), batch_size=None, num_workers=workers)
        )

    for options, complaint in (
        ({"workers": 2}, "num_workers=2: each worker would read all"),
        ({"rank": 2, "world_size": 2}, "rank=2 is outside world_size=2"),
        ({"world_size": 7}, "7 ranks cannot share"),
    ):
        with pytest.raises(ValueError, match=complaint):
            read(**options)
    with pytest.raises(ValueError, match="lacks stream"):
        PackedStreamDataset(stream()).load_state_dict({"micro_batch": 0, "world_size": 1, "sync": "micro"})
