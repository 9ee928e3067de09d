"""`multipack train` under torchrun with gloo: the same run as one process, and orderly ends."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import sharding as tiny

from multipack.data.prepare import prepare
from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _command(processes, program):
    if processes == 1:
        return [sys.executable, *program]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*launcher, "--master-port", str(_free_port()), *program]


def _run(processes, program, timeout=300):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        _command(processes, program), env=environment, capture_output=True, text=True, timeout=timeout
    )


def _train(processes, words, out, *more):
    if processes == 1:  # here: a process of its own imports for seconds
        printed = io.StringIO()
        with redirect_stdout(printed):
            train(compose_run([*words, f"out={out}", *more]))
        return printed.getvalue()
    done = _run(processes, ["-m", "multipack", "train", *words, f"out={out}", *more])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _losses(out):
    return [record["loss"] for record in _records(out) if "loss" in record]


def _are_close(one, other, keys):
    """Check that two runs have the same steps and, in them, close values of these keys; the keys that occur."""
    seen = set()
    for a, b in zip(_records(one), _records(other), strict=True):
        assert (a["step"], a.get("target_tokens")) == (b["step"], b.get("target_tokens"))
        for key in keys & a.keys():
            assert b[key] == pytest.approx(a[key], abs=1e-5), (a["step"], key)
            seen.add(key)
    return seen


def test_losses_are_those_of_one_process(words, tmp_path):
    eight = [word for word in words if not word.startswith("train.steps")] + [
        "train.steps=8",
        "train.eval_every=4",
        "parallel.timeout_seconds=30",
    ]
    _train(1, eight, tmp_path / "1")
    printed = _train(2, [*eight, "log.all_ranks=true"], tmp_path / "together")
    assert len(_losses(tmp_path / "1")) == 8
    keys = {"loss", "grad_norm", "val_loss", "train_loss"}
    assert _are_close(tmp_path / "1", tmp_path / "together", keys) == keys
    for rank in (0, 1):
        assert printed.count(f"[rank {rank}] step=8 loss=") == 1
    assert "2 processes" in printed
    assert "torchrun" in printed


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_sigterm_saves_and_stops_and_the_run_goes_on_bit_for_bit(pools, processes, words, tmp_path):
    def train_on_pool(*words):
        pools(processes).run(tiny.train_here, words, tmp_path / "cache")

    long = [word for word in words if not word.startswith("train.steps")] + [
        "train.steps=40",
        "parallel.timeout_seconds=30",
        "log.every=1",
        "optimizer.decay_steps=40",
    ]
    train_on_pool(*long, f"out={tmp_path / 'whole'}")
    out = tmp_path / "stopped"
    program = ["-m", "multipack", "train", *long, f"out={out}"]
    process = subprocess.Popen(
        _command(processes, program),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    for line in process.stdout:
        if line.startswith("step=5 "):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait(60) != 0
    assert "SIGTERM: saved after step" in rest
    done = len(_losses(out))
    assert 5 <= done < 40
    train_on_pool("train.resume=true", f"out={out}")
    assert _losses(out) == _losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_within_the_timeout(words, tmp_path):
    """SIGKILL one of two ranks: the launcher ends the other, nothing hangs, the last checkpoint is whole."""
    out = tmp_path / "run"
    program = ["-m", "multipack", "train", *words, "train.steps=5000", "log.every=1", f"out={out}"]
    process = subprocess.Popen(
        _command(2, [*program, "parallel.timeout_seconds=10"]),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step=8 "):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("this system does not list child processes in /proc")
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    began = time.monotonic()
    process.stdout.read()
    process.stdout.close()
    assert process.wait(60) != 0
    assert time.monotonic() - began < 60
    assert load_checkpoint(RunDirectory(out).latest_checkpoint()).step >= 6


@pytest.mark.slow
def test_a_stream_is_the_same_on_1_and_2_processes_until_it_ends(words, corpus_path, tmp_path):
    config = compose(["data=jsonl", f"data.path={corpus_path}", "tokenizer=byte"])
    shards = prepare(config.data, config.tokenizer, tmp_path / "shards", shards=3)
    kept = [word for word in words if not word.startswith(("data", "tokenizer", "train.steps"))]
    stream = [*kept, "data=store", f"data.path={shards}", "data.stream=true", "train.steps=100"]
    for processes in (1, 2):
        printed = _train(processes, [*stream, "train.ema_decay=0.9"], tmp_path / str(processes))
        assert "the stream of documents has ended" in printed
    keys = {"loss", "grad_norm", "val_loss", "val_loss_ema", "train_loss"}
    assert _are_close(tmp_path / "1", tmp_path / "2", keys) == keys
    steps = [record for record in _records(tmp_path / "2") if "loss" in record]
    assert 2 < len(steps) < 100
    assert (tmp_path / "1/checkpoints/best").read_text() == (tmp_path / "2/checkpoints/best").read_text()
