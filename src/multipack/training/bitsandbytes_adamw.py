"""AdamW of bitsandbytes with 8-bit moments (Dettmers et al. 2022, arXiv:2110.02861), with state that checkpoints hold.

    state1, state2    codes of the moments: 1 byte an element, with a scale for every 256 elements (absmax1, absmax2)
                      and the same table of values (qmap1, qmap2); float32 for tensors of fewer than 4,096 elements
    step              an integer in bitsandbytes; here a tensor, as in torch's optimizers

Codes are rounded to the nearest, unlike those of `optimizer.name=adamw_8bit`; bitsandbytes has a kernel for updates.
Scales belong to elements in the order of the whole tensor, so that ranks cannot divide tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multipack.machine import import_extra
from multipack.training.settings import OptimizerConfig


def bitsandbytes_adamw(groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW8bit of bitsandbytes over groups of parameters.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    base: Any = import_extra("bitsandbytes", f"optimizer.name={config.name}", "bitsandbytes").optim.AdamW8bit

    class AdamW(base):  # type: ignore[misc]
        """AdamW8bit whose state has tensors only."""

        def init_state(self, group: dict[str, Any], p: torch.Tensor, *place: int) -> None:
            """Make the state of a parameter."""
            super().init_state(group, p, *place)
            self.state[p]["step"] = torch.tensor(0.0)

        def update_step(self, group: dict[str, Any], p: torch.Tensor, *place: int) -> None:
            """Update a parameter and its state."""
            state, counter = self.state[p], self.state[p]["step"]
            state["step"] = int(counter)
            super().update_step(group, p, *place)
            state["step"] = counter.fill_(state["step"])

    made: torch.optim.Optimizer = AdamW(
        list(groups) or [{"params": []}], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )
    return made
