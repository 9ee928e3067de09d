"""The trainer on ranks: whatever a run trains, and whichever meshes it moves through, it is that of one process.

Values of its records, its random numbers and its saved tensors are compared. The last test draws settings at random:
there methods of parallel training, models, losses, plans and what watches a run meet by chance.
"""

import json
import random
import re
from typing import NamedTuple

import numpy as np
import pytest
import sharding as tiny
import torch

from hf_models import run_words, save_model
from multipack.data.stores.prepare import prepare
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import TokenizerConfig, byte_tokenizer
from multipack.models.decoder import Decoder
from multipack.parallel.world import World
from multipack.run import RunDirectory, config_yaml
from multipack.shapes import ModelShape
from multipack.training.checkpoint import CheckpointWriter, load_checkpoint
from multipack.training.checks import check
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train

RECORDED = (
    *("loss", "val_loss", "train_loss", "reward", "val_reward", "kl", "val_kl", "grad_norm"),
    *("target", "step", "tokens", "documents"),
)
"""Beginnings of the names of compared values."""


def split(text):
    """Words of a text; lists keep their spaces."""
    return re.findall(r"\S+=\[.*?\]|\S+", text)


def joined(words, more):
    """Words, of which later ones replace those of their name; `data=…` replaces all words of its group."""
    named = {}
    for word in [*words, *more]:
        name = word.partition("=")[0]
        named = {other: kept for other, kept in named.items() if not f"{other}.".startswith(f"{name}.")}
        named[name] = word
    return list(named.values())


def by_step(path):
    """Step → the values that a run recorded."""
    steps = {}
    for record in RunDirectory(path).records():
        steps.setdefault(record["step"], {}).update(record)
    return steps


def saved(path):
    return load_checkpoint(RunDirectory(path).latest_checkpoint()).source


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Words → the directory of their run on one process, made once."""
    made = {}

    def run(words):
        if tuple(words) not in made:
            made[tuple(words)] = tmp_path_factory.mktemp("alone") / "run"
            train(compose_run([*words, f"out={made[tuple(words)]}"]))
        return made[tuple(words)]

    return run


@pytest.fixture
def found(tmp_path):
    """The directory of the run on ranks."""
    return tmp_path / "found"


@pytest.fixture
def equal(pools, alone, found, tmp_path):
    """A function that compares a run on meshes with the same run on one process.

    It takes the words of both, and (ranks, more words) of each mesh: on the second and later ones the run is resumed.
    `names`: beginnings of the names of compared values; `tensors`: how far saved ones may differ, None = not compared;
    `free`: an end of names of tensors that may differ; others: how far values and `norms` may differ. It returns what
    was printed.
    """

    def compare(words, meshes, names=RECORDED, norms=2e-3, tensors=None, free=None, **near):
        expected, printed, count = alone(words), "", 0
        for count, (ranks, more) in enumerate(meshes, 1):
            begun = ["train.resume=true"] if count > 1 else words
            run = [*joined(begun, split(more)), f"out={found}"]
            if ranks == 1:
                train(compose_run(run))
                continue
            shown, *others = pools(ranks).run(tiny.train_here, run, tmp_path / "cache", seconds=240)
            assert not any(others)  # only rank 0 prints
            printed += shown
        is_moved = count > 1
        compare_records(
            by_step(found), by_step(expected), names, is_moved, norms, {"rel": 1e-5, "abs": 1e-5} | near
        )
        if tensors is not None:
            compare_tensors(saved(found), saved(expected), tensors, free)
        if not is_moved:
            check_random_numbers(saved(found), ranks)
        return printed

    return compare


def compare_records(found, expected, names, is_moved, norms, near):
    """Where a run moves, it ends more often, and so evaluates at steps more than the other."""
    assert found.keys() == expected.keys() != set()
    for step, values in expected.items():
        wanted, seen = ({name for name in each if name.startswith(names)} for each in (values, found[step]))
        assert seen >= wanted if is_moved else seen == wanted
        for name in wanted:
            limits = near | ({"rel": norms} if "norm" in name else {})
            assert found[step][name] == pytest.approx(values[name], **limits), (step, name)


def compare_tensors(found, expected, limit, free):
    ours, theirs = found.whole("model"), expected.whole("model")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        if free is None or not name.endswith(free):
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=limit)


def check_random_numbers(source, ranks):
    """Without dropout nothing draws: evaluations and samples leave every rank's generator as the run seeded it."""
    for rank in range(ranks):
        seed = int(np.random.SeedSequence([0, rank]).generate_state(1)[0])
        state = source.tensor("rng", f"rank-{rank}.cpu")
        assert torch.equal(state, torch.Generator().manual_seed(seed).get_state()), rank


