"""Memory for models that were built on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


def allocate(
    model: nn.Module, device: torch.device, empty_like: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Allocate a model's parameters on a device, without values, in place; buffers that have values keep them.

    Buffers are constants that a model's code computes when it is built, such as rotary frequencies. On the meta device
    they stay where they are. `empty_like` allocates a parameter elsewhere than in the device's memory.

    Raises:
        ValueError: a buffer has no values.
    """
    constants = [(module, name) for module in model.modules() for name in module._buffers]
    values = [module._buffers[name] for module, name in constants]
    for (module, name), value in zip(constants, values, strict=True):
        if value is not None and value.is_meta:
            raise ValueError(
                f"{name} of {type(module).__name__} is a buffer without values: compute it in the forward pass"
            )
    # As `to_empty`, which takes a device only.
    model._apply(empty_like or partial(torch.empty_like, device=device))  # type: ignore[no-untyped-call]
    for (module, name), value in zip(constants, values, strict=True):
        if value is not None:
            module._buffers[name] = value if device.type == "meta" else value.to(device)
