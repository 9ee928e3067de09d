"""Trackers: where records go beside metrics.jsonl. A new one is a subclass of `Tracker` and a row in `TRACKERS`.

Creating a tracker imports its package and does nothing else. Any method may raise: the tracker is left out then.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multipack.training.settings import TrackConfig
from multipack.words import flatten


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers show it.

    Attributes:
        config: names of run, project and group.
        path: the run directory.
        settings: the run's configuration, nested by groups.
        run_id: of the tracker's run to continue; empty = a new one.
        step: of the first record to come.
        resumed: an earlier process already sent records.
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
    def is_offline(self) -> bool:
        """Whether trackers write files only."""
        return self.config.mode == "offline"

    @property
    def folder(self) -> Path:
        """Folder of trackers' files."""
        return Path(self.config.folder or self.path)

    @property
    def flat_settings(self) -> dict[str, str]:
        """Settings by their full names, `group.key`, as text."""
        return {name: str(value) for name, value in flatten(dict(self.settings)).items()}


class Tracker:
    """Base class of trackers."""

    name = ""
    """As in `track.to`."""

    def begin(self, run: TrackedRun) -> str:
        """Start a run, or continue one; returns its id ("" where there are no ids)."""
        raise NotImplementedError

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step."""
        raise NotImplementedError

    def sample(self, step: int, text: str) -> None:
        """Text that the model generated after a step."""
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        """The run is over; also called where `begin` failed."""
        raise NotImplementedError


class TensorboardTracker(Tracker):
    """Event files in `<folder>/tensorboard`: `tensorboard --logdir RUN`."""

    name = "tensorboard"

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class: Any = SummaryWriter
        self._writer: Any = None

    def begin(self, run: TrackedRun) -> str:
        """Open an event file; later steps of an earlier process are hidden."""
        folder = run.folder / "tensorboard"
        folder = folder if run.folder == run.path else folder / run.name
        self._writer = self._writer_class(str(folder), purge_step=run.step)
        lines = [f"{key}: {value}" for key, value in run.flat_settings.items()]
        self._writer.add_text("config", _verbatim("\n".join(lines)), run.step)
        return ""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def sample(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._writer.add_text("sample", _verbatim(text), step)

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        if self._writer is not None:
            self._writer.close()


class WandbTracker(Tracker):
    """Weights & Biases: a run online, or its files in `<folder>/wandb` for `wandb sync`."""

    name = "wandb"

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, run: TrackedRun) -> str:
        """See `Tracker`."""
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=run.config.project,
            entity=run.config.entity or None,
            group=run.config.group or None,
            name=run.name,
            id=run.run_id or None,
            resume="allow" if run.run_id else None,
            mode="offline" if run.is_offline else "online",
            dir=run.folder,
            config=dict(run.settings),
            allow_val_change=bool(run.run_id),  # a resumed run may have other settings
        )
        # A run that resumes from an older checkpoint repeats steps, which wandb's own step counter cannot.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, **values})

    def sample(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, "sample": self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        if self._run is not None:
            self._run.finish(exit_code=int(failed))


class MlflowTracker(Tracker):
    """MLflow: a run on the configured server, or in `<folder>/mlflow.db`; metrics are sent by mlflow's threads."""

    name = "mlflow"

    def __init__(self) -> None:
        import mlflow

        self._mlflow: Any = mlflow

    def begin(self, run: TrackedRun) -> str:
        """See `Tracker`; settings are parameters, and those that a resumed run changes are tags."""
        run.folder.mkdir(parents=True, exist_ok=True)
        if run.is_offline:
            self._mlflow.set_tracking_uri(f"sqlite:///{(run.folder / 'mlflow.db').resolve()}")
            if self._mlflow.get_experiment_by_name(run.config.project) is None:
                artifacts = str((run.folder / "mlflow-artifacts").resolve())
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
        return str(active.info.run_id)

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


class TrackioTracker(Tracker):
    """Trackio: a run in its local database, or where TRACKIO_SPACE_ID and TRACKIO_SERVER_URL send it."""

    name = "trackio"

    def __init__(self) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run: Any = None

    def begin(self, run: TrackedRun) -> str:
        """See `Tracker`; the id is the run's name."""
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if run.is_offline and os.environ.get(variable):
                raise ValueError(f"track.mode=offline, but {variable} is set and sends records: unset it")
        self._run = self._trackio.init(
            project=run.config.project,
            name=run.name,
            group=run.config.group or None,
            config=dict(run.settings),
            resume="allow" if run.resumed else "never",
            embed=False,
        )
        return run.name

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def sample(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._run.log({"sample": self._trackio.Markdown(_verbatim(text))}, step=step)

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        if self._run is not None:
            self._run.finish()


def _verbatim(text: str) -> str:
    """Text as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())


TRACKERS: dict[str, Callable[[], Tracker]] = {
    tracker.name: tracker for tracker in (TensorboardTracker, WandbTracker, MlflowTracker, TrackioTracker)
}
"""Name in `track.to` → tracker; settings.py has the same names."""
