"""Where a benchmark's figures go, with what they were measured on."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch


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
