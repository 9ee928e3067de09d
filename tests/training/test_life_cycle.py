"""Runs that start from the weights of others: their shape, tokenizer, checkpoint and chat template."""

import datetime
import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.data.text import chat, data_config
from multipack.data.text.tokenizer import Tokenizer
from multipack.run import RunDirectory
from multipack.training.run_config import compose, compose_run
from multipack.training.source_files import find_template
from multipack.training.train import train
from multipack.words import ConfigError

FEW = [
    *(
        "plan.capacity=256",
        "plan.packs_per_step=2",
        "train.steps=1",
        "train.eval_every=0",
        "train.dtype=fp32",
    ),
]
NAMES = ["pack", "token", "rank", "plan", "loss", "step", "batch", "mask", "cost", "seed"]
TURNS = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "pack"}]
PAIR = {"prompt": "say", "chosen": " token", "rejected": " rank"}


def _texts(path, seed):
    draw = np.random.default_rng(seed)
    path.write_text("\n\n".join(" ".join(draw.choice(NAMES[seed:], 9)) for _ in range(60)))
    return ["data=text", f"data.path={path}", "data.documents=blank_line"]


def _records(path, record):
    path.write_text((json.dumps(record) + "\n") * 40)
    return ["data=jsonl", f"data.path={path}"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on text, with byte pairs of its own."""
    folder = tmp_path_factory.mktemp("base")
    words = [*_texts(folder / "a.txt", 0), "tokenizer=bpe", "tokenizer.vocabulary_size=280", "model=tiny"]
    train(compose([*words, *FEW, f"out={folder / 'base'}"]))
    return folder / "base"


def test_a_run_takes_shape_and_tokenizer_of_its_initial_weights(base, tmp_path):
    out, texts = tmp_path / "on", _texts(tmp_path / "b.txt", 3)
    train(compose_run([*texts, *FEW, f"train.init_from={base}", f"out={out}"]))
    first, second = (Tokenizer.load(RunDirectory(run).latest_checkpoint()).hash for run in (base, out))
    assert first == second
    words = compose_run([*texts, f"train.init_from={base}", "tokenizer=byte"])
    assert words.tokenizer.kind == "byte"  # words win
    stores = compose_run(["data=store", f"data.path={tmp_path}", f"train.init_from={base}"])
    assert stores.tokenizer.kind == "auto"  # stores have their own


def test_the_initial_checkpoint_is_named_and_does_not_move(base):
    words = ["data=stdlib", f"train.init_from={base}", f"preference.reference={base}"]
    config = compose_run(words)
    first = str(RunDirectory(base).latest_checkpoint())
    assert (config.train.init_from, config.preference.reference) == (first, first)
    with pytest.raises(ConfigError, match=r"preference\.reference=nowhere"):
        compose_run([*words, "preference.reference=nowhere"])


def test_weights_without_documents_are_not_trained_on_the_standard_library(base, tmp_path):
    for given in (f"train.init_from={base}", f"model_name_or_path={base}"):
        with pytest.raises(ConfigError, match=r"documents: name them, such as data=jsonl data\.path=FILE"):
            compose_run([given])
    (tmp_path / "file.yaml").write_text("data:\n  source: stdlib\n")
    config = compose_run([f"train.init_from={base}", f"config={tmp_path / 'file.yaml'}"])
    assert config.data.source == "stdlib"


def test_preferences_keep_the_chat_template_of_the_model(tmp_path):
    chats, pairs = (
        _records(tmp_path / "chats.jsonl", {"messages": TURNS}),
        _records(tmp_path / "pairs.jsonl", PAIR),
    )
    train(compose([*chats, "tokenizer=byte", "model=tiny", *FEW, f"out={tmp_path / 'chat'}"]))
    train(compose_run([*pairs, *FEW, f"train.init_from={tmp_path / 'chat'}", f"out={tmp_path / 'dpo'}"]))
    expected = find_template(tmp_path / "chat").to_json()
    assert find_template(tmp_path / "dpo").to_json() == expected
    train(compose_run([f"out={tmp_path / 'dpo'}", "train.resume=true", "train.steps=2"]))
    assert find_template(RunDirectory(tmp_path / "dpo").latest_checkpoint()).to_json() == expected


def test_a_template_that_names_the_day_keeps_it(tmp_path, monkeypatch):
    """A run is resumed on the next day with the same documents, and so is an interrupted prepare."""

    def on(day):
        class Today(datetime.date):
            @classmethod
            def today(cls):
                return cls.fromisoformat(day)

        for module in (chat, data_config):
            monkeypatch.setattr(module, "datetime", SimpleNamespace(date=Today))

    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d %b') }}{% for m in messages %} {{ m.role }}: {{ m.content }}{% endfor %}"
    )
    chats = [*_records(tmp_path / "chats.jsonl", {"messages": TURNS}), f"data.chat_template={template}"]
    words = [*chats, "tokenizer=byte", "model=tiny", *FEW, f"out={tmp_path / 'run'}", "train.resume=auto"]
    store = ["prepare", *chats, "tokenizer=byte", "--store", str(tmp_path / "store")]

    def prepared(*more):
        ended = CliRunner().invoke(app, [*store, *more, "--json"])
        return ended.exception or json.loads(ended.stdout)["description"]

    on("2026-03-04")
    train(compose_run(words))
    begun = prepared()
    on("2026-03-05")
    resumed = compose_run([*words, "train.steps=2"])
    assert resumed.data.template_date == "2026-03-04"
    assert train(resumed).step == 2
    assert prepared() == begun
    with pytest.raises(ConfigError, match=r"data\.template_date was 2026-03-04 .* cannot become 2026-03-05"):
        compose_run([*words, "data.template_date=2026-03-05"])
    assert "data.template_date=2026-03-04" in str(prepared("data.template_date=2026-03-05"))


def test_a_model_of_text_learns_to_chat(base, tmp_path):
    """Its tokenizer gets the template's special tokens; a run that starts from it takes its template."""
    chats = [*_records(tmp_path / "chats.jsonl", {"messages": TURNS}), *FEW]
    first, second = tmp_path / "first", tmp_path / "second"
    train(compose_run([*chats, "data.chat_template=llama3", f"train.init_from={base}", f"out={first}"]))
    train(compose_run([*chats, f"train.init_from={first}", f"out={second}"]))
    old, new, same = (Tokenizer.load(RunDirectory(run).latest_checkpoint()) for run in (base, first, second))
    assert new.vocabulary_size == old.vocabulary_size + 4
    assert new.hash == same.hash
    assert find_template(first).name == "llama3"
    assert find_template(second).to_json() == find_template(first).to_json()
