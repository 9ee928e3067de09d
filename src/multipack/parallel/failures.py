"""Which rank failed: an error of a collective that lacks a rank names the rank, in one line, on every other rank.

    every rank, once a second    ─▶ store   heartbeat/RANK     a number that increases
    a rank with an error         ─▶ store   failure            "rank 3 failed at step 42: …"; the first one counts
    a rank whose collective fails ◀─ store  both: `LostRank` replaces the error of the backend

The heartbeat has a thread and a connection of its own. A rank that is killed or stopped has no heartbeat. A rank that
hangs has one, but does not report that its collective failed, as the others do.

Under gloo a collective that lacks a rank raises an error. Under nccl the caller waits in the driver, until torch's
watchdog aborts the process: there the thread prints the line and ends the process.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from multipack.parallel.ranks import print_error

INTERVAL_SECONDS = 1.0
"""Time between heartbeats of a rank; longer with more than a thousand ranks, which share a store."""
GRACE_SECONDS = 6.0
"""How long ranks whose collective failed wait for each other's reports."""
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|timed out|timeout|broken pipe|socket closed"
    r"|remote process exit|network error|was aborted",
    re.IGNORECASE,
)
"""Errors of gloo and nccl about another process; their other errors are bugs, which keep their traceback."""
Answer = TypeVar("Answer")


class LostRank(ConnectionError):
    """Another rank failed, was killed or hangs, so that this one cannot continue; the message names it."""


class NotConnected(ValueError):
    """Ranks cannot connect to each other: over a network interface that they do not share, or through a firewall."""

    def __init__(self, backend: str, timeout_seconds: float, error: BaseException) -> None:
        super().__init__(
            f"this rank, on {socket.gethostname()}, could not connect to the others by {backend} within"
            f" parallel.timeout_seconds={timeout_seconds:g}: set {backend.upper()}_SOCKET_IFNAME to a network interface"
            f" that all hosts share (`multipack doctor` lists them; {(str(error).splitlines() or [''])[0]})"
        )


def lacks_rank(error: BaseException) -> bool:
    """Whether an error is that of a collective that another rank did not complete."""
    if isinstance(error, NotConnected):
        return False
    if isinstance(error.__cause__, Exception) and lacks_rank(error.__cause__):
        return True
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    backends = isinstance(error, dist.DistBackendError) or (
        isinstance(error, (RuntimeError, ValueError)) and "gloo" in str(error)
    )
    return backends and bool(_LOST.search(str(error)))


