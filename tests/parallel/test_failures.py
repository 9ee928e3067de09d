"""Two ranks of one process, each with its connection to the store."""

import queue
import re
import threading
import time

import pytest
from torch.distributed import DistBackendError, DistNetworkError, TCPStore

from multipack.parallel import failures
from multipack.parallel.failures import LostRank, NotConnected, Watch, is_lost_rank_error

TIMED_OUT = RuntimeError("[../gloo/transport/tcp/buffer.cc:72] Timed out waiting 8000ms for recv operation")
CLOSED = RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3")


@pytest.fixture
def watch(monkeypatch):
    """Rank → its watch, with heartbeats ten times a second."""
    monkeypatch.setattr(failures, "INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(failures, "GRACE_SECONDS", 1.0)
    server, made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []

    def make(rank, size=2, blocks=False, timeout_seconds=8.0):
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        made.append(Watch(store, rank, size, timeout_seconds, blocks))
        made[-1].place = 42, 0, ""
        return made[-1]

    yield make
    for each in made:
        each.close()
    for thread in threading.enumerate():  # none may find the fixtures undone
        if thread.name == "multipack-heartbeat":
            thread.join(10)


@pytest.fixture
def ends(monkeypatch):
    """The messages of ranks that their watch ends."""
    messages = queue.Queue()

    def end(self, message):
        messages.put(message)
        self.close()

    monkeypatch.setattr(Watch, "_end", end)
    return messages


def test_a_rank_without_a_heartbeat_is_named(watch):
    first, _, killed = (watch(rank, size=3) for rank in range(3))
    killed.close()
    time.sleep(0.2)
    found = first.report(CLOSED, one_line=True)
    assert isinstance(found, LostRank)
    assert str(found) == "rank 2 ended at step 42 without an error message"  # rank 1 lives, and will fail too


@pytest.mark.parametrize("error", [CLOSED, ValueError(f"checkpoint step-1 was not written: {TIMED_OUT}")])
def test_a_rank_that_hangs_is_named_with_the_setting(watch, error):
    """It has a heartbeat, but its collective has not failed."""
    ranks = [watch(rank, size=3) for rank in range(3)]
    found = []
    errors = [TIMED_OUT, error]  # of which the second may follow from the first
    threads = [
        threading.Thread(
            target=lambda each=each, error=error: found.append(each.report(error, one_line=True))
        )
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
    assert first.report(bug, one_line=True) is bug
    assert str(second.report(CLOSED, one_line=True)) == "rank 0 failed at step 42: KeyError: 'document 17'"


def test_an_error_that_all_ranks_have_is_printed_once(watch, capsys):
    first, second = watch(0), watch(1)
    errors = [ValueError("out=run holds another run"), ValueError("rank 0: out=run holds another run")]
    assert [first.report(errors[0], one_line=True), second.report(errors[1], one_line=True)] == errors
    assert capsys.readouterr().err == "error: out=run holds another run\n"
    assert first.report(errors[0], one_line=True) is errors[0]  # once more, by the context that is left
    errors = [ValueError("the next one"), ValueError("and another")]  # a second failure of the same processes
    assert [first.report(errors[0], one_line=True), second.report(errors[1], one_line=True)] == errors
    assert capsys.readouterr().err == "error: the next one\nerror: and another\n"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (
            RuntimeError("[enforce fail at ../gloo/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 4"),
            False,
        ),
        (
            DistBackendError("NCCL error, ncclInvalidUsage: This usually reflects invalid usage of NCCL"),
            False,
        ),
        (DistBackendError("ncclRemoteError: possibly a network error or a remote process exiting"), True),
        (DistBackendError("NCCL communicator was aborted on rank 0."), True),
        (NotConnected("gloo", 8.0, CLOSED), False),
    ],
)
def test_errors_about_another_process_are_told_from_bugs(watch, error, is_lost):
    assert is_lost_rank_error(error) == is_lost
    assert is_lost or watch(0).report(error, one_line=True) is error


def test_a_store_that_is_gone_is_an_answer(watch, monkeypatch):
    rank = watch(0)
    monkeypatch.setattr(rank, "_find", lambda *_: time.sleep(60))
    rank._grace = -1.8
    assert "the process that holds the store (rank 0 or the launcher)" in str(
        rank.report(CLOSED, one_line=True)
    )


class Gone:
    """A store whose process has ended."""

    def set(self, *_):
        raise DistNetworkError("Connection reset by peer")


NO_ANSWER = "rank 1 did not answer at step 42 within parallel.timeout_seconds=1"


@pytest.mark.parametrize(
    ("how", "blocks", "expected"),
    [
        ("fails", True, "rank 1 failed at step 42: document 17 is damaged"),
        ("is killed", True, NO_ANSWER),
        pytest.param("is killed", False, NO_ANSWER, marks=pytest.mark.slow),
        ("held the store", True, "the process that holds the store .* does not answer at step 42"),
    ],
)
def test_a_rank_that_waits_without_a_limit_is_ended(watch, ends, how, blocks, expected):
    """Its main thread is in the driver, or waits for a checkpoint: the thread of the heartbeat prints the line."""
    other, rank = watch(1), watch(0, blocks=blocks)
    rank._timeout_seconds = 60.0 if how == "fails" else 1.0
    if how == "fails":
        other.report(ValueError("document 17 is damaged"), one_line=True)
    elif how == "is killed":
        other.close()
    else:
        rank._store = Gone()
    assert re.fullmatch(expected, ends.get(timeout=10))


SECOND, THIRD = "forward pass of micro-batch 2", "backward pass of micro-batch 3"


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (
            [(42, 8, THIRD), (42, 0, "reading its packs")],
            "rank 1 did not answer at step 42 (reading its packs)",
        ),
        ([(42, 8, THIRD), (42, 5, SECOND), (42, 6, "")], f"rank 1 did not answer at step 42 ({SECOND})"),
        ([(43, 2, ""), (42, 8, THIRD)], f"rank 1 did not answer at step 42 ({THIRD})"),  # the step is its own
        (
            [(42, 5, SECOND), (42, 8, THIRD), (42, 5, SECOND)],
            f"ranks 0, 2 did not answer at step 42 ({SECOND})",
        ),
    ],
)
def test_the_ranks_that_are_last_are_named_with_their_stage(watch, ends, places, expected):
    """All ranks have heartbeats, and under nccl the others wait in the driver."""
    ranks = [watch(rank, len(places), blocks=True) for rank in range(len(places))]
    for each, place in zip(ranks, places, strict=True):
        each.place, each._timeout_seconds = place, 1.0  # none is late because it was made late
    assert ends.get(timeout=10) == f"{expected} within parallel.timeout_seconds=1"


@pytest.mark.parametrize("ahead", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_no_rank_is_named_while_all_advance_or_if_none_is_last(watch, ends, ahead):
    ranks = [watch(rank, blocks=True, timeout_seconds=1.0) for rank in range(2)]
    for stage in (0, 3, 6):
        if ahead or not stage:
            ranks[0].place, ranks[1].place = (42, stage + ahead, ""), (42, stage, "")
        time.sleep(0.5)
    assert ends.empty()
