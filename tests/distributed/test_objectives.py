"""Runs of other kinds on two ranks: a stream of documents, and preferences. They are those of one rank."""

import json
import os
import socket
import subprocess
import sys

import pytest

from multipack.data.prepare import prepare
from multipack.training.run_config import compose
from multipack.training.trainer import train


def _train(processes, *words):
    """Train in this process, or in several under torchrun."""
    if processes == 1:
        train(compose(words))
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "multipack", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def _records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _are_alike(one, other, keys):
    """Whether two runs have the same steps and evaluations, and these metrics alike in them."""
    alone, together = _records(one), _records(other)
    assert [record["step"] for record in together] == [record["step"] for record in alone]
    seen = set()
    for a, b in zip(alone, together, strict=True):
        assert a.get("target_tokens") == b.get("target_tokens")
        for key in keys & a.keys():
            assert b[key] == pytest.approx(a[key], abs=1e-5), (a["step"], key)
            seen.add(key)
    assert seen == keys


@pytest.mark.slow
def test_a_stream_is_the_same_on_1_and_2_processes_until_it_ends(words, corpus_path, tmp_path, capfd):
    config = compose(["data=jsonl", f"data.path={corpus_path}", "tokenizer=byte"])
    shards = prepare(config.data, config.tokenizer, tmp_path / "shards", shards=3)
    kept = [word for word in words if not word.startswith(("data", "tokenizer", "train.steps"))]
    stream = [*kept, "data=store", f"data.path={shards}", "data.stream=true", "train.steps=100"]
    for processes in (1, 2):
        _train(processes, *stream, "train.ema_decay=0.9", f"out={tmp_path / str(processes)}")
        assert "the stream of documents has ended" in capfd.readouterr().out
    _are_alike(
        tmp_path / "1", tmp_path / "2", {"loss", "grad_norm", "val_loss", "val_loss_ema", "train_loss"}
    )
    steps = [record for record in _records(tmp_path / "2") if "loss" in record]
    assert 2 < len(steps) < 100
    assert (tmp_path / "1/checkpoints/best").read_text() == (tmp_path / "2/checkpoints/best").read_text()


def test_preferences_are_the_same_on_1_and_2_processes(words, tmp_path, capfd):
    pairs = tmp_path / "pairs.jsonl"
    names = ["pack", "token", "rank", "plan", "loss", "step", "batch", "mask", "cost", "seed"]
    with pairs.open("w") as file:
        for number in range(60):
            chosen, rejected = (" ".join(names[: 1 + (number * k) % 9]) for k in (3, 5))
            file.write(json.dumps({"prompt": f"Q{number}", "chosen": chosen, "rejected": rejected}) + "\n")
    kept = [word for word in words if not word.startswith("data")]
    for processes in (1, 2):
        out = tmp_path / str(processes)
        cache = f"data.cache={tmp_path / f'cache-{processes}'}"
        more = ["preference.label_smoothing=0.1", "train.ema_decay=0.9"]
        _train(processes, *kept, "data=jsonl", f"data.path={pairs}", cache, *more, f"out={out}")
        assert "pairs computed" in " ".join(capfd.readouterr().out.split())
    metrics = {"reward_margin", "reward_chosen", "reward_rejected"}
    evaluated = {"val_loss", "val_loss_ema", *(f"val_{name}" for name in metrics)}
    _are_alike(tmp_path / "1", tmp_path / "2", {"loss", "grad_norm", "train_loss", *metrics, *evaluated})
