"""Forwards records and samples to trackers; metrics.jsonl has all records in any case.

Trackers begin with the first record, when the run directory exists. The ids of their runs are part of checkpoints, so
that a resumed run continues in the same ones. A tracker that raises is reported once and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from multipack.parallel.world import World
from multipack.training.callbacks.callback import Callback
from multipack.training.callbacks.trackers import TRACKERS, TrackedRun, Tracker
from multipack.training.settings import TrackConfig


def open_trackers(config: TrackConfig, world: World) -> list[Tracker]:
    """The trackers of this rank: those of `config` on rank 0, none on the others.

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


class Tracking(Callback):
    """Forwards records and samples to trackers. A failing tracker never ends the run.

    Args:
        trackers: of this rank; see `open_trackers`.
        run: the run, as trackers show it.
        report: prints which tracker failed, and how.
    """

    name = "trackers"

    def __init__(
        self, trackers: Sequence[Tracker], run: TrackedRun, report: Callable[[str], None] = print
    ) -> None:
        self._run = run
        self._report = report
        self._working = list(trackers)
        self._begun: set[str] = set()
        self._run_ids: dict[str, str] = {}

    def record(self, values: Mapping[str, float]) -> None:
        """See `Callback`."""
        step = int(values["step"])
        numbers = {name: float(value) for name, value in values.items() if name != "step"}
        self._forward("record", step, lambda tracker: tracker.record(step, numbers))

    def sample(self, step: int, text: str) -> None:
        """See `Callback`."""
        self._forward("sample", step, lambda tracker: tracker.sample(step, text))

    def close(self, failed: bool) -> None:
        """Close the trackers that began."""
        for tracker in list(self._working):
            if tracker.name in self._begun:
                self._attempt(tracker, "close", lambda tracker: tracker.close(failed))
        self._working.clear()

    def _forward(self, what: str, step: int, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._working):
            begun = tracker.name in self._begun
            if begun or self._attempt(tracker, "begin", lambda tracker: self._begin(tracker, step)):
                self._attempt(tracker, what, call)

    def _begin(self, tracker: Tracker, step: int) -> None:
        self._begun.add(tracker.name)
        saved = self._run_ids.get(tracker.name)
        run_id = self._run.config.run_id or saved or ""
        run = replace(self._run, run_id=run_id, step=step, resumed=saved is not None)
        self._run_ids[tracker.name] = tracker.begin(run)

    def _attempt(self, tracker: Tracker, what: str, call: Callable[[Tracker], None]) -> bool:
        """Returns whether the call succeeded; if not, the tracker is reported, closed and left out."""
        try:
            call(tracker)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self._working.remove(tracker)
            self._report(
                f"tracker {tracker.name} failed at {what}: {reason}; the run continues without it, and metrics.jsonl"
                " has all records"
            )
            if what != "close":
                try:
                    tracker.close(True)
                except Exception as another:
                    self._report(f"tracker {tracker.name} could not be closed either: {another}")
            return False
        return True

    def state(self) -> dict[str, Any]:
        """The ids of the trackers' runs, including trackers that failed."""
        return {"run_ids": dict(self._run_ids)} if self._run_ids else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        self._run_ids = {str(name): str(run_id) for name, run_id in state["run_ids"].items()}
