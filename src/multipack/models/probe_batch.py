"""Batches of the isolation probe: its documents, how they are packed, where they are, and fields that are wrong.

Fields are read by their names in transformers (`position_ids`, `cu_seq_lens_q`, `max_length_q`, `seq_idx`, `labels`)
or in `PackedBatch` (`cu_seqlens`, `max_seqlen`, `targets`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multipack.data.packs.batch import PackedBatch
from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import IGNORE, Document
from multipack.models.probe_report import ProbeFinding
from multipack.ops.attention.model_inputs import model_inputs
from multipack.planning.lengths import check_integer, check_lengths, short

Documents = Sequence[Sequence[int]]
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
LONGEST = ("max_length_q", "max_length_k", "max_seqlen")


def transformers_batch(documents: Documents) -> dict[str, Any]:
    """Documents as the arguments of a model of transformers, without labels."""
    return model_inputs(packed_batch(documents))


def packed_batch(documents: Documents) -> PackedBatch:
    """Documents as a `PackedBatch` in which every token but the first of a document is a target."""
    collate = PackedCollator(len(documents), max(map(len, documents)))
    tokens = [np.array(document, dtype=np.uint32) for document in documents]
    return collate([Document(each, np.array([[0, len(each)]])) for each in tokens])


def find_vocabulary_size(model: Any, config: Any) -> int:
    """Size of the vocabulary: of a configuration, of a `Decoder`, or of the largest embedding.

    Raises:
        ValueError: the model has none of them.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    own = getattr(getattr(model, "shape", None), "vocabulary_size", None)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    sizes = [module.num_embeddings for module in modules if isinstance(module, nn.Embedding)]
    size = getattr(text, "vocab_size", None) or own or max(sizes, default=0)
    if not size:
        raise ValueError("the model has no embedding: pass vocabulary_size=…")
    return int(size)


def special_tokens(config: Any) -> set[int]:
    """Tokens that a configuration gives a meaning: padding, images and others."""
    found: set[int] = set()
    for part in (config, getattr(config, "text_config", None)):
        for name, value in vars(part).items() if part is not None else ():
            if name.endswith(("token_id", "token_index", "token_ids")):
                found.update(
                    each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)
                )
    return found


def draw_tokens(
    lengths: tuple[int, ...], size: int, special: set[int]
) -> tuple[list[list[int]], list[Tensor]]:
    """Documents of distinct tokens, as far as the vocabulary allows, and as many other tokens for each."""
    sizes = check_lengths(lengths).tolist()
    if len(sizes) < 2:
        raise ValueError(f"lengths={short(lengths)}: the probe needs at least two documents")
    size = check_integer("vocabulary_size", size)
    allowed = torch.tensor([token for token in range(min(size, 1 << 16)) if token not in special])
    if len(allowed) < 2:
        raise ValueError(
            f"a vocabulary of {size:,} tokens, {len(special)} of them special, leaves none to change: pass a larger"
            " vocabulary_size"
        )
    generator, total, choices = torch.Generator().manual_seed(0), sum(sizes), len(allowed)
    if choices >= total:
        drawn = torch.randperm(choices, generator=generator)[:total]
    else:
        drawn = torch.randint(choices, (total,), generator=generator)
    tokens, others = allowed[drawn], allowed[(drawn + choices // 2) % choices]
    return [part.tolist() for part in torch.split(tokens, sizes)], list(torch.split(others, sizes))


# --- where the documents are ------------------------------------------------------------------------


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
        """The same batch with other fields."""
        if isinstance(self.given, Mapping):
            return replace(self, given={**self.given, **values})
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
    yield from _wrong_targets(batch)


def _wrong_bounds(batch: PlacedBatch) -> Iterator[ProbeFinding]:
    values, slots = batch.values, batch.ids.numel()
    for name in BOUNDS:
        bounds = values.get(name)
        if not isinstance(bounds, Tensor):
            continue
        found = bounds.reshape(-1).tolist()
        rises = found[:1] == [0] and found[-1] == slots and all(a <= b for a, b in pairwise(found))
        own = [start for start, end in pairwise(found) for span in batch.spans if (start, end) == span]
        if bounds.dtype != torch.int32 or not rises or len(own) != len(batch.spans):
            yield ProbeFinding(
                "bounds",
                f"{name}={found} of {str(bounds.dtype).removeprefix('torch.')} are not the bounds of documents in slots"
                f" {', '.join(f'{start} to {end}' for start, end in batch.spans)}",
                f"give int32 bounds of every document, from 0 to {slots}",
            )
            break
    longest = max(end - start for start, end in batch.spans)
    for name in LONGEST:
        if values.get(name) is not None and int(values[name]) < longest:
            text = (
                f"{name}={int(values[name])}, but a document has {longest} tokens: kernels leave out the rest"
            )
            yield ProbeFinding("bounds", text, f"set it to at least {longest}")
            break


def _wrong_rows(batch: PlacedBatch) -> Iterator[ProbeFinding]:
    """Wrong `position_ids` and `seq_idx`."""
    positions = _per_slot(batch.values.get("position_ids"), batch)
    for number, (start, end) in enumerate(batch.spans, 1):
        if positions is not None and positions[start:end] != list(range(end - start)):
            yield ProbeFinding(
                "positions",
                f"position_ids of document {number} begin with {positions[start : start + 3]} instead of [0, 1, 2]",
                "count position_ids from 0 in every document",
            )
            break
    segments = _per_slot(batch.values.get("seq_idx"), batch)
    own = [set(segments[start:end]) for start, end in batch.spans] if segments else []
    if any(len(each) > 1 for each in own) or len(set().union(*own)) < len(own):
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


def _wrong_targets(batch: PlacedBatch) -> Iterator[ProbeFinding]:
    """Targets (or labels, which the model shifts) that are not the next tokens of their document."""
    ids, labels = batch.ids.reshape(-1).tolist(), _per_slot(batch.values.get("labels"), batch)
    targets = _per_slot(batch.values.get("targets"), batch) if labels is None else [*labels[1:], IGNORE]
    if targets is None:
        return
    for number, (start, end) in enumerate(batch.spans, 1):
        last = (
            [] if labels is not None and end % batch.width == 0 else [IGNORE]
        )  # labels are shifted inside a row
        pairs = enumerate(zip(targets[start:end], ids[start + 1 : end] + last, strict=False))
        wrong = [at for at, (target, token) in pairs if target not in (IGNORE, token)]
        if wrong == [end - start - 1]:
            field = "last target" if labels is None else "first label"
            yield ProbeFinding(
                "border",
                f"the last token of document {number} is trained to predict {targets[end - 1]}, of another document",
                f"set the {field} of every document to {IGNORE}",
            )
            return
        if wrong:
            yield ProbeFinding(
                "labels",
                f"targets of document {number} are not its next tokens",
                f"targets are the next tokens, labels (which the model shifts) a copy of input_ids; {IGNORE} = none",
            )
            return