@pytest.fixture
def steady(words):
    """A model that two tensor or context ranks can divide, with every callback that computes something."""
    model = "model.layers=2 model.heads=4 model.kv_heads=2 model.vocabulary_size=264 plan.packs_per_step=4"
    watched = "train.eval_every=2 train.spike=skip train.steps=2"
    return joined(words, split(f"{model} {watched}"))


SUM = "You add numbers. Answer with the sum alone."
# Number of records, and the record of a number.
ROWS = {
    "pairs": (60, lambda n: {**question(n), "chosen": "yes " * (1 + n % 5), "rejected": "no " * (1 + n % 3)}),
    "labels": (
        60,
        lambda n: {**question(n), "completion": "yes " * (1 + n % 5), "label": n % 3 > 0, "w": n % 4 / 2},
    ),
    # All are in every step, in any packs.
    "sums": (12, lambda n: {"prompt": f"{SUM} {n}+1=", "completion": f"{n}"}),
    "pairs of sums": (12, lambda n: {"prompt": f"{SUM} {n}+1=", "chosen": f"{n}", "rejected": f"{n + 1}"}),
    "long": (12, lambda n: {**question(n), "completion": "ab c" * (40 + n % 5)}),
    "short": (9, lambda n: {**question(n), "completion": "ab c" * (5 + n % 5)}),
}


def question(number):
    return {"prompt": f"Q{number}:"}


WORDS = {
    "pairs": "data.validation=0.2 log.verbose=true",
    "labels": "data.validation=0.2 data.weight_field=w",
    "sums": "data.validation=0.25",
    "pairs of sums": "data.validation=0.25 plan.packs_per_step=16",
    "mixture": "data.validation=0.5 train.eval_every=1 train.steps=1 train.fixed_shape=true",
}
SEEN = {"pairs": "val_reward", "labels": "val_kl", "mixture": "val_loss/"}
"""Beginning of the name of a value that the last record has."""


def documents(name, folder):
    """Words of documents by their name; those of the words of every run have none."""

    def written(name):
        count, row = ROWS[name]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row(n)) + "\n" for n in range(count)))
        return file

    if name != "mixture":
        return [f"data.path={written(name)}", *split(WORDS[name])] if name else []
    stores = [folder / f"{each}.store" for each in ("long", "short")]
    for store in stores:
        prepare(DataConfig("jsonl", str(written(store.stem))), TokenizerConfig("byte"), store)
    return ["data=mixture", f"data.paths=[{','.join(map(str, stores))}]", *split(WORDS[name])]


REWARD = "preference.loss=reward model.tied=false"
SMOOTH = "preference.label_smoothing=0.1"
FROZEN = "optimizer.rules=[blocks.2 freeze,blocks.3 freeze,norm freeze,head freeze]"
DEEP = "model.layers=4 train.fixed_shape=true"


class Case(NamedTuple):
    """Words of a run on ranks: its documents, what it shares with one process, and what it does not."""

    ranks: int
    data: str
    shared: str
    parallel: str


