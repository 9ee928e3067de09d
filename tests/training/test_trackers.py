"""Trackers: fakes that fail in every hook, and each real one, offline, where its package is installed."""

import json
import sqlite3
from typing import get_args

import pytest

from multipack.training.callbacks import trackers
from multipack.training.callbacks.trackers import TRACKERS, TrackedRun, Tracking, check_trackers
from multipack.training.settings import TrackConfig, TrackerName

SETTINGS = {"train": {"steps": 6, "seed": 0}, "optimizer": {"rules": ["norm lr=2"]}, "out": "runs/a"}


class Fake:
    """A tracker that records its calls, and raises in one of them."""

    def __init__(self, run, calls, fails):
        self.run_id, self.calls, self.fails = run.run_id or "run-1", calls, fails
        self._call("begin", run)

    def _call(self, what, *values):
        self.calls.append((what, *values))
        if what == self.fails or (what, self.fails) == ("close", "record"):
            raise OSError(f"no {what}\n  today")

    def record(self, step, values):
        self._call("record", step, dict(values))

    def sample(self, step, text):
        self._call("sample", step, text)

    def close(self, failed):
        self._call("close", failed)


@pytest.fixture
def fake(monkeypatch):
    """(name, hook that fails) → the calls of a fake tracker of this name."""

    def register(name, fails=""):
        calls = []
        monkeypatch.setitem(TRACKERS, name, ("json", lambda run: Fake(run, calls, fails)))
        return calls

    return register


def _described(tmp_path, *to, **options):
    return TrackedRun(TrackConfig(to=list(to), **options), tmp_path / "run-7", SETTINGS)


def _feed(callback, first=0, last=2):
    for step in range(first, last + 1):
        callback.record({"step": step, "loss": 4.0 - step, "grad_norm/blocks.0": 0.5})
        callback.sample(step, f"words of step {step}")


def test_records_and_samples_are_forwarded_with_their_steps(tmp_path, fake):
    calls, reported = fake("wandb"), []
    callback = Tracking(_described(tmp_path, "wandb"), reported.append)
    assert calls == []  # nothing begins before the first record
    _feed(callback, 3, 4)
    callback.close(failed=False)
    (what, run), *rest = calls
    assert (what, run.name, run.step, run.resumed, run.run_id) == ("begin", "run-7", 3, False, "")
    assert run.flat_settings["optimizer.rules"] == "['norm lr=2']"
    assert rest == [
        ("record", 3, {"loss": 1.0, "grad_norm/blocks.0": 0.5}),
        ("sample", 3, "words of step 3"),
        ("record", 4, {"loss": 0.0, "grad_norm/blocks.0": 0.5}),
        ("sample", 4, "words of step 4"),
        ("close", False),
    ]
    assert reported == []


@pytest.mark.parametrize("fails", ["begin", "record", "sample", "close"])
def test_a_failing_tracker_is_reported_once_and_the_others_continue(tmp_path, fake, fails):
    broken, sound, reported = fake("wandb", fails), fake("mlflow"), []
    callback = Tracking(_described(tmp_path, "wandb", "mlflow"), reported.append)
    _feed(callback)
    callback.close(failed=False)
    assert [what for what, *_ in sound] == ["begin", *["record", "sample"] * 3, "close"]
    assert len(reported) == 1
    assert reported[0].startswith(f"tracker wandb failed: no {fails} today; the run continues without it")
    assert [what for what, *_ in broken].count("close") == (fails != "begin")


def test_a_resumed_run_continues_in_the_same_one(tmp_path, fake):
    fake("wandb")
    before = Tracking(_described(tmp_path, "wandb", run_id="abc"))
    _feed(before)
    state = json.loads(json.dumps(before.state()))
    calls, new = fake("wandb"), fake("trackio")
    after = Tracking(_described(tmp_path, "wandb", "trackio"))
    after.load_state(state)
    _feed(after, 3, 3)
    assert (calls[0][1].run_id, calls[0][1].resumed, calls[0][1].step) == ("abc", True, 3)
    assert (new[0][1].run_id, new[0][1].resumed) == ("", False)
    fake("wandb", "begin")  # the id of a failed tracker is kept
    failed = Tracking(_described(tmp_path, "wandb", run_id="mine"), lambda line: None)
    failed.load_state(state)
    _feed(failed)
    assert failed.state() == state
    calls = fake("wandb")
    after = Tracking(_described(tmp_path, "wandb", run_id="mine"))
    after.load_state(state)
    _feed(after)
    assert calls[0][1].run_id == "mine"  # the setting wins
    assert after.state() == {"run_ids": {"wandb": "mine"}}


