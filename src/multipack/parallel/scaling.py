"""Loss scaling for fp16: gradients are multiplied by a factor while they are computed, so that small ones stay nonzero.

A step whose gradient overflows is skipped and the scale halved; after 2,000 steps without overflow it doubles
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
    """The current scale; constant 1 unless `enabled`.

    It is the same on every rank, because overflow is decided by the global gradient norm.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL_SCALE if enabled else 1.0
        self.steps = 0  # since the scale last changed

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self.enabled and (held := [local(gradient) for gradient in gradients]):
            torch._foreach_mul_(held, 1.0 / self.scale)

    def update(self, overflowed: bool) -> None:
        """Adjust the scale at the end of a step."""
        if not self.enabled:
            return
        self.steps = 0 if overflowed else self.steps + 1
        if overflowed:
            self.scale /= 2
        elif self.steps == GROWTH_STEPS:
            self.scale, self.steps = self.scale * 2, 0

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint, with the names of torch's `GradScaler`."""
        return {"scale": torch.tensor(self.scale), "_growth_tracker": torch.tensor(float(self.steps))}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load what `state()` returned."""
        self.scale, self.steps = float(state["scale"]), int(state["_growth_tracker"])