RUNS = [
    Case(2, "", "", "parallel.data=zero3 train.recompute=full train.tiles=3"),
    Case(2, "pairs", SMOOTH, "parallel.data=zero3"),
    Case(2, "sums", "", "parallel.data=zero1 data.share_prefixes=all"),
]
SLOW_RUNS = [
    Case(2, "", f"{DEEP} model.tied=false {FROZEN}", "parallel.pipeline=2"),  # the last stage is frozen
    Case(2, "", "train.loss_weighting=document", "parallel.data=zero1"),
    Case(2, "", "", "parallel.context=2 parallel.context_method=planned train.recompute=selective"),
    Case(4, "", DEEP, "parallel.pipeline=2 parallel.data=zero3 data.readers=1"),
    Case(4, "", "", "parallel.data=zero2 parallel.tensor=2"),
    Case(4, "", "", "parallel.data=hsdp"),
    Case(4, "", "model.kv_heads=4", "parallel.tensor=4"),
    Case(4, "", DEEP, "parallel.pipeline=4"),
    Case(4, "", DEEP, "parallel.pipeline=2 parallel.tensor=2 parallel.schedule=interleaved"),
    Case(4, "", "", "parallel.context=2 parallel.tensor=2"),
    Case(4, "", "", "parallel.data=zero3 parallel.offload=cpu train.tiles=3"),
    Case(4, "", "", "data.readers=2"),
    Case(2, "pairs", SMOOTH, "parallel.tensor=2"),
    Case(2, "pairs", REWARD, "parallel.data=zero3"),
    Case(2, "pairs", REWARD, "parallel.data=zero1"),
    # The reference point of KTO is a mean over the ranks of the step before.
    Case(2, "labels", "", "parallel.data=zero3"),
    Case(2, "labels", "", "data.readers=1"),
    Case(4, "labels", "", "parallel.tensor=2"),
    Case(2, "pairs of sums", "", "parallel.data=ddp data.share_prefixes=pairs"),
    Case(2, "pairs of sums", "", "parallel.data=zero3 data.share_prefixes=all"),
    Case(2, "sums", "", "parallel.data=zero2 data.share_prefixes=groups"),
    Case(2, "sums", "", "parallel.tensor=2 data.share_prefixes=all"),
    Case(2, "sums", "", "parallel.context=2 data.share_prefixes=all"),
    Case(2, "sums", "", "parallel.pipeline=2 train.fixed_shape=true data.share_prefixes=all"),
    *(Case(2, "mixture", "", f"parallel.{each}") for each in ("data=ddp", "data=zero1", "data=zero3")),
    *(Case(2, "mixture", "", f"parallel.{each}=2") for each in ("tensor", "context", "pipeline")),
]


@pytest.mark.parametrize(
    "case",
    [*RUNS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_RUNS)],
    ids=lambda case: " ".join(map(str, case)),
)
def test_a_run_is_that_of_one_process(equal, steady, found, tmp_path, case):
    """One process does not share beginnings of documents, and computes with whole models."""
    ranks, data, shared, parallel = case
    words = joined(steady, [*documents(data, tmp_path), *split(shared)])
    shares = {"names": ("loss", "val_loss"), "abs": 0} if "share_prefixes" in parallel else {}
    printed = equal(words, [(ranks, parallel)], **shares)
    *_, last = by_step(found).values()
    assert any(name.startswith(SEEN.get(data, "loss")) for name in last)
    if data == "pairs":
        assert ("pairs computed" in " ".join(printed.split())) == (shared == SMOOTH)
    if not data:
        # Samples are written with a whole model on rank 0; the header says where ranks divide it.
        is_whole = not re.search("zero[23]|hsdp|parallel.(tensor|context|pipeline)", parallel)
        assert ("▌" in printed) == is_whole
        assert printed.count("no samples") == (not is_whole)


@pytest.mark.slow
def test_a_stream_is_that_of_one_process_until_it_ends(equal, steady, found, tmp_path):
    of_data = [word for word in steady if word.startswith(("data", "tokenizer"))]
    config = compose(of_data)
    shards = prepare(config.data, config.tokenizer, tmp_path / "shards", shards=3)
    stream = ["data=store", f"data.path={shards}", "data.stream=true", "train.steps=100"]
    words = joined([word for word in steady if word not in of_data], stream)
    assert "the stream of documents has ended" in equal(words, [(2, "")])
    assert 2 < max(by_step(found)) < 100


QLORA = "adapter=qlora adapter.rank=2"
INT8 = f"{QLORA} adapter.quantize=int8"
LORA = "adapter=lora adapter.targets=[all-linear] adapter.rank=2 adapter.train=[model.norm,head]"
TIED_LORA = LORA.replace("model.norm,head", "embedding")  # the head is the embedding
FOREIGN = [
    ("mixtral", "zero3", QLORA),
    ("mixtral", "ddp", ""),
    ("mixtral", "zero3", ""),
    ("mixtral", "hsdp", ""),
    ("phi", "hsdp", QLORA),
    ("gpt_oss", "zero1", ""),
    ("deepseek_v3", "zero2", "train.recompute=full"),
    ("deepseek_v3", "zero3", "train.recompute=selective"),
    ("phi", "zero3", ""),
    ("mixtral", "zero3", TIED_LORA),
    ("gpt_oss", "ddp", LORA),
    *(("phi", data, QLORA) for data in ("ddp", "zero1", "zero2")),
    ("gpt_oss", "zero3", INT8),
    ("deepseek_v3", "zero2", INT8),
]


