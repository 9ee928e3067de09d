"""Weights & Biases: a run online, or its files in `<folder>/wandb` for `wandb sync`."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from multipack.training.trackers.protocol import About


class WandbTracker:
    """A run of wandb with the project, entity, group, name and id that the user set."""

    name = "wandb"

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb
        self._run: Any = None

    def begin(self, about: About) -> str:
        """Begin a run, or go on in the one with this id."""
        about.folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=about.project,
            entity=about.entity or None,
            group=about.group or None,
            name=about.name,
            id=about.run_id or None,
            resume="allow" if about.run_id else None,
            mode="offline" if about.offline else "online",
            dir=about.folder,
            config=dict(about.settings),
            allow_val_change=bool(about.run_id),  # a resumed run may go on with more steps
        )
        # A run that goes on from an older checkpoint takes steps again, and wandb's own step never goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """A row, drawn over `step`."""
        self._run.log({"step": step, **values})

    def sample(self, step: int, text: str) -> None:
        """A page of text."""
        self._run.log({"step": step, "sample": self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self, failed: bool) -> None:
        """Send what is left; the run counts as finished or as failed."""
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
