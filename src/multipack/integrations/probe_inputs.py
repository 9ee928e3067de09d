"""Batches of the isolation probe: where its documents are, which fields are wrong, and repairs to try.

Fields are read by their names in transformers (`position_ids`, `cu_seq_lens_q`, `max_length_q`, `seq_idx`, `labels`,
`attention_mask`, `use_cache`) or in `PackedBatch` (`cu_seqlens`, `max_seqlen`, `targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from multipack.data.batch import IGNORE, PackedBatch
from multipack.integrations.probe_documents import Documents
from multipack.integrations.probe_report import ProbeFinding

BOUNDS, LONGEST = (
    ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"),
    ("max_length_q", "max_length_k", "max_seqlen"),
)


@dataclass(frozen=True)
class PlacedBatch:
    """A batch, and where each document is in its flattened `input_ids`.

    Attributes:
        given: the batch as the model takes it: a mapping or a dataclass.
        spans: first slot and end of each document.
    """

    given: Any
    spans: tuple[tuple[int, int], ...]

    @property
    def values(self) -> dict[str, Any]:
        """Fields of the batch."""
        return _fields(self.given)

    @property
    def ids(self) -> Tensor:
        """`input_ids`: (T,) or (rows, T)."""
        ids: Tensor = self.values["input_ids"]
        return ids

    @property
    def width(self) -> int:
        """Slots of a row."""
        return self.ids.shape[-1]

    def with_values(self, **values: Any) -> PlacedBatch:
        """The same batch with other fields; None removes a field of a mapping."""
        if isinstance(self.given, Mapping):
            merged = {**self.given, **values}
            return replace(self, given={name: value for name, value in merged.items() if value is not None})
        return replace(self, given=replace(self.given, **values))

    def with_tokens(self, number: int, tokens: Tensor) -> PlacedBatch:
        """The same batch with other tokens in the last slots of document `number`."""
        ids, end = self.ids.clone(), self.spans[number][1]
        ids.view(-1)[end - len(tokens) : end] = tokens.to(ids)
        return self.with_values(input_ids=ids)


def place(given: Any, documents: Documents) -> PlacedBatch:
    """Find the documents in a batch.

    Raises:
        ValueError: the batch has no `input_ids`, or a document is not in them as it was given.
    """
    values = _fields(given)
    ids = values.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(
            "the probe's batch has no tensor input_ids: make_batch must return a mapping or a PackedBatch"
        )
    flat, width, spans = ids.reshape(-1).tolist(), ids.shape[-1], []
    for number, document in enumerate(documents):
        length = len(document)
        starts = (
            start
            for start in range(len(flat) - length + 1)
            if flat[start : start + length] == list(document)
            and start // width == (start + length - 1) // width
        )
        start = next(starts, None)
        if start is None:
            raise ValueError(
                f"make_batch: document {number + 1} of {len(documents)} ({length} tokens) is not whole in one row of"
                " input_ids; it must be packed without truncation or change"
            )
        spans.append((start, start + length))
    return PlacedBatch(given, tuple(spans))


def _fields(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if is_dataclass(given) and not isinstance(given, type):
        return dict(vars(given))
    raise ValueError(
        f"make_batch returned {type(given).__name__}: return a mapping of keyword arguments or a PackedBatch"
    )


# --- fields that are wrong whatever the model does with them ------------------------------------------


def wrong_fields(batch: PlacedBatch) -> Iterator[ProbeFinding]:
    """Fields that contradict the documents."""
    yield from _wrong_bounds(batch)
    yield from _wrong_rows(batch)
    values, flat = batch.values, batch.ids.reshape(-1)
    if isinstance(values.get("labels"), Tensor):
        yield from _wrong_labels(batch, flat.tolist(), values["labels"].reshape(-1).tolist())
    if isinstance(values.get("targets"), Tensor):
        yield from _wrong_targets(batch, flat.tolist(), values["targets"].reshape(-1).tolist())


def _wrong_bounds(batch: PlacedBatch) -> Iterator[ProbeFinding]:
    values, longest = batch.values, max(end - start for start, end in batch.spans)
    given = {name: values[name] for name in BOUNDS if isinstance(values.get(name), Tensor)}
    for name, bounds in given.items():
        if why := _bounds_problem(bounds, batch):
            yield ProbeFinding(
                "bounds",
                f"{name}={bounds.tolist()} {why}",
                f"bounds are int32 and rise from 0 to the number of slots: {_true_bounds(batch).tolist()}",
            )
            break
    short = [name for name in LONGEST if values.get(name) is not None and int(values[name]) < longest]
    if short:
        yield ProbeFinding(
            "longest",
            f"{short[0]}={int(values[short[0]])}, but a document has {longest} tokens: kernels leave out the rest",
            f"set {' and '.join(short)} to at least {longest}",
        )


def _bounds_problem(bounds: Tensor, batch: PlacedBatch) -> str:
    found, slots = bounds.reshape(-1).tolist(), batch.ids.numel()
    if bounds.dtype != torch.int32:
        return f"is {str(bounds.dtype).removeprefix('torch.')}, and attention kernels read int32"
    if found[:1] != [0] or found[-1] != slots or any(a > b for a, b in pairwise(found)):
        return f"does not rise from 0 to the {slots} slots"
    for number, (start, end) in enumerate(batch.spans, 1):
        if not {start, end} <= set(found) or any(start < bound < end for bound in found):
            return f"does not bound document {number}, which has slots {start} to {end}"
    return ""


def _true_bounds(batch: PlacedBatch) -> Tensor:
    bounds = {0, batch.ids.numel(), *(bound for span in batch.spans for bound in span)}
    bounds |= set(range(0, batch.ids.numel(), batch.width))
    return torch.tensor(sorted(bounds), dtype=torch.int32, device=batch.ids.device)


def _wrong_rows(batch: PlacedBatch) -> Iterator[ProbeFinding]:
    """Wrong `position_ids` and `seq_idx`."""
    values = batch.values
    positions = _per_slot(values.get("position_ids"), batch)
    for number, (start, end) in enumerate(batch.spans, 1):
        if positions is not None and positions[start:end] != list(range(end - start)):
            yield ProbeFinding(
                "positions",
                f"position_ids of document {number} begin with {positions[start : start + 3]} instead of [0, 1, 2]",
                "count position_ids from 0 in every document",
            )
            break
    segments = _per_slot(values.get("seq_idx"), batch)
    if segments is None:
        return
    own = [set(segments[start:end]) for start, end in batch.spans]
    if any(len(each) > 1 for each in own) or len(set.union(*own)) < len(own):
        yield ProbeFinding(
            "segments",
            "seq_idx is not one number per document: kernels of recurrent layers carry state between documents",
            "number the documents 0, 1, 2, … in seq_idx (int32)",
        )


def _per_slot(tensor: Any, batch: PlacedBatch) -> list[int] | None:
    """A value for each slot; None if the field is missing or has another form."""
    if not isinstance(tensor, Tensor) or tensor.numel() != batch.ids.numel():
        return None
    return tensor.reshape(-1).tolist()


def _wrong_labels(batch: PlacedBatch, ids: list[int], labels: list[int]) -> Iterator[ProbeFinding]:
    """Labels that the model shifts: the label of a slot is its own token."""
    wrong = [
        slot
        for start, end in batch.spans
        for slot in range(start + 1, end)
        if labels[slot] not in (IGNORE, ids[slot])
    ]
    if wrong:
        inside = [slot for start, end in batch.spans for slot in range(start, end - 1)]
        shifted = all(labels[slot] in (IGNORE, ids[slot + 1]) for slot in inside)
        yield ProbeFinding(
            "labels",
            "labels are already shifted, and the model shifts them again"
            if shifted
            else f"labels[{wrong[0]}]={labels[wrong[0]]} is neither {IGNORE} nor the token {ids[wrong[0]]} of its slot",
            f"labels are a copy of input_ids, {IGNORE} where there is no target",
        )
        return
    for number, (start, _) in enumerate(batch.spans, 1):
        if start % batch.width and labels[start] != IGNORE:
            yield ProbeFinding(
                "border",
                f"the first label of document {number} is {labels[start]}: the last token of the document before it is"
                " trained to predict it",
                f"set the first label of every document to {IGNORE}",
            )
            return


def _wrong_targets(batch: PlacedBatch, ids: list[int], targets: list[int]) -> Iterator[ProbeFinding]:
    """Targets that are shifted already: the target of a slot is the next token."""
    for number, (start, end) in enumerate(batch.spans, 1):
        if targets[end - 1] != IGNORE:
            yield ProbeFinding(
                "border",
                f"the last target of document {number} is {targets[end - 1]}, a token of the next document",
                f"set the last target of every document to {IGNORE}",
            )
            return
        if any(targets[slot] not in (IGNORE, ids[slot + 1]) for slot in range(start, end - 1)):
            yield ProbeFinding(
                "labels",
                f"targets of document {number} are not its next tokens",
                "the target of a slot is the token of the next slot",
            )
            return


# --- repairs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repair:
    """A change of a batch that may end a leak, and what it means if it does."""

    finding: ProbeFinding
    apply: Callable[[PlacedBatch], PlacedBatch]


def repairs(batch: PlacedBatch, has_cache: bool) -> list[Repair]:
    """Changes to try, each alone and then together.

    Args:
        batch: the batch that leaks.
        has_cache: the model has an argument `use_cache`.
    """
    values, found = batch.values, []
    if has_cache and values.get("use_cache") is not False:
        text = "use_cache is not False: with a cache, transformers builds one causal mask over all documents"
        found.append(
            Repair(
                ProbeFinding("cache", text, "pass use_cache=False with every packed batch"),
                lambda b: b.with_values(use_cache=False),
            )
        )
    if values.get("attention_mask") is not None:
        text = (
            "attention_mask is present: document bounds are then not read from position_ids, and a 4D mask replaces"
            " sliding windows"
        )
        found.append(
            Repair(
                ProbeFinding("mask", text, "pass no attention_mask with packed batches"),
                lambda b: b.with_values(attention_mask=None),
            )
        )
    positions = true_positions(batch)
    given = values.get("position_ids")
    if _per_slot(given, batch) != positions.reshape(-1).tolist():
        text = (
            "there are no position_ids"
            if given is None
            else "position_ids do not restart at 0 in every document"
        )
        remedy = "count position_ids from 0 in every document and pass them"
        found.append(
            Repair(ProbeFinding("positions", text, remedy), lambda b: b.with_values(position_ids=positions))
        )
    found += _bounds_repair(batch)
    if batch.ids.dim() == 2 and len(batch.ids) > 1:
        text = f"the batch has {len(batch.ids)} packed rows, and this attention reads bounds in one row only"
        found.append(
            Repair(
                ProbeFinding("rows", text, "pack into one row: batch size 1 with a larger capacity"),
                _flattened,
            )
        )
    return found


def _bounds_repair(batch: PlacedBatch) -> list[Repair]:
    values, bounds = batch.values, _true_bounds(batch)
    names = [name for name in BOUNDS if name in values] or ["cu_seq_lens_q", "cu_seq_lens_k"]
    is_right = all(
        isinstance(values.get(name), Tensor) and not _bounds_problem(values[name], batch) for name in names
    )
    if is_right:
        return []
    longest = int(bounds.diff().max())
    new: dict[str, Any] = dict.fromkeys(names, bounds)
    new |= dict.fromkeys(
        [name for name in LONGEST if name in values] or ["max_length_q", "max_length_k"], longest
    )
    if isinstance(batch.given, PackedBatch):
        new["lengths"] = tuple(bounds.diff().tolist())
    what = "are wrong" if any(name in values for name in BOUNDS) else "are missing"
    text = f"cu_seq_lens {what}, and this attention reads bounds from nothing else"
    return [Repair(ProbeFinding("bounds", text, f"pass {', '.join(new)}"), lambda b: b.with_values(**new))]


def true_positions(batch: PlacedBatch) -> Tensor:
    """`position_ids` that restart in every document; slots outside documents keep theirs, or count on."""
    given = batch.values.get("position_ids")
    like = torch.arange(batch.width, device=batch.ids.device).expand(batch.ids.shape)
    positions = (given if isinstance(given, Tensor) and given.shape == batch.ids.shape else like).clone()
    for start, end in batch.spans:
        positions.view(-1)[start:end] = torch.arange(end - start, device=positions.device)
    return positions


def _flattened(batch: PlacedBatch) -> PlacedBatch:
    """All rows as one, with positions that restart and bounds."""
    rows = {
        name: value.reshape(1, -1)
        for name, value in batch.values.items()
        if isinstance(value, Tensor) and value.shape == batch.ids.shape
    }
    bounds = _true_bounds(batch)
    rows |= {"position_ids": true_positions(batch).reshape(1, -1)}
    return batch.with_values(
        **rows, **dict.fromkeys(BOUNDS[:2], bounds), **dict.fromkeys(LONGEST[:2], int(bounds.diff().max()))
    )
