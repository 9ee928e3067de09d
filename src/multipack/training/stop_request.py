"""Signals that ask a run to save and stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequest:
    """Records SIGTERM and Ctrl-C for the loop, which saves and stops; a second Ctrl-C interrupts at once.

    Args:
        interrupt: called with the first signal; ends waiting for documents.
        announces: whether the first signal prints on standard error that the run will stop. Not below torchrun,
            which sends SIGTERM after the failure of a rank, too, and prints the line itself.

    Attributes:
        signal: the first signal that this rank received; None = none.
        agreed: whether all ranks know of a signal that one of them received, and end the run after the same step.
    """

    def __init__(self, interrupt: Callable[[], None] = lambda: None, announces: bool = False) -> None:
        self._interrupt, self._announces = interrupt, announces
        self.signal: signal.Signals | None = None
        self.agreed = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agree(self) -> None:
        """End the run after this step without an evaluation; called on all ranks if one received a signal."""
        self.signal, self.agreed = self.signal or signal.SIGTERM, True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if self._announces:  # print is not safe here: the signal may have interrupted one
            again = "; Ctrl-C once more stops at once" if number == signal.SIGINT else ""
            os.write(2, f"\n{self.signal.name}: the run saves and stops after this step{again}\n".encode())
        self._interrupt()
