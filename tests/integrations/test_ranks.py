"""The samplers under torch.distributed, three gloo processes: every rank has the same number of batches."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    program = Path(__file__).with_name("ranks_report.py")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "--master-port",
        str(port),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(program), str(out)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]


def test_ranks_with_different_shards_have_equal_numbers_of_batches(reports):
    alone = [report["alone"] for report in reports]
    assert len(set(alone)) > 1
    assert {report["len"] for report in reports} == {report["iterated"] for report in reports} == {min(alone)}
    for report in reports:
        assert len(report["trained"]) + report["left_out"] == report["shard"]
    assert reports[alone.index(max(alone))]["left_out"] > 0


def test_a_rank_without_a_batch_stops_all(reports):
    assert all("too few for a batch of batch_size=2" in report["error"] for report in reports)


def test_batches_side_by_side_are_equal_in_cost(reports):
    """Hosts assign batch b to rank b % ranks; the same sampler on all ranks gives the same batches."""
    assert reports[0]["batches"] == reports[1]["batches"] == reports[2]["batches"]
    squares = np.array(reports[0]["squares"])
    sides = squares[: len(squares) // 3 * 3].reshape(-1, 3)
    mixed = np.random.default_rng(0).permutation(squares)[: sides.size].reshape(-1, 3)
    assert np.ptp(sides, axis=1).mean() < np.ptp(mixed, axis=1).mean()


def test_rank_and_replicas_come_from_the_group(reports):
    assert [report["place"] for report in reports] == [[3, 0], [3, 1], [3, 2]]
    assert len({len(report["documents"]) for report in reports}) == 1
    held = [number for report in reports for batch in report["documents"] for number in batch]
    assert sorted(held) == list(range(600))
