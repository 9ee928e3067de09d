"""Preference pairs: two neighboring documents of a store, the chosen and the rejected answer, each after its prompt.

    store     |prompt chosen|prompt rejected|prompt …    documents 2i and 2i + 1
    pack      | c c c c | r r r | c c | r r r r | …      the same, pair after pair
    reference  −11.0     −13.5    …                      log-probabilities under a reference model, summed over targets

The planner's item is the pair, so that both answers are in one pack and the loss of a pair needs no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.data.collate import PackedCollator, Planned
from multipack.data.documents import Document, Documents


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt.

    Attributes:
        chosen: the prompt and the better answer.
        rejected: the prompt and the other answer.
        reference: (2,) float64 log-probabilities of both answers under the reference model; None = not known yet.
    """

    chosen: Document
    rejected: Document
    reference: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class PreferenceBatch(PackedBatch):
    """A pack of preference pairs: its documents come two by two, the chosen one first.

    Attributes:
        reference: (pairs, 2) float64 log-probabilities of chosen and rejected under the reference model; None while
            they are being computed.
    """

    reference: Tensor | None = None

    def _each(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        changed = cast(PreferenceBatch, super()._each(change))
        return changed if self.reference is None else replace(changed, reference=change(self.reference))

    @property
    def num_pairs(self) -> int:
        """Pairs in this pack."""
        return self.num_documents // 2

    @property
    def denominator(self) -> int:
        """This pack's share of the loss's denominator: its pairs."""
        return self.num_pairs


class PreferencePairs:
    """The pairs of a view: a data set for `PackedLoader` and `PreferenceCollator`.

    Args:
        documents: a view of a store of pairs.
        reference: (n, 2) float64 log-probabilities of each pair's answers; None = not known yet.

    Raises:
        ValueError: reference values of another number of pairs.
    """

    def __init__(self, documents: Documents, reference: NDArray[np.float64] | None = None) -> None:
        if reference is not None and reference.shape != (len(documents), 2):
            raise ValueError(
                f"{len(documents):,} pairs need reference values ({len(documents)}, 2), got {reference.shape}"
            )
        self.documents = documents
        self.reference = reference

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> PreferencePair:
        """Pair `index`.

        Raises:
            IndexError: there is none.
            ValueError: the documents are no pairs, or an answer has no target.
        """
        chosen, rejected = self.documents.pair(index)
        return PreferencePair(chosen, rejected, None if self.reference is None else self.reference[index])


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
            ValueError: more than the plan allows in a pack; only some pairs have reference values.
        """
        known = [pair.reference for pair in pairs if pair.reference is not None]
        if known and len(known) < len(pairs):
            raise ValueError(f"only {len(known)} of {len(pairs)} pairs have reference values")
        batch = self.packed([answer for pair in pairs for answer in (pair.chosen, pair.rejected)])
        held: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(PackedBatch)}
        # A pack without pairs counts as one whose values are known.
        values = torch.from_numpy(np.array(known, dtype=np.float64).reshape(-1, 2))
        return PreferenceBatch(**held, reference=values if len(known) == len(pairs) else None)
