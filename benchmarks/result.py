"""What the benchmarks share: a command line, silent training runs, and a file of figures."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import tempfile
from argparse import ArgumentParser, RawTextHelpFormatter
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


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
        train(compose([*words, "train.compare_padding=false", "log.every=0", f"out={folder}/run"]))
        return list(RunDirectory(f"{folder}/run").records())


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
