"""Everything to run first on a machine with one GPU: the cuda tests, then benchmarks. About half an hour, offline.

    PYTHONPATH=src python benchmarks/gpu_check.py                        # or: make gpu-check
    PYTHONPATH=src python benchmarks/gpu_check.py --part llama-eager     # one part; give the option again for more
    PYTHONPATH=src python benchmarks/gpu_check.py --device cpu --small   # that every part runs; minutes

Each part is a process of its own with a time limit: one that fails or hangs costs its own figures only. A part writes
PART.json and PART.log to results/gpu (runs/gpu-check on a CPU), and summary.json is written anew after each. It has the
state and the seconds of every part, and the asked figures with what was reached. docs/gpu.md describes the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent


@dataclass(frozen=True)
class Part:
    """A command of its own process.

    Attributes:
        name: of the part and its files.
        limit: seconds after which it is ended.
        command: arguments of Python; `{device}` and `{out}` are replaced.
        small: further arguments of the reduced form.
    """

    name: str
    limit: float
    command: tuple[str, ...]
    small: tuple[str, ...] = ()


def module_part(name: str, limit: float, module: str, *arguments: str) -> Part:
    """A module of gpu_parts."""
    command = ("-m", f"gpu_parts.{module}", "--device", "{device}", "--out", "{out}", *arguments)
    return Part(name, limit, command, ("--small",))


ATTENTION = (
    *("attention.py", "--device", "{device}", "--out", "{out}"),
    *("--tokens", "8192", "--documents", "18", "--pad-factor", "4", "--heads", "32", "--kv-heads", "8"),
    *("--dtype", "bfloat16", "--without", "dense"),
)
SMALL_ATTENTION = (
    *("attention.py", "--device", "{device}", "--out", "{out}"),
    *("--tokens", "256", "--documents", "4", "--pad-factor", "2", "--heads", "2", "--kv-heads", "1"),
    *("--dtype", "float32", "--repeats", "1"),
)
BENCHES = (
    Part("attention", 180, ATTENTION, SMALL_ATTENTION),
    module_part("bounds", 90, "bounds"),
    module_part("loss", 90, "loss"),
    *(
        module_part(f"llama-{way}", 200, "llama", "--way", way)
        for way in ("eager", "compiled", "fixed", "automatic")
    ),
    module_part("gpt2", 300, "gpt2"),
    module_part("padding", 240, "padding"),
    module_part("trace", 200, "trace"),
)
TEST_LIMIT = 600.0


def cuda_tests(tests: Path) -> list[Part]:
    """A part for every test file that has cuda tests, by name: collecting all tests would import all of multipack."""
    files = [
        path for path in sorted(tests.rglob("test_*.py")) if "mark.cuda" in path.read_text(encoding="utf-8")
    ]
    options = ("-q", "-m", "cuda", "--durations=5", "-p", "no:cacheprovider")
    return [
        Part(f"tests-{path.stem.removeprefix('test_')}", TEST_LIMIT, ("-m", "pytest", *options, str(path)))
        for path in files
    ]


def all_parts() -> list[Part]:
    """The parts in the order in which they run."""
    return [module_part("environment", 120, "environment"), *cuda_tests(ROOT / "tests"), *BENCHES]


def run_part(part: Part, device: str, small: bool, out: Path) -> dict[str, Any]:
    """Run one part; returns its state (passed, failed or out of time), seconds, last line, and asked figures."""
    result, log = out / f"{part.name}.json", out / f"{part.name}.log"
    result.unlink(missing_ok=True)
    arguments = [*part.command, *(part.small if small else ())]
    places = {"{device}": device, "{out}": str(result)}
    command = [sys.executable, *(places.get(each, each) for each in arguments)]
    paths = [str(ROOT / "src"), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        # A session of its own, so that processes which a part has started end with it.
        process = subprocess.Popen(
            command,
            cwd=BENCHMARKS,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    state = {0: "passed", None: "out of time"}.get(code, "failed")
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    figures = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    return {
        "part": part.name,
        "state": state,
        "seconds": round(time.perf_counter() - began, 1),
        "last_line": re.sub(r"\s+", " ", lines[-1])[:300] if lines else "",
        "asked": figures.get("asked", []),
    }


def run_parts(parts: Sequence[Part], device: str, small: bool, out: Path) -> list[dict[str, Any]]:
    """Run parts one after the other, and write the summary after each."""
    out.mkdir(parents=True, exist_ok=True)
    summary = out / "summary.json"
    before = json.loads(summary.read_text(encoding="utf-8"))["parts"] if summary.is_file() else []
    rows = {row["part"]: row for row in before}  # parts that are not run again keep their row
    for part in parts:
        print(f"{part.name:28}", end="", flush=True)
        row = rows[part.name] = run_part(part, device, small, out)
        print(f"{row['state']:12}{row['seconds']:>7.1f} s  {row['last_line'][:100]}", flush=True)
        content = {"device": device, "small": small, "parts": list(rows.values())}
        summary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for row in rows.values():
        for each in row["asked"]:
            sign = -1 if each.get("at_most") else 1
            verdict = "reached" if sign * each["reached"] >= sign * each["asked"] else "NOT REACHED"
            print(f"{verdict:12}{each['figure']}: {each['reached']:.2f}, asked {each['asked']:.2f}")
    return [rows[part.name] for part in parts]


def main() -> int:
    parts = {part.name: part for part in all_parts()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="the reduced form of every part")
    parser.add_argument("--part", action="append", choices=parts, help="run only these parts")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args()
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu needs --small: the whole checks would take days there")
    folder = BENCHMARKS / "results" / "gpu" if options.device == "cuda" else ROOT / "runs" / "gpu-check"
    chosen = [parts[name] for name in options.part or parts]
    rows = run_parts(chosen, options.device, options.small, (options.out or folder).resolve())
    return 0 if all(row["state"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
