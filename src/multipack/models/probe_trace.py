"""The first module that differs: the rows of a document at every module, compared between two runs of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multipack.models.probe_batch import PlacedBatch

Rows = dict[str, Tensor]
"""Place of a tensor in a module's arguments or outputs → (n, …) its rows of one document."""


class Watched(NamedTuple):
    """A document in a batch that the model runs on; `number` is the document's in that batch."""

    batch: PlacedBatch
    number: int


class _Call(NamedTuple):
    name: str
    module: nn.Module
    inputs: Rows
    outputs: Rows


def first_module(
    model: Any, call: Callable[[PlacedBatch], Any], one: Watched, two: Watched, tolerance: float
) -> str:
    """The innermost module whose inputs for a document are the same in two runs, and whose outputs differ.

    Args:
        model: the model.
        call: runs it on a batch.
        one: the document in the batch of one run.
        two: the same document in the batch of the other run.
        tolerance: largest difference, relative to the largest value, that counts as none.

    Returns:
        The end of a message: its name and class, and how many tokens differ if not all do; empty if there is none.
    """
    if not isinstance(model, nn.Module):
        return ""
    # Hooks are called when a module returns, so that inner modules come first.
    for before, after in zip(*(_calls(model, call, watched) for watched in (one, two)), strict=False):
        inputs = _differing(before.inputs, after.inputs, tolerance)
        tokens = _differing(before.outputs, after.outputs, tolerance)
        has_same_inputs = before.module is after.module and inputs is not None and not inputs.any()
        if has_same_inputs and tokens is not None and tokens.any():
            reach = "" if tokens.all() else f", in {int(tokens.sum())} of {len(tokens)} tokens"
            return f": {before.name or 'the model'} ({type(before.module).__name__}){reach}"
    return ""


def _differing(before: Rows, after: Rows, tolerance: float) -> Tensor | None:
    """(n,) whether the rows of each token differ, at the places of both runs; None if there is no such place."""
    places = before.keys() & after.keys()
    changed = [_changed(before[place], after[place], tolerance).cpu() for place in places]
    return torch.stack(changed).any(0) if changed else None


def _calls(model: nn.Module, call: Callable[[PlacedBatch], Any], watched: Watched) -> list[_Call]:
    """All calls of modules in a run, in the order in which they return."""
    slots, shape = torch.arange(*watched.batch.spans[watched.number]), watched.batch.ids.shape
    calls: list[_Call] = []

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, outputs = (dict(_rows("", value, slots, shape)) for value in ([args, kwargs], output))
            calls.append(_Call(name, module, inputs, outputs))

        return hook

    handles = [
        module.register_forward_hook(record(name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        call(watched.batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _rows(place: str, value: Any, slots: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Rows of the slots, in all tensors of nested containers that have a dimension of tokens."""
    if isinstance(value, Tensor):
        rows = _token_rows(value, shape)
        if rows is not None:
            yield place, rows[slots.to(rows.device)].detach().clone()
    elif isinstance(value, (dict, list, tuple)):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _rows(f"{place}.{name}", part, slots, shape)


def _token_rows(value: Tensor, shape: torch.Size) -> Tensor | None:
    """(slots, …) the tensor with its tokens first; None if it has no dimension of tokens, or two (a mask)."""
    width, rows = shape[-1], shape.numel() // shape[-1]
    sizes = list(value.shape)
    if sizes.count(width) == 1 and rows > 1 and sizes[0] == rows:
        return value.movedim(sizes.index(width), 1).flatten(0, 1)
    if sizes.count(rows * width) == 1:
        return value.movedim(sizes.index(rows * width), 0)
    return None


def _changed(before: Tensor, after: Tensor, tolerance: float) -> Tensor:
    """(n,) whether each row differs."""
    if before.shape != after.shape:
        return torch.ones(len(before), dtype=torch.bool)
    one, two = (part.reshape(len(part), -1).double().nan_to_num() for part in (before, after))
    scale = one.abs().max().clamp(min=1e-30) if one.numel() else 1.0
    return ((one - two).abs() > tolerance * scale).any(1)
