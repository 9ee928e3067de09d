"""Collators: the documents of one pack → `PackedBatch`, packed or, for comparison, padded; also of preference pairs.

    store     |prompt chosen|prompt rejected|prompt …    a pair: documents 2i and 2i + 1
    pack      | c c c c | r r r | c c | r r r r | …      the same, pair after pair
    reference  −11.0     −13.5    …                      log-probabilities under a reference model, summed over targets

The planner's item is the pair, so that both answers are in one pack and the loss of a pair needs no other rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multipack.data.batch import IGNORE, PackedBatch
from multipack.data.documents import Document, Documents
from multipack.data.sampler import PackedBatchSampler
from multipack.planning.lengths import check_integer
from multipack.planning.options import LossWeighting, check_choice
from multipack.planning.plan import Plan
from multipack.planning.stream import PackStream

TILE_TOKENS = 128
"""Queries that one thread block of an attention kernel processes: `max_seqlen` is a multiple of it."""

Planned = Plan | PackStream | PackedBatchSampler
"""What determines the settings of a collator."""


@dataclass(frozen=True)
class PackedCollator:
    """Concatenates the documents of a pack. `PackedCollator.of(plan)` takes the settings that a plan decides from it.

    Args:
        max_documents: the plan's largest number of documents in a pack; more are an error.
        max_seqlen: slots of the plan's longest document; longer ones are an error.
        pad_to: slots of every batch (the capacity), with one padding document at the end; None = no padding.
        pad_id: token of padding.
        align: pad each document at its end to a multiple of this, for context parallelism (twice its ranks) and fp8
            matrix products (16). Attention is causal, so that losses and gradients do not change.
        loss_weighting: `token`: every target has weight 1; `document`: 1 / (targets of its document)
            (`PackedBatch.weights`), and the denominator is the number of documents with a target.
        multiple: slots of every pack are a multiple of this, by a padding document at the end, for ranks that divide
            the tokens of a pack. The capacity must be a multiple, too.

    A pack without documents (of a rank without work in a micro-batch) becomes one padding document without weight, so
    that every rank runs the same collectives.

    Raises:
        ValueError: an alignment below 1, a `pad_to` that is not a multiple of it, or an unknown weighting.
    """

    max_documents: int
    max_seqlen: int
    pad_to: int | None = None
    pad_id: int = 0
    align: int = 1
    loss_weighting: LossWeighting = "token"
    multiple: int = 1

    def __post_init__(self) -> None:
        check_integer("align", self.align)
        check_integer("multiple", self.multiple)
        check_choice("loss_weighting", self.loss_weighting, LossWeighting)
        for name in ("align", "multiple"):
            factor = getattr(self, name)
            if self.pad_to is not None and self.pad_to % factor:
                nearest = self.pad_to // factor * factor or factor
                raise ValueError(
                    f"pad_to={self.pad_to:,} is not a multiple of {name}={factor}; use {nearest:,}"
                )

    @classmethod
    def of(
        cls, plan: Planned, pad_to: int | None = None, pad_id: int = 0, multiple: int = 1
    ) -> PackedCollator:
        """The collator of a plan, or of a sampler."""
        return cls(
            plan.most_documents, plan.longest, pad_to, pad_id, plan.align, plan.loss_weighting, multiple
        )

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
        sizes = [-(-length // self.align) * self.align for length in lengths]
        used = sum(sizes)
        aligned = "" if self.align == 1 else f" (each document padded to a multiple of {self.align})"
        slots = self.pad_to
        if slots is None:
            slots = -(-max(used, self.align) // self.multiple) * self.multiple
        if used > slots:
            raise ValueError(f"a pack of {used:,} tokens{aligned} does not fit into pad_to={slots:,}")
        if used < slots:
            sizes.append(slots - used)
        longest = max(sizes)
        if longest > max(self.max_seqlen, self.pad_to or max(self.align, self.multiple)):
            raise ValueError(
                f"a document of {longest:,} tokens{aligned} exceeds max_seqlen={self.max_seqlen:,}"
            )
        ends = np.cumsum(sizes)
        starts = ends - sizes
        input_ids = np.full(slots, self.pad_id, dtype=np.int64)
        targets = np.full(slots, IGNORE, dtype=np.int64)
        # The last size may be that of padding, which has no document.
        for start, length, document in zip(starts, lengths, documents, strict=False):
            input_ids[start : start + length] = document.tokens
            targets[start : start + length] = document.shifted_targets()
        owner = np.repeat(np.arange(len(sizes)), sizes)  # document of each slot
        is_target = targets != IGNORE
        counts = np.bincount(owner, is_target, len(sizes))
        weights = None
        if self.loss_weighting == "document":
            each = (1.0 / np.maximum(counts, 1)).astype(np.float32)
            weights = torch.from_numpy(each[owner] * is_target)
        return PackedBatch(
            input_ids=torch.from_numpy(input_ids),
            targets=torch.from_numpy(targets),
            position_ids=torch.from_numpy(np.arange(slots, dtype=np.int64) - starts[owner]),
            cu_seqlens=torch.from_numpy(np.append(0, ends).astype(np.int32)),
            max_seqlen=-(-longest // TILE_TOKENS) * TILE_TOKENS,
            num_documents=len(documents),
            num_tokens=sum(lengths),
            num_target_tokens=int(np.count_nonzero(is_target)),
            lengths=tuple(sizes),
            longest=max(lengths, default=0),
            num_target_documents=int(np.count_nonzero(counts)),
            weights=weights,
        )


def pad_documents(
    documents: Sequence[Document], pad_id: int = 0, loss_weighting: LossWeighting = "token"
) -> PackedBatch:
    """Pad each document (at least one) to the longest, as conventional loaders do, to measure the cost of padding.

    The result is a `PackedBatch` of equally long documents whose tails are padding; the model computes every slot.
    """
    width = max(len(document.tokens) for document in documents)
    collate = PackedCollator(len(documents), width, pad_id=pad_id, align=width, loss_weighting=loss_weighting)
    return collate(documents)


# --- preference pairs ---------------------------------------------------------------------------------


PreferencePair = tuple[Document, Document, NDArray[np.float64] | None]
"""The chosen and the rejected answer, each after the prompt, and (2,) log-probabilities under the reference model."""


@dataclass(frozen=True)
class PreferenceBatch(PackedBatch):
    """A pack of preference pairs: its documents come two by two, the chosen one first.

    Attributes:
        reference: (pairs, 2) float64 log-probabilities of chosen and rejected under the reference model; None while
            they are being computed.
    """

    reference: Tensor | None = None

    @property
    def denominator(self) -> int:
        """This pack's share of the loss's denominator: its pairs."""
        return self.num_documents // 2


class PreferencePairs:
    """The pairs of a view: a data set for `PackedLoader` and `PreferenceCollator`.

    Args:
        documents: a view of a store of pairs.
        reference: (n, 2) float64 log-probabilities of each pair's answers; None = not known yet.
    """

    def __init__(self, documents: Documents, reference: NDArray[np.float64] | None = None) -> None:
        self.documents, self.reference = documents, reference

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> PreferencePair:
        """Pair `index`; `ValueError` if the documents are no pairs, or an answer has no target."""
        chosen, rejected = self.documents.pair(index)
        return chosen, rejected, None if self.reference is None else self.reference[index]


@dataclass(frozen=True)
class PreferenceCollator:
    """Concatenates the answers of pairs; `PreferenceCollator.of(plan)` takes the settings from a plan of the pairs.

    Args:
        packed: collator of packs with twice as many documents as the plan has pairs in one.
    """

    packed: PackedCollator

    @classmethod
    def of(
        cls, plan: Planned, pad_to: int | None = None, pad_id: int = 0, multiple: int = 1
    ) -> PreferenceCollator:
        """The collator of a plan over pairs, or of a sampler.

        Raises:
            ValueError: the plan aligns documents: it counts one alignment for a pair, and two answers would need two.
        """
        if plan.align != 1:
            raise ValueError(f"plan.align={plan.align} is not possible with preference pairs: use 1")
        return cls(PackedCollator(2 * plan.most_documents, plan.longest, pad_to, pad_id, multiple=multiple))

    def __call__(self, pairs: Sequence[PreferencePair]) -> PreferenceBatch:
        """Pack `pairs` in the order given.

        Raises:
            ValueError: more than the plan allows in a pack.
        """
        known = [reference for _, _, reference in pairs if reference is not None]
        batch = self.packed([answer for chosen, rejected, _ in pairs for answer in (chosen, rejected)])
        # A pack without pairs counts as one whose values are known.
        values = torch.from_numpy(np.array(known, dtype=np.float64).reshape(-1, 2))
        return PreferenceBatch(**vars(batch), reference=values if len(known) == len(pairs) else None)
