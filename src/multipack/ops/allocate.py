"""Memory for models that were built on the meta device."""

from __future__ import annotations

import torch
from torch import nn


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate a model's parameters on a device, without values, in place; buffers that have values keep them.

    Buffers are constants that a model's code computes when it is built, such as rotary frequencies. On the meta device
    they stay where they are.

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
    model.to_empty(device=device)
    for (module, name), value in zip(constants, values, strict=True):
        if value is not None:
            module._buffers[name] = value if device.type == "meta" else value.to(device)
