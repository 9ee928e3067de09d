"""The main job as it is: `multipack train` with its defaults. Minutes, so marked slow."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_run_learns_the_standard_library(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "multipack", "train", f"out={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validation = [record["val_loss"] for record in records if "val_loss" in record]
    assert 7.4 < validation[0] < 8.0
    assert validation[-1] <= 4.8
    assert "packed / padded" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_characters_of_shakespeare_are_learned(shared_data, tmp_path):
    """nanoGPT's stream, cut into blocks: well below the 4.17 of guessing among 65 characters."""
    words = [
        "data=shakespeare_char",
        f"data.path={shared_data / 'text' / 'tinyshakespeare.txt'}",
        "data.block_size=256",
        "model=tiny",
        "plan.capacity=2048",
        "train.steps=250",
        "train.eval_every=250",
        "train.eval_packs=16",
        "train.compare_padding=false",
        f"out={tmp_path / 'run'}",
    ]
    subprocess.run([sys.executable, "-m", "multipack", "train", *words], check=True, capture_output=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["val_loss"] < 2.4
