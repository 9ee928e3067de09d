"""Names the rank that failed, in one line on every other rank.

    every rank, once a second     ─▶ store  heartbeat/RANK     a number that increases, and the rank's place in the run
    a rank with an error          ─▶ store  failure            "rank 3 failed at step 42: …"; the first one counts
    a rank whose collective fails ◀─ store  both: `LostRank` replaces the error of the backend

The heartbeat has a thread and a connection of its own. A rank that was killed or stopped sends no heartbeats. A rank
that hangs sends them, but its place does not change, and it does not report a failed collective.

Under gloo a collective that lacks a rank raises an error, but not while a checkpoint is written, which may take long.
Under nccl it blocks in the driver, until torch's watchdog aborts the process. For both cases the thread of the
heartbeat looks for lost ranks, prints the line and ends the process.

A place is a step and a stage of it, as the host sees them. All ranks pass the same places in the same order, so a rank
that others wait for has the lowest place. Under nccl a rank that hangs is not named if all ranks have the same place
(in an evaluation or a checkpoint, which have no stages), and a rank whose device hangs while its host runs ahead may
have a higher place than others. The passes of a pipeline are one stage.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from multipack.parallel.ranks import is_reported, mark_reported, print_error

INTERVAL_SECONDS = 1.0
"""Time between heartbeats of a rank; above 1,000 ranks, which share one store, it grows in proportion."""
GRACE_SECONDS = 6.0
"""Time that ranks whose collective failed wait for each other's reports; it grows as the interval."""
# A rank that hangs is named after two waits. Under nccl both must end before the timeout, at which torch's watchdog
# aborts the process and names no rank. Under gloo the error of the collective comes first, at the timeout.
PATIENCE = {"blocks": 0.45, "raises": 1.0}
"""What a collective that lacks a rank does → share of the timeout for which the heartbeat waits for that rank."""
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


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty without one."""
    return (str(error).strip().splitlines() or [""])[0]


def is_lost_rank_error(error: BaseException) -> bool:
    """Whether an error comes from a collective that another rank did not complete."""
    if isinstance(error, NotConnected):
        return False
    if isinstance(error.__cause__, Exception) and is_lost_rank_error(error.__cause__):
        return True
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    backends = isinstance(error, dist.DistBackendError) or (
        isinstance(error, (RuntimeError, ValueError)) and "gloo" in str(error)
    )
    return backends and bool(_LOST.search(str(error)))


class Alone:
    """The place of a rank in its run. A run of one process needs no more.

    Attributes:
        place: step, number of its stage, and the stage in words; (0, 0, "") before the first step.
    """

    place: tuple[int, int, str] = (0, 0, "")

    def at_step(self, step: int) -> None:
        """Record that this rank begins a step."""
        self.place = step, 0, "reading its packs"

    def at_stage(self, stage: str) -> None:
        """Record that this rank begins the next stage of its step; all ranks have the same stages."""
        step, number, _ = self.place
        self.place = step, number + 1, stage

    def report(self, error: BaseException, one_line: bool | None = None) -> BaseException:
        """Report an error of this rank to the other ranks; returns the error to raise."""
        return error


class Watch(Alone):
    """Publishes that this rank runs, and determines which rank does not.

    Args:
        store: connection to the store of the run, used by nothing else.
        rank, size: rank of this process, and number of processes.
        timeout_seconds: how long a collective waits for a missing rank.
        blocks: whether a collective that lacks a rank blocks instead of raising an error: under nccl.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float, blocks: bool) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout_seconds, self._blocks = timeout_seconds, blocks
        self._interval, self._grace = (
            each * max(1.0, size / 1000) for each in (INTERVAL_SECONDS, GRACE_SECONDS)
        )
        self._failures = 0
        # Rank → its last heartbeat, and the time at which this process first saw it.
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._failed_at = self._looked_at = 0.0
        self._ended = threading.Event()
        # Every rank has a heartbeat before the ranks have joined.
        store.set(f"heartbeat/{rank}", json.dumps([0, *self.place]))
        threading.Thread(target=self._run, name="multipack-heartbeat", daemon=True).start()

    def close(self) -> None:
        """End the heartbeat."""
        self._ended.set()

    def report(self, error: BaseException, one_line: bool | None = None) -> BaseException:
        """Report an error of this rank to the store, and print it unless another rank prints the same message.

        Waits for the reports of other ranks, up to `GRACE_SECONDS` + 2. An error reported before is returned.

        Args:
            error: an error of this rank.
            one_line: whether to print no traceback; None = for `ValueError` and `OSError`.

        Returns:
            The error; `LostRank` in its place if it only says that another rank is missing.
        """
        if is_reported(error):
            return error
        self._failures += 1
        if one_line is None:
            one_line = isinstance(error, (ValueError, OSError))
        with _without_sigterm():  # the launcher sends it to ranks that are left, which have a line to print
            found, is_printed = self._examine(error)
            if not is_printed and isinstance(found, Exception):
                print_error(found, one_line or found is not error)
        mark_reported(found)
        return found

    def _examine(self, error: BaseException) -> tuple[BaseException, bool]:
        """The error to raise, and whether another rank prints it."""
        key = f"failure/{self._failures}"
        if is_lost_rank_error(error):
            return LostRank(self._ask(lambda: self._find(key, error)) or self._no_store), False
        name = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        message = f"rank {self._rank} failed{self._at}: {name}{first_line(error)}"
        first = self._ask(lambda: self._first(key, message)) or message
        if first != message and isinstance(error, NotConnected):  # to a rank that failed before it connected
            return LostRank(first), False
        return error, first != message and _same(first, message)

    def _find(self, key: str, error: BaseException) -> str:
        """The message of the first failure; without one, a message on the ranks that sent no report."""
        is_late = re.search("timed out|timeout", str(error), re.IGNORECASE)
        self._store.append(f"{key}/reports", f"{self._rank} {'late' if is_late else 'closed'}\n")
        began, beats = time.monotonic(), dict[int, tuple[bytes, float]]()
        while not self._store.check([key]):
            reports = self._store.get(f"{key}/reports").decode()
            missing = sorted({*range(self._size)} - {int(line.split()[0]) for line in reports.splitlines()})
            silence = self._silence(beats)
            stopped = [rank for rank in missing if silence[rank] > 4 * self._interval]
            if stopped or not missing or time.monotonic() - began > self._grace:
                # The first rank that gives up closes connections, which the others see.
                return self._publish(key, stopped or missing, "late" in reports, error)
            time.sleep(0.1 * max(1.0, self._size / 100))
        return str(self._store.get(key).decode())

    def _publish(self, key: str, lost: Sequence[int], late: bool, error: BaseException) -> str:
        """The message on lost ranks, which ranks that fail later repeat."""
        if not lost:
            message = f"a collective failed{self._at} on every rank: {first_line(error)}"
        elif late:
            message = self._no_answer(lost, self._at)
        else:
            message = f"{_ranks(lost)} ended{self._at} without an error message"
        return self._first(key, message)

    def _first(self, key: str, message: str) -> str:
        """The message of the first rank that wrote one; `message` if this rank is the first."""
        return str(self._store.compare_set(key, "", message).decode())

    @property
    def _at(self) -> str:
        """The step of this rank in words."""
        return _at(self.place[0])

    @property
    def _no_store(self) -> str:
        return f"the process that holds the store (rank 0 or the launcher) does not answer{self._at}"

    def _no_answer(self, lost: Sequence[int], at: str) -> str:
        return f"{_ranks(lost)} did not answer{at} within parallel.timeout_seconds={self._timeout_seconds:g}"

    def _silence(self, seen: dict[int, tuple[bytes, float]]) -> list[float]:
        """Seconds since this process first saw each rank's last heartbeat, or began to look.

        `seen` is rank → its last heartbeat and when it was first seen; each thread that looks has its own.
        """
        now = time.monotonic()
        beats = self._store.multi_get([f"heartbeat/{rank}" for rank in range(self._size)])
        for rank, beat in enumerate(beats):
            if seen.get(rank, (b"", 0.0))[0] != beat:
                seen[rank] = beat, now
        return [now - since for _, since in (seen[rank] for rank in range(self._size))]

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """The store's answer; None if it is gone, or its process is stopped."""
        answers: list[Answer] = []

        def ask() -> None:
            with suppress(RuntimeError):  # torch's errors of a store
                answers.append(question())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(self._grace + 2)
        return answers[0] if answers else None

    def _run(self) -> None:
        beat, place, moved = 0, self.place, time.monotonic()
        while not self._ended.wait(self._interval):
            beat += 1
            if place != self.place:
                place, moved = self.place, time.monotonic()
            try:
                self._store.set(f"heartbeat/{self._rank}", json.dumps([beat, *place]))
                if not self._failures:
                    self._check(time.monotonic() - moved)
            except RuntimeError:  # the store has ended with its process
                if self._blocks and not self._ended.wait(self._grace) and not self._failures:
                    self._end(self._no_store)
                return

    def _check(self, waited: float) -> None:
        """End this process if it waits for a rank that reported an error, sends no heartbeats, or hangs."""
        now = time.monotonic()
        if self._blocks and self._store.check(["failure/1"]):
            self._failed_at = self._failed_at or now
            if now - self._failed_at > self._grace:
                self._end(self._store.get("failure/1").decode())
        patience = PATIENCE["blocks" if self._blocks else "raises"] * self._timeout_seconds
        if waited < patience:
            self._beats.clear()
        elif now - self._looked_at > patience / 8:
            self._looked_at = now
            silence = self._silence(self._beats)
            lost, at = [rank for rank, seconds in enumerate(silence) if seconds > patience], self._at
            # While all ranks send heartbeats: the last one of a killed rank may be from an earlier place.
            if self._blocks and waited > 2 * patience and max(silence) < patience / 2:
                places = [json.loads(self._beats[rank][0])[1:] for rank in range(self._size)]
                last = min(places)
                lost = [rank for rank, place in enumerate(places) if place == last < [*self.place]]
                at = _at(*last)
            if lost and not self._failures:
                self._end(self._first("failure/1", self._no_answer(lost, at)))

    def _end(self, message: str) -> None:
        """Print a line and end the process, whose main thread waits in a collective that cannot be interrupted."""
        if not self._ended.is_set():  # closed while this thread asked the store: the run is over
            print_error(LostRank(message), one_line=True)
            os._exit(2)


def _same(first: str, second: str) -> bool:
    """Whether messages of two ranks are about one error; `World.on_main` adds the rank that it occurred on."""
    texts = [message.partition(": ")[2] for message in (first, second)]
    return all(texts) and (texts[0] in texts[1] or texts[1] in texts[0])


def _at(step: int, _: int = 0, stage: str = "") -> str:
    """A place in words."""
    return (f" at step {step}" if step else " before the first step") + (f" ({stage})" if stage else "")


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


@contextmanager
def _without_sigterm() -> Iterator[None]:
    """Context that ignores SIGTERM in the main thread; other threads cannot change handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
