"""Documents of one pack → `PackedBatch`, packed without padding or, for comparison, padded as others do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from multipack.data.batch import IGNORE, PackedBatch
from multipack.data.documents import Document


@dataclass(frozen=True)
class PackedCollator:
    """Concatenates the documents of a pack.

    Args:
        max_documents: the plan's most documents in a pack: fixes the length of `cu_seqlens`.
        max_seqlen: tokens of the longest document of the plan (a constant for kernels).
        pad_to: give every batch this many slots (the capacity) with one padding document at the end;
            None = no padding at all.
        pad_id: the token that fills padding.

    A pack without documents (a rank that has nothing to do in a micro-batch) becomes one weightless padding
    document, so that every rank runs the same collectives.
    """

    max_documents: int
    max_seqlen: int
    pad_to: int | None = None
    pad_id: int = 0

    def __call__(self, documents: Sequence[Document]) -> PackedBatch:
        """Pack `documents` in the order given.

        Raises:
            ValueError: more documents or tokens than the plan allows in a pack.
        """
        if len(documents) > self.max_documents:
            raise ValueError(
                f"{len(documents)} documents in one pack, but the plan has at most {self.max_documents}"
            )
        lengths = [len(document.tokens) for document in documents]
        tokens = sum(lengths)
        slots = self.pad_to if self.pad_to is not None else max(tokens, 1)
        if tokens > slots:
            raise ValueError(f"a pack of {tokens:,} tokens does not fit into pad_to={slots:,}")
        if tokens < slots:
            lengths.append(slots - tokens)
        longest = max(self.max_seqlen, self.pad_to or 1)
        if max(lengths) > longest:
            raise ValueError(f"a document of {max(lengths):,} tokens exceeds max_seqlen={longest:,}")
        return _assemble(documents, lengths, slots, self.max_documents, longest, self.pad_id)


@dataclass(frozen=True)
class PaddedCollator:
    """Pads every document to the longest of the batch, as a conventional loader does.

    The result is a `PackedBatch` of equally long documents, whose tails are padding: the model runs on it
    unchanged and computes every padded slot. It exists to measure what padding costs.
    """

    pad_id: int = 0

    def __call__(self, documents: Sequence[Document]) -> PackedBatch:
        """Pad `documents` (at least one) to rows of the longest one's length."""
        rows, width = len(documents), max(len(document.tokens) for document in documents)
        input_ids = np.full((rows, width), self.pad_id, dtype=np.int64)
        targets = np.full((rows, width), IGNORE, dtype=np.int64)
        real = 0
        for row, document in enumerate(documents):
            count = len(document.tokens)
            input_ids[row, :count] = document.tokens
            targets[row, :count] = document.shifted_targets()
            real += count
        return PackedBatch(
            input_ids=torch.from_numpy(input_ids.reshape(-1)),
            targets=torch.from_numpy(targets.reshape(-1)),
            position_ids=torch.arange(width).repeat(rows),
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * width,
            max_seqlen=width,
            num_documents=rows,
            num_tokens=real,
            num_target_tokens=int((targets != IGNORE).sum()),
            lengths=(width,) * rows,
        )


def _assemble(
    documents: Sequence[Document],
    lengths: list[int],
    slots: int,
    max_documents: int,
    max_seqlen: int,
    pad_id: int,
) -> PackedBatch:
    input_ids = np.full(slots, pad_id, dtype=np.int64)
    targets = np.full(slots, IGNORE, dtype=np.int64)
    start = 0
    for document in documents:
        stop = start + len(document.tokens)
        input_ids[start:stop] = document.tokens
        targets[start:stop] = document.shifted_targets()
        start = stop
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    cu_seqlens = np.full(max_documents + 2, slots, dtype=np.int32)
    cu_seqlens[: len(lengths)] = starts
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(np.arange(slots, dtype=np.int64) - np.repeat(starts, sizes)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
        num_documents=len(documents),
        num_tokens=start,
        num_target_tokens=int((targets != IGNORE).sum()),
        lengths=tuple(lengths),
    )
