"""Runs of several ranks that a launcher starts, whose processes tests kill, stop and wait for."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

COMPARED = ("step", "loss", "grad_norm", "lr", "target_tokens", "padding")


class Launched:
    """A run, its launcher, its ranks, and what they print.

    Args:
        out: directory of the run, which a word of the command names.
        size: number of ranks.
        command: arguments of Python that start the launcher.
        wait_seconds: limit of all waiting; seconds on an idle machine become minutes on a busy one.
    """

    def __init__(self, out, size, command, wait_seconds=240):
        self.out, self.size, self.wait_seconds = out, size, wait_seconds
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.launcher = subprocess.Popen(
            [sys.executable, *command], **pipes, text=True, start_new_session=True
        )

    def ranks(self):
        """Rank → process, of the ranks that run."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended meanwhile
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                rank = next((entry[5:] for entry in environment if entry.startswith("RANK=")), None)
                if f"out={self.out}" in words and rank is not None:
                    found[int(rank)] = int(folder.name)
        return found

    def until(self, condition):
        """Wait for a condition while the launcher runs."""
        ends = time.monotonic() + self.wait_seconds
        while not condition():
            assert self.launcher.poll() is None, self.launcher.communicate()
            assert time.monotonic() < ends
            time.sleep(0.05)

    def until_step(self, step):
        """Wait until all ranks run and a step is recorded; 0 = none."""
        self.until(lambda: len(self.ranks()) == self.size)
        self.running = self.ranks()
        metrics = self.out / "metrics.jsonl"
        self.until(lambda: step == 0 or (metrics.exists() and metrics.read_bytes().count(b"\n") >= step))

    def send(self, number, *ranks):
        """Send a signal to the ranks of the last `until_step`; without any, to the launcher's process group."""
        if not ranks:
            os.killpg(self.launcher.pid, number)
        for rank in ranks:
            os.kill(self.running[rank], number)

    def end(self, seconds=None):
        """Wait until the launcher and its ranks have ended; returns the lines on standard error."""
        began = time.monotonic()
        try:
            self.printed, errors = self.launcher.communicate(timeout=seconds or self.wait_seconds)
        finally:
            left = self.ranks()
            self.kill()
        assert not left, f"ranks {sorted(left)} are left"
        self.seconds = time.monotonic() - began
        return errors.splitlines()

    def kill(self):
        """End all processes that are left."""
        running = [self.launcher.pid] if self.launcher.poll() is None else []
        for process in [*running, *self.ranks().values()]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def records(out):
    """Records of a run in order, without times."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line).get(key) for key in COMPARED} for line in lines]
