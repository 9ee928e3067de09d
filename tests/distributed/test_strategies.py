"""The trainer itself, under every strategy: what a run records, evaluates, samples and saves is that of one process."""

import json
import re

import numpy as np
import pytest
import sharding as tiny
import torch

from multipack.data.stores.prepare import prepare
from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose
from multipack.training.train import train

STEPS = 2


@pytest.fixture
def steady(words):
    """A model that two tensor or context ranks can divide, with every callback that computes something."""
    fixed = [word for word in words if not word.startswith("train.steps")]
    more = "model.layers=2 model.heads=4 model.kv_heads=2 model.vocabulary_size=264 plan.packs_per_step=4"
    watched = "train.ema_decay=0.9 log.layer_norms=true train.eval_every=2 train.spike=skip"
    return [*fixed, *more.split(), *watched.split(), f"train.steps={STEPS}"]


def records_of(path):
    return [
        {key: value for key, value in record.items() if _compared(key)}
        for record in RunDirectory(path).records()
    ]


def _compared(key):
    losses = (
        "loss",
        "val_loss",
        "train_loss",
        "reward",
        "val_reward",
        "kl",
        "val_kl",
        "grad_norm",
        "weight_norm",
    )
    return key.startswith((*losses, "target", "step", "tokens", "documents"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Words → the records of the same run on one process, made once."""
    made = {}

    def records(words):
        if tuple(words) not in made:
            path = tmp_path_factory.mktemp("alone") / "run"
            train(compose([*words, f"out={path}"]))
            made[tuple(words)] = records_of(path)
        return made[tuple(words)]

    return records


@pytest.fixture
def check(pools, alone, tmp_path):
    """Run on so many ranks, compare with the same run on one process, and return what rank 0 printed."""

    def equal(ranks, words, *parallel):
        out, cache = tmp_path / "found", tmp_path / "cache"
        printed = pools(ranks).run(tiny.train_here, [*words, *parallel, f"out={out}"], cache)
        expected, found = alone(words), records_of(out)
        assert expected
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                near = pytest.approx(value, rel=2e-3 if "norm" in key else 1e-5, abs=1e-5)
                assert ours[key] == near, (key, theirs)
        assert not any(printed[1:])  # only rank 0 prints
        check_random_numbers(out, ranks)
        return printed[0]

    return equal


def check_random_numbers(path, ranks):
    """Without dropout nothing draws: evaluations and samples leave every rank's generator as the run seeded it."""
    source = load_checkpoint(RunDirectory(path).latest_checkpoint()).source
    for rank in range(ranks):
        seed = int(np.random.SeedSequence([0, rank]).generate_state(1)[0])
        saved = source.tensor("rng", f"rank-{rank}.cpu")
        assert torch.equal(saved, torch.Generator().manual_seed(seed).get_state()), rank


FROZEN = "optimizer.rules=[blocks.2 freeze,blocks.3 freeze,norm freeze,head freeze]"
DEEP = "model.layers=4 train.fixed_shape=true"
RUN = (2, "", "parallel.data=zero3 train.recompute=full train.tiles=3")
SLOW = [
    (2, f"{DEEP} model.tied=false {FROZEN}", "parallel.pipeline=2"),  # the last stage is frozen
    (2, "train.loss_weighting=document", "parallel.data=zero1"),
    (2, "", "parallel.context=2 parallel.context_method=planned train.recompute=selective"),
    (4, DEEP, "parallel.pipeline=2 parallel.data=zero3 data.readers=1"),
    (4, "", "parallel.data=zero2 parallel.tensor=2"),
    (4, "", "parallel.data=hsdp"),
    (4, "model.kv_heads=4", "parallel.tensor=4"),
    (4, DEEP, "parallel.pipeline=4"),
    (4, DEEP, "parallel.pipeline=2 parallel.tensor=2 parallel.schedule=interleaved"),
    (4, "", "parallel.context=2 parallel.tensor=2"),
    (4, "", "parallel.data=zero3 parallel.offload=cpu train.tiles=3"),
    (4, "", "data.readers=2 data.stage=memory"),
]


@pytest.mark.parametrize(
    ("ranks", "shared", "parallel"), [RUN, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW)]
)
def test_a_run_is_that_of_one_process(check, steady, ranks, shared, parallel):
    words = re.findall(r"\S+=\[.*?\]|\S+", shared)
    printed = check(ranks, [*steady, *words], *parallel.split())
    # Samples are written with a whole model on rank 0; the header says where ranks divide it.
    whole = all(not re.search("zero[23]|hsdp|tensor|context|pipeline", word) for word in parallel.split())
    assert ("▌" in printed) == whole
    assert printed.count("no samples") == (not whole)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Words of preference pairs."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = (
        {"prompt": f"Q{n}:", "chosen": "yes " * (1 + n % 5), "rejected": "no " * (1 + n % 3)}
        for n in range(60)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.path={path}", "data.validation=0.2", "preference.label_smoothing=0.1"]


@pytest.mark.parametrize(
    "parallel", ["parallel.data=zero3", pytest.param("parallel.tensor=2", marks=pytest.mark.slow)]
)
def test_preferences_are_trained_on_divided_models(check, steady, pairs, tmp_path, parallel):
    printed = check(2, [*steady, *pairs, "log.verbose=true"], parallel)
    assert "pairs computed" in " ".join(printed.split())
    assert "val_reward_margin" in records_of(tmp_path / "found")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["parallel.data=zero3", "parallel.data=zero1"])
def test_rewards_are_trained_on_ranks(check, steady, pairs, parallel):
    plain = [word for word in pairs if "label_smoothing" not in word]
    check(2, [*steady, *plain, "preference.loss=reward", "model.tied=false"], parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel"), [(2, "parallel.data=zero3"), (2, "data.readers=1"), (4, "parallel.tensor=2")]
)
def test_labels_and_weights_are_trained_on_ranks(check, steady, tmp_path, ranks, parallel):
    """The reference point of KTO is a mean over the ranks of the step before."""
    path = tmp_path / "labels.jsonl"
    rows = (
        {"prompt": f"Q{n}:", "completion": "yes " * (1 + n % 5), "label": n % 3 > 0, "w": (n % 4) / 2}
        for n in range(60)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(ranks, [*steady, f"data.path={path}", "data.validation=0.2", "data.weight_field=w"], parallel)
    assert "val_kl" in records_of(tmp_path / "found")[-1]


@pytest.mark.slow
def test_a_stream_is_that_of_one_process_until_it_ends(check, steady, tmp_path):
    data = [word for word in steady if word.startswith(("data", "tokenizer"))]
    config = compose(data)
    shards = prepare(config.data, config.tokenizer, tmp_path / "shards", shards=3)
    kept = [word for word in steady if word not in data and not word.startswith("train.steps")]
    stream = ["data=store", f"data.path={shards}", "data.stream=true", "train.steps=100"]
    printed = check(2, [*kept, *stream])
    assert "the stream of documents has ended" in printed
    assert 2 < records_of(tmp_path / "found")[-1]["step"] < 100
