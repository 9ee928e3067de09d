"""Two ranks of one process, each with its connection to the store."""

import threading
import time

import pytest
from torch.distributed import DistBackendError, TCPStore

from multipack.parallel import failures
from multipack.parallel.failures import LostRank, NotConnected, Watch, lacks_rank

TIMED_OUT = RuntimeError("[../gloo/transport/tcp/buffer.cc:72] Timed out waiting 8000ms for recv operation")
CLOSED = RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3")


@pytest.fixture
def watch(monkeypatch):
    """Rank → its watch, with heartbeats ten times a second."""
    monkeypatch.setattr(failures, "INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(failures, "GRACE_SECONDS", 1.0)
    server, made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []

    def make(rank, size=2, ends_process=False):
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        made.append(Watch(store, rank, size, 8.0, ends_process))
        made[-1].step = 42
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_rank_without_a_heartbeat_is_named(watch):
    first, _, killed = (watch(rank, size=3) for rank in range(3))
    killed.close()
    time.sleep(0.2)
    found = first.explain(CLOSED)
    assert isinstance(found, LostRank)
    assert str(found) == "rank 2 ended at step 42 without an error message"  # rank 1 lives, and will fail too


@pytest.mark.parametrize("error", [CLOSED, ValueError(f"checkpoint step-1 was not written: {TIMED_OUT}")])
def test_a_rank_that_hangs_is_named_with_the_setting(watch, error):
    """It has a heartbeat, but its collective has not failed."""
    ranks = [watch(rank, size=3) for rank in range(3)]
    found = []
    errors = [TIMED_OUT, error]  # of which the second may follow from the first
    threads = [
        threading.Thread(target=lambda each=each, error=error: found.append(each.explain(error)))
        for each, error in zip(ranks[:2], errors, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = "rank 2 did not answer at step 42 within parallel.timeout_seconds=8"
    assert [str(each) for each in found] == [expected] * 2


def test_an_error_is_kept_and_other_ranks_repeat_it(watch):
    first, second = watch(0), watch(1)
    bug = KeyError("document 17")
    assert first.explain(bug) is bug
    assert not bug.printed
    assert str(second.explain(CLOSED)) == "rank 0 failed at step 42: KeyError: 'document 17'"


def test_an_error_that_all_ranks_have_is_printed_once(watch):
    first, second = watch(0), watch(1)
    errors = [ValueError("out=run holds another run"), ValueError("rank 0: out=run holds another run")]
    assert [first.explain(errors[0]), second.explain(errors[1])] == errors
    assert [error.printed for error in errors] == [False, True]
    errors = [ValueError("the next one"), ValueError("and another")]  # a second failure of the same processes
    assert [first.explain(errors[0]), second.explain(errors[1])] == errors
    assert [error.printed for error in errors] == [False, False]


@pytest.mark.parametrize(
    "bug",
    [
        RuntimeError("[enforce fail at ../gloo/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 4"),
        DistBackendError("NCCL error, ncclInvalidUsage: This usually reflects invalid usage of NCCL library"),
    ],
)
def test_bugs_of_collectives_keep_their_traceback(watch, bug):
    assert watch(0).explain(bug) is bug


def test_errors_of_nccl_about_another_process_are_recognized():
    remote = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    assert lacks_rank(DistBackendError(remote))
    assert lacks_rank(DistBackendError("NCCL communicator was aborted on rank 0."))


def test_ranks_that_cannot_connect_are_not_lost(watch):
    error = NotConnected("gloo", 8.0, CLOSED)
    assert watch(0).explain(error) is error


def test_a_store_that_is_gone_is_an_answer(watch, monkeypatch):
    rank = watch(0)
    monkeypatch.setattr(rank, "_find", lambda *_: time.sleep(60))
    monkeypatch.setattr(failures, "GRACE_SECONDS", -1.8)
    assert "the process that holds the store (rank 0 or the launcher)" in str(rank.explain(CLOSED))


@pytest.mark.parametrize("fails", [True, False])
def test_under_nccl_a_rank_that_waits_is_ended(watch, monkeypatch, fails):
    """Its main thread is in the driver: the thread of the heartbeat prints the line."""
    ended = threading.Event()
    messages = []

    def end(self, message):
        messages.append(message)
        ended.set()
        self.close()

    monkeypatch.setattr(Watch, "_end", end)
    other = watch(1)
    rank = watch(0, ends_process=True)
    rank._timeout_seconds = 60.0 if fails else 1.0
    if fails:
        other.explain(ValueError("document 17 is damaged"))
        expected = "rank 1 failed at step 42: document 17 is damaged"
    else:
        other.close()
        expected = "rank 1 did not answer at step 42 within parallel.timeout_seconds=1"
    assert ended.wait(10)
    assert messages[0] == expected


def test_under_nccl_a_rank_that_trains_is_not_ended(watch, monkeypatch):
    messages = []
    monkeypatch.setattr(Watch, "_end", lambda self, message: messages.append(message))
    watch(1)
    rank = watch(0, ends_process=True)
    rank._timeout_seconds = 0.5
    time.sleep(1.0)  # an evaluation that takes longer than a collective may wait
    assert not messages
