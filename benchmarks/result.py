"""What the benchmarks share: a command line, silent training runs, times of ways by turns, files of figures, pages."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import tempfile
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).resolve().parents[1] / "docs"


def parser_of(doc: str | None, name: str) -> ArgumentParser:
    """A parser of the benchmark `name` whose help is its docstring, with the option --out."""
    parser = ArgumentParser(description=doc, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="JSON file to write")
    return parser


def records_of(words: list[str]) -> list[dict[str, Any]]:
    """The records of a silent run of this project's trainer with these settings."""
    from multipack.run import RunDirectory
    from multipack.training.run_config import compose
    from multipack.training.train import train

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(compose([*words, "log.every=0", f"out={folder}/run"]))
        return list(RunDirectory(f"{folder}/run").records())


def seconds_of(
    work: Callable[[], object], device: str = "cpu", clock: Callable[[], float] = time.process_time
) -> float:
    """Seconds of a call: of `clock`, by default CPU seconds of this process; on a GPU, of the device's own clock."""
    if not device.startswith("cuda"):
        began = clock()
        work()
        return clock() - began
    torch.cuda.synchronize(device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop) / 1e3


def by_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.process_time,
    unmeasured: int = 1,
) -> dict[str, list[float]]:
    """Way → its seconds in each round; in a round every way is called once, and another one begins than before.

    Args:
        ways: by name.
        rounds: that are measured.
        device: of `seconds_of`.
        clock: of `seconds_of`.
        unmeasured: rounds before them, which compile and allocate.
    """
    names, found = list(ways), {name: list[float]() for name in ways}
    for turn in range(unmeasured + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds = seconds_of(ways[name], device, clock)
            found[name] += [seconds] if turn >= unmeasured else []
    return found


def median_ratio(one: list[float], other: list[float]) -> float:
    """Median over rounds of the seconds of one way over those of another."""
    return median(mine / theirs for mine, theirs in zip(one, other, strict=True))


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """The name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def write_result(out: Path, figures: dict[str, Any]) -> None:
    """Write `figures` and the machine's description as JSON."""
    machine = {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**figures, "machine": machine}, indent=2) + "\n")
    print(f"wrote {out}")


def write_between(path: Path, name: str, text: str) -> None:
    """Put text between the marks `<!-- NAME: begin -->` and `end` of a page."""
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    page = path.read_text(encoding="utf-8")
    if begin not in page or end not in page:
        raise SystemExit(f"{path} lacks the marks {begin} and {end}, between which the tables go")
    before, after = page.split(begin)[0], page.split(end)[1]
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
    print(f"wrote {path}")