def test_illegal_settings_are_refused_by_name():
    for options, message in (
        ({"to": ["wandbb"]}, "track.to='wandbb' .*nearest: wandb"),
        ({"to": ["wandb", "wandb"]}, "more than once"),
        ({"to": ["wandb", "mlflow"], "run_id": "a"}, "track.run_id=a"),
        ({"project": ""}, "track.project"),
    ):
        with pytest.raises(ValueError, match=message):
            TrackConfig(**options)


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch):
    assert tuple(TRACKERS) == get_args(TrackerName)
    for name in TRACKERS:
        monkeypatch.setitem(trackers.TRACKERS, name, ("no_such_package", None))
        with pytest.raises(ValueError, match=rf"track\.to={name} needs .*pip install .*\[{name}\]"):
            check_trackers(TrackConfig(to=[name]))


def _track(tmp_path, tracker, state=None, first=0, last=2, failed=False, settings=SETTINGS, **options):
    """Track a run with a real tracker; returns the state of the callback."""
    config = TrackConfig(to=[tracker], mode="offline", **options)
    (tmp_path / "run-7").mkdir(exist_ok=True)
    callback = Tracking(TrackedRun(config, tmp_path / "run-7", settings), pytest.fail)
    if state is not None:
        callback.load_state(json.loads(json.dumps(state)))
    _feed(callback, first, last)
    callback.close(failed)
    return callback.state()


def test_tensorboard_writes_event_files_and_hides_repeated_steps(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    state = _track(tmp_path, "tensorboard", last=4)
    _track(tmp_path, "tensorboard", state, first=3, last=5)
    found = EventAccumulator(str(tmp_path / "run-7" / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "grad_norm/blocks.0"}
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(s, 4.0 - s) for s in range(6)]
    texts = "".join(
        event.tensor_proto.string_val[0].decode()
        for tag in found.Tags()["tensors"]
        for event in found.Tensors(tag)
    )
    assert "optimizer.rules: ['norm lr=2']" in texts
    assert "    words of step 5" in texts


@pytest.mark.slow  # its service takes seconds to start and to end
def test_wandb_writes_an_offline_run_with_all_its_names(tmp_path):
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    names = {"project": "packs", "entity": "a-team", "group": "sweep-3", "name": "the-run"}
    state = _track(tmp_path, "wandb", run_id="abc123", **names)
    assert state == {"run_ids": {"wandb": "abc123"}}
    wandb.teardown()  # its service writes until then
    [folder] = (tmp_path / "run-7" / "wandb").glob("offline-run-*-abc123")
    written = (folder / "run-abc123.wandb").read_bytes()
    for name in [*names.values(), "abc123", "grad_norm/blocks.0", "norm lr=2"]:
        assert name.encode() in written, name
    assert any("words of step 2" in path.read_text() for path in folder.rglob("*.html"))


@pytest.mark.slow  # the tables of its database take seconds
def test_mlflow_keeps_a_run_and_continues_it(tmp_path):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow is installed without its database (mlflow-skinny)")
    from mlflow import MlflowClient

    state = _track(tmp_path, "mlflow", project="packs", group="sweep-3", failed=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run-7' / 'mlflow.db'}")
    run_id = state["run_ids"]["mlflow"]
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FAILED", "run-7")
    assert run.data.tags["group"] == "sweep-3"
    assert run.data.params["train.steps"] == "6"
    assert client.get_experiment(run.info.experiment_id).name == "packs"
    longer = {**SETTINGS, "train": {"steps": 9, "seed": 0}}
    _track(tmp_path, "mlflow", state, 3, 4, settings=longer, project="packs")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.params["train.steps"], run.data.tags["resumed.train.steps"]) == ("6", "9")
    history = client.get_metric_history(run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(s, 4.0 - s) for s in range(5)]
    samples = tmp_path / "run-7" / "mlflow-artifacts" / run_id / "artifacts" / "samples"
    assert (samples / "step-00000004.txt").read_text() == "words of step 4"


def test_trackio_keeps_a_run_and_continues_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read as the package is imported
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    state = _track(tmp_path, "trackio", last=1, project="packs")
    assert state == {"run_ids": {"trackio": "run-7"}}
    _track(tmp_path, "trackio", state, first=2, last=3, project="packs")
    with sqlite3.connect(tmp_path / "trackio" / "packs.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    losses = {step: values["loss"] for _, step, text in rows if "loss" in (values := json.loads(text))}
    assert losses == {step: 4.0 - step for step in range(4)}
    assert {name for name, *_ in rows} == {"run-7"}


def test_an_offline_trackio_run_is_never_sent_to_a_space(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/mine")
    reported = []
    callback = Tracking(_described(tmp_path, "trackio", mode="offline"), reported.append)
    _feed(callback)
    assert "track.mode=offline, but TRACKIO_SPACE_ID is set" in reported[0]
