"""Two processes started to see whether they can work together, and ended when they do not come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from multipack.launch.smoke import CHECKS
from multipack.parallel.ranks import TABLE

SMOKE_SECONDS = 90.0
"""How long two processes may take for all checks; most of it is importing torch."""


def smoke_test(
    environment: Mapping[str, str],
    device: str,
    timeout_seconds: float,
    program: Sequence[str] = ("-m", "multipack.launch.smoke"),
) -> Iterator[tuple[str, str, float]]:
    """Run smoke.py in two processes, as a run would be.

    Args:
        environment: variables that they get, without those by which this process may have been launched itself.
        device: what they compute on.
        timeout_seconds: after which they are killed.
        program: what torchrun starts.

    Yields:
        (check, error, seconds) for every check, in their order; no error is an empty text.
    """
    with tempfile.TemporaryDirectory(prefix="multipack-doctor-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ending = _run([*command, *program, folder, device], _own(environment), timeout_seconds)
        found = [_read(Path(folder) / f"rank-{rank}.jsonl") for rank in (0, 1)]
    stopped = False
    for name in CHECKS:
        if stopped:
            yield name, "not run: one before it failed", 0.0
        elif all(name in one for one in found):
            error = next((one[name][0] for one in found if one[name][0]), "")
            yield name, error, max(one[name][1] for one in found)
            stopped = bool(error)
        else:
            said = next((one[name][0] for one in found if name in one and one[name][0]), "")
            yield name, said or f"did not come back: {ending or 'a process ended without a word'}", 0.0
            stopped = True


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables without a launcher's: these two processes are a run of their own, whoever started this one."""
    names = {name for row in TABLE for names in row[1:] for name in names}
    names |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}
    return {name: value for name, value in environment.items() if name not in names}


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float) -> str:
    """Run a command with its children to their end; what went wrong, in words."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, told = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers, which have sessions of their own
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return f"ended after {timeout_seconds:.0f} s"
    lines = [line.strip() for line in told.splitlines() if "Error" in line or "error" in line]
    return "" if process.returncode == 0 else next(iter(lines), f"exit code {process.returncode}")[:300]


def _read(path: Path) -> dict[str, tuple[str, float]]:
    """Check → (error, seconds), as far as the process came; a line that was cut off does not count."""
    found: dict[str, tuple[str, float]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        found[entry["check"]] = (entry["error"], entry["seconds"])
    return found
