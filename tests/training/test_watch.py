import pytest

from multipack.parallel.world import World
from multipack.run import RunDirectory
from multipack.training import trackers
from multipack.training.settings import LogConfig, TrackConfig, TrainConfig
from multipack.training.watch import build_observers


class Idle:
    """A tracker that is never told anything."""

    name = "wandb"


def _names(tmp_path, train=None, log=None, track=None, world=None, micro_batches=2):
    told = []
    found = build_observers(
        TrainConfig(**(train or {})),
        LogConfig(**(log or {})),
        TrackConfig(**(track or {})),
        RunDirectory.at(tmp_path / "run"),
        world or World(),
        settings={"train": {"seed": 0}},
        micro_batches=micro_batches,
        tell=told.append,
    )
    found.close(failed=False)
    assert not (tmp_path / "run").exists()  # nothing is written before a run does something
    return [observer.name for observer in found]


def test_a_plain_run_is_not_watched(tmp_path):
    assert _names(tmp_path) == []
    assert _names(tmp_path, track={"to": ["wandb"], "mode": "disabled"}) == []


def test_every_setting_brings_its_observer(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Idle)
    train = {"ema_decay": 0.9, "spike": "skip", "patience": 2, "profile": True}
    log = {"layer_norms": True, "gradient_noise": True}
    names = ["trace", "layer_norms", "gradient_noise", "spikes", "average", "stopping", "trackers"]
    assert _names(tmp_path, train, log, {"to": ["wandb"]}) == names
    for setting, value in train.items():
        assert len(_names(tmp_path, {setting: value})) == 1
    for setting, value in log.items():
        assert _names(tmp_path, log={setting: value}) == [setting]


def test_all_ranks_have_the_same_observers_and_rank_0_alone_feeds_trackers(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda: opened.append("wandb") or Idle())
    monkeypatch.setattr(World, "on_main", lambda world, function: function() if world.is_main else None)
    asked = {"train": {"profile": True}, "track": {"to": ["wandb"]}}
    ranks = [_names(tmp_path, **asked, world=World(rank=rank, size=2)) for rank in (0, 1)]
    assert ranks == [["trace", "trackers"]] * 2
    assert opened == ["wandb"]


def test_noise_with_one_micro_batch_is_refused_at_once(tmp_path):
    with pytest.raises(
        ValueError, match=r"log\.gradient_noise=true .*each rank has 1 a step: set plan\.packs_per_step"
    ):
        _names(tmp_path, log={"gradient_noise": True}, micro_batches=1)
