"""What a tracker is, and what it is told of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class About:
    """A run, as trackers show it.

    Attributes:
        name: of the run.
        project: that it belongs to.
        entity: whose project; empty = the tracker's default.
        group: of runs; empty = none.
        run_id: of the tracker's run to go on in; empty = a new one.
        offline: write files only.
        folder: where files go.
        path: the run directory.
        settings: the run's configuration, nested by groups.
        step: of the first record to come.
        resumed: the tracker was told of the run's earlier steps by another process.
    """

    name: str
    project: str
    entity: str
    group: str
    run_id: str
    offline: bool
    folder: Path
    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    resumed: bool = False

    def flat_settings(self) -> dict[str, str]:
        """Settings by their full names, `group.key`, as text."""
        return dict(_flatten(self.settings, ""))


def _flatten(settings: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for key, value in settings.items():
        flat += (
            _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, str(value))]
        )
    return flat


class Tracker(Protocol):
    """A place that records go to. Any method may raise: the tracker is left out then, and the run goes on."""

    name: str

    def begin(self, about: About) -> str:
        """Begin a run, or go on in one; returns its id ("" where there are no ids)."""
        ...

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step."""
        ...

    def sample(self, step: int, text: str) -> None:
        """What the model wrote after a step."""
        ...

    def close(self, failed: bool) -> None:
        """The run is over; also called where `begin` did not get far."""
        ...


def indented(text: str) -> str:
    """Text as a Markdown block that is shown as it is, whatever marks it holds."""
    return "\n".join(f"    {line}" for line in text.splitlines())
