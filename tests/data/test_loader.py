"""Loaders: the sampler's order, states with batches made ahead, errors, and the end of their threads."""

import threading
import time

import pytest

from multipack.data.packs.collate import PackedCollator
from multipack.data.packs.loader import THREAD, PackedLoader
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import Documents


@pytest.fixture(scope="module")
def lists():
    """The sampler's lists of documents in epoch 2."""
    return list(sampler())


def sampler():
    made = PackedBatchSampler([2, 3, 4, 5, 6, 7], capacity=10, packs_per_step=2)
    made.set_epoch(2)
    return made


@pytest.fixture
def documents(write_store):
    return Documents.whole(write_store([[(number + 2, True)] for number in range(6)]))


@pytest.fixture
def make(documents):
    """Makes loaders, and closes them."""
    made = []

    def loader(prefetch=2, collator=None):
        made.append(PackedLoader(documents, sampler(), collator or PackedCollator(8, 64), prefetch))
        return made[-1]

    yield loader
    for each in made:
        each.close()


@pytest.fixture
def threads():
    """Returns the loaders' threads that were started in this test, and do not end in a moment."""
    before = set(threading.enumerate())

    def alive():
        made = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]
        for thread in (made := [thread for thread in made if thread not in before]):
            thread.join(0.2)
        return [thread for thread in made if thread.is_alive()]

    return alive


def content(batches):
    return [batch.input_ids.tolist() for batch in batches]


@pytest.mark.parametrize("prefetch", [0, 1, 100])
def test_batches_follow_the_sampler(make, documents, lists, prefetch, threads):
    loader = make(prefetch)
    expected = [[int(token) for number in pack for token in documents[number].tokens] for pack in lists]
    assert len(loader) == len(lists) == 4
    for _ in range(2):
        assert content(loader) == expected
    assert not threads()


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_state_is_that_of_the_last_batch_handed_out(make, lists, prefetch):
    whole = content(make(prefetch))
    for taken in range(len(lists) + 1):
        loader, other = make(prefetch), make(prefetch)
        batches = iter(loader)
        first = content(next(batches) for _ in range(taken))
        time.sleep(0.01 * bool(prefetch))  # the thread runs ahead
        state = loader.state_dict()
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert first + content(other) == whole


def test_prefetch_bounds_the_batches_made_ahead(make):
    collated = []
    loader = make(2, lambda pack: collated.append(1) or PackedCollator(8, 64)(pack))
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 5
    while len(collated) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(collated) == 3  # one handed out, two ahead


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_names_the_documents_of_its_batch(make, lists, prefetch, threads):
    collated = []

    def collate(pack):
        collated.append(pack)
        if len(collated) == 3:
            raise KeyError("broken")
        return PackedCollator(8, 64)(pack)

    loader = make(prefetch, collate)
    batches = iter(loader)
    assert len([next(batches) for _ in range(2)]) == 2
    with pytest.raises(KeyError, match="broken") as caught:
        next(batches)
    assert f"documents {', '.join(map(str, lists[2]))}" in caught.value.__notes__[0]
    assert (loader.state_dict()["step"], loader.state_dict()["micro_batch"]) == (1, 0)
    assert not threads()


def test_an_iteration_is_closed_wherever_the_garbage_collector_runs(make, threads):
    batches = iter(make(1))
    next(batches)
    with threading._shutdown_locks_lock:  # as inside the start and the end of any thread
        batches.close()
    assert not threads()


@pytest.mark.parametrize("end", ["close", "garbage", "again", "load"])
def test_the_thread_ends_with_the_iteration(make, end, threads):
    loader = make(1)
    batches = iter(loader)
    assert not threads()  # before the first batch
    next(batches)
    state = loader.state_dict()
    assert len(threads()) == 1
    if end == "close":
        loader.close()
    elif end == "garbage":
        del batches
    elif end == "again":
        content(loader)
    else:
        loader.load_state_dict(state)
    assert not threads()
    if end in ("close", "again"):
        with pytest.raises(RuntimeError, match="was ended"):
            next(batches)
    assert len(content(loader)) == (3 if end == "load" else 4)
