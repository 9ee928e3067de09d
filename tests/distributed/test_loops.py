"""The examples of loops without a Trainer, on one and two processes: equal to documents alone, and resumed exactly."""

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hosts import RATE, ROW, Texts, numbers_of, steps_of, tiny_llama, train_alone, weights

EXAMPLES = Path(__file__).parents[2] / "examples"


def recorded(model, rows):
    """The same model, which records the documents of every row that it reads."""
    model.register_forward_pre_hook(
        lambda _model, _inputs, named: rows.append(numbers_of(named)), with_kwargs=True
    )
    return model


def case_loop(world, name, accumulation, lora, settings):
    """Rows and weights of a run, and of one that stops in the middle of epoch 1 and is resumed."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    settings = settings | {"capacity": 2 * ROW, "accumulation": accumulation, "rate": RATE}
    rows, again = [], []
    model = tiny_llama(lora)
    example.train(recorded(model, rows), Texts(), **settings)
    middle = len(rows) // accumulation * 3 // 4
    saved = example.train(recorded(tiny_llama(lora), again), Texts(), **settings, stop=middle)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    resumed = tiny_llama(lora)
    example.train(recorded(resumed, again), Texts(), **settings, saved=torch.load(file, weights_only=False))
    return {"rows": [rows, again], "weights": [weights(model), weights(resumed)], "middle": saved["epoch"]}


LOOPS = [
    ("pytorch_loop", "torchdata", {}),
    pytest.param("pytorch_loop", "torchdata", {"workers": 2}, marks=pytest.mark.slow),
    ("accelerate_loop", "accelerate", {"cpu": True}),
]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("accumulation", "lora"), [(1, False), (2, True)], ids=["full", "lora"])
@pytest.mark.parametrize(("name", "package", "settings"), LOOPS)
def test_a_loop_equals_every_document_alone(pools, name, package, settings, accumulation, lora, processes):
    for needed in ("transformers", "torchdata", package, *(["peft"] if lora else [])):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    found = pools(processes).run(case_loop, name, accumulation, lora, settings)
    steps = steps_of([rank["rows"][0] for rank in found], accumulation)
    first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    for epoch in (first, second):
        assert sorted(number for step in epoch for number in step) == list(range(40))
    assert first != second
    model = tiny_llama(lora)
    before = weights(model)
    alone = train_alone(model, Texts(), steps)
    assert np.abs(alone - before).max() > 1e-2
    for rank in found:
        assert np.abs(rank["weights"][0] - alone).max() <= 1e-6
        assert rank["middle"] == 1
        assert rank["rows"][0] == rank["rows"][1]
        assert np.array_equal(*rank["weights"])
