"""Runs that begin with the weights of others: the very ones, their tokenizer, and how they are talked to."""

import json

import numpy as np
import pytest

from multipack.data.tokenizer import Tokenizer
from multipack.run import RunDirectory
from multipack.training.inference import load_template
from multipack.training.run_config import compose, compose_run
from multipack.training.trainer import train
from multipack.words import ConfigError

FEW = [
    "plan.capacity=256",
    "plan.packs_per_step=2",
    "train.steps=2",
    "train.eval_every=2",
    "train.dtype=fp32",
    "train.sample_tokens=2",
    "train.compare_padding=false",
]
NAMES = ["pack", "token", "rank", "plan", "loss", "step", "batch", "mask", "cost", "seed"]


def _texts(path, seed):
    draw = np.random.default_rng(seed)
    path.write_text("\n\n".join(" ".join(draw.choice(NAMES[seed:], 9)) for _ in range(60)))
    return ["data=text", f"data.path={path}", "data.documents=blank_line"]


@pytest.fixture
def base(tmp_path):
    """A run on text, with byte pairs of its own."""
    words = [*_texts(tmp_path / "a.txt", 0), "tokenizer=bpe", "tokenizer.vocabulary_size=280", "model=tiny"]
    train(compose([*words, *FEW, f"out={tmp_path / 'base'}"]))
    return tmp_path / "base"


def test_a_run_takes_shape_and_tokenizer_of_the_weights_that_it_begins_with(base, tmp_path):
    out = tmp_path / "on"
    train(compose_run([*_texts(tmp_path / "b.txt", 3), *FEW, f"train.init_from={base}", f"out={out}"]))
    saved = [RunDirectory(run).latest_checkpoint() for run in (base, out)]
    first, second = (Tokenizer.load(folder).hash for folder in saved)
    assert first == second
    said = compose_run([*_texts(tmp_path / "b.txt", 3), f"train.init_from={base}", "tokenizer=byte"])
    assert said.tokenizer.kind == "byte"  # words win
    stores = compose_run(["data=store", f"data.path={tmp_path}", f"train.init_from={base}"])
    assert stores.tokenizer.kind == "auto"  # stores have their own


def test_the_checkpoint_that_a_run_began_with_is_named_and_does_not_move(base, tmp_path):
    words = ["data=jsonl", "data.path=pairs.jsonl", f"train.init_from={base}", f"preference.reference={base}"]
    config = compose_run(words)
    began = str(RunDirectory(base).latest_checkpoint())
    assert (config.train.init_from, config.preference.reference) == (began, began)
    train(compose_run([f"out={base}", "train.resume=true", "train.steps=3"]))
    assert str(RunDirectory(base).latest_checkpoint()) != began
    with pytest.raises(ConfigError, match=r"preference\.reference=nowhere: nowhere is not there"):
        compose_run([*words, "preference.reference=nowhere"])


def test_preferences_leave_a_model_of_chats_its_template(tmp_path):
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "pack"}]
    pair = {"prompt": "say", "chosen": " token", "rejected": " rank"}
    for name, record in (("chats", {"messages": turns}), ("pairs", pair)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(record) + "\n") * 40)
    chats = ["data=jsonl", f"data.path={tmp_path / 'chats.jsonl'}", "tokenizer=byte", "model=tiny"]
    train(compose([*chats, *FEW, f"out={tmp_path / 'chat'}"]))
    pairs = ["data=jsonl", f"data.path={tmp_path / 'pairs.jsonl'}", f"train.init_from={tmp_path / 'chat'}"]
    train(compose_run([*pairs, *FEW, f"out={tmp_path / 'dpo'}"]))
    wanted = load_template(tmp_path / "chat").to_json()
    assert load_template(tmp_path / "dpo").to_json() == wanted
    train(compose_run([f"out={tmp_path / 'dpo'}", "train.resume=true", "train.steps=3"]))
    assert load_template(RunDirectory(tmp_path / "dpo").latest_checkpoint()).to_json() == wanted


def test_a_model_of_text_learns_to_chat_and_later_chats_are_written_alike(base, tmp_path):
    """Its tokenizer gets the template's special tokens; what goes on from there takes the run's own template."""
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "pack"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    chats = ["data=jsonl", f"data.path={tmp_path / 'chats.jsonl'}", *FEW]
    first, second = tmp_path / "first", tmp_path / "second"
    train(compose_run([*chats, "data.chat_template=llama3", f"train.init_from={base}", f"out={first}"]))
    train(compose_run([*chats, f"train.init_from={first}", f"out={second}"]))
    old, new, same = (Tokenizer.load(RunDirectory(run).latest_checkpoint()) for run in (base, first, second))
    assert new.vocabulary_size == old.vocabulary_size + 4
    assert new.hash == same.hash
    assert load_template(first).name == "llama3"
    assert load_template(second).to_json() == load_template(first).to_json()
