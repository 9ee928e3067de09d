"""Additions to autocast: dtypes of operations that it does not cover, and casts of weights once a step.

Autocast keeps its copy of a weight until its outermost context ends. A compiled module, whose graph does not see these
copies, would cast in every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Replaced = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]
"""The parameters of a module, a name in it, and the weight that a copy replaces under this name."""

_replaced: list[list[Replaced]] = []  # of each context of `keeping_copies`, the innermost last


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would run a matrix product of `x`; its own where autocast is off.

    Like autocast itself, this leaves float64 unchanged.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def in_autocast_dtype(x: Tensor) -> Tensor:
    """`x` in `autocast_dtype(x)`."""
    return x.to(autocast_dtype(x))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: the dtype of sums over half-precision numbers."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def keeping_copies(device: torch.device) -> Iterator[None]:
    """Context in which each weight is cast once; weights must not change in it.

    It does not enable autocast: all of autocast's contexts inside of it share their copies.
    """
    _replaced.append([])
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _restore(_replaced.pop())


def drop_copies() -> None:
    """Cast weights anew when they are next used."""
    torch.clear_autocast_cache()
    for replaced in _replaced:
        _restore(replaced)


def use_copies(module: nn.Module) -> None:
    """Replace a module's matrices by copies in autocast's dtype until `keeping_copies` ends; no effect outside of it.

    The gradients of copies are added to the gradients of the weights.
    """
    for part in module.modules() if _replaced else ():
        for name, weight in part._parameters.items():
            if not isinstance(weight, nn.Parameter) or weight.dim() < 2:
                continue
            if weight.is_floating_point() and autocast_dtype(weight) != weight.dtype:
                _replaced[-1].append((part._parameters, name, weight))
                with torch.enable_grad():  # also where the first use has no gradients
                    part._parameters[name] = in_autocast_dtype(weight)  # type: ignore[assignment]


def _restore(replaced: list[Replaced]) -> None:
    while replaced:
        parameters, name, weight = replaced.pop()
        parameters[name] = weight
