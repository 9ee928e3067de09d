"""`multipack calibrate`: real packs, a fit, and a check on packs that it has not seen."""

import json

import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console
from multipack.training import predict
from multipack.training.run_config import compose
from multipack.training.trainer import train


class LinearTimer:
    """Seconds that follow the formula exactly, whatever the model."""

    def __init__(self, *_):
        self.timed = []

    def __call__(self, lengths):
        self.timed.append(lengths)
        return 1e-3 + 2e-6 * sum(lengths) + 3e-9 * sum(n * (n + 1) for n in lengths) + 5e-6 * len(lengths)


@pytest.fixture
def exact(monkeypatch):
    monkeypatch.setattr(predict, "DecoderTimer", LinearTimer)


def test_real_packs_are_fitted_and_others_predicted(words, exact):
    found = predict.calibrate_documents(compose(words), World(), Console(rank=1))
    assert found.error < 1e-6
    assert found.model.timed.token == pytest.approx(2e-6, rel=1e-3)
    assert len(found.checked) >= 2
    for documents, tokens, longest, measured, predicted in found.checked:
        assert 1 <= documents <= tokens <= 256
        assert longest <= tokens
        assert measured == pytest.approx(predicted, rel=1e-6)


def test_too_few_packs_are_refused(words, exact, tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"text": "abc" * n}) + "\n" for n in range(1, 4)))
    few = [*words, f"data.path={file}", "data.validation=0", "plan.capacity=512"]
    with pytest.raises(ValueError, match="packs are too few to fit a cost"):
        predict.calibrate_documents(compose(few), World(), Console(rank=1))


def test_the_command_saves_a_cost_that_plans_and_trains(words, exact, tmp_path, monkeypatch):
    saved = tmp_path / "cost.json"
    run = CliRunner()
    result = run.invoke(app, ["calibrate", *words, "--save", str(saved), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["error"] < 1e-6
    assert CostModel.load(saved).timed is not None
    again = run.invoke(app, ["calibrate", *words, "--save", str(saved)])
    assert again.exit_code != 0
    assert "exists" in str(again.exception)
    out = tmp_path / "run"
    train(compose([*words, "train.steps=3", "train.eval_every=0", f"plan.cost={saved}", f"out={out}"]))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(record["dt_predicted"] > 0 for record in records)
    assert CostModel.load(out / "cost.json").to_dict() == CostModel.load(saved).to_dict()
    store = tmp_path / "store"
    assert run.invoke(app, ["prepare", *words[:3], "--store", str(store)]).exit_code == 0
    shown = run.invoke(app, ["plan", str(store), f"cost={saved}", "plan.capacity=256", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["step_seconds"] > 0


def test_a_prediction_is_compared_with_what_steps_took(words, tmp_path, capsys):
    train(compose([*words, "plan.cost=measured", "train.eval_every=0", f"out={tmp_path / 'run'}"]))
    printed = capsys.readouterr().out
    assert "predicted and measured time" in printed
    assert "predicted / measured" in printed


def test_an_impossible_cost_is_refused():
    with pytest.raises(ValueError, match=r"plan\.cost='flop': flops, measured, or a \.json file"):
        compose(["plan.cost=flop"])
