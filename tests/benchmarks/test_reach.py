"""The count of Axolotl's examples, on configurations of two kinds."""

import importlib
import sys
from pathlib import Path

import pytest

CONFIG = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [{"path": "a/b", "type": "alpaca"}],
    "sample_packing": True,
    "micro_batch_size": 1,
}


@pytest.fixture
def reach(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("reach")
    sys.modules.pop("reach")


def test_resolved_examples_are_counted_and_others_say_what_they_lack(reach):
    changes = ({}, {"lisa_n_layers": 4}, {"sample_packing": False}, {"base_model": "ai21labs/Jamba-v0.1"})
    examples = [{"path": f"examples/{n}.yml", "config": {**CONFIG, **each}} for n, each in enumerate(changes)]
    figures = reach.count(examples)
    assert (figures["examples"], figures["packing"], figures["own_decoder"], figures["with_hf"]) == (
        4,
        3,
        1,
        1,
    )
    assert figures["unpacked"] == 1
    assert list(figures["lacking"]) == ["examples/1.yml", "examples/3.yml"]
    assert "| 1.yml | `lisa_n_layers`: " in reach.page(figures)
