"""Settings drawn at random, and a restart on other ranks with others: the run is that of one process.

Other tests take what somebody thought of. Here methods of parallel training, models, losses, plans and what watches a
run meet by chance, from seeds; what cannot be is drawn anew.
"""

import random

import pytest
import sharding as tiny
import test_strategies as strategies

from multipack.training.checks import check
from multipack.training.run_config import compose_run
from multipack.training.train import train

SEEDS = 16
STEPS, MORE_STEPS = 5, 8
NORMAL = "model.layers=4 model.heads=4 model.vocabulary_size=264 train.eval_every=2 optimizer.decay_steps=8 log.every=1"
MODELS = [
    "model.positions=learned model.norm=layernorm model.activation=gelu model.bias=true model.context=256",
    "model.kv_heads=1",
    "model.kv_heads=2 model.tied=false",
    "model.kv_heads=4 model.window=40",
]
RUNS = [
    ["", "train.ema_decay=0.9", "train.spike=skip", "log.layer_norms=true"],
    ["", "train.loss_weighting=document", "train.z_loss=1e-3", "train.label_smoothing=0.1"],
    ["", "plan.tail=carry", "plan.tail=drop", "plan.window=4"],
    ["", "", "optimizer.rules=[embedding freeze]", "optimizer.rules=[blocks.2 freeze,norm lr=0.5]"],
    ["plan.packs_per_step=4", "plan.packs_per_step=6", "plan.packs_per_step=8"],
    ["", "plan.balance=tokens", "plan.balance=joint"],
]
WAYS = [
    ["", "train.recompute=full", "train.recompute=selective"],
    ["", "", "train.tiles=3"],
    ["", "", "data.readers=1", "data.stage=memory"],
    ["", "train.checkpoint_async=true"],
]


def _some(draw, lists):
    """A word of each list, but where there is none; words with a space are rules."""
    return [word for word in (draw.choice(each) for each in lists) if word]


def _strategy(draw):
    """(ranks, words): ranks divided among methods in a random order."""
    size = left = draw.choice([2, 4, 4, 8])
    words = [f"parallel.data={draw.choice(['ddp', 'zero1', 'zero2', 'zero3', 'hsdp'])}"]
    for axis in draw.sample(["tensor", "context", "pipeline"], 3):
        ranks = draw.choice([1, 1, 2, 4])
        if ranks <= left:
            left //= ranks
            words.append(f"parallel.{axis}={ranks}")
    words.append(f"parallel.context_method={draw.choice(['ulysses', 'planned'])}")
    words.append(f"parallel.schedule={draw.choice(['gpipe', '1f1b', 'interleaved'])}")
    words.append(f"parallel.offload={draw.choice(['none', 'none', 'cpu'])}")
    return size, [*words, *_some(draw, WAYS)]


def _legal(draw, words):
    """The first strategy drawn that goes with these words."""
    while True:
        size, more = _strategy(draw)
        try:
            config = compose_run([*words, *more])
            check(config, size)
        except ValueError:
            continue
        if (
            config.parallel.pipeline == 1 or config.plan.for_ranks(1).packs_per_step == 8
        ):  # else it gets more packs
            return size, more


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_runs_of_random_settings_are_those_of_one_process(pools, words, tmp_path, monkeypatch, seed):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw = random.Random(seed)
    fixed = [word for word in words if not word.startswith(("train.steps", "plan.packs"))]
    run = [*fixed, *NORMAL.split(), *draw.choice(MODELS).split(), *_some(draw, RUNS)]
    run += ["train.fixed_shape=true", f"train.steps={STEPS}", f"train.seed={draw.randrange(100)}"]
    alone, found = f"out={tmp_path / 'alone'}", f"out={tmp_path / 'found'}"

    def compare(steps):
        expected, records = (strategies.records_of(tmp_path / name) for name in ("alone", "found"))
        assert max(record["step"] for record in records) == steps
        for ours, theirs in zip(records, expected, strict=True):
            assert ours == {
                key: pytest.approx(value, rel=2e-3 if "norm" in key else 2e-5, abs=2e-5)
                for key, value in theirs.items()
            }

    size, more = _legal(draw, run)
    train(compose_run([*run, alone]))
    pools(size).run(tiny.train_here, [*run, *more, found], tmp_path / "cache", seconds=240)
    compare(STEPS)
    on = ["train.resume=true", f"train.steps={MORE_STEPS}"]
    size, more = _legal(draw, [*on, found])
    train(compose_run([*on, alone]))
    pools(size).run(tiny.train_here, [*on, *more, found], tmp_path / "cache", seconds=240)
    compare(MORE_STEPS)
