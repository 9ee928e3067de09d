"""Trackio: a run in its local database, or wherever TRACKIO_SPACE_ID and TRACKIO_SERVER_URL send it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from multipack.training.trackers.protocol import About, indented


class TrackioTracker:
    """A run of trackio; its id is its name, by which trackio finds a run again."""

    name = "trackio"

    def __init__(self) -> None:
        import trackio

        self._trackio = trackio
        self._run: Any = None

    def begin(self, about: About) -> str:
        """Begin a run, or go on in the one of this name.

        Raises:
            ValueError: an offline run that trackio's variables would send elsewhere.
        """
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if about.offline and os.environ.get(variable):
                raise ValueError(
                    f"track.mode=offline, but {variable} is set and sends records elsewhere: unset it"
                )
        self._run = self._trackio.init(
            project=about.project,
            name=about.name,
            group=about.group or None,
            config=dict(about.settings),
            resume="allow" if about.resumed else "never",
            embed=False,
        )
        return about.name

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics, written by trackio's own thread."""
        self._run.log(dict(values), step=step)

    def sample(self, step: int, text: str) -> None:
        """A block of Markdown."""
        self._run.log({"sample": self._trackio.Markdown(indented(text))}, step=step)

    def close(self, failed: bool) -> None:
        """Write what is left."""
        if self._run is not None:
            self._run.finish()
