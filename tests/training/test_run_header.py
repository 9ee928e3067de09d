"""Every kind of run begins with at most ten lines, and no line of a run has more than 100 columns."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.data.stores.prepare import prepare
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.reports.console import LINE, Detail, folded
from multipack.training.run_config import compose_run
from multipack.training.train import train

CHATS = ["train.init_from=finished", "data=jsonl", "data.path=chats.jsonl", "data.broken=skip"]
PAIRS = ["train.init_from=finished", "data=jsonl", "data.path=pairs.jsonl"]
NEW = ["model=tiny", "model.layers=1", "tokenizer=byte"]
JOURNEYS = {
    "text": ["data=text", "data.path=books", "data.overlong=split", *NEW],
    "chats": [*CHATS, "data.overlong=truncate"],
    "adapters": [*CHATS, "data.overlong=drop", "data.validation_path=[held.jsonl]", "adapter=lora"],
    "pairs": PAIRS,
    "reward": [*PAIRS, "preference.loss=reward"],
    "stream": ["data=store", "data.path=store", "data.stream=true", "data.overlong=truncate", *NEW],
    "resumed": ["train.resume=true", "out=finished", "train.steps=7", "log.every=1"],
}
"""Words of a run; all but the resumed one have those of SMALL, too."""
SMALL = [
    "plan.capacity=96",
    "plan.packs_per_step=2",
    "train.steps=1",
    "train.dtype=fp32",
    "train.sample_tokens=4",
    "out=run",
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {}}}


def chat(question, answer="Yes.", **fields):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **fields}]
    return json.dumps({"messages": turns})


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """A folder with a trained run, and documents that runs have something to say about."""
    monkeypatch.chdir(tmp_path)
    chats = [*map(chat, "abcdefgh"), chat("x" * 200), chat("call", tool_calls=[CALL]), "broken", chat("", "")]
    pairs = [{"prompt": "p", "chosen": "c" * number, "rejected": "r"} for number in range(1, 9)]
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    (tmp_path / "held.jsonl").write_text("\n".join([*map(chat, "ij"), chat("y" * 200)]))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "books").mkdir()
    for number in range(1, 9):
        (tmp_path / f"books/{number}.txt").write_text("text " * 5 * number)
    prepare(DataConfig(source="text", path="books"), TokenizerConfig(kind="byte"), tmp_path / "store")


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_run_begins_with_few_lines(journey, folder, capsys):
    words = JOURNEYS[journey]
    train(compose_run([*words, *([] if journey == "resumed" else SMALL)]))
    printed = capsys.readouterr().out
    before, step, after = re.split(r"^(step.*)$", printed, maxsplit=1, flags=re.M)
    assert "  documents  " in before
    assert len(before.strip("\n").splitlines()) <= 11, before  # a note is never cut
    lines = [*before.splitlines(), step, *after.partition("\nwritten")[0].splitlines()]
    assert max(map(len, lines)) <= LINE, printed


def test_the_header_names_quantized_adapters_and_runs_without_validation(folder, capsys):
    sizes = ["model.d_model=64", "model.d_ff=64", "model.heads=1", "model.layers=1", "model.kv_heads=1"]
    texts = ["data=text", "data.path=books", "data.overlong=split", "data.validation=0"]
    train(compose_run([*texts, "tokenizer=byte", *sizes, *SMALL]))
    printed = capsys.readouterr().out
    assert "data.validation=0" in printed
    assert "starting 1 step " in printed
    assert compose_run(["train.resume=true", "out=run"]).train.eval_every == 0
    changed = [word for word in SMALL if not word.startswith(("out=", "plan.packs"))]
    train(
        compose_run(
            [*texts, "train.init_from=run", "adapter=qlora", *changed, "plan.packs_per_step=1", "out=q"]
        )
    )
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  adapter"))
    assert "QLoRA" in row
    assert "NF4" in row


def test_the_command_that_prepare_ends_with_runs(folder):
    words = ["data=jsonl", "data.path=chats.jsonl", "data.broken=skip", "tokenizer=byte", "plan.capacity=96"]
    done = CliRunner().invoke(app, ["prepare", *words, "model=tiny"], catch_exceptions=False)
    assert "1 document of more than 96 tokens" in done.output
    command = shlex.split(done.output.splitlines()[-1])
    assert command[-1] == "data.overlong=truncate"
    train(compose_run([*command[2:], "train.steps=1", "train.eval_every=0", "train.dtype=fp32", "out=run"]))


def test_a_plan_takes_the_words_of_a_run_and_ends_with_its_command(folder):
    Path("recipe.yaml").write_text("data: {source: jsonl, overlong: truncate}\noptimizer: {lr: 1.0e-4}\n")
    words = ["config=recipe.yaml", *CHATS, *SMALL, "train.seed=3", "parallel.context=2"]
    words.remove("data=jsonl")
    done = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert done.exit_code == 0
    assert "left out" in done.output  # a broken line
    command = shlex.split(done.output.splitlines()[-1])
    assert command[:5] == ["multipack", "launch", "-n", "2", "--"]
    assert compose_run(command[6:]) == compose_run(words)
    refused = CliRunner().invoke(app, ["plan", *words, "train.stepz=1"])
    assert "did you mean train.steps?" in str(refused.exception)


def test_notes_that_do_not_fit_are_left_out_whole():
    short, long = "note: short", "note: " + "word " * 30
    for notes, most, whole, left in (
        ([short, long], 3, [short, long], 0),
        ([short, long], 2, [short], 1),
        ([long, short], 1, [long], 1),
        ([short, long, short, long, Detail("last")], 4, [short, long, short], 2),
    ):
        shown, found = folded(notes, most)
        assert " ".join(shown).split() == " ".join(whole).split()
        assert all(len(line) <= LINE for line in shown)
        assert found == left
