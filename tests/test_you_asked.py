"""docs/you-asked.md: its commands run, on small data and with the settings of a small run; its Python, too."""

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "you-asked.md").read_text()
ASKS = re.findall(r"^\*\*(.+?)\*\*(.+?)(?=^\*\*|^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
"""(symptom, answer) of each ask."""
COMMANDS, BLOCKS = (
    [
        pytest.param(*found, id=symptom[:40])
        for symptom, text in ASKS
        for found in re.findall(rf"^```({language})\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
    ]
    for language in ("", "python")
)
SMALL = {
    "data": "jsonl",
    "data.path": "train.jsonl",
    "tokenizer": "byte",
    "model.layers": 2,
    "model.d_model": 32,
    "model.d_ff": 48,
    "model.heads": 4,
    "model.kv_heads": 4,
    "plan.capacity": 256,
    "plan.packs_per_step": 2,
    "train.steps": 2,
    "train.eval_every": 0,
    "train.compare_padding": "false",
}
"""What a command of `train` gets where it does not say otherwise."""


def shortened(words):
    """The words of a command as those of a run of seconds."""
    if "train" not in words:
        return [*words, "tokenizer=byte"]
    words = [word for word in words if not word.startswith("train.steps=")]
    given = {word.partition("=")[0] for word in words}
    if "data=store" in words:
        given.add("tokenizer")
    if "train.epochs" in given:
        given.add("train.steps")
    return [*words, *(f"{name}={value}" for name, value in SMALL.items() if name not in given)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the page's commands read."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    lengths = draw.integers(10, 200, 40)
    np.save("lengths.npy", draw.integers(10, 4000, 500))
    texts = ["".join(map(chr, draw.integers(97, 123, length))) for length in lengths]
    Path("train.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    Path("books").mkdir()
    for number, text in enumerate(texts):
        Path(f"books/{number}.txt").write_text(text)
    return tmp_path


def commands_of(block):
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


QUICK = ("plan", "probe", "advise")


@pytest.mark.parametrize(
    ("_", "block"), [each for each in COMMANDS if commands_of(each.values[1])[0][0] in QUICK]
)
def test_quick_commands(folder, _, block):
    from multipack.cli import app

    for words in commands_of(block):
        if words[0] == "probe":
            pytest.importorskip("transformers", reason="transformers is not installed")
        done = CliRunner().invoke(app, words)
        assert done.exit_code in ((0, 1) if "exit code 1" in block else (0,)), done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("_", "block"), [each for each in COMMANDS if commands_of(each.values[1])[0][0] not in QUICK]
)
def test_runs(folder, _, block):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    for words in commands_of(block):
        command = [sys.executable, "-m", "multipack", *shortened(words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture
def names(folder):
    """What the page's Python takes for granted: a model, documents, and the settings of the host."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from multipack.integrations.tiny_models import tiny_model

    lengths = [5, 9, 3, 8, 7, 4, 6, 10]
    return {
        "model": tiny_model(transformers.LlamaConfig()),
        "args": transformers.TrainingArguments("run", max_steps=1, **SILENT),
        "dataset": [{"input_ids": list(range(length))} for length in lengths],
        "lengths": lengths,
        "rank": 0,
        "ranks": 1,
    }


SILENT = {"report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no"}


def names_of_trl(names):
    """The same for TRL, which wants its own kind of data set, and a tokenizer beside the model."""
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import datasets
    import peft
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "a": 2}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "a")), pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained("model")
    names["model"].save_pretrained("model")
    names["model"].config._name_or_path = "model"
    settings = SILENT | {
        "output_dir": "run",
        "max_steps": 1,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    return names | {
        "SFTConfig": partial(trl.SFTConfig, **settings),
        "LoraConfig": partial(peft.LoraConfig, target_modules=["q_proj", "v_proj"]),
        "dataset": datasets.Dataset.from_list(names["dataset"]),
    }


def is_slow(block):
    return [pytest.mark.slow] if ".trl" in block else []


@pytest.mark.parametrize(
    "block", [pytest.param(each.values[1], id=each.id, marks=is_slow(each.values[1])) for each in BLOCKS]
)
def test_python(names, block):
    if "torchdata" in block:
        pytest.importorskip("torchdata", reason="torchdata is not installed")
    names = names_of_trl(names) if is_slow(block) else names
    exec(compile(block, "you-asked.md", "exec"), names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 1
    elif "batch" in names:
        assert names["batch"]["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    else:
        (made,) = (names[name] for name in ("loader", "batches", "micro_batches") if name in names)
        assert list(made)


def test_every_ask_has_threads_lines_and_a_test():
    assert len(ASKS) >= 20
    for symptom, text in ASKS:
        assert re.search(r"\w#\d+|TokenBudgetBatcher", text), symptom
        assert "`tests/" in text, symptom
        (block,) = re.findall(r"^```(?:python)?\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for line in block.splitlines() if line and not line.startswith(("from ", "import "))]
        assert len(lines) <= 4, symptom
