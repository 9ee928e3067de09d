"""`Items`: what a plan places, where an item is several documents that share the tokens of their beginnings.

documents   0 1 2 3 4 …         lengths, targets, weights
items       {3, 0} {4} {1, 2}   slots: distinct tokens; attention; in the order of the epoch
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.attention_pairs import AttentionPairs
from multipack.planning.lengths import Packs, offsets_of
from multipack.planning.options import PlanOptions

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Items:
    """The items of an epoch, in their order, and the documents that they consist of.

    Attributes:
        members: document numbers of each item; a document may occur several times.
        places: (members,) place of each member in the epoch's order of documents.
        shared: (members,) tokens of each member that are computed in the one before it.
        slots: (items,) int64 slots of each item: its distinct tokens.
        attention: that of each item.
        lengths: (all documents,) int64 tokens of each.
        targets: (all documents,) int64 targets of each.
        weights: (all documents,) weight of each in the loss; None = 1.
        carried_in: numbers of the documents carried over from the previous epoch.
        least_slots: proven lower bound on the slots of any packs that hold all documents of the epoch.
        most_documents: maximum number of documents of a pack, in any epoch.
        min_prefix: shortest beginning that documents share, for the collator.
        key: plain values that determine the items, beside lengths, targets and options.
        answers: (all documents, 2) int64 where a document of the plan is a pair: tokens of the first of the two, and
            those of them that are computed for both; None = it is not.
    """

    members: Packs
    places: Integers
    shared: Integers
    slots: Integers
    attention: AttentionPairs
    lengths: Integers
    targets: Integers
    weights: NDArray[np.float64] | None
    carried_in: Integers
    least_slots: int
    most_documents: int
    min_prefix: int
    key: dict[str, Any] = field(default_factory=dict)
    answers: Integers | None = None

    def __len__(self) -> int:
        return len(self.members)

    def entries(self, items: Integers) -> Integers:
        """(members of these items,) indices into `members.order` and `places`, item after item."""
        starts, sizes = self.members.offsets[items], self.members.sizes()[items]
        ends = offsets_of(sizes)
        return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], sizes)

    def added(self, entries: Integers) -> Integers:
        """(entries,) slots that these members take beside the members before them in their items."""
        documents = self.members.order[entries]
        own = self.lengths[documents] - self.shared[entries]
        return own if self.answers is None else own - self.answers[documents, 1]

    def documents(self, items: Integers) -> Integers:
        """Document numbers of these items, item after item."""
        return self.members.order[self.entries(items)]

    def packs_of_documents(self, packs: Packs) -> Packs:
        """Packs of documents from packs of items."""
        offsets = offsets_of(self.members.sizes()[packs.order])
        return Packs(self.documents(packs.order), offsets[packs.offsets])


class ItemSource(ABC):
    """Makes the items of each epoch."""

    @abstractmethod
    def items(self, seed: int = 0, epoch: int = 0, carried: ArrayLike = (), widened: int = 1) -> Items:
        """The items of an epoch, in its order.

        Args:
            seed: of the order, as in `multipack.plan`.
            epoch: from 0; with the seed it determines the order.
            carried: numbers of the documents left over by the epoch before; they come first.
            widened: number by which the windows of the order, whose documents form items, are multiplied.
        """

    @abstractmethod
    def is_whole(self, widened: int) -> bool:
        """Whether the items do not depend on the window if it is multiplied by this number."""


def check_item_options(options: PlanOptions, setting: str) -> None:
    """Refuse options that items of documents with shared beginnings cannot have.

    Args:
        options: of the plan.
        setting: that asks for such items, as the message names it.

    Raises:
        ValueError: the message names the option and what to use.
    """
    if options.align != 1:
        raise ValueError(
            f"plan.align={options.align} pads each document, and {setting} divides them: use plan.align=1"
        )
    if options.max_documents:
        raise ValueError(
            f"plan.max_documents={options.max_documents} counts documents, and {setting} places several at once: use"
            " plan.max_documents=0"
        )
