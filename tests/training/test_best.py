"""`checkpoints/best`: the lowest validation loss of the course that the run has taken, through stops and resumes."""

import json
import signal

import pytest

from multipack.run import RunDirectory
from multipack.training import trainer
from multipack.training.run_config import compose, compose_run
from multipack.training.trainer import train


@pytest.fixture
def losses(monkeypatch):
    """Validation losses to come, instead of real ones."""
    coming = []
    monkeypatch.setattr(trainer, "validation_loss", lambda *_: coming.pop(0))
    return coming


def _best(out):
    run = RunDirectory(out)
    return run.best.read_text().strip() if run.best.is_file() else None


def test_the_best_evaluation_may_be_one_that_a_resumed_run_makes_up_for(words, tmp_path, losses, monkeypatch):
    """Asked to stop in step 3, before its evaluation, which is the best of all."""
    agree = trainer._agree

    def asked(session, data, result, stop):
        if session.step == 2:
            stop.signal = signal.SIGTERM
        return agree(session, data, result, stop)

    monkeypatch.setattr(trainer, "_agree", asked)
    out = tmp_path / "run"
    losses += [5.0]
    assert train(compose([*words, f"out={out}"])).step == 3
    assert _best(out) is None  # the evaluation before the first step has no checkpoint
    monkeypatch.setattr(trainer, "_agree", agree)
    losses += [3.0, 4.0]
    train(compose_run([f"out={out}", "train.resume=true", "train.keep_checkpoints=1"]))
    assert _best(out) == "step-00000003"
    assert RunDirectory(out).best_checkpoint().is_dir()
    assert RunDirectory(out).latest_checkpoint().name == "step-00000006"


def test_a_run_that_goes_back_forgets_the_best_of_the_course_that_it_leaves(words, tmp_path, losses):
    out = tmp_path / "run"
    long = [
        *words,
        "train.steps=4",
        "train.eval_every=1",
        "train.keep_checkpoints=0",
        "optimizer.decay_steps=4",
    ]
    losses += [9.0, 4.0, 5.0, 3.0, 6.0]
    train(compose([*long, f"out={out}"]))
    assert _best(out) == "step-00000003"
    losses += [4.5]
    train(compose_run([f"train.resume={out / 'checkpoints' / 'step-00000002'}", "train.steps=3"]))
    assert _best(out) == "step-00000001"
    state = json.loads((RunDirectory(out).latest_checkpoint() / "state.json").read_text())
    assert (state["progress"]["best"], state["progress"]["best_step"]) == (4.0, 1)
