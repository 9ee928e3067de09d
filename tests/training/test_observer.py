"""Observers in the loop: called where the protocol says, kept in checkpoints, put back on resume."""

import json
from contextlib import contextmanager

import pytest
import torch

from multipack.parallel.state import Whole
from multipack.run import RunDirectory
from multipack.training import trainer
from multipack.training.assemble import assemble
from multipack.training.checkpoint import load_checkpoint
from multipack.training.observer import Observer, Observers
from multipack.training.run_config import compose, compose_run
from multipack.training.trainer import train


class Recorder(Observer):
    name = "recorder"

    def __init__(self, skip=(), stop_at=None):
        self.seen, self.skip, self.stop_at, self.total = [], skip, stop_at, torch.zeros(())

    def before_step(self, step):
        self.seen.append(("before", step))

    def micro_batch(self, index, engine, own, whole):
        self.seen.append(("micro", index))

    def gradient(self, step, engine):
        self.seen.append(("gradient", step))
        return {"my_metric": float(step)}

    def judge(self, step, loss, grad_norm):
        self.seen.append(("judge", step))
        return "skip" if step in self.skip else "apply"

    def after_step(self, step, engine, applied):
        self.seen.append(("after", step))
        self.total += step

    def record(self, values):
        self.seen.append(("record", int(values["step"]), "val_loss" in values))

    def sample(self, step, text):
        self.seen.append(("sample", step))

    def weightings(self, engine):
        @contextmanager
        def zeroed():
            before = [p.detach().clone() for p in engine.model.parameters()]
            with torch.no_grad():
                for p in engine.model.parameters():
                    p.zero_()
            yield
            with torch.no_grad():
                for p, old in zip(engine.model.parameters(), before, strict=True):
                    p.copy_(old)

        return [("_zero", zeroed())]

    def evaluated(self, step, val_loss):
        return "enough is enough" if step == self.stop_at else ""

    def state(self):
        return {"count": len(self.seen)}

    def load_state(self, state):
        self.loaded = state["count"]

    def tensors(self):
        return {"total": self.total}

    def load_tensors(self, tensors):
        self.total = tensors["total"].clone()

    def close(self, failed):
        self.seen.append(("close", failed))


@pytest.fixture
def watched(monkeypatch):
    """Every run of the trainer is watched by the observers that the test puts into this list."""
    observers = []

    def assembled(*arguments):
        from multipack.training import assemble as module

        before = module.Observers
        monkeypatch.setattr(module, "Observers", lambda own: before([*own, *observers]))
        try:
            return assemble(*arguments)
        finally:
            monkeypatch.setattr(module, "Observers", before)

    monkeypatch.setattr(trainer, "assemble", assembled)
    return observers


def test_an_observer_sees_the_loop_in_order(words, tmp_path, watched):
    recorder = Recorder()
    watched.append(recorder)
    train(compose([*words, "train.steps=2", "train.eval_every=2", f"out={tmp_path / 'run'}"]))
    micro = [("micro", index) for index in range(3)]
    assert recorder.seen == [
        *[("record", 0, True), ("sample", 0)],
        *[("before", 1), *micro, ("gradient", 1), ("judge", 1), ("after", 1), ("record", 1, False)],
        *[("before", 2), *micro, ("gradient", 2), ("judge", 2), ("after", 2), ("record", 2, False)],
        *[("record", 2, True), ("sample", 2), ("close", False)],
    ]
    records = list(RunDirectory.at(tmp_path / "run").records())
    assert [r["my_metric"] for r in records if "loss" in r] == [1.0, 2.0]
    # Weights of zero say nothing: every token alike.
    zero = [r["val_loss_zero"] for r in records if "val_loss" in r]
    assert zero[0] == zero[1]
    assert zero[0] != records[0]["val_loss"]


def test_a_step_that_is_left_out_changes_no_weights(words, tmp_path, watched):
    watched.append(Recorder(skip=(1, 2)))
    losses = []
    for skip in ((1, 2), ()):
        watched[0] = Recorder(skip=skip)
        out = tmp_path / f"run{len(skip)}"
        train(compose([*words, "train.steps=2", "train.eval_every=2", f"out={out}"]))
        losses.append([r for r in RunDirectory.at(out).records() if "val_loss" in r])
    assert losses[0][0]["val_loss"] == losses[0][1]["val_loss"]
    assert losses[1][0]["val_loss"] != losses[1][1]["val_loss"]
    records = [r for r in RunDirectory.at(tmp_path / "run2").records() if "loss" in r]
    assert [r["skipped"] for r in records] == [1.0, 1.0]


def test_an_observer_ends_a_run_which_can_go_on(words, tmp_path, watched, capsys):
    out = tmp_path / "run"
    watched.append(Recorder(stop_at=2))
    result = train(compose([*words, "train.steps=6", "train.eval_every=2", f"out={out}"]))
    assert (result.step, result.stopped_by) == (2, None)
    assert "ended after step 2 of 6: enough is enough" in capsys.readouterr().out
    checkpoint = load_checkpoint(RunDirectory.at(out).latest_checkpoint())
    assert checkpoint.step == 2
    assert float(checkpoint.source.tensor("observers", "recorder.total")) == 3.0
    watched[0] = Recorder()
    result = train(compose_run([f"out={out}", "train.resume=true"]))
    assert result.step == 6
    assert watched[0].loaded > 0
    assert float(watched[0].total) == 1 + 2 + 3 + 4 + 5 + 6


def test_the_best_checkpoint_is_kept(words, tmp_path, monkeypatch):
    """Validation losses that rise after step 2: `best` stays there while the others are pruned."""
    out = tmp_path / "run"
    losses = iter([5.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0])
    monkeypatch.setattr(trainer, "validation_loss", lambda *_: next(losses))
    train(compose([*words, "train.steps=6", "train.eval_every=1", "train.keep_checkpoints=1", f"out={out}"]))
    run = RunDirectory.at(out)
    assert run.best.read_text().strip() == "step-00000002"
    kept = {path.name for path in run.checkpoints.glob("step-*")}
    assert kept == {"step-00000002", "step-00000006"}
    state = json.loads((run.latest_checkpoint() / "state.json").read_text())
    assert state["progress"]["best"] == 3.0


def test_names_must_differ():
    with pytest.raises(AssertionError):
        Observers([Recorder(), Recorder()])


def test_many_observers_are_one():
    one, other = Recorder(), Recorder(skip=(3,))
    other.name = "other"
    both = Observers([one, other])
    assert both.judge(3, 1.0, 1.0) == "skip"
    assert both.judge(4, 1.0, 1.0) == "apply"
    assert both.evaluated(1, 2.0) == ""
    assert set(both.tensors()) == {"recorder.total", "other.total"}
    both.load_tensors(Whole({"observers": {"recorder.total": torch.tensor(5.0)}}), None)
    assert (float(one.total), float(other.total)) == (5.0, 0.0)
    both.close(True)
    assert one.seen[-1] == other.seen[-1] == ("close", True)
