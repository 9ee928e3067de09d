"""Observers on two ranks: every rank sees the same, and the noise is that of the known covariance."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_two_ranks_see_the_same_and_the_noise_of_the_known_covariance(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(HERE / "watched.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["steps"] == 10
    # tr Σ = 6 · 1, |G|² = 6 · ½²; the last ten steps move the weights by a hundredth.
    assert first["found"]["gradient_noise"] == pytest.approx(6 / 1.5, rel=0.15)
    assert set(first["found"]) == {
        "gradient_noise",
        *(f"{kind}/{layer}" for kind in ("grad_norm", "weight_norm") for layer in ("first", "second")),
    }
