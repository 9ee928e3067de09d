"""The trainer itself, under every strategy: what a run records, evaluates, samples and saves is that of one process."""

import json

import numpy as np
import pytest
import sharding as tiny
import torch

from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose
from multipack.training.train import train

STEPS = 2


@pytest.fixture
def steady(words):
    """A model that two tensor or context ranks can divide, with every callback that computes something."""
    fixed = [word for word in words if not word.startswith("train.steps")]
    more = "model.layers=2 model.heads=4 model.kv_heads=2 model.vocabulary_size=264 plan.packs_per_step=8"
    watched = "train.ema_decay=0.9 log.layer_norms=true train.eval_every=2 train.spike=skip"
    return [*fixed, *more.split(), *watched.split(), f"train.steps={STEPS}"]


def records_of(path):
    return [
        {key: value for key, value in record.items() if _compared(key)}
        for record in RunDirectory(path).records()
    ]


def _compared(key):
    losses = ("loss", "val_loss", "train_loss", "reward", "val_reward", "grad_norm", "weight_norm")
    return key.startswith((*losses, "target", "step", "tokens", "documents"))


def check(pool, steady, tmp_path, *more):
    cache = tmp_path / "cache"
    train(compose([*steady, f"out={tmp_path / 'alone'}"]))
    printed = pool.run(tiny.train_here, [*steady, *more, f"out={tmp_path / 'found'}"], cache, seconds=120)
    expected, found = records_of(tmp_path / "alone"), records_of(tmp_path / "found")
    assert len(found) == len(expected) == STEPS + STEPS // 2 + 1
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=2e-3 if "norm" in key else 1e-5, abs=1e-5), (
                key,
                theirs,
            )
    assert not any(printed[1:])  # only rank 0 prints
    check_random_numbers(tmp_path / "found", pool.size)
    return printed[0]


def check_random_numbers(path, ranks):
    """Without dropout nothing draws: evaluations and samples leave every rank's generator as the run seeded it."""
    source = load_checkpoint(RunDirectory(path).latest_checkpoint()).source
    for rank in range(ranks):
        seed = int(np.random.SeedSequence([0, rank]).generate_state(1)[0])
        saved = source.tensor("rng", f"rank-{rank}.cpu")
        assert torch.equal(saved, torch.Generator().manual_seed(seed).get_state()), rank


SLOW = [
    ("parallel.data=hsdp",),
    ("parallel.tensor=4", "model.kv_heads=4"),
    ("parallel.pipeline=4", "plan.packs_per_step=8"),
    ("parallel.pipeline=2", "parallel.tensor=2", "parallel.schedule=interleaved"),
    ("parallel.context=2", "parallel.tensor=2"),
    ("parallel.data=zero3", "parallel.offload=cpu", "train.tiles=3"),
    ("data.readers=2", "data.stage=memory"),
]


@pytest.mark.parametrize(
    "more",
    [
        ("parallel.data=zero1",),
        ("parallel.data=zero3", "train.recompute=full", "train.tiles=3"),
        ("parallel.data=zero2", "parallel.tensor=2"),
        ("parallel.context=2", "parallel.context_method=ring", "train.recompute=selective"),
        ("parallel.pipeline=2", "parallel.data=zero3", "data.readers=1", "train.fixed_shape=true"),
        *(pytest.param(more, marks=pytest.mark.slow) for more in SLOW),
    ],
    ids=" ".join,
)
def test_a_run_is_that_of_one_process(pools, steady, tmp_path, more):
    steady = [*steady, *(word for word in more if word.startswith("model."))]
    if any("pipeline" in word for word in more):
        steady = [*steady, "model.layers=4", "train.fixed_shape=true"]
    printed = check(pools(4), steady, tmp_path, *more)
    assert "▌" in printed  # a sample, from the model that nobody holds whole


@pytest.mark.parametrize("more", [(), ("parallel.data=zero3",), ("parallel.tensor=2",)], ids=" ".join)
def test_preferences_are_trained_on_divided_models(pools, steady, tmp_path, more):
    path = tmp_path / "pairs.jsonl"
    with path.open("w") as file:
        for number in range(60):
            pair = {
                "prompt": f"Q{number}:",
                "chosen": "yes " * (1 + number % 5),
                "rejected": "no " * (1 + number % 3),
            }
            file.write(json.dumps(pair) + "\n")
    pairs = [f"data.path={path}", "data.validation=0.2", "preference.label_smoothing=0.1"]
    printed = check(pools(2), [*steady, *pairs], tmp_path, *more)
    assert "pairs computed" in " ".join(printed.split())
    assert "val_reward_margin" in records_of(tmp_path / "found")[-1]


def test_a_mean_over_documents_is_that_of_one_process(pools, steady, tmp_path):
    check(pools(2), [*steady, "train.loss_weighting=document"], tmp_path)


def test_a_stage_that_is_frozen_is_averaged_and_saved_with_the_others(pools, steady, tmp_path):
    frozen = "[blocks.2 freeze,blocks.3 freeze,norm freeze,head freeze]"
    steady = [
        *steady,
        "model.layers=4",
        "model.tied=false",
        f"optimizer.rules={frozen}",
        "train.fixed_shape=true",
    ]
    check(pools(2), steady, tmp_path, "parallel.pipeline=2")


def test_a_pipeline_raises_packs_per_step_and_says_so(pools, steady, tmp_path):
    words = [*steady, "model.layers=4", "plan.packs_per_step=2", f"out={tmp_path / 'run'}"]
    printed = pools(4).run(tiny.train_here, [*words, "parallel.pipeline=2"], tmp_path / "cache")[0]
    assert "plan.packs_per_step is 4" in printed
    assert "pipelines need one shape" in printed
    assert "pipeline 2 (1f1b, 2 stages) x ddp 2" in printed
    header = " ".join(printed.split())
    assert "2 per data-parallel rank" in header  # the two ranks of one model replica share their packs
    assert "maximum, 2 ranks)" in header
