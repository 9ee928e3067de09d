"""A run that moves from 4 ranks to 2, 3 and 1 within an epoch: every step once, the losses of one process to 1e-5."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import forked

pytestmark = pytest.mark.timeout(1200)

RANKS = ((4, 5), (2, 10), (3, 15), (1, 20))
"""Numbers of ranks, and the step up to which they train."""
STEADY = [
    *(
        "model.kv_heads=2",
        "plan.packs_per_step=4",
        "plan.capacity=256",
        "train.eval_every=0",
        "train.checkpoint_every=5",
    ),
    # A low rate after a long warm-up: rounding is not amplified, as it is where embeddings move by their initial size.
    *(
        "optimizer.lr=1e-4",
        "optimizer.warmup_steps=10",
        "optimizer.decay_steps=20",
        "parallel.timeout_seconds=60",
    ),
]
CHANGED = {word.partition("=")[0] for word in STEADY} | {"train.steps"}


def test_ranks_come_and_go_within_an_epoch(tmp_path, words, outcome):
    fixed = [word for word in words if word.partition("=")[0] not in CHANGED] + STEADY
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    alone = forked.start(tmp_path, forked.run, [*fixed, "train.steps=20", f"out={whole}"]).wait()
    assert alone.code == 0, alone.text
    for size, steps in RANKS:
        more = ["train.resume=auto", f"train.steps={steps}", f"out={parts}"]
        ended = forked.together(tmp_path, [*fixed, *more], size)
        assert [each.code for each in ended] == [0] * size, [each.error for each in ended]
    expected, found = forked.records(whole), forked.records(parts)
    worst = max(
        abs(one["loss"] - other["loss"]) / one["loss"] for one, other in zip(expected, found, strict=True)
    )
    outcome("changes of ranks", len(RANKS) - 1)
    outcome("steps", len(found))
    outcome("worst difference of a loss", f"{worst:.1e}")
    assert [record["step"] for record in found] == list(range(1, 21))
    assert [record["target_tokens"] for record in found] == [record["target_tokens"] for record in expected]
    assert worst < 1e-5
