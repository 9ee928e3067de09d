"""The module that mixes documents: found by comparing every module's rows before and after a change elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multipack.integrations.probe_report import ProbeFinding

KINDS = (
    (
        "recurrent",
        r"mamba|ssm|rwkv|lstm|gru|rnn|recurr|rglru|delta|lightning|linear_?att|retention|kda|gla\b",
    ),
    ("convolution", r"conv"),
    ("attention", r"att\w*$"),
    ("routing", r"moe|expert|router|gate|mlp|feed_?forward|ffn"),
    ("statistics", r"norm"),
)
"""Cause → pattern in the name of the mixing module's class, or of a class inside it, in order of preference."""

TEXTS = {
    "recurrent": "state of a recurrent layer is carried from one document into the next",
    "convolution": "a convolution reaches from the first tokens of a document into the document before it",
    "routing": "what an expert or a feed-forward layer computes for a token depends on other documents (capacity)",
    "statistics": "a normalization uses statistics of several documents",
    "attention": "the attention mask ignores the bounds of documents",
    "mixing": "tokens of different documents are mixed",
}
REMEDIES = {
    "recurrent": "train one document per row, or choose a model whose layers reset state at cu_seq_lens or seq_idx",
    "convolution": "train one document per row, or choose a model whose convolutions read seq_idx",
    "routing": "route without a capacity (dropless)",
    "statistics": "normalize each token alone",
    "attention": "use an attention that reads cu_seq_lens ('multipack', 'flash_attention_2'), or pad one document"
    " per row",
    "mixing": "reset what this module carries at cu_seq_lens, or pad one document per row",
}


@dataclass
class _Call:
    """Rows of a module's inputs and outputs, in the documents that are watched."""

    name: str
    module: nn.Module
    before: list[Tensor]
    after: list[Tensor]


def mixing_module(
    model: nn.Module,
    base: Callable[[], Any],
    changed: Callable[[], Any],
    slots: Tensor,
    shape: torch.Size,
    tolerance: float,
) -> ProbeFinding:
    """Name the innermost module whose inputs are the same in some slots, and whose outputs differ.

    Args:
        model: the model that runs.
        base: runs it on the batch.
        changed: runs it on the batch with another document changed.
        slots: (n,) flattened slots of a document that was not changed.
        shape: of `input_ids`.
        tolerance: largest difference, relative to the largest value, that counts as none.
    """
    with _recorded(model, slots, shape) as calls:
        base()
        first = list(calls)
        calls.clear()
        changed()
    for before, after in zip(first, calls, strict=False):
        if before.module is not after.module or not before.before:
            continue
        if _same(before.before, after.before, tolerance) and not _same(before.after, after.after, tolerance):
            return _finding(before, after, tolerance)
    return ProbeFinding("mixing", TEXTS["mixing"], REMEDIES["mixing"])


@contextmanager
def _recorded(model: nn.Module, slots: Tensor, shape: torch.Size) -> Iterator[list[_Call]]:
    calls: list[_Call] = []

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            rows = [list(_rows(part, slots, shape)) for part in ((args, kwargs), output)]
            calls.append(_Call(name, module, *rows))

        return hook

    handles = [
        module.register_forward_hook(record(name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _rows(value: Any, slots: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """(n, …) rows of the slots, in all tensors of nested containers that have a dimension of tokens."""
    if isinstance(value, Tensor):
        rows = _token_rows(value, shape)
        if rows is not None:
            yield rows[slots.to(rows.device)].detach().clone()
    elif isinstance(value, dict):
        for part in value.values():
            yield from _rows(part, slots, shape)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _rows(part, slots, shape)


def _token_rows(value: Tensor, shape: torch.Size) -> Tensor | None:
    """(slots, …) the tensor with its tokens first; None if it has no dimension of tokens, or two (a mask)."""
    width, rows = shape[-1], shape.numel() // shape[-1]
    sizes = list(value.shape)
    if sizes.count(width) == 1 and rows > 1 and sizes[0] == rows:
        return value.movedim(sizes.index(width), 1).flatten(0, 1)
    if sizes.count(rows * width) == 1:
        return value.movedim(sizes.index(rows * width), 0)
    return None


def _changes(before: Tensor, after: Tensor, tolerance: float) -> Tensor:
    """(n,) whether each row differs."""
    if before.shape != after.shape:
        return torch.ones(len(before), dtype=torch.bool)
    one, two = (part.detach().reshape(len(part), -1).double().nan_to_num() for part in (before, after))
    scale = one.abs().max().clamp(min=1e-30) if one.numel() else 1.0
    return ((one - two).abs() > tolerance * scale).any(1)


def _same(before: list[Tensor], after: list[Tensor], tolerance: float) -> bool:
    return len(before) == len(after) and not any(
        bool(_changes(one, two, tolerance).any()) for one, two in zip(before, after, strict=True)
    )


def _finding(before: _Call, after: _Call, tolerance: float) -> ProbeFinding:
    module = before.module
    affected = torch.stack(
        [_changes(one, two, tolerance).cpu() for one, two in zip(before.after, after.after, strict=True)]
    ).any(0)
    cause = _kind(module, affected)
    where = f"{before.name or 'the model'} ({type(module).__name__})"
    reach = "" if affected.all() else f", in {int(affected.sum())} of {len(affected)} tokens"
    return ProbeFinding(cause, f"{TEXTS[cause]}: {where}{reach}", REMEDIES[cause])


def _kind(module: nn.Module, affected: Tensor) -> str:
    """The cause by the names of classes: first the module's own, then those inside it."""
    inner = "\n".join({type(part).__name__ for part in module.children()})
    for names in (type(module).__name__, inner):
        for cause, pattern in KINDS:
            if re.search(pattern, names, re.IGNORECASE | re.MULTILINE):
                # A mixer that has a convolution also has a state, if more than the first tokens are affected.
                has_state = cause == "convolution" and names is inner and bool(affected[-1])
                return "recurrent" if has_state else cause
    is_first = not affected.all() and bool((affected[:-1] >= affected[1:]).all())
    return "convolution" if is_first else "mixing"
