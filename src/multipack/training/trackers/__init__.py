"""Trackers: where else a run's records go. metrics.jsonl has all of them in any case.

    trainer ─ record, sample ─▶ TrackerObserver ─▶ tensorboard, wandb, mlflow, trackio     (rank 0 only)
                                     └─ a tracker that raises is named once, with its reason, and left out

Trackers begin with the first record, when the run directory is there. The ids of their runs are part of checkpoints,
so that a resumed run goes on in the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multipack.parallel.world import World
from multipack.training.observer import Observer
from multipack.training.settings import TrackConfig
from multipack.training.trackers.mlflow import MlflowTracker
from multipack.training.trackers.protocol import About, Tracker
from multipack.training.trackers.tensorboard import TensorboardTracker
from multipack.training.trackers.trackio import TrackioTracker
from multipack.training.trackers.wandb import WandbTracker

__all__ = ["TRACKERS", "About", "Tracker", "TrackerObserver", "open_trackers"]

TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""What `track.to` names. Making one imports its package, and does nothing else."""


def open_trackers(config: TrackConfig, world: World) -> list[Tracker]:
    """The trackers that this rank feeds: those of `config` on rank 0, none on the others.

    Raises:
        ValueError: on every rank, if rank 0 lacks a tracker's package; the extra that installs it is named.
    """
    trackers: list[Tracker] = []

    def make() -> None:
        for name in config.to:
            try:
                trackers.append(TRACKERS[name]())
            except ImportError as error:
                raise ValueError(
                    f'track.to={name} needs its package ({error}): pip install "multipack[{name}]", or leave it away'
                ) from error

    world.on_main(make)
    return trackers


class TrackerObserver(Observer):
    """Hands records and samples to trackers; whatever they do, the run goes on.

    Args:
        trackers: of this rank; see `open_trackers`.
        about: the run, as the trackers should show it.
        tell: says which tracker failed, and how.
    """

    name = "trackers"

    def __init__(
        self, trackers: Sequence[Tracker], about: About, tell: Callable[[str], None] = print
    ) -> None:
        self._about = about
        self._tell = tell
        self._working = list(trackers)
        self._begun: set[str] = set()
        self._run_ids: dict[str, str] = {}

    def record(self, values: Mapping[str, float]) -> None:
        """Hand on a record, under its step."""
        step = int(values["step"])
        numbers = {name: float(value) for name, value in values.items() if name != "step"}
        self._each("record", step, lambda tracker: tracker.record(step, numbers))

    def sample(self, step: int, text: str) -> None:
        """Hand on what the model wrote."""
        self._each("sample", step, lambda tracker: tracker.sample(step, text))

    def close(self, failed: bool) -> None:
        """Close those that began."""
        for tracker in list(self._working):
            if tracker.name in self._begun:
                self._attempt(tracker, "close", lambda tracker: tracker.close(failed))
        self._working.clear()

    def _each(self, what: str, step: int, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._working):
            if tracker.name not in self._begun and not self._attempt(tracker, "begin", self._beginning(step)):
                continue
            self._attempt(tracker, what, call)

    def _beginning(self, step: int) -> Callable[[Tracker], None]:
        def begin(tracker: Tracker) -> None:
            self._begun.add(tracker.name)
            saved = self._run_ids.get(tracker.name)
            run_id = self._about.run_id or saved or ""
            about = replace(self._about, run_id=run_id, step=step, resumed=saved is not None)
            self._run_ids[tracker.name] = tracker.begin(about)

        return begin

    def _attempt(self, tracker: Tracker, what: str, call: Callable[[Tracker], None]) -> bool:
        """Whether the call went well; if not, the tracker is named, closed as far as it can be, and left out."""
        try:
            call(tracker)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self._working.remove(tracker)
            self._tell(
                f"tracker {tracker.name} failed at {what}: {reason}; the run goes on without it, and metrics.jsonl has"
                " everything"
            )
            if what != "close":
                try:
                    tracker.close(True)
                except Exception as another:
                    self._tell(f"tracker {tracker.name} could not be closed either: {another}")
            return False
        return True

    def state(self) -> dict[str, Any]:
        """The ids of the trackers' runs, also of those that failed meanwhile."""
        return {"run_ids": dict(self._run_ids)} if self._run_ids else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on in the saved runs."""
        self._run_ids = {str(name): str(run_id) for name, run_id in state["run_ids"].items()}


def about_run(config: TrackConfig, path: Path, settings: Mapping[str, Any]) -> About:
    """A run as its trackers show it.

    Args:
        config: its names.
        path: the run directory.
        settings: the configuration of the run, nested by groups.
    """
    return About(
        name=config.name or path.resolve().name,
        project=config.project,
        entity=config.entity,
        group=config.group,
        run_id=config.run_id,
        offline=config.mode == "offline",
        folder=Path(config.folder or path),
        path=path,
        settings=settings,
    )
