"""Trackers: fakes that fail in every hook, and each real one, offline, where its package is installed."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest

from multipack.parallel.world import World
from multipack.training.callbacks import tracking
from multipack.training.callbacks.trackers import TRACKERS, TrackedRun
from multipack.training.callbacks.tracking import Tracking, open_trackers
from multipack.training.settings import TRACKER_NAMES, TrackConfig

SETTINGS = {"train": {"steps": 6, "seed": 0}, "optimizer": {"rules": ["norm lr=2"]}, "out": "runs/a"}


class Fake:
    """Records its calls; raises in the given methods."""

    def __init__(self, name="fake", fails=(), run_id="run-1"):
        self.name, self.fails, self.run_id = name, set(fails), run_id
        self.told = []

    def _tell(self, what, *values):
        self.told.append((what, *values))
        if what in self.fails or "all" in self.fails:
            raise OSError(f"no {what}\n  today")

    def begin(self, about):
        self._tell("begin", about)
        return about.run_id or self.run_id

    def record(self, step, values):
        self._tell("record", step, dict(values))

    def sample(self, step, text):
        self._tell("sample", step, text)

    def close(self, failed):
        self._tell("close", failed)


def _described(tmp_path, **options):
    return TrackedRun(TrackConfig(**options), tmp_path / "run-7", SETTINGS)


def _feed(callback, first=0, last=2):
    for step in range(first, last + 1):
        callback.record({"step": step, "loss": 4.0 - step, "grad_norm/blocks.0": 0.5})
        callback.sample(step, f"words of step {step}")


def test_records_and_samples_are_forwarded_with_their_steps(tmp_path):
    fake, told = Fake(), []
    callback = Tracking([fake], _described(tmp_path), told.append)
    assert fake.told == []  # nothing begins before the first record
    assert callback.state() == {}
    _feed(callback, 3, 4)
    callback.close(failed=False)
    (what, about), *rest = fake.told
    assert (what, about.name, about.step, about.resumed, about.run_id) == ("begin", "run-7", 3, False, "")
    assert about.flat_settings["optimizer.rules"] == "['norm lr=2']"
    assert rest == [
        ("record", 3, {"loss": 1.0, "grad_norm/blocks.0": 0.5}),
        ("sample", 3, "words of step 3"),
        ("record", 4, {"loss": 0.0, "grad_norm/blocks.0": 0.5}),
        ("sample", 4, "words of step 4"),
        ("close", False),
    ]
    assert told == []


@pytest.mark.parametrize("fails", ["begin", "record", "sample", "close", "all"])
def test_a_failing_tracker_is_reported_once_and_the_others_continue(tmp_path, fails):
    broken, sound, told = Fake("broken", [fails]), Fake("sound"), []
    callback = Tracking([broken, sound], _described(tmp_path), told.append)
    _feed(callback)
    callback.close(failed=False)
    assert [what for what, *_ in sound.told] == ["begin", *["record", "sample"] * 3, "close"]
    named = [line for line in told if "failed at" in line]
    assert len(named) == 1
    where = "begin" if fails == "all" else fails
    assert named[0].startswith(
        f"tracker broken failed at {where}: no {where} today; the run continues without it"
    )
    assert [what for what, *_ in broken.told].count("close") == 1
    assert len(told) == (2 if fails == "all" else 1)


def test_a_tracker_that_never_began_is_not_closed(tmp_path):
    fake = Fake()
    Tracking([fake], _described(tmp_path)).close(failed=True)
    assert fake.told == []


def test_a_resumed_run_continues_in_the_same_one(tmp_path):
    before = Tracking([Fake(run_id="abc")], _described(tmp_path))
    _feed(before)
    state = json.loads(json.dumps(before.state()))
    fake, new = Fake(), Fake("new")
    after = Tracking([fake, new], _described(tmp_path))
    after.load_state(state)
    _feed(after, 3, 3)
    assert (fake.told[0][1].run_id, fake.told[0][1].resumed, fake.told[0][1].step) == ("abc", True, 3)
    assert (new.told[0][1].run_id, new.told[0][1].resumed) == ("", False)
    asked = Fake()
    after = Tracking([asked], _described(tmp_path, run_id="mine"))
    after.load_state(state)
    _feed(after)
    assert asked.told[0][1].run_id == "mine"  # the setting wins
    assert after.state() == {"run_ids": {"fake": "mine"}}


def test_the_run_id_of_a_failed_tracker_is_kept(tmp_path):
    first = Tracking([Fake(run_id="abc")], _described(tmp_path))
    _feed(first)
    second = Tracking([Fake(fails=["begin"])], _described(tmp_path), lambda line: None)
    second.load_state(first.state())
    _feed(second)
    assert second.state() == first.state()


def test_illegal_settings_are_refused_by_name():
    for options, message in (
        ({"to": ["wandbb"]}, "track.to=wandbb .*did you mean wandb"),
        ({"to": ["jsonl"]}, r"metrics\.jsonl is always written"),
        ({"to": ["wandb", "wandb"]}, "more than once"),
        ({"to": ["wandb", "mlflow"], "run_id": "a"}, "track.run_id=a"),
        ({"project": ""}, "track.project"),
    ):
        with pytest.raises(ValueError, match=message):
            TrackConfig(**options)


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch):
    assert tuple(TRACKERS) == TRACKER_NAMES
    for name in TRACKER_NAMES:
        monkeypatch.setitem(tracking.TRACKERS, name, lambda: __import__("no_such_package"))
        with pytest.raises(ValueError, match=rf'track\.to={name} needs .*pip install "multipack\[{name}\]"'):
            open_trackers(TrackConfig(to=[name]), World())


def test_only_rank_0_feeds_trackers(monkeypatch):
    monkeypatch.setitem(tracking.TRACKERS, "wandb", Fake)
    monkeypatch.setattr(World, "on_main", lambda world, function: function() if world.is_main else None)
    config = TrackConfig(to=["wandb"])
    assert [len(open_trackers(config, World(rank=rank, size=2))) for rank in (0, 1)] == [1, 0]


def _track(tmp_path, tracker, state=None, first=0, last=2, failed=False, **options):
    """Track a run with a real tracker; returns the state of the callback."""
    config = TrackConfig(to=[tracker], mode="offline", **options)
    told = []
    callback = Tracking(
        open_trackers(config, World()), TrackedRun(config, tmp_path / "run-7", SETTINGS), told.append
    )
    if state is not None:
        callback.load_state(json.loads(json.dumps(state)))
    _feed(callback, first, last)
    found = callback.state()
    callback.close(failed)
    assert told == []
    return found


def test_tensorboard_writes_event_files_and_hides_repeated_steps(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    state = _track(tmp_path, "tensorboard", last=4)
    _track(tmp_path, "tensorboard", state, first=3, last=5)
    found = EventAccumulator(str(tmp_path / "run-7" / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "grad_norm/blocks.0"}
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(s, 4.0 - s) for s in range(6)]
    texts = {
        tag: [event.tensor_proto.string_val[0].decode() for event in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }
    assert any(
        "optimizer.rules: ['norm lr=2']" in text
        for tag, many in texts.items()
        if "config" in tag
        for text in many
    )
    assert any(
        "    words of step 5" in text for tag, many in texts.items() if "sample" in tag for text in many
    )


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
    config = TrackConfig(to=["mlflow"], mode="offline", project="packs")
    about = TrackedRun(config, tmp_path / "run-7", longer)
    callback = Tracking(open_trackers(config, World()), about, pytest.fail)
    callback.load_state(state)
    _feed(callback, 3, 4)
    callback.close(failed=False)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.params["train.steps"], run.data.tags["resumed.train.steps"]) == ("6", "9")
    history = client.get_metric_history(run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(s, 4.0 - s) for s in range(5)]
    samples = tmp_path / "run-7" / "mlflow-artifacts" / run_id / "artifacts" / "samples"
    assert (samples / "step-00000004.txt").read_text() == "words of step 4"


TRACKIO = """
import sys
from pathlib import Path
from multipack.parallel.world import World
from multipack.training.callbacks.trackers import TrackedRun
from multipack.training.callbacks.tracking import Tracking, open_trackers
from multipack.training.settings import TrackConfig

