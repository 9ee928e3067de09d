"""AdamW of torchao with 4-bit moments (Li et al. 2023, arXiv:2309.01507) and a scale for every 128 elements.

Moments of torchao are subclasses of Tensor, which checkpoints do not hold; their parts are slots of their own here:
`exp_avg_codes`, `exp_avg_scale` and `exp_avg_qmap` (the table of values), and the same of `exp_avg_sq`. Tensors of
fewer than 4,096 elements, or of no whole number of blocks, have moments of the parameter's dtype. Codes are rounded to
the nearest. Blocks are counted through the whole tensor, so that ranks cannot divide it.

torchao compiles the update of each shape of parameters. On a CPU that takes longer than many short runs and needs a C++
compiler, so the same function runs uncompiled there; roundings differ in the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from multipack.machine import import_extra
from multipack.training.optimizer import Groups
from multipack.training.settings import OptimizerConfig


def adamw_4bit_ao(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW4bit of torchao over groups of parameters.

    Raises:
        ImportError: torchao is not installed.
    """
    import_extra("torchao", f"optimizer.name={config.name}", "torchao")
    base: Any = import_extra("torchao.optim", f"optimizer.name={config.name}", "torchao").AdamW4bit

    class AdamW(base):  # type: ignore[misc]
        """AdamW4bit with a `state` of plain tensors, which share the memory of torchao's moments."""

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

    made: torch.optim.Optimizer = AdamW(list(groups) or [{"params": []}], **config.adam_options)
    return made


def _parts(state: dict[str, Any]) -> dict[str, Tensor]:
    """The plain tensors of a parameter's state."""
    found = {}
    for slot, value in state.items():
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        found.update({f"{slot}_{name}": getattr(value, name) for name in names} or {slot: value})
    return found
