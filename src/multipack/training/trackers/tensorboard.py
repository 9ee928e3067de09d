"""TensorBoard: event files in `<folder>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multipack.training.trackers.protocol import About, indented


class TensorboardTracker:
    """Scalars, samples and settings as TensorBoard shows them: `tensorboard --logdir RUN`."""

    name = "tensorboard"

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class = SummaryWriter
        self._writer: Any = None

    def begin(self, about: About) -> str:
        """Open an event file; what an earlier process wrote of the steps to come is not shown any more."""
        folder = about.folder / "tensorboard"
        if about.folder != about.path:
            folder /= about.name
        self._writer = self._writer_class(str(folder), purge_step=about.step)
        lines = [f"{key}: {value}" for key, value in about.flat_settings().items()]
        self._writer.add_text("config", indented("\n".join(lines)), about.step)
        return ""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def sample(self, step: int, text: str) -> None:
        """A text."""
        self._writer.add_text("sample", indented(text), step)

    def close(self, failed: bool) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.close()
