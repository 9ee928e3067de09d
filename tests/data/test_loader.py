import threading
import time

import pytest

from multipack.data.collate import PackedCollator
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.sampler import PackedBatchSampler


class Listed:
    """A sampler over given packs, with the state that the protocol asks for."""

    def __init__(self, packs):
        self.packs, self.epoch, self.position, self.start = packs, 0, 0, 0

    def __iter__(self):
        start, self.start = self.start, 0
        for position in range(start, len(self.packs)):
            self.position = position + 1
            yield self.packs[position]

    def __len__(self):
        return len(self.packs)

    def set_epoch(self, epoch):
        self.epoch, self.position, self.start = epoch, 0, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position, self.start = state["epoch"], state["position"], state["position"]


PACKS = [[0, 1], [2], [], [3, 4, 5], [1], [5, 0]]


@pytest.fixture
def documents(write_store):
    return Documents.whole(write_store([[(number + 2, True)] for number in range(6)]))


@pytest.fixture
def make(documents):
    """Makes loaders, and closes them."""
    made = []

    def loader(sampler=None, prefetch=2, collator=None):
        collator = PackedCollator(max_documents=8, max_seqlen=64) if collator is None else collator
        made.append(PackedLoader(documents, sampler or Listed(PACKS), collator, prefetch))
        return made[-1]

    yield loader
    for each in made:
        each.close()


@pytest.fixture
def threads():
    """Returns the loaders' threads that were started in this test."""
    before = set(threading.enumerate())
    return lambda: [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("multipack-loader") and thread not in before
    ]


def content(batches):
    return [batch.input_ids.tolist() for batch in batches]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 100])
def test_batches_keep_the_samplers_order(make, documents, prefetch, threads):
    loader = make(prefetch=prefetch)
    expected = [[int(token) for number in pack for token in documents[number].tokens] for pack in PACKS]
    expected[2] = [0]  # a pack without documents is one token of padding
    assert len(loader) == 6
    for _ in range(2):
        assert content(loader) == expected
    assert not threads()


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_state_is_that_of_the_last_batch_handed_out(make, prefetch):
    loader = make(prefetch=prefetch)
    whole = content(loader)
    for taken in range(len(PACKS) + 1):
        loader.set_epoch(4)
        batches = iter(loader)
        first = content(next(batches) for _ in range(taken))
        time.sleep(0.01 * bool(prefetch))  # the thread runs ahead
        state = loader.state_dict()
        assert state == {"epoch": 4, "position": taken}
        other = make(prefetch=prefetch)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert first + content(other) == whole


def test_prefetch_bounds_the_batches_made_ahead(make):
    collated = []
    inner = PackedCollator(8, 64)
    loader = make(prefetch=2, collator=lambda pack: collated.append(1) or inner(pack))
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 5
    while len(collated) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(collated) == 3  # one handed out, two ahead


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_with_its_batch(make, prefetch, threads):
    def collate(pack):
        if len(pack) == 3:
            raise KeyError("broken")
        return PackedCollator(8, 64)(pack)

    loader = make(prefetch=prefetch, collator=collate)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(KeyError, match="broken") as caught:
        next(batches)
    assert "documents 3, 4, 5" in caught.value.__notes__[0]
    assert loader.state_dict()["position"] == 3
    assert not threads()


@pytest.mark.parametrize("end", ["close", "with", "garbage", "again", "load"])
def test_the_thread_ends_with_the_iteration(make, end, threads):
    loader = make(prefetch=1)
    batches = iter(loader)
    assert not threads()  # before the first batch
    next(batches)
    assert len(threads()) == 1
    if end == "close":
        loader.close()
    elif end == "with":
        with loader:
            pass
    elif end == "garbage":
        del batches
    elif end == "again":
        iter(loader)
    else:
        loader.load_state_dict({"epoch": 0, "position": 2})
    assert not threads()
    if end in ("close", "again"):
        with pytest.raises(RuntimeError, match="was ended"):
            next(batches)
    assert len(content(loader)) == (4 if end == "load" else 6)


def test_a_real_sampler_resumes_in_the_middle(documents):
    def loader():
        sampler = PackedBatchSampler(documents.lengths, capacity=10, packs_per_step=2)
        return PackedLoader(documents, sampler, PackedCollator(sampler.most_documents, sampler.longest))

    with loader() as first:
        first.set_epoch(2)
        whole = content(first)
        batches = iter(first)
        begun = content(next(batches) for _ in range(2))
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert begun + content(second) == whole
