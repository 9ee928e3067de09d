"""AdamW of torchao with compact moments, whose state is kept as plain tensors, which checkpoints hold.

    adamw_8bit_ao   8 bits (Dettmers et al. 2022, arXiv:2110.02861), with a scale for every 256 elements
    adamw_4bit_ao   4 bits (Li et al. 2023, arXiv:2309.01507), with a scale for every 128 elements

Moments of torchao are subclasses of Tensor; their parts are slots of their own here, such as `exp_avg_codes`,
`exp_avg_scale` and `exp_avg_qmap` (the table of values). Tensors of fewer than 4,096 elements, or of no whole number of
blocks, have moments of the parameter's dtype. Codes are rounded to the nearest. Blocks are counted through the whole
tensor, so that ranks cannot divide it.

torchao compiles the update of each shape of parameters. On a CPU that takes longer than many short runs and needs a C++
compiler, so the same function runs uncompiled there; roundings differ in the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from multipack.machine import import_extra
from multipack.training.settings import OptimizerConfig


def torchao_adamw(
    kind: str, groups: Sequence[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """An optimizer of torchao over groups of parameters.

    Args:
        kind: name of the class in `torchao.optim`.
        groups: of parameters, with `lr` and `weight_decay`.
        config: other settings.

    Raises:
        ImportError: torchao is not installed.
    """
    import_extra("torchao", f"optimizer.name={config.name}", "torchao")
    base: Any = getattr(import_extra("torchao.optim", f"optimizer.name={config.name}", "torchao"), kind)

    class AdamW(base):  # type: ignore[misc]
        """The optimizer of torchao; tensors of `state` are parts of its own, and share their memory."""

        state: Any

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._moments: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            """Update all parameters that have gradients."""
            parts, self.state = self.state, self._moments
            rates = [group["lr"] for group in self.param_groups]
            on_cpu = all(each.is_cpu for group in self.param_groups for each in group["params"])
            try:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = torch.as_tensor(rate, dtype=torch.float32)  # a number would be compiled in
                with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                    super().step()
            finally:
                self.state = parts
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate
            for parameter, moments in self._moments.items():
                if parameter not in parts:
                    parts[parameter] = _parts(moments)

    made: torch.optim.Optimizer = AdamW(
        list(groups) or [{"params": []}], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )
    return made


def _parts(state: dict[str, Any]) -> dict[str, Tensor]:
    """The plain tensors of a parameter's state."""
    found = {}
    for slot, value in state.items():
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        found.update({f"{slot}_{name}": getattr(value, name) for name in names} or {slot: value})
    return found
