"""Settings that only the vocabulary or names of parameters show to be illegal are refused before processes join."""

import pytest

from multipack.data.stores.prepare import prepare
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.training import assemble
from multipack.training import train as module
from multipack.training.run_config import compose

BYTES = TokenizerConfig("byte")
SMALL = ["model=tiny", "model.kv_heads=2", "plan.capacity=256", "plan.packs_per_step=4", "train.dtype=fp32"]


@pytest.fixture
def one_of_two(monkeypatch):
    """This process is one of two, and fails if it joins the other."""

    def joined(*_, **__):
        raise AssertionError("joined the other process")

    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(assemble, "connected", joined)


@pytest.fixture(scope="module")
def sources(corpus_path, tmp_path_factory):
    """Kind of source → its words; the tokenizer is found in another way for each."""
    folder = tmp_path_factory.mktemp("sources")
    data = DataConfig(source="jsonl", path=str(corpus_path))
    store, shards = folder / "store", folder / "shards"
    prepare(data, BYTES, out=store)
    prepare(data, BYTES, out=shards, shards=2)
    text = ["data=jsonl", f"data.path={corpus_path}"]
    stream = ["data=store", f"data.path={shards}", "data.stream=true", "data.patience_seconds=5"]
    return {
        "byte": [*text, "tokenizer=byte", *SMALL],
        "store": ["data=store", f"data.path={store}", *SMALL],
        "stream": [*stream, "train.steps=3", *SMALL],
    }


def test_a_vocabulary_that_ranks_do_not_divide(one_of_two, sources):
    for kind, size in (("byte", 257), ("store", 257), ("stream", 257)):
        message = rf"model\.vocabulary_size={size}: use model\.vocabulary_size={size + 1}"
        with pytest.raises(ValueError, match=message):
            module.train(compose([*sources[kind], "parallel.tensor=2"]))


def test_a_frozen_first_stage(one_of_two, sources):
    words = ["model.tied=false", "model.layers=2", "parallel.pipeline=2"]
    frozen = "optimizer.rules=[embedding freeze,blocks.0 freeze]"
    with pytest.raises(ValueError, match=r"optimizer\.rules .*parallel\.pipeline=1"):
        module.train(compose([*sources["byte"], *words, frozen]))


def test_legal_settings_join(one_of_two, sources):
    for words in (
        ["parallel.tensor=2", "model.vocabulary_size=258"],
        ["parallel.pipeline=2", "model.layers=2", "optimizer.rules=[blocks.0 freeze]"],
    ):
        with pytest.raises(AssertionError, match="joined the other process"):
            module.train(compose([*sources["byte"], *words]))
