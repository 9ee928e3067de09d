"""Trackers: services and files that get a run's records beside metrics.jsonl.

To add one, write a class like `Tracker`, its row in `TRACKERS`, and its name in settings.py. Trackers start with the
first record, when the run directory exists. The ids of their runs are part of checkpoints, so that a resumed run
continues them. A tracker that raises is reported once and no longer used.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from multipack.machine import install_words
from multipack.training.callbacks.callback import Callback
from multipack.training.settings import TrackConfig
from multipack.words import flatten


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers show it.

    Attributes:
        config: settings of trackers.
        path: the run directory.
        settings: the run's configuration, nested by groups.
        run_id: id of the tracker's run to continue; empty = a new one.
        step: step of the first record.
        resumed: whether an earlier process of the run already sent records.
    """

    config: TrackConfig
    path: Path
    settings: Mapping[str, Any]
    run_id: str = ""
    step: int = 0
    resumed: bool = False

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.name or self.path.resolve().name

    @property
    def flat_settings(self) -> dict[str, str]:
        """Settings by their full names, `group.key`, as text."""
        return {name: str(value) for name, value in flatten(dict(self.settings)).items()}


class Tracker(Protocol):
    """A run in a tracker; creating one starts the run, or continues it. Every method may raise."""

    run_id: str
    """Id with which the run is continued; empty if it has none."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step."""

    def sample(self, step: int, text: str) -> None:
        """Text that the model generated after a step."""

    def close(self, failed: bool) -> None:
        """The run is over."""


class TensorboardTracker:
    """Event files in `RUN/tensorboard`: `tensorboard --logdir RUN`. Repeated steps of a resumed run are hidden."""

    run_id = ""

    def __init__(self, run: TrackedRun) -> None:
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(run.path / "tensorboard"), purge_step=run.step)
        lines = [f"{key}: {value}" for key, value in run.flat_settings.items()]
        self._writer.add_text("config", _verbatim("\n".join(lines)), run.step)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def sample(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._writer.add_text("sample", _verbatim(text), step)

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases: a run online, or its files in `RUN/wandb` for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb: Any = import_module("wandb")
        self._run = self._wandb.init(
            project=run.config.project,
            entity=run.config.entity or None,
            group=run.config.group or None,
            name=run.name,
            id=run.run_id or None,
            resume="allow" if run.run_id else None,
            mode=run.config.mode,
            dir=run.path,
            config=dict(run.settings),
            allow_val_change=bool(run.run_id),  # a resumed run may have other settings
        )
        # A run that resumes from an older checkpoint repeats steps, which wandb's own step counter cannot.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, **values})

    def sample(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, "sample": self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """MLflow: a run on the configured server, or in `RUN/mlflow.db`; metrics are sent by mlflow's threads.

    Settings are parameters of the run; settings that a resumed run changes are tags.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow: Any = import_module("mlflow")
        if run.config.mode == "offline":
            self._mlflow.set_tracking_uri(f"sqlite:///{(run.path / 'mlflow.db').resolve()}")
            if self._mlflow.get_experiment_by_name(run.config.project) is None:
                artifacts = str((run.path / "mlflow-artifacts").resolve())
                self._mlflow.create_experiment(run.config.project, artifact_location=artifacts)
        self._mlflow.set_experiment(run.config.project)
        tags = {"group": run.config.group} if run.config.group else None
        active = self._mlflow.start_run(run_id=run.run_id or None, run_name=run.name, tags=tags)
        before, settings = active.data.params, run.flat_settings
        new = [(name, value) for name, value in settings.items() if name not in before]
        for first in range(0, len(new), 100):  # mlflow's limit per request
            self._mlflow.log_params(dict(new[first : first + 100]))
        changed = {f"resumed.{n}": value for n, value in settings.items() if before.get(n, value) != value}
        self._mlflow.set_tags(changed)
        self.run_id = str(active.info.run_id)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._mlflow.log_metrics(dict(values), step=step, synchronous=False)

    def sample(self, step: int, text: str) -> None:
        """See `Tracker`; a text file among the run's artifacts."""
        self._mlflow.log_text(text, f"samples/step-{step:08d}.txt")

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        self._mlflow.flush_async_logging()
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class TrackioTracker:
    """Trackio: a run in its local database, or where TRACKIO_SPACE_ID and TRACKIO_SERVER_URL send it."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio: Any = import_module("trackio")
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if run.config.mode == "offline" and os.environ.get(variable):
                raise ValueError(f"track.mode=offline, but {variable} is set and sends records: unset it")
        self.run_id = run.name
        self._run = self._trackio.init(
            project=run.config.project,
            name=run.name,
            group=run.config.group or None,
            config=dict(run.settings),
            resume="allow" if run.resumed else "never",
            embed=False,
        )

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def sample(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._run.log({"sample": self._trackio.Markdown(_verbatim(text))}, step=step)

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        self._run.finish()


def _verbatim(text: str) -> str:
    """Text as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())


TRACKERS: dict[str, tuple[str, Callable[[TrackedRun], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorboardTracker),
    "wandb": ("wandb", WandbTracker),
    "mlflow": ("mlflow", MlflowTracker),
    "trackio": ("trackio", TrackioTracker),
}
"""Name in `track.to` → module to import, and tracker; settings.py has the same names."""


def check_trackers(config: TrackConfig) -> None:
    """Import the packages of the trackers of a run.

    Raises:
        ValueError: a package is missing; the extra that installs it is named.
    """
    for name in config.to:
        try:
            import_module(TRACKERS[name][0])
        except ImportError as error:
            raise ValueError(
                f"track.to={name} needs its package ({error}): {install_words(name)}, or leave it out"
            ) from error


class Tracking(Callback):
    """Forwards records and samples to trackers, on rank 0. A failing tracker never ends the run.

    Args:
        run: the run, as trackers show it.
        report: prints which tracker failed, and why.
    """

    name = "trackers"
    saved = ("run_ids",)

    def __init__(self, run: TrackedRun, report: Callable[[str], None] = print) -> None:
        self.run_ids: dict[str, str] = {}
        self._run, self._report = run, report
        self._begun: dict[str, Tracker] = {}
        self._failed: set[str] = set()

    def record(self, values: Mapping[str, float]) -> None:
        """See `Callback`."""
        step = int(values["step"])
        numbers = {name: float(value) for name, value in values.items() if name != "step"}
        self._forward(step, lambda tracker: tracker.record(step, numbers))

    def sample(self, step: int, text: str) -> None:
        """See `Callback`."""
        self._forward(step, lambda tracker: tracker.sample(step, text))

    def close(self, failed: bool) -> None:
        """Close the trackers that began."""
        for name, tracker in self._begun.items():
            with self._reported(name):
                tracker.close(failed or name in self._failed)
        self._begun.clear()

    def _forward(self, step: int, call: Callable[[Tracker], None]) -> None:
        for name in self._run.config.to:
            if name in self._failed:
                continue
            with self._reported(name):
                if name not in self._begun:
                    self._begun[name] = self._begin(name, step)
                call(self._begun[name])

    def _begin(self, name: str, step: int) -> Tracker:
        saved = self.run_ids.get(name)
        run_id = self._run.config.run_id or saved or ""
        tracker = TRACKERS[name][1](replace(self._run, run_id=run_id, step=step, resumed=saved is not None))
        self.run_ids[name] = tracker.run_id
        return tracker

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Context whose first error is printed; the tracker gets no more records."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if name not in self._failed:
                self._report(
                    f"tracker {name} failed: {reason}; the run continues without it, and metrics.jsonl has all records"
                )
            self._failed.add(name)
