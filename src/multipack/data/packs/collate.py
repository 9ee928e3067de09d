"""Collators: the documents of one pack → `PackedBatch`, packed or, for comparison, padded; also of preference pairs.

    store     |prompt chosen|prompt rejected|prompt …    an item: documents 2i and 2i + 1
    pack      | c c c c | r r r | c c | r r r r | …      the same, pair after pair
    reference  −11.0     −13.5    …                      log-probabilities under a reference model, summed over targets

The planner's item is the pair, so that both answers are in one pack and the loss of a pair needs no other rank. The
second document of a labeled answer is another record's answer after the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multipack.data.packs.batch import PackedBatch, PackedTree, rounded
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import IGNORE, Document, Documents
from multipack.data.views.prefix_tree import PrefixTree
from multipack.planning.lengths import Integers, check_integer
from multipack.planning.options import LossWeighting, check_choice
from multipack.planning.plan import Plan, denominator_of

if TYPE_CHECKING:
    from multipack.planning.stream import PackStream

    Planned = Plan | PackStream | PackedBatchSampler
    """Objects that determine the settings of a collator."""


@dataclass(frozen=True)
class PackedCollator:
    """Concatenates the documents of a pack. `PackedCollator.of(plan)` takes the plan's settings.

    Args:
        max_documents: the plan's largest number of documents in a pack; more are an error.
        max_seqlen: slots of the plan's longest document; longer ones are an error.
        pad_to: slots of every batch (the capacity), with one padding document at the end; None = no padding.
        pad_id: token of padding.
        loss_weighting: `token`: every target has weight 1; `document`: 1 / (targets of its document)
            (`PackedBatch.weights`), and the denominator is the number of documents with a target.
        weighted: whether the plan has weights of documents, which multiply the weights of their targets.
        multiple: slots of every pack are a multiple of this, by a padding document at the end, for ranks that divide
            the tokens of a pack. The capacity must be a multiple, too.
        min_prefix: documents share common beginnings of at least this number of tokens (`PrefixTree.of`); None = none
            is shared. Packs without such beginnings are the same with and without it.

    A pack without documents (of a rank without work in a micro-batch) becomes one padding document without weight, so
    that every rank runs the same collectives.

    Raises:
        ValueError: `multiple` below 1, a `pad_to` that is not one, or an unknown weighting.
    """

    max_documents: int
    max_seqlen: int
    pad_to: int | None = None
    pad_id: int = 0
    loss_weighting: LossWeighting = "token"
    multiple: int = 1
    weighted: bool = False
    min_prefix: int | None = None

    def __post_init__(self) -> None:
        check_integer("multiple", self.multiple)
        check_choice("loss_weighting", self.loss_weighting, LossWeighting)
        if self.pad_to is not None and self.pad_to % self.multiple:
            nearest = self.pad_to // self.multiple * self.multiple or self.multiple
            raise ValueError(f"pad_to={self.pad_to:,} is not a multiple of {self.multiple}; use {nearest:,}")

    @classmethod
    def of(
        cls, plan: Planned, pad_to: int | None = None, pad_id: int = 0, multiple: int = 1
    ) -> PackedCollator:
        """The collator of a plan, or of a sampler."""
        given, weighted = (pad_to, pad_id, plan.loss_weighting), plan.weights is not None
        return cls(plan.most_documents, plan.longest, *given, multiple, weighted, plan.min_prefix)

    def __call__(self, documents: Sequence[Document]) -> PackedBatch:
        """Pack `documents` in the order given.

        Raises:
            ValueError: more documents or tokens than the plan allows in a pack; a document with a weight, where the
                plan has none.
        """
        if not self.weighted and (heavy := [each.weight for each in documents if each.weight != 1.0]):
            raise ValueError(
                f"a document has the weight {heavy[0]:g}, and the plan has none, which its denominators need: give"
                " weights=documents.weights to the sampler (a stream of documents has no weights)"
            )
        if len(documents) > self.max_documents:
            raise ValueError(
                f"{len(documents)} documents in one pack, but the plan has at most {self.max_documents}"
            )
        lengths = [len(document.tokens) for document in documents]
        tree = None
        if self.min_prefix is not None:
            tree = PrefixTree.of([document.tokens for document in documents], self.min_prefix)
        if tree is not None and tree.shares:
            sizes = tree.length.tolist()
            pieces = list(zip(tree.document.tolist(), tree.start.tolist(), sizes, strict=True))
        else:
            tree, pieces = None, [(number, 0, length) for number, length in enumerate(lengths)]
            sizes = list(lengths)
        self._pad(sizes, max(lengths, default=0))
        input_ids, position_ids = self._laid_out(documents, pieces, sizes)
        shifted = [document.shifted_targets() for document in documents]
        counts = np.array([np.count_nonzero(each != IGNORE) for each in shifted], dtype=np.int64)
        if tree is None:
            packed, owner = None, np.repeat(np.arange(len(sizes)), sizes)
            targets = np.full(len(input_ids), IGNORE, dtype=np.int64)
            for stop, size, each in zip(np.cumsum(sizes), sizes, shifted, strict=False):
                targets[stop - size : stop - size + len(each)] = each
        else:
            packed, targets = PackedTree.of(tree, sizes, shifted)
            owner = np.repeat(np.arange(len(documents)), counts)  # document of each target
        own, weights = np.array([document.weight for document in documents], dtype=np.float64), None
        if self.weighted or self.loss_weighting == "document":
            of_target = own / np.maximum(counts, 1) if self.loss_weighting == "document" else own
            with_padding = np.append(of_target, 0.0).astype(np.float32)
            weights = torch.from_numpy(with_padding[owner] * (targets != IGNORE))
        return PackedBatch(
            input_ids=torch.from_numpy(input_ids),
            targets=torch.from_numpy(targets),
            position_ids=torch.from_numpy(position_ids),
            cu_seqlens=torch.from_numpy(np.cumsum([0, *sizes]).astype(np.int32)),
            max_seqlen=rounded(max(sizes)),
            num_documents=len(documents),
            num_tokens=sum(lengths),
            num_target_tokens=int(counts.sum()),
            lengths=tuple(sizes),
            longest=max(lengths, default=0),
            denominator=denominator_of(counts, self.loss_weighting, own if self.weighted else None),
            weights=weights,
            tree=packed,
        )

    def _laid_out(
        self, documents: Sequence[Document], pieces: Sequence[tuple[int, int, int]], sizes: Sequence[int]
    ) -> tuple[Integers, Integers]:
        """Tokens of the slots, and their positions in documents.

        A piece is the number of a document, its first token and the number of tokens; `sizes` are the slots of each,
        and of padding, if there is any.
        """
        stops = np.cumsum(sizes)
        tokens = np.full(stops[-1], self.pad_id, dtype=np.int64)
        moved = stops - sizes  # slot minus position of its token
        for piece, (number, first, length) in enumerate(pieces):
            start = moved[piece]
            tokens[start : start + length] = documents[number].tokens[first : first + length]
            moved[piece] -= first
        return tokens, np.arange(stops[-1]) - np.repeat(moved, sizes)

    def _pad(self, sizes: list[int], longest: int) -> None:
        """Check `sizes`, the slots of a pack's pieces, and append the slots of its padding, if there is any.

        `longest` is the number of tokens of the longest document.
        """
        used = sum(sizes)
        slots = self.pad_to
        if slots is None:
            slots = -(-max(used, 1) // self.multiple) * self.multiple
        if used > slots:
            raise ValueError(f"a pack of {used:,} tokens does not fit into pad_to={slots:,}")
        if used < slots:
            sizes.append(slots - used)
        longest = max(*sizes, longest, 0)
        if longest > max(self.max_seqlen, self.pad_to or self.multiple):
            raise ValueError(f"a document of {longest:,} tokens exceeds max_seqlen={self.max_seqlen:,}")


def pad_documents(
    documents: Sequence[Document],
    pad_id: int = 0,
    loss_weighting: LossWeighting = "token",
    weighted: bool = False,
) -> PackedBatch:
    """Pad each document (at least one) to the longest, as conventional loaders do, to measure the cost of padding.

    The result is a `PackedBatch` of equally long documents whose tails are padding; the model computes every slot.
    """
    lengths = [len(document.tokens) for document in documents]
    longest = max(lengths)
    padded = [
        replace(document, tokens=np.pad(document.tokens, (0, longest - length), constant_values=pad_id))
        for document, length in zip(documents, lengths, strict=True)
    ]
    collate = PackedCollator(len(documents), longest, loss_weighting=loss_weighting, weighted=weighted)
    return replace(collate(padded), num_tokens=sum(lengths))


# --- items of two documents ---------------------------------------------------------------------------


class PreferencePair(NamedTuple):
    """An item of two documents: the chosen and the rejected answer, or a labeled one and another record's answer.

    Each begins with the prompt.

    Attributes:
        first, second: the documents.
        reference: (2,) log-probabilities under the reference model; None = unknown.
        weight: weight in the loss, at least 0.
        is_desirable: label of an answer; true for pairs.
    """

    first: Document
    second: Document
    reference: NDArray[np.float64] | None = None
    weight: float = 1.0
    is_desirable: bool = True


@dataclass(frozen=True)
class PreferenceBatch(PackedBatch):
    """A pack of items of two documents; its denominator is the sum of their weights.

    Attributes:
        reference: (items, 2) float64 log-probabilities under the reference model; None while they are being computed.
        item_weights: (items,) float64 weights; None = all are 1.
        desirable: (items,) bool labels; None = all are true.
    """

    reference: Tensor | None = None
    item_weights: Tensor | None = None
    desirable: Tensor | None = None


class PreferencePairs:
    """The items of a view: a data set for `PackedLoader` and `PreferenceCollator`.

    Args:
        documents: a view of a store of pairs, or of labeled answers.
        reference: (n, 2) float64 log-probabilities of each item's documents; None = not known yet.

    Raises:
        ValueError: the documents are neither.
    """

    def __init__(self, documents: Documents, reference: NDArray[np.float64] | None = None) -> None:
        if documents.size != 2:
            raise ValueError(f"{documents.store.path} holds no pairs: prepare data.format=preference")
        self.documents, self.reference = documents, reference

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> PreferencePair:
        """Item `index`; `ValueError` if an answer has no target."""
        first, second = self.documents.members(index)
        reference = None if self.reference is None else self.reference[index]
        weight = 1.0 if self.documents.weights is None else float(self.documents.weights[index])
        return PreferencePair(first, second, reference, weight, bool(self.documents.labels[index]))


@dataclass(frozen=True)
class PreferenceCollator:
    """Concatenates the documents of items; `PreferenceCollator.of(plan)` takes the settings from a plan of the items.

    Args:
        packed: collator of packs with twice as many documents as the plan has items in one.
    """

    packed: PackedCollator

    @classmethod
    def of(
        cls, plan: Planned, pad_to: int | None = None, pad_id: int = 0, multiple: int = 1
    ) -> PreferenceCollator:
        """The collator of a plan over items, or of a sampler."""
        most = 2 * plan.most_documents
        return cls(
            PackedCollator(most, plan.longest, pad_to, pad_id, multiple=multiple, min_prefix=plan.min_prefix)
        )

    def __call__(self, items: Sequence[PreferencePair]) -> PreferenceBatch:
        """Pack `items` in the order given; `ValueError` if they are more than the plan allows in a pack."""
        known = [item.reference for item in items if item.reference is not None]
        batch = self.packed([document for item in items for document in (item.first, item.second)])
        # A pack without items counts as one whose values are known.
        reference = torch.from_numpy(np.array(known, dtype=np.float64).reshape(-1, 2))
        weights = torch.tensor([item.weight for item in items], dtype=torch.float64)
        return PreferenceBatch(
            **vars(replace(batch, denominator=float(weights.sum()))),
            reference=reference if len(known) == len(items) else None,
            item_weights=weights,
            desirable=torch.tensor([item.is_desirable for item in items], dtype=torch.bool),
        )
