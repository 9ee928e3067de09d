"""The Python of pages runs: after `<!-- tested -->` as it stands, elsewhere with the names of `names_of_hosts`."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WHOLE, OTHERS = {}, {}
"""Python → the page that has it: of blocks that are whole programs, and of others."""
for page in PAGES:
    for mark, block in re.findall(
        r"(<!-- tested -->\n)?^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        (WHOLE if mark else OTHERS).setdefault(block, page.name)
ASKS = re.findall(
    r"^\*\*(.+?)\*\*(.+?)(?=^\*\*|^## |\Z)",
    (ROOT / "docs" / "you-asked.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
"""(symptom, answer) of each ask."""
SILENT = {"report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no"}


def cases(blocks):
    """Blocks as parameters, those of TRL as slow ones."""
    for block, page in blocks.items():
        marks = [pytest.mark.slow] if "PackedSFTTrainer(" in block else []
        yield pytest.param(block, id=f"{page}: {block.splitlines()[0][:50]}", marks=marks)


@pytest.mark.parametrize("block", cases(WHOLE))
def test_programs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "page", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", cases(OTHERS))
def test_excerpts(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("transformers", reason="transformers is not installed")
    for package in ("torchdata", "torchtitan"):
        if re.search(rf"from (multipack\.integrations\.)?{package}", block):
            pytest.importorskip(package, reason=f"{package} is not installed")
    names = names_of_benchmark(monkeypatch) if "Tool(" in block else names_of_hosts()
    names |= names_of_trl(names) if "PackedSFTTrainer(" in block else {}
    exec(compile(block, "page", "exec"), names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 1
    if "PackedDataCollator()([" in block:
        assert names["batch"]["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    if "Tool(" in block:
        assert sorted(names["next_fit"](np.full(4, 5), 10, 2, 0).order) == [0, 1, 2, 3]
    for name in {"loader", "batches", "micro_batches", "shares", "each"} & names.keys():
        assert len(list(names[name]))


def names_of_hosts():
    """A model, its documents, and the settings of a host."""
    import transformers

    import multipack
    from multipack.models.tiny_models import tiny_model

    lengths = [5, 9, 3, 8, 7, 4, 6, 10]
    rows = [np.arange(length, dtype=np.uint16) for length in lengths]
    return {
        "multipack": multipack,
        "PackedCollator": multipack.PackedCollator,
        "model": tiny_model(transformers.LlamaConfig()),
        "args": transformers.TrainingArguments("run", max_steps=1, **SILENT),
        "dataset": [{"input_ids": row.tolist()} for row in rows],
        "documents": [multipack.Document(row, np.array([[2, len(row)]])) for row in rows],
        "lengths": lengths,
        "prompts": [0, 0, 1, 1, 2, 2, 3, 3],
        "prompt_lengths": [2] * len(lengths),
        "targets": sum(lengths) - len(lengths),
        "epochs": 1,
        "rank": 0,
        "ranks": 1,
    }


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
    return {
        "SFTConfig": partial(trl.SFTConfig, **settings),
        "LoraConfig": partial(peft.LoraConfig, target_modules=["q_proj", "v_proj"]),
        "dataset": datasets.Dataset.from_list(names["dataset"]),
    }


def names_of_benchmark(monkeypatch):
    """What tools of the packing benchmark are written with."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from packing import epoch, tools

    return vars(epoch) | vars(tools)


def test_every_ask_has_threads_lines_and_a_test():
    assert len(ASKS) >= 20
    for symptom, text in ASKS:
        assert re.search(r"\w#\d+|TokenBudgetBatcher", text), symptom
        assert "`tests/" in text, symptom
        (block,) = re.findall(r"^```(?:python)?\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for line in block.splitlines() if line and not line.startswith(("from ", "import "))]
        assert len(lines) <= 4, symptom
