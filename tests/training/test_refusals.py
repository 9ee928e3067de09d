"""What only the vocabulary or the names of parameters tell against is refused before a process joins the others."""

import shutil

import pytest

from multipack.data.corpus import find_tokenizer, load_corpus
from multipack.data.data_config import DataConfig
from multipack.data.prepare import prepare
from multipack.data.tokenizer import TokenizerConfig
from multipack.parallel.world import connected
from multipack.training import trainer
from multipack.training.run_config import compose, compose_run

BYTES = TokenizerConfig("byte")


@pytest.fixture
def alone(monkeypatch):
    """One of two processes that would be heard if it joined the other."""

    def joined(*_):
        raise AssertionError("joined the other process")

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    monkeypatch.setattr(trainer, "connected", joined)


@pytest.fixture
def sources(corpus_path, tmp_path):
    """Words of documents by how their tokenizer is found."""
    data = DataConfig(source="jsonl", path=str(corpus_path))
    store, other, shards = tmp_path / "store", tmp_path / "other", tmp_path / "shards"
    prepare(data, BYTES, out=store)
    shutil.copytree(store, other)
    prepare(data, BYTES, out=shards, shards=2)
    text = ["data=jsonl", f"data.path={corpus_path}"]
    return {
        "byte": [*text, "tokenizer=byte"],
        "char": [*text, "tokenizer=char"],
        "bpe": [*text, "tokenizer=bpe", "tokenizer.vocabulary_size=301"],
        "store": ["data=store", f"data.path={store}"],
        "mixture": ["data=mixture", f"data.paths=[{store},{other}]"],
        "stream": [
            "data=store",
            f"data.path={shards}",
            "data.stream=true",
            "data.patience_seconds=5",
            "train.steps=3",
        ],
    }


def _config(sources, kind, *more):
    small = "model=tiny model.kv_heads=2 plan.capacity=256 plan.packs_per_step=4 train.dtype=fp32"
    return compose([*sources[kind], *small.split(), *more])


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "store", "mixture", "stream"])
def test_the_tokenizer_is_found_before_documents_are_tokenized(sources, kind):
    config = _config(sources, kind)
    found = find_tokenizer(config.data, config.tokenizer, limit=256)
    assert found.hash == load_corpus(config.data, config.tokenizer, limit=256).tokenizer.hash


@pytest.mark.parametrize(
    ("kind", "size"), [("byte", 257), ("bpe", 301), ("store", 257), ("mixture", 257), ("stream", 257)]
)
def test_a_vocabulary_that_ranks_do_not_divide(alone, sources, kind, size):
    said = rf"parallel\.tensor=2 does not divide model\.vocabulary_size={size}: use model\.vocabulary_size={size + 1}"
    with pytest.raises(ValueError, match=said):
        trainer.train(_config(sources, kind, "parallel.tensor=2"))


def test_the_vocabulary_of_the_weights_that_a_run_begins_with(alone, sources, tmp_path, monkeypatch):
    with monkeypatch.context() as one:
        for name in ("RANK", "WORLD_SIZE"):
            one.delenv(name)
        one.setattr(trainer, "connected", connected)
        before = _config(
            sources, "byte", "train.steps=1", "model.vocabulary_size=259", f"out={tmp_path / 'before'}"
        )
        trainer.train(before)
    begun = compose_run([*sources["byte"], f"train.init_from={tmp_path / 'before'}", "parallel.tensor=2"])
    with pytest.raises(ValueError, match=r"does not divide model\.vocabulary_size=259"):
        trainer.train(begun)


def test_a_first_stage_that_nobody_trains(alone, sources):
    untied = ["model.tied=false", "model.layers=2", "parallel.pipeline=2"]
    frozen = "optimizer.rules=[embedding freeze,blocks.0 freeze]"
    with pytest.raises(ValueError, match=r"freeze all that the first stage .* parallel\.pipeline=1"):
        trainer.train(_config(sources, "byte", *untied, frozen))


@pytest.mark.parametrize(
    "more",
    [
        ["parallel.tensor=2", "model.vocabulary_size=258"],
        ["parallel.pipeline=2", "model.layers=2", "optimizer.rules=[blocks.0 freeze]"],
    ],
)
def test_what_goes_together_joins(alone, sources, more):
    with pytest.raises(AssertionError, match="joined the other process"):
        trainer.train(_config(sources, "byte", *more))
