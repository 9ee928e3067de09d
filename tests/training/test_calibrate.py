"""Calibration: mixes and real packs that are timed, the fit, and runs that plan with it."""

import json

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from multipack.cli import app
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.training import calibrate as calibrate_module
from multipack.training.calibrate import calibrate, decoder_timer, mixes
from multipack.training.run_config import compose, compose_run
from multipack.training.run_cost import COST_FILE, cost_rows
from multipack.training.train import train

SHAPE = ModelShape(layers=2, heads=2, d_model=16, d_ff=32, vocabulary_size=50, dropout=0.5)


def _seconds(lengths, base=2e-3, token=3e-6, pair=2e-9, document=4e-5):
    x = np.array(lengths, dtype=np.float64)
    return base + token * x.sum() + pair * (x * (x + 1)).sum() + document * len(x)


@pytest.mark.parametrize(
    ("tokens", "longest"), [(2048, 2048), (256, 100), (1000, 64), (7, 7), (1, 1), (64, 1)]
)
def test_mixes_fit_and_differ(tokens, longest):
    made = mixes(tokens, longest)
    assert 1 <= len(made) <= 21
    assert all(min(lengths) >= 1 and max(lengths) <= longest and sum(lengths) <= tokens for lengths in made)
    assert len({tuple(lengths) for lengths in made}) == len(made)
    if tokens >= 256 and longest >= 64:
        assert len(made) >= 12
        assert max(map(sum, made)) >= 0.9 * tokens
        assert max(map(max, made)) == min(tokens, longest)


def test_coefficients_are_recovered_through_the_mixes():
    model = calibrate(_seconds, SHAPE, capacity=8192, longest=8192, budget_seconds=100.0)
    assert (model.linear, model.quadratic, model.constant) == (1500, 1, 20_000)
    assert model.seconds([100, 5000]) == pytest.approx(_seconds([100, 5000]), rel=1e-9)
    assert model.flops([10]) == CostModel.from_shape(SHAPE).flops([10])
    rows = dict(cost_rows(model))
    assert rows["measured times"].startswith("2 ms per micro-batch, 3 µs per token, 2 ns per l(l+1), 40 µs")
    assert rows["cost of l tokens"].startswith("1,500·l + l(l+1) + 20,000; by FLOPs alone ")
    assert cost_rows(CostModel.from_shape(SHAPE)) == []


def test_the_budget_limits_the_size_of_mixes():
    timed = []

    def timer(lengths):
        timed.append(sum(lengths))
        # Another program runs for a moment; the smaller of two times counts.
        disturbed = 5.0 if len(timed) % 37 == 20 else 0.0
        return _seconds(lengths, base=0.0, token=1e-3) + disturbed

    model = calibrate(timer, SHAPE, capacity=1 << 20, longest=1 << 20, budget_seconds=30.0)
    # Two rounds of 21 mixes of 12 times their size in tokens take 24.6 s; the next size would take twice as long.
    assert max(timed) == 1024
    assert sum(timed) * 1e-3 < 1.5 * 30.0
    assert model.linear == pytest.approx(1e-3 / 2e-9, rel=1e-3)


def test_times_without_information_are_refused():
    with pytest.raises(ValueError, match=r"use plan\.cost=flops"):
        calibrate(lambda lengths: 1.0, SHAPE, capacity=512, longest=512)
    with pytest.raises(ValueError, match="in documents of up to 2"):
        calibrate(_seconds, SHAPE, capacity=2, longest=2)


class Products(TorchDispatchMode):
    """Records the dtypes of products of matrices."""

    dtypes = ()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.name().startswith(("aten::mm", "aten::addmm")):
            self.dtypes += (args[-1].dtype,)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_timer_times_a_pass(dtype, monkeypatch):
    """By a clock that counts products: of 7 matrices a layer and the head, one forwards and two backwards."""
    with Products() as products:
        monkeypatch.setattr("time.perf_counter", lambda: len(products.dtypes))
        assert decoder_timer(SHAPE, "auto", World(), dtype)([5, 3]) == 3 * (7 * 2 + 1)
    assert {*products.dtypes} == {dtype}


@pytest.fixture
def exact(monkeypatch):
    """Times follow the formula exactly, whatever the model."""
    monkeypatch.setattr(calibrate_module, "decoder_timer", lambda *_: _seconds)


def test_too_few_packs_are_refused(words, exact, tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"text": "abc" * n}) + "\n" for n in range(1, 4)))
    few = [*words, f"data.path={file}", "data.validation=0", "plan.capacity=512"]
    result = CliRunner().invoke(app, ["calibrate", *few, "--save", str(tmp_path / "cost.json")])
    assert "packs are too few to fit a cost" in str(result.exception)


@pytest.mark.slow
def test_the_command_saves_a_cost_that_plans_and_trains(words, exact, tmp_path):
    saved, out, store, run = tmp_path / "cost.json", tmp_path / "run", tmp_path / "store", CliRunner()
    result = run.invoke(app, ["calibrate", *words, "--save", str(saved), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["error"] < 1e-6
    model = CostModel.load(saved)
    assert model.timed.token == pytest.approx(3e-6, rel=1e-3)
    again = run.invoke(app, ["calibrate", *words, "--save", str(saved)])
    assert "exists" in str(again.exception)
    assert run.invoke(app, ["prepare", *words[:3], "--store", str(store)]).exit_code == 0
    shown = run.invoke(app, ["plan", str(store), f"cost={saved}", "plan.capacity=256", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["step_seconds"] > 0
    train(compose([*words, "train.steps=3", "train.eval_every=0", f"plan.cost={saved}", f"out={out}"]))
    assert all(record["dt_predicted"] > 0 for record in RunDirectory(out).records())
    # The run keeps its cost.
    saved.unlink()
    assert CostModel.load(out / COST_FILE).to_dict() == model.to_dict()
    resume = [f"out={out}", "train.resume=true", "train.steps=4"]
    assert train(compose_run(resume)).step == 4
    (out / COST_FILE).write_text(json.dumps(CostModel.load(out / COST_FILE).to_dict()))  # the same model
    with pytest.raises(ValueError, match=r"cost\.json is not what was written"):
        train(compose_run(resume))
    (out / COST_FILE).unlink()
    with pytest.raises(ValueError, match=r"cost\.json is missing"):
        train(compose_run(resume))
