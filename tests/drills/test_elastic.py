"""A run that moves from 4 ranks to 2, 3 and 1 within an epoch: every step once, the losses of one process to 1e-5."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))
import forked

pytestmark = pytest.mark.timeout(600)

RANKS = ((4, 12), (2, 24), (3, 36), (1, 0))
"""Numbers of ranks, and the step up to which they train; 0 = the end of the epoch."""


@pytest.fixture
def epoch(tmp_path):
    """Documents that make an epoch of 49 steps, and words of a run of them at the default learning rate."""
    draw, path = np.random.default_rng(3), tmp_path / "documents.jsonl"
    vocabulary = ["pack", "token", "rank", "plan", "loss", "step", "batch", "mask", "cost", "seed"]
    sizes = np.clip(draw.lognormal(2.2, 0.8, 900), 1, 40).astype(int)
    texts = [" ".join(draw.choice(vocabulary, size)) for size in sizes]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [
        *("data=jsonl", f"data.path={path}", "tokenizer=byte", "model=tiny", "train.dtype=fp32"),
        *(
            "plan.capacity=256",
            "plan.packs_per_step=4",
            "optimizer.warmup_steps=20",
            "optimizer.decay_steps=49",
        ),
        *("train.eval_every=0", "train.sample_tokens=0", "train.compare_padding=false", "log.every=0"),
        "parallel.timeout_seconds=60",
    ]


def test_ranks_come_and_go_within_an_epoch(tmp_path, epoch, outcome):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    alone = forked.start(tmp_path, forked.run, [*epoch, f"out={whole}"]).wait()
    assert alone.code == 0, alone.text
    for size, steps in RANKS:
        more = ["train.resume=auto", f"train.steps={steps}", f"out={parts}"]
        ended = forked.together(tmp_path, [*epoch, *more], size)
        assert [each.code for each in ended] == [0] * size, [each.error for each in ended]
    expected, found = forked.records(whole), forked.records(parts)
    worst = {
        name: max(
            abs(one[name] - other[name]) / one[name] for one, other in zip(expected, found, strict=True)
        )
        for name in ("loss", "grad_norm")
    }
    outcome("changes of ranks", len(RANKS) - 1)
    outcome("steps", len(found))
    outcome("worst difference of a loss", f"{worst['loss']:.1e}")
    outcome("of a gradient norm", f"{worst['grad_norm']:.1e}")
    assert len(found) >= 40
    assert [record["step"] for record in found] == list(range(1, len(expected) + 1))
    assert [record["target_tokens"] for record in found] == [record["target_tokens"] for record in expected]
    assert worst["loss"] < 1e-5
    assert worst["grad_norm"] < 1e-5
