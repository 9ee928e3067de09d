"""Preference pairs: one document of a store is two of a pack, the chosen answer and the rejected one.

    store     |prompt chosen·prompt rejected|            one document, its `border` where the second half begins
    pack      | c c c c | r r r | c c | r r r r | …      documents 2i and 2i + 1 are pair i
    reference  −11.0 −13.5 | …                           what another model gave both halves, summed over targets

A pair is planned as one document, so that both halves meet in one pack and the loss of a pair needs no other rank.
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
            these are being computed.
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
        """This pack's share of what the loss is divided by: its pairs."""
        return self.num_pairs


class PreferencePairs:
    """Documents that are pairs, as pairs: a data set for `PackedLoader` and `PreferenceCollator`.

    Args:
        documents: every one has a border.
        reference: (n, 2) float64 log-probabilities of each pair's halves; None = not known yet.

    Raises:
        ValueError: documents without targets, or reference values of another number of pairs.
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
            ValueError: the document is no pair, or a half of it has no target; it is named.
        """
        try:
            chosen, rejected = halves(self.documents[index])
        except ValueError as error:
            raise ValueError(f"{self.documents.names(index)}: {error}") from None
        return PreferencePair(chosen, rejected, None if self.reference is None else self.reference[index])


def halves(document: Document) -> tuple[Document, Document]:
    """The chosen and the rejected half of a document that is a pair.

    Raises:
        ValueError: it has no border, or a half has no target to prefer.
    """
    border, length = document.border, len(document.tokens)
    if not 0 < border < length:
        raise ValueError(
            f"a document of {length:,} tokens with border={border} is no preference pair; prepare the data with"
            " data.format=preference (prompt, chosen, rejected)"
        )
    parts = []
    for name, start, stop in (("chosen", 0, border), ("rejected", border, length)):
        spans = np.clip(document.spans - start, 0, stop - start)
        spans = spans[spans[:, 1] > np.maximum(spans[:, 0], 1)]
        if not len(spans):
            raise ValueError(
                f"the {name} half of this preference pair has no target token: its answer is empty"
            )
        parts.append(Document(document.tokens[start:stop], spans))
    return parts[0], parts[1]


@dataclass(frozen=True)
class PreferenceCollator:
    """Concatenates the halves of pairs. `PreferenceCollator.of(plan)` takes all it needs from a plan of the pairs.

    Args:
        packed: of packs with twice as many documents as the plan has pairs in one.
    """

    packed: PackedCollator

    @classmethod
    def of(
        cls, plan: Planned, pad_to: int | None = None, pad_id: int = 0, multiple: int = 1
    ) -> PreferenceCollator:
        """The collator of a plan over pairs, or of a sampler.

        Raises:
            ValueError: the plan aligns documents: it counted one alignment for a pair, and halves would need two.
        """
        if plan.align != 1:
            raise ValueError(
                f"plan.align={plan.align} does not go with preference pairs, whose halves lie side by side: use 1"
            )
        return cls(PackedCollator(2 * plan.most_documents, plan.longest, pad_to, pad_id, multiple=multiple))

    def __call__(self, pairs: Sequence[PreferencePair]) -> PreferenceBatch:
        """Pack `pairs` in the order given.

        Raises:
            ValueError: more than the plan allows in a pack; some pairs have reference values and others have not.
        """
        known = [pair.reference for pair in pairs if pair.reference is not None]
        if known and len(known) < len(pairs):
            raise ValueError(f"only {len(known)} of {len(pairs)} pairs have reference values")
        batch = self.packed([half for pair in pairs for half in (pair.chosen, pair.rejected)])
        held: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(PackedBatch)}
        # A pack without pairs has all (none) of its values.
        values = torch.from_numpy(np.array(known, dtype=np.float64).reshape(-1, 2))
        return PreferenceBatch(**held, reference=values if len(known) == len(pairs) else None)