state = None
for first in (0, 2):
    config = TrackConfig(to=["trackio"], mode="offline", project="packs", group="sweep-3")
    about = TrackedRun(config, Path(sys.argv[1]) / "run-7", {"train": {"steps": 6}})
    callback = Tracking(open_trackers(config, World()), about, lambda line: sys.exit(line))
    if state:
        callback.load_state(state)
    for step in range(first, first + 2):
        callback.record({"step": step, "loss": 4.0 - step})
        callback.sample(step, "words")
    state = callback.state()
    callback.close(failed=False)
assert state == {"run_ids": {"trackio": "run-7"}}, state
"""


def test_trackio_keeps_a_run_in_its_database(tmp_path):
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    # In a process of its own: trackio reads where its database is when it is imported.
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with sqlite3.connect(tmp_path / "trackio" / "packs.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
        configs = database.execute("SELECT run_name, config FROM configs").fetchall()
    losses = {
        (name, step): values["loss"] for name, step, text in rows if "loss" in (values := json.loads(text))
    }
    assert losses == {("run-7", step): 4.0 - step for step in range(4)}
    assert {name for name, _ in configs} == {"run-7"}
    assert any("sweep-3" in (text if isinstance(text, str) else text.decode()) for _, text in configs)


def test_an_offline_trackio_run_is_never_sent_to_a_space(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/mine")
    told = []
    config = TrackConfig(to=["trackio"], mode="offline")
    callback = Tracking(
        open_trackers(config, World()), TrackedRun(config, tmp_path / "run-7", SETTINGS), told.append
    )
    _feed(callback)
    assert "track.mode=offline, but TRACKIO_SPACE_ID is set" in told[0]
