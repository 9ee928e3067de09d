"""Attempts in forked processes with limits of time and memory, which are replaced when they hang or crash."""

import os
import random
import resource
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mutation import MARKER

SECONDS, WAIT, BYTES = 10, 120, 4 << 30  # of processor time, on a busy machine, beyond what is used
SEED = os.environ.get("SEED", "")
"""Another value of this variable draws other mutants."""
MUTANTS = int(os.environ.get("MUTANTS", "1000"))
"""10,000 tries ten times as many mutants of every surface."""
CLEAN = ("refused", "memory", "accepted", "equal", "different")
"""Outcomes of mutants that are not lost: the command line shows one line where memory is lacking, too. What is read of
an accepted mutant equals that of the original, or differs."""


def run_all(attempt, count, name):
    """Call `attempt(number)` for all numbers in forked processes, which are replaced when they hang or crash.

    Returns:
        Outcome (one of `CLEAN`, hang, crash, or the kind of an error) → number of mutants; and texts about the lost.
    """
    outcomes, lost, number = Counter(), [], 0
    while number < count:
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.close(reader)
            _attempts(attempt, range(number, count), writer)
        os.close(writer)
        rest, begun, used = b"", time.monotonic(), 0.0
        while number < count:
            ready, _, _ = select.select([reader], [], [], 1.0)
            if not ready and _processor_seconds(child) - used < SECONDS and time.monotonic() < begun + WAIT:
                continue
            chunk = os.read(reader, 1 << 16) if ready else b""
            if not chunk:
                break
            used = _processor_seconds(child)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                outcome, _, text = line.decode().partition(" ")
                outcomes[outcome] += 1
                if outcome not in CLEAN:
                    lost.append(f"{name} {number}: {outcome} {text}")
                number, begun = number + 1, time.monotonic()
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(reader)
        if number < count:
            outcome = "hang" if not ready else "crash"
            outcomes[outcome] += 1
            lost.append(f"{name} {number}: {outcome} (status {status})")
            number += 1
    return outcomes, lost


def _processor_seconds(process):
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _attempts(attempt, numbers, writer):
    """Of the forked process: one line per attempt; never returns."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for number in numbers:
        try:
            line = attempt(number)
        except (ValueError, OSError) as error:  # what the command line shows in one line
            text = str(error)
            line = (
                "refused"
                if text.strip() and "\n" not in text and len(text) < 20_000
                else f"message {text[:300]!r}"
            )
        except BaseException as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                os.write(writer, b"memory\n")
                continue
            frame = traceback.extract_tb(error.__traceback__)[-1]
            own = [each for each in traceback.extract_tb(error.__traceback__) if "multipack" in each.filename]
            place = (
                f"{Path(own[-1].filename).name}:{own[-1].lineno}"
                if own
                else f"{frame.filename}:{frame.lineno}"
            )
            line = f"{type(error).__name__} {place} {str(error)[:200]!r}"
        os.write(writer, line.encode() + b"\n")
    os._exit(0)


@dataclass
class Surface:
    """A file that mutants replace.

    Attributes:
        name: of the surface.
        file: a valid file.
        mutations: function of (its content, random numbers) → number of mutants where `MUTANTS` is 1,000.
        read: reads the file; what it returns of a mutant is compared with the original's, unless it is None.
        finish: is called before each reading.
    """

    name: str
    file: Path
    mutations: dict[Callable[[bytes, random.Random], bytes], int]
    read: Callable[[], Any]
    finish: Callable[[], Any] = lambda: None


class Drill:
    """Tries mutants of surfaces, one after the other, and fails if one was lost."""

    def __init__(self, outcome):
        self._outcome, self._total, self._lost = outcome, Counter(), []

    def __call__(self, surfaces):
        for surface in surfaces:
            original = surface.file.read_bytes()
            for mutate, count in surface.mutations.items():
                name = f"{surface.name} {mutate.__name__}"
                attempt = partial(self._attempt, surface, original, mutate, [])
                found, lost = run_all(attempt, max(round(count * MUTANTS / 1000), 1), name)
                self._total.update(found)
                self._lost += lost
            surface.file.write_bytes(original)
            surface.finish()
        self._outcome("mutants", sum(self._total.values()))
        for kind in dict.fromkeys((*CLEAN, "hang", "crash", *sorted(self._total))):
            self._outcome(kind, self._total[kind])
        self._outcome("executions", int(MARKER.exists()))
        MARKER.unlink(missing_ok=True)
        assert not self._lost, "\n".join(self._lost)

    def _attempt(self, surface, original, mutate, known, number):
        """Of a forked process; `known` gets what is read of the original."""
        draw = random.Random(f"{surface.name} {mutate.__name__} {number}{SEED}")
        try:
            if not known:
                known.append(self._read(surface, original))
            mutant = mutate(original, draw)
        except (ValueError, OSError) as error:
            raise AssertionError(f"the original is refused: {error}") from error
        value = self._read(surface, mutant)
        return "accepted" if value == "None" else "equal" if value == known[0] else "different"

    @staticmethod
    def _read(surface, content):
        surface.file.write_bytes(content)
        surface.finish()
        return repr(surface.read())