@pytest.mark.parametrize(
    ("kind", "data", "shared"),
    [FOREIGN[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in FOREIGN[1:])],
)
def test_models_of_transformers_are_trained_on_ranks_and_another_mesh_continues(
    equal, tmp_path, kind, data, shared
):
    pytest.importorskip("transformers", "5.2", reason="transformers >= 5.2 is not installed")
    save_model(
        kind, tmp_path / "base", **({"hidden_size": 64, "intermediate_size": 64} if "qlora" in shared else {})
    )
    ranks = 4 if data == "hsdp" else 2
    more = f"{shared} optimizer.decay_steps=4 plan.packs_per_step={ranks}"
    words = joined(run_words(tmp_path, tmp_path / "base"), split(more))
    meshes = [(ranks, f"parallel.data={data} train.steps=3"), (1, "parallel.data=ddp train.steps=4")]
    # The gradient of keys' biases is zero but for rounding, which AdamW makes large.
    equal(words, meshes, names="loss", tensors=1e-4, free="k_proj.bias", rel=0)


def base_run(folder):
    """A run that saved a decoder whose matrices are wide enough for adapters and blocks of quantized weights."""
    shape = ModelShape(2, 2, 2, 64, 128, vocabulary_size=264, tied=False, context=64, head_dim=64)
    torch.manual_seed(5)
    values = config_yaml(compose([f"model.{name}={value}" for name, value in shape.to_dict().items()]))
    run = RunDirectory(folder)
    run.create(values)
    files = {"config.yaml": values, "tokenizer.json": byte_tokenizer().to_json()}
    CheckpointWriter(run, World(), 0).save(1, {"model": dict(Decoder(shape).named_parameters())}, {}, files)
    return run.path


ZERO3 = (2, "train.steps=2 parallel.data=zero3")
IN_BACKGROUND = (4, "train.steps=3 parallel.tensor=2 train.checkpoint_async=true train.checkpoint_every=1")
ALONE = (1, "train.steps=4 parallel.tensor=1 parallel.data=ddp train.checkpoint_async=false")
WATCHED = "model.kv_heads=2 model.vocabulary_size=264 train.eval_every=2"


@pytest.mark.parametrize(
    "meshes", [[ZERO3, ALONE], pytest.param([ZERO3, IN_BACKGROUND, ALONE], marks=pytest.mark.slow)]
)
def test_a_run_continues_on_other_meshes(equal, words, found, meshes):
    words = joined(words, split(f"{WATCHED} train.steps=4 optimizer.decay_steps=4"))
    equal(words, meshes, names=("loss", "val_loss"), tensors=2e-5, rel=0)
    spreads = {
        step: values["time_spread"] for step, values in by_step(found).items() if "time_spread" in values
    }
    assert sorted(spreads) == [2]  # of the step before, where data-parallel ranks have taken one
    assert all(0 <= spread < 1 for spread in spreads.values())


@pytest.mark.slow
def test_ranks_come_and_go_within_an_epoch(equal, found, tmp_path):
    """An epoch of 49 steps at the default learning rate; `train.steps=0` is its end."""
    draw, path = np.random.default_rng(3), tmp_path / "documents.jsonl"
    vocabulary = ["pack", "token", "rank", "plan", "loss", "step", "batch", "mask", "cost", "seed"]
    sizes = np.clip(draw.lognormal(2.2, 0.8, 900), 1, 40).astype(int)
    rows = [{"text": " ".join(draw.choice(vocabulary, size))} for size in sizes]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"data=jsonl data.path={path} tokenizer=byte model=tiny train.dtype=fp32 train.steps=0"
    words += " plan.capacity=256 plan.packs_per_step=4 optimizer.warmup_steps=20 optimizer.decay_steps=49"
    words += " train.eval_every=0 train.sample_tokens=0 log.every=0"
    meshes = [(ranks, f"train.steps={step}") for ranks, step in ((4, 12), (2, 24), (3, 36), (1, 0))]
    equal(split(words), meshes, names=("loss", "grad_norm", "target_tokens"), norms=1e-5, abs=0)
    assert len(by_step(found)) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_adapters_continue_on_other_meshes(equal, words, tmp_path, kind):
    adapter = f"adapter={kind} adapter.rank=2 train.init_from={base_run(tmp_path / 'base')}"
    more = f"{adapter} train.fixed_shape=true plan.packs_per_step=4 train.steps=6 optimizer.decay_steps=6"
    words = joined([word for word in words if not word.startswith("model")], split(more))
    grid = (4, "train.steps=4 parallel.data=ddp parallel.tensor=2 parallel.pipeline=2")
    one = (1, "train.steps=6 parallel.tensor=1 parallel.pipeline=1")
    equal(words, [ZERO3, grid, one], names="loss", abs=0)