class Watch:
    """Publishes that this rank runs, and determines which rank does not.

    Args:
        store: connection to the store of the run, used by nothing else.
        rank, size: of this process, and the number of processes.
        timeout_seconds: how long a collective waits for a missing rank.
        ends_process: whether the thread ends a process that waits for a lost rank: under nccl.

    Attributes:
        step: number of the step that is being computed, for messages.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float, ends_process: bool) -> None:
        self.step = 0
        self._store, self._rank, self._size = store, rank, size
        self._timeout_seconds, self._ends_process = timeout_seconds, ends_process
        self._failures = 0
        # Rank → its last heartbeat, and since when it is the last.
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._failed_at = self._looked_at = 0.0
        self._ended = threading.Event()
        store.set(f"heartbeat/{rank}", "0")  # every rank has one before the ranks have joined
        threading.Thread(target=self._run, name="multipack-heartbeat", daemon=True).start()

    def close(self) -> None:
        """End the heartbeat."""
        self._ended.set()

    def explain(self, error: BaseException) -> BaseException:
        """Report a failure of this rank; called once for each, on every rank that fails.

        Returns:
            The error; `LostRank` in its place if it only says that another rank is missing. Its attribute `printed` is
            True if another rank prints the same message.
        """
        self._failures += 1
        # The launcher ends the ranks that are left, and this one has a line to print.
        before = _ignore_sigterm()
        try:
            found = self._explain(error)
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        return found

    def _explain(self, error: BaseException) -> BaseException:
        key = f"failure/{self._failures}"
        if not lacks_rank(error):
            name = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
            text = (str(error).strip().splitlines() or [""])[0]
            message = f"rank {self._rank} failed{self._at()}: {name}{text}"
            first = self._ask(lambda: str(self._store.compare_set(key, "", message).decode())) or message
            error.printed = first != message and _same(first, message)  # type: ignore[attr-defined]
            return error
        gone = f"the process that holds the store (rank 0 or the launcher) does not answer{self._at()}"
        found = LostRank(self._ask(lambda: self._find(key, error)) or gone)
        found.printed = False  # type: ignore[attr-defined]
        return found

    def _find(self, key: str, error: BaseException) -> str:
        """The message of the first failure; without one, which ranks did not report that they failed too."""
        reports = [f"{key}/{rank}" for rank in range(self._size)]
        is_late = re.search("timed out|timeout", str(error), re.IGNORECASE)
        self._store.set(reports[self._rank], "late" if is_late else "closed")
        before, ends = self._heartbeats(), time.monotonic() + GRACE_SECONDS
        quiet_at = time.monotonic() + 4 * self._interval
        while True:
            if self._store.check([key]):
                return str(self._store.get(key).decode())
            silent = [rank for rank, report in enumerate(reports) if not self._store.check([report])]
            # The first rank that gives up closes connections, which the others see.
            late = any(self._store.get(reports[rank]) == b"late" for rank in {*range(self._size)} - {*silent})
            now = time.monotonic()
            if silent and now > quiet_at:
                beats = self._heartbeats()
                if stopped := [rank for rank in silent if beats[rank] == before[rank]]:
                    return self._publish(key, stopped, late, error)
            if now > ends or not silent:
                break
            time.sleep(0.1)
        return self._publish(key, silent, late, error)

    def _publish(self, key: str, lost: Sequence[int], late: bool, error: BaseException) -> str:
        """The message on lost ranks, which ranks that fail later repeat."""
        if not lost:
            message = f"a collective failed{self._at()} on every rank: {str(error).splitlines()[0]}"
        elif late:
            message = f"{_ranks(lost)} did not answer{self._at()} within {self._limit}"
        else:
            message = f"{_ranks(lost)} ended{self._at()} without an error message"
        return str(self._store.compare_set(key, "", message).decode())

    @property
    def _limit(self) -> str:
        return f"parallel.timeout_seconds={self._timeout_seconds:g}"

    @property
    def _interval(self) -> float:
        return INTERVAL_SECONDS * max(1.0, self._size / 1000)

    def _at(self) -> str:
        return f" at step {self.step}" if self.step else " before the first step"

    def _heartbeats(self) -> list[bytes]:
        return list(self._store.multi_get([f"heartbeat/{rank}" for rank in range(self._size)]))

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """The store's answer; None if it is gone, or its process is stopped."""
        answers: list[Answer] = []

        def ask() -> None:
            with suppress(RuntimeError):  # torch's errors of a store
                answers.append(question())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(GRACE_SECONDS + 2)
        return answers[0] if answers else None

    def _run(self) -> None:
        beat, step, moved = 0, self.step, time.monotonic()
        while not self._ended.wait(self._interval):
            beat += 1
            if step != self.step:
                step, moved = self.step, time.monotonic()
            try:
                self._store.set(f"heartbeat/{self._rank}", str(beat))
                if self._ends_process and not self._failures:
                    self._check(time.monotonic() - moved)
            except RuntimeError:  # the store has ended with its process
                return

    def _check(self, waited: float) -> None:
        """End this process if it waits for a rank that reported an error, or that has had no heartbeat for long."""
        now = time.monotonic()
        if self._store.check(["failure/1"]):
            self._failed_at = self._failed_at or now
            if now - self._failed_at > GRACE_SECONDS:
                self._end(self._store.get("failure/1").decode())
        # Twice this is less than the timeout, after which torch's watchdog would abort the process without a name.
        patience = 0.45 * self._timeout_seconds
        if waited < patience:
            self._beats.clear()
        elif now - self._looked_at > patience / 8:
            self._looked_at = now
            for rank, beat in enumerate(self._heartbeats()):
                if self._beats.get(rank, (b"", 0.0))[0] != beat:
                    self._beats[rank] = beat, now
            if lost := [rank for rank, (_, since) in self._beats.items() if now - since > patience]:
                self._end(f"{_ranks(lost)} did not answer{self._at()} within {self._limit}")

    def _end(self, message: str) -> NoReturn:
        """Print a line and end the process, whose main thread waits in a collective that cannot be interrupted."""
        print_error(LostRank(message), one_line=True)
        os._exit(2)


def _same(first: str, second: str) -> bool:
    """Whether messages of two ranks are about one error; `World.on_main` adds the rank that it occurred on."""
    texts = [message.partition(": ")[2] for message in (first, second)]
    return all(texts) and (texts[0] in texts[1] or texts[1] in texts[0])


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _ignore_sigterm() -> Any:
    """Ignore SIGTERM; returns the handler before, or None outside the main thread, which alone has handlers."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, signal.SIG_IGN)
