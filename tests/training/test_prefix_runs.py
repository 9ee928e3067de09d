"""Runs whose documents share their beginnings (`data.share_prefixes`) equal runs whose documents do not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from multipack.run import RunDirectory
from multipack.training.run_config import compose_run
from multipack.training.train import train

SYSTEM = "You add numbers. Answer with the sum alone. "


def losses(words, out):
    """Losses and validation losses of a run, and its metrics."""
    train(compose_run([*words, f"out={out}"]))
    records = list(RunDirectory(out).records())
    return [record[name] for record in records for name in ("loss", "val_loss") if name in record]


@pytest.fixture
def base(words, tmp_path):
    """Every step has all documents, so that losses do not depend on the packs."""

    def make(*more, pairs=False):
        rows = [{"prompt": f"{SYSTEM}{n}+1=", "completion": f"{n + 1}"} for n in range(16)]
        if pairs:
            rows = [
                {"prompt": f"{SYSTEM}{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}!"} for n in range(8)
            ]
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = ["plan.packs_per_step=8", "train.steps=2", "train.eval_every=2", "train.checkpoint_every=2"]
        own += ["train.sample_tokens=0"]
        changed = {word.partition("=")[0] for word in own} | {"data.path"}
        kept = [word for word in words if word.partition("=")[0] not in changed]
        return [*kept, *own, f"data.path={file}", *more]

    return make


@pytest.mark.parametrize(
    ("pairs", "share", "more"),
    [
        (True, "pairs", []),
        pytest.param(
            False,
            "all",
            ["data.train_on_prompt=true", "train.loss_weighting=document"],
            marks=pytest.mark.slow,
        ),
        pytest.param(True, "all", ["preference.loss=reward"], marks=pytest.mark.slow),
        pytest.param(False, "all", ["train.fixed_shape=true", "train.z_loss=1e-3"], marks=pytest.mark.slow),
        pytest.param(False, "groups", ["train.recompute=selective", "train.tiles=2"], marks=pytest.mark.slow),
    ],
)
def test_losses_equal_those_of_a_run_that_shares_nothing(base, tmp_path, pairs, share, more):
    words = base("model.d_model=32", "model.heads=2", "model.kv_heads=2", *more, pairs=pairs)
    alone = losses(words, tmp_path / "alone")
    shared = losses([*words, f"data.share_prefixes={share}"], tmp_path / "shared")
    assert len(alone) == len(shared) >= 3
    np.testing.assert_allclose(shared, alone, rtol=1e-5)
