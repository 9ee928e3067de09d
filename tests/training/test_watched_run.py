"""Runs with observers, end to end."""

import json

import pytest
import torch

from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose, compose_run
from multipack.training.trainer import train

TIMED = {
    "dt",
    "dtf",
    "dtb",
    "dto",
    "data_time",
    "sps",
    "tps",
    "sps_per_device",
    "tps_per_device",
    "mfu",
    "memory",
}


def _with(words, *more):
    keys = {word.partition("=")[0] for word in more}
    return [word for word in words if word.partition("=")[0] not in keys] + list(more)


def _records(out):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMED} for record in records]


@pytest.fixture
def watched(words):
    return _with(
        words,
        "train.steps=8",
        "train.eval_every=2",
        "train.ema_decay=0.9",
        "train.spike=skip",
        "train.patience=9",
        "log.layer_norms=true",
        "log.gradient_noise=true",
        "optimizer.rules=[blocks.0.attention freeze, *norm* lr=2]",
        "optimizer.lr_scaling=sqrt",
        "optimizer.reference_tokens=1000",
    )


def test_everything_that_watches_goes_on_bit_for_bit(watched, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(compose([*watched, f"out={whole}"]))
    printed = capsys.readouterr().out
    assert "frozen: " in printed
    assert "sqrt in" in printed
    train(compose(_with(watched, "train.steps=4", "optimizer.decay_steps=8", f"out={parts}")))
    train(compose_run([f"out={parts}", "train.resume=true", "train.steps=8"]))
    assert _records(parts) == _records(whole)
    last = _records(whole)[-1]
    assert last["val_loss_ema"] != last["val_loss"]
    steps = [record for record in _records(whole) if "loss" in record]
    assert "grad_norm/blocks.1" in steps[0]
    assert sum(v**2 for k, v in steps[0].items() if k.startswith("grad_norm/")) ** 0.5 == pytest.approx(
        steps[0]["grad_norm"], rel=1e-4
    )
    sources = [load_checkpoint(RunDirectory(out).latest_checkpoint()).source for out in (whole, parts)]
    saved = [{group: source.whole(group) for group in source.groups} for source in sources]
    assert saved[0]["observers"]
    assert not any(name.startswith("average.blocks.0.attention.") for name in saved[0]["observers"])
    for group in ("model", "observers"):
        for name, tensor in saved[0][group].items():
            assert torch.equal(tensor, saved[1][group][name]), name


def test_patience_ends_a_run_that_learns_nothing(words, tmp_path, capsys):
    result = train(
        compose(
            _with(
                words,
                "train.steps=40",
                "train.eval_every=1",
                "train.patience=3",
                "train.min_improvement=100",
                f"out={tmp_path / 'run'}",
            )
        )
    )
    assert result.step == 3
    assert "train.patience=3" in capsys.readouterr().out


def test_a_profile_is_one_trace_in_the_run_directory(words, tmp_path):
    train(compose([*words, "train.profile=true", f"out={tmp_path / 'run'}"]))
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("step ")}
    assert steps == {"step 3", "step 4", "step 5"}
