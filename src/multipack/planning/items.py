"""`Items`: what a plan places, in the order of an epoch. Every document is an item, or documents share one.

documents      0 1 2 3 4 …         lengths, targets, weights
`Items`        3 0 4 1 2           each document; slots: its tokens
`SharedItems`  {3, 0} {4} {1, 2}   documents that share the tokens of their beginnings; slots: distinct tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.attention_pairs import AttentionPairs
from multipack.planning.histogram import count, simple_bound
from multipack.planning.lengths import Integers, Packs, offsets_of
from multipack.planning.options import PlanOptions


@dataclass(frozen=True, eq=False, kw_only=True)
class Items:
    """The items of an epoch, in its order; here each document is one, and has its number.

    Attributes:
        lengths: (all documents,) int64 tokens of each.
        targets: (all documents,) int64 targets of each; None = length − 1.
        weights: (all documents,) float64 weight of each in the loss; None = 1.
        carried_in: numbers of the documents carried over from the previous epoch.
        slots: (items,) int64 slots of each item in a pack.
        sequence: numbers of the items in the order of the epoch; a carried document occurs twice.
        most_documents: maximum number of documents of a pack, in any epoch.
        key: plain values that determine the items, beside lengths, targets and options.
        min_prefix: shortest beginning that documents share, for the collator; None = they share none.
    """

    lengths: Integers
    targets: Integers | None
    weights: NDArray[np.float64] | None
    carried_in: Integers
    slots: Integers
    sequence: NDArray[Any]
    most_documents: int
    key: dict[str, Any] = field(default_factory=dict)
    min_prefix: int | None = None

    def documents(self, items: Integers) -> Integers:
        """Document numbers of these items, item after item."""
        return items

    def packs_of_documents(self, packs: Packs) -> Packs:
        """Packs of documents from packs of items."""
        return packs

    def attention(self, items: NDArray[Any]) -> AttentionPairs | None:
        """Attention of these items, for `CostModel.cost`; None = each is one document."""
        return None

    def places(self, positions: NDArray[Any]) -> NDArray[Any]:
        """(documents,) place of each in the epoch's order of documents, for items at these positions of `sequence`."""
        return positions

    def added(self, items: Integers) -> Integers:
        """(documents of these items,) tokens that each document adds to the documents before it in its item."""
        return self.lengths[items]

    def least(self, items: Integers, options: PlanOptions) -> tuple[int, int]:
        """Proven lower bounds on the slots, and on the number, of any packs of the documents of these items."""
        planned = self.slots[items]
        limit = options.max_documents or len(planned)
        return int(planned.sum()), simple_bound(count(planned), options.capacity, limit)


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedItems(Items):
    """Items of documents that share the tokens of their beginnings, numbered in the order of the epoch.

    Attributes:
        members: document numbers of each item; a document may occur several times.
        member_places: (members,) place of each member in the epoch's order of documents.
        shared: (members,) tokens of each member that the member before it computes.
        pairs: attention of each item.
        least_slots: proven lower bound on the slots of any packs that hold all documents of the epoch.
        answers: (all documents, 2) int64 where a document of the plan is a pair: tokens of the first of the two, and
            tokens that both have and that are computed once; None = it is not.
    """

    members: Packs
    member_places: Integers
    shared: Integers
    pairs: AttentionPairs
    least_slots: int
    answers: Integers | None = None

    def entries(self, items: Integers) -> Integers:
        """(members of these items,) indices into `members.order` and `shared`, item after item."""
        starts, sizes = self.members.offsets[items], self.members.sizes()[items]
        ends = offsets_of(sizes)
        return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], sizes)

    def documents(self, items: Integers) -> Integers:
        """See `Items`."""
        return self.members.order[self.entries(items)]

    def packs_of_documents(self, packs: Packs) -> Packs:
        """See `Items`."""
        offsets = offsets_of(self.members.sizes()[packs.order])
        return Packs(self.documents(packs.order), offsets[packs.offsets])

    def attention(self, items: NDArray[Any]) -> AttentionPairs:
        """See `Items`."""
        return self.pairs.take(items)

    def places(self, positions: NDArray[Any]) -> NDArray[Any]:
        """See `Items`; an item's position is its number."""
        return self.member_places[self.entries(positions)]

    def added(self, items: Integers) -> Integers:
        """See `Items`."""
        entries = self.entries(items)
        documents = self.members.order[entries]
        own = self.lengths[documents] - self.shared[entries]
        return own if self.answers is None else own - self.answers[documents, 1]

    def least(self, items: Integers, options: PlanOptions) -> tuple[int, int]:
        """See `Items`. Other items may share more; without the items left out, the bound is lower by their slots."""
        slots = self.least_slots - (int(self.slots.sum()) - int(self.slots[items].sum()))
        return slots, -(-max(slots, 1) // options.capacity)


class ItemSource(ABC):
    """Makes the items of each epoch."""

    @abstractmethod
    def items(
        self, seed: int = 0, epoch: int = 0, carried: ArrayLike | None = None, widened: int = 1
    ) -> Items:
        """The items of an epoch, in its order.

        Args:
            seed: of the order, as in `multipack.plan`.
            epoch: from 0; with the seed it determines the order.
            carried: numbers of the documents left over by the epoch before, which come first; None = none.
            widened: number by which the windows of the order, whose documents form items, are multiplied.
        """

    def is_whole(self, widened: int) -> bool:
        """Whether windows wider than this multiple would give the same items."""
        return True
