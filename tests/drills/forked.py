"""Runs in processes that a warmed-up server forks, and that are killed where a drill wants them to be.

A kill comes after some seconds of CPU time, or at the n-th event: a call that changes files, which is where a kill
could leave something half done. `start` begins a process, `Ended` says how it ended.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch",
    "numpy",
    "multipack.training.train",
    "multipack.training.export",
    "multipack.data.views.corpus",
]
EVENTS = [(os, name) for name in ("fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "chmod")]
COMPARED = ("step", "loss", "lr", "grad_norm", "target_tokens", "padding", "val_loss", "train_loss")
"""Values of records that equal runs share to the last bit."""


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        code: exit code; negative = the signal that killed it; None = it did not end in time.
        error: the last line on standard error.
        text: all of standard error.
        events, seconds: of a process that was not killed.
    """

    code: int | None
    error: str = ""
    text: str = ""
    events: int = 0
    seconds: float = 0.0
    names: list[str] = field(default_factory=list)


def run(words: list[str]) -> None:
    """Train."""
    from multipack.training.run_config import compose_run
    from multipack.training.train import train

    train(compose_run(words))


def run_until_read_only(words: list[str], disk: str, step: int) -> None:
    """Train; the disk, a mount point, becomes read-only before this step is recorded."""
    from multipack.training.run_files import RunLog

    record = RunLog.record

    def closing(log: Any, values: Any) -> None:
        if values["step"] == step:
            _close_disk(disk, log)
        record(log, values)

    RunLog.record = closing  # type: ignore[method-assign]
    run(words)


def _close_disk(disk: str, log: Any) -> None:
    """Make a file system read-only, which is refused while files are open for writing: the log's are replaced."""
    for name, file in log._files.items():
        file.close()
        log._files[name] = _ReadOnly()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


class _ReadOnly:
    """A file whose disk has become read-only."""

    def write(self, content: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def fileno(self) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def close(self) -> None:
        pass


def write_export(path: str, folder: str) -> None:
    """Export the latest checkpoint of a run."""
    from multipack.training.export import export

    export(Path(path), Path(folder))


def prepare_store(source: str, folder: str) -> None:
    """Tokenize a text by a tokenizer trained on it, with the cache and the store in a folder."""
    from multipack.data.stores.prepare import prepare
    from multipack.data.text.data_config import DataConfig
    from multipack.data.text.tokenizer import TokenizerConfig

    data = DataConfig(source="text", path=source, cache=f"{folder}/cache")
    prepare(data, TokenizerConfig("bpe", "", 300), Path(folder) / "store")


def prepare_in_parts(words: list[str]) -> None:
    """The command `multipack prepare`, with small batches and shards."""
    from multipack.cli import main
    from multipack.data.stores import prepare, writer

    prepare.BATCH_DOCUMENTS, writer.SHARD_TOKENS = 10, 3000
    sys.argv = ["multipack", "prepare", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def create(path: str, config: str, go: str) -> None:
    """Make the directory of a new run and lock its log, when the file `go` appears."""
    from multipack.run import RunDirectory
    from multipack.training.run_files import RunLog

    while not Path(go).exists():
        pass
    run = RunDirectory(path)
    run.create(config)
    RunLog(run).record({"step": 1})


@dataclass
class Running:
    """A process that was started."""

    process: Any
    folder: Path

    def wait(self, seconds: float = 300.0) -> Ended:
        """How it ended; it is killed after so many seconds."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        text = (self.folder / "stderr").read_text() if (self.folder / "stderr").is_file() else ""
        lines = [line for line in text.splitlines() if line.strip()]
        counted = self.folder / "counted"
        counts = json.loads(counted.read_text()) if counted.is_file() else {}
        return Ended(code, lines[-1] if lines else "", text, **counts)


_numbers = iter(range(1 << 30))


def start(
    folder: Path,
    function: Any,
    *arguments: Any,
    event: int | None = None,
    cpu: float | None = None,
    environment: dict[str, str] | None = None,
) -> Running:
    """Call a function of this module in a new process; `folder` takes its output.

    `event` and `cpu` say where it is killed.
    """
    folder = folder / f"process-{next(_numbers)}"
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    where = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", ""), **(environment or {})}
    place = (str(folder.absolute()), os.getcwd())
    process = context.Process(
        target=_child, args=(place, function.__name__, arguments, event, cpu, where), daemon=True
    )
    process.start()
    return Running(process, folder)


def together(folder: Path, words: list[str], size: int, killed: int = 0, **kill: Any) -> list[Ended]:
    """Train in `size` processes that join each other; rank `killed` is the one that `kill` kills."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(size):
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_PORT": port,
        }
        place = {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
        own = kill if rank == killed else {}
        ranks.append(start(folder, run, words, environment=place, **own))
    return [each.wait() for each in ranks]


def _child(
    place: tuple[str, str],
    name: str,
    arguments: Any,
    event: int | None,
    cpu: float | None,
    environment: dict[str, str],
) -> None:
    folder, directory = place
    os.chdir(directory)  # that of the server is where it was started
    os.environ.update(environment)
    for number, file in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{file}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    names: list[str] = []
    _watch(names, event)
    from multipack.training import precision

    precision.matmul_peak = lambda *_, **__: 1e11
    began = time.process_time()
    if cpu is not None:
        threading.Thread(target=_kill_after, args=(began + cpu,), daemon=True).start()
    try:
        globals()[name](*arguments)
    except (ValueError, OSError) as error:  # as the command line prints them
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    counted = {"events": len(names), "seconds": time.process_time() - began, "names": names}
    Path(folder, "counted").write_text(json.dumps(counted))
    sys.stdout.flush()
    os._exit(0)


def _kill_after(moment: float) -> None:
    while time.process_time() < moment:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(names: list[str], event: int | None) -> None:
    """Count calls that change files, and kill the process before or after the event with this number."""

    def watched(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            names.append(name)
            if event == 2 * len(names):
                os.kill(os.getpid(), signal.SIGKILL)
            value = original(*arguments, **options)
            if event == 2 * len(names) + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        setattr(module, name, call)

    for module, name in EVENTS:
        watched(module, name)
    watched(shutil, "rmtree")


def records(path: Path) -> list[dict[str, Any]]:
    """What equal runs share of a run's records."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in COMPARED if name in line} for line in lines]


def different(path: Path, expected: Path) -> list[str]:
    """Names of what differs between two finished runs: records, samples, tensors of the latest checkpoint."""
    from multipack.run import RunDirectory
    from multipack.training.checkpoint import load_checkpoint

    found = [] if records(path) == records(expected) else ["metrics.jsonl"]
    if (path / "samples.txt").read_bytes() != (expected / "samples.txt").read_bytes():
        found.append("samples.txt")
    ours, theirs = (
        load_checkpoint(RunDirectory(each).latest_checkpoint()).source for each in (path, expected)
    )
    for group in ("model", "optimizer", "rng"):
        one, other = ours.whole(group), theirs.whole(group)
        found += sorted(one.keys() ^ other.keys())
        found += [name for name in one.keys() & other.keys() if not bool((one[name] == other[name]).all())]
    left = [entry.name for entry in (path / "checkpoints").iterdir() if entry.name.startswith(".")]
    return found + left
