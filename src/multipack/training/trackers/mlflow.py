"""MLflow: a run on the server that mlflow is set up for, or in `<folder>/mlflow.db`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from multipack.training.trackers.protocol import About

MOST_PENDING = 1000
"""Records that may be on their way to the server; one that is further behind is waited for."""
MOST_PARAMS = 100
"""Parameters that one request may hold."""


class MlflowTracker:
    """A run of mlflow, through a client of its own: nothing of mlflow's global state is touched."""

    name = "mlflow"

    def __init__(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client_class, self._metric, self._param = MlflowClient, Metric, Param
        self._client: Any = None
        self._run_id = ""
        self._pending: deque[Future[None]] = deque()
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._reachable = True

    def begin(self, about: About) -> str:
        """Begin a run in the experiment of the project's name, or go on in the one with this id."""
        if about.offline:
            about.folder.mkdir(parents=True, exist_ok=True)
        where = f"sqlite:///{(about.folder / 'mlflow.db').resolve()}" if about.offline else None
        self._client = self._client_class(tracking_uri=where)
        if about.run_id:
            run = self._client.get_run(about.run_id)
            self._run_id = about.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            self._describe(about, before=run.data.params)
            return self._run_id
        experiment = self._client.get_experiment_by_name(about.project)
        if experiment is None:
            files = str((about.folder / "mlflow-artifacts").resolve()) if about.offline else None
            number = self._client.create_experiment(about.project, artifact_location=files)
        else:
            number = experiment.experiment_id
        tags = {"group": about.group} if about.group else {}
        self._run_id = self._client.create_run(number, run_name=about.name, tags=tags).info.run_id
        self._describe(about, before={})
        return self._run_id

    def _describe(self, about: About, before: Mapping[str, str]) -> None:
        """Settings as parameters; those that a resumed run changes as tags, for parameters cannot change."""
        settings = about.flat_settings()
        new = [self._param(key, value) for key, value in settings.items() if key not in before]
        for first in range(0, len(new), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=new[first : first + MOST_PARAMS])
        for key, value in settings.items():
            if before.get(key, value) != value:
                self._client.set_tag(self._run_id, f"resumed.{key}", value)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics, sent by a thread.

        Raises:
            MlflowException: something earlier could not be sent.
        """
        now = int(time.time() * 1000)
        metrics = [self._metric(key, value, now, step) for key, value in values.items()]
        self._send(self._client.log_batch, self._run_id, metrics)

    def sample(self, step: int, text: str) -> None:
        """A text file among the run's artifacts, sent as `record` does."""
        self._send(self._client.log_text, self._run_id, text, f"samples/step-{step:08d}.txt")

    def _send(self, call: Callable[..., None], *arguments: Any) -> None:
        self._pending.append(self._sender.submit(call, *arguments))
        while self._pending and (self._pending[0].done() or len(self._pending) > MOST_PENDING):
            self._confirm()

    def _confirm(self) -> None:
        try:
            self._pending.popleft().result()
        except Exception:
            self._reachable = False
            raise

    def close(self, failed: bool) -> None:
        """Wait for what is on its way; the run counts as finished or as failed. A lost server is not asked again."""
        try:
            while self._pending and self._reachable:
                self._confirm()
            if self._run_id and self._reachable:
                self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
        finally:
            self._sender.shutdown(wait=False, cancel_futures=True)
