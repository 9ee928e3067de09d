"""Runs on two ranks whose documents share their beginnings: equal to one process whose documents do not."""

import json

import numpy as np
import pytest
import sharding as tiny

from multipack.run import RunDirectory
from multipack.training.run_config import compose
from multipack.training.train import train


@pytest.fixture
def run(words, tmp_path):
    """Words of a run of 12 documents, or pairs, and those of its own; a step has all of them, in any packs."""
    own = [
        "train.steps=2",
        "train.eval_every=2",
        "train.checkpoint_every=2",
        "train.sample_tokens=0",
        "data.validation=0.25",
        "model.d_model=32",
        "model.heads=2",
        "model.kv_heads=2",
        "model.vocabulary_size=264",
    ]

    def make(*more, pairs=False):
        prompts = [f"You add numbers. Answer with the sum alone. {n}+1=" for n in range(12)]
        ends = ("chosen", "rejected") if pairs else ("completion",)
        rows = [
            {"prompt": prompt} | {end: f"{n + k}" for k, end in enumerate(ends)}
            for n, prompt in enumerate(prompts)
        ]
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changed = {word.partition("=")[0] for word in own} | {"data.path", "plan.packs_per_step"}
        kept = [word for word in words if word.partition("=")[0] not in changed]
        return [*kept, *own, f"plan.packs_per_step={16 if pairs else 4}", f"data.path={file}", *more]

    return make


def losses(out):
    """Losses and validation losses of a run."""
    return [
        record[name]
        for record in RunDirectory(out).records()
        for name in ("loss", "val_loss")
        if name in record
    ]


@pytest.mark.parametrize(
    ("pairs", "more"),
    [
        (False, ["data.share_prefixes=all", "parallel.data=zero1"]),
        *(
            pytest.param(pairs, more, marks=pytest.mark.slow)
            for pairs, more in (
                (True, ["data.share_prefixes=pairs", "parallel.data=ddp"]),
                (True, ["data.share_prefixes=all", "parallel.data=zero3"]),
                (False, ["data.share_prefixes=groups", "parallel.data=zero2"]),
                (False, ["data.share_prefixes=all", "parallel.tensor=2"]),
                (False, ["data.share_prefixes=all", "parallel.context=2"]),
                (False, ["data.share_prefixes=all", "parallel.pipeline=2", "train.fixed_shape=true"]),
            )
        ),
    ],
    ids=str,
)
def test_runs_on_ranks_equal_one_process_that_shares_nothing(pools, run, tmp_path, pairs, more):
    train(compose(run(f"out={tmp_path / 'one'}", pairs=pairs)))
    expected = losses(tmp_path / "one")
    assert len(expected) >= 3
    pools(2).run(tiny.train_here, run(*more, f"out={tmp_path / 'two'}", pairs=pairs), str(tmp_path / "cache"))
    np.testing.assert_allclose(losses(tmp_path / "two"), expected, rtol=1e-5)
