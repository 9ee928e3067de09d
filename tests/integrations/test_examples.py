"""The scripts in examples/ run as they are, and are short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
NEEDED = {
    "trl_sft": ("trl", "peft"),
    "pytorch_loop": ("torchdata",),
    "accelerate_loop": ("torchdata", "accelerate"),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    if path.stem == "torchtitan_train":
        pytest.skip("torchtitan trains on GPUs; test_torchtitan.py trains this configuration on a CPU")
    for package in ("transformers", *NEEDED.get(path.stem, ("accelerate",))):
        pytest.importorskip(package, reason=f"{package} is not installed")
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