@pytest.mark.slow
def test_eight_bit_moments_continue_on_other_meshes(equal, words, found):
    """Codes and scales that two ranks of ZeRO-3 saved are those of one process, but for noise of rounding."""
    more = "optimizer.name=adamw_8bit model.vocabulary_size=263 train.steps=4 optimizer.decay_steps=4"

    def meshes():
        yield ZERO3
        codes, scales = (
            saved(found).tensor("optimizer", f"embedding.weight.exp_avg{end}") for end in ("", "_scale")
        )
        assert (codes.dtype, codes.shape, scales.shape) == (torch.float8_e4m3fn, (263, 64), (263, 1))
        yield 1, "train.steps=4 parallel.data=ddp"

    equal(joined(words, split(more)), meshes(), names="loss", abs=1e-3, rel=0)


# Settings drawn at random

NORMAL = "model.layers=4 model.heads=4 model.vocabulary_size=264 train.eval_every=5 optimizer.decay_steps=8 log.every=1"
MODELS = [
    "model.positions=learned model.norm=layernorm model.activation=gelu model.bias=true model.context=256",
    "model.kv_heads=1",
    "model.kv_heads=2 model.tied=false",
    "model.kv_heads=4 model.window=40",
]
DRAWN = [
    ["", "train.spike=skip"],
    ["", "train.loss_weighting=document", "train.z_loss=1e-3", "train.label_smoothing=0.1"],
    ["", "plan.tail=carry", "plan.tail=drop", "plan.window=4"],
    ["", "", "optimizer.rules=[embedding freeze]", "optimizer.rules=[blocks.2 freeze,norm lr=0.5]"],
    ["plan.packs_per_step=4", "plan.packs_per_step=6", "plan.packs_per_step=8"],
    ["", "plan.balance=tokens", "plan.balance=joint"],
]
WAYS = [
    ["", "train.recompute=full", "train.recompute=selective"],
    ["", "", "train.tiles=3"],
    ["", "", "data.readers=1"],
    ["", "train.checkpoint_async=true"],
]


def some(draw, lists):
    """A word of each list, but where there is none."""
    return [word for word in (draw.choice(each) for each in lists) if word]


def strategy(draw):
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
    return size, [*words, *some(draw, WAYS)]


def legal(draw, words):
    """The first strategy drawn that goes with these words."""
    while True:
        size, more = strategy(draw)
        try:
            config = compose_run([*words, *more])
            check(config, size)
        except ValueError:
            continue
        # To other numbers of packs a pipeline adds some.
        if config.parallel.pipeline == 1 or config.plan.for_ranks(1).packs_per_step == 8:
            return size, " ".join(more)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_runs_of_random_settings_are_those_of_one_process(equal, words, found, tmp_path, monkeypatch, seed):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw = random.Random(seed)
    more = [*split(NORMAL), *split(draw.choice(MODELS)), *some(draw, DRAWN), "train.fixed_shape=true"]
    run = joined(words, [*more, "train.steps=8", f"train.seed={draw.randrange(100)}"])

    def meshes():
        """It moves where it evaluates: a mean loss is of the steps since the last evaluation."""
        ranks, more = legal(draw, run)
        yield ranks, f"{more} train.steps=5"
        ranks, more = legal(draw, [f"out={found}", "train.resume=true", "train.steps=8"])
        yield ranks, f"{more} train.steps=8"

    equal(run, meshes(), rel=2e-5, abs=2e-5)
