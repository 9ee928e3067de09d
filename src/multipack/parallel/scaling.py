"""The loss scale of fp16: gradients are multiplied by it until they are used, so that small ones stay above zero.

A step whose gradient overflows is left out and the scale halved; after 2,000 steps without one it doubles
(Micikevicius et al. 2018, arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from multipack.parallel.state import local

INITIAL_SCALE = 65536.0
GROWTH_STEPS = 2000


class LossScaler:
    """The scale, and when it changes; without `enabled` it is 1 and stays so.

    The same on every rank, as whether a step overflows is decided by the global norm of its gradient.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL_SCALE if enabled else 1.0
        self.steps = 0  # since the scale last changed

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        held = [local(gradient) for gradient in gradients]
        if self.enabled and held:
            torch._foreach_mul_(held, 1.0 / self.scale)

    def update(self, overflowed: bool) -> None:
        """A step is over."""
        if not self.enabled:
            return
        self.steps = 0 if overflowed else self.steps + 1
        if overflowed:
            self.scale /= 2
        elif self.steps == GROWTH_STEPS:
            self.scale, self.steps = self.scale * 2, 0

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; nothing if not `enabled`."""
        if not self.enabled:
            return {}
        return {"scale": torch.tensor(self.scale), "_growth_tracker": torch.tensor(float(self.steps))}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state()` gave."""
        self.scale, self.steps = float(state["scale"]), int(state["_growth_tracker"])
