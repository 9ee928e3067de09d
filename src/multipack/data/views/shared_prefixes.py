"""`SharedPrefixes`: the items of an epoch, whose documents share the tokens of their beginnings.

    pairs    each preference pair                           the same items in every epoch
    groups   neighboring documents with the same prompt     the same groups; one larger than a pack is cut
    all      documents with common beginnings, among `window` steps of the epoch's order

    order    3 0 7 2 | 5 1 4 6        windows of the order
    sorted   0 3 2 7 | 1 4 5 6        by tokens, in each window
    items    {0 3 2} {7} | {1 4} …    cut so that few tokens are repeated (common_prefix.cut)

A model computes the tokens that documents of one pack share once (prefix_tree.py). Items of one pack may have a common
beginning, too; then the pack has fewer slots than planned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.data.views.common_prefix import (
    LARGEST_TOKEN,
    Tokens,
    common_prefixes,
    cut,
    least_slots,
    shared,
    sort_by_tokens,
)
from multipack.data.views.documents import Documents
from multipack.planning.attention_pairs import AttentionPairs
from multipack.planning.items import ItemSource, SharedItems
from multipack.planning.lengths import (
    Integers,
    Packs,
    check_carried,
    check_integers,
    check_lengths,
    check_targets,
    check_weights,
    offsets_of,
)
from multipack.planning.options import PlanOptions, check_item_options
from multipack.planning.steps import permutation

TREES_PER_PACK = 4
"""With `all`, an item has at most 1/4 of a pack's slots. InstructLab as bytes: in packs of 32,768, items of
1/2, 1/4 and 1/8 reach an efficiency (tokens over slots) of 137, 136 and 136 %, and balance 4 ranks to 98.5,
99.9 and 99.99 %; in packs of 8,192 they reach 125, 125 and 109 %."""


@dataclass(frozen=True, eq=False)
class FlatTokens:
    """Tokens of documents in one array.

    Attributes:
        tokens: flat tokens.
        starts, lengths: (documents,) first token and number of tokens of each document.
    """

    tokens: Tokens
    starts: Integers
    lengths: Integers

    @classmethod
    def of(cls, documents: Sequence[ArrayLike]) -> FlatTokens:
        """Tokens of documents given as lists of token numbers."""
        lengths = check_lengths([len(np.asarray(each)) for each in documents])
        tokens = np.concatenate([np.asarray(each) for each in documents])
        if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > LARGEST_TOKEN:
            raise ValueError(f"tokens must be whole numbers from 0 to {LARGEST_TOKEN:,}")
        dtype = np.uint16 if tokens.max() < 1 << 16 else np.uint32
        return cls(tokens.astype(dtype), offsets_of(lengths)[:-1], lengths)

    @classmethod
    def of_view(cls, documents: Documents) -> FlatTokens:
        """Tokens of a view; each preference pair gives two documents. One shard is not copied."""
        pieces, store = documents.pieces, documents.store
        if store.vocabulary_size > LARGEST_TOKEN + 1:
            raise ValueError(
                f"data.share_prefixes compares tokens below {LARGEST_TOKEN + 1:,}, and the vocabulary of {store.path}"
                f" has {store.vocabulary_size:,}: use data.share_prefixes=off"
            )
        parts = [shard.tokens for shard in store.shards]
        sizes = np.array([len(part) for part in parts])
        bases = [
            shard.offsets[:-1] + base
            for shard, base in zip(store.shards, np.cumsum(sizes) - sizes, strict=True)
        ]
        begin = np.concatenate(bases)
        starts, lengths = begin[pieces["document"]] + pieces["start"], np.ascontiguousarray(pieces["length"])
        copied = np.flatnonzero(pieces["prefix"])  # pieces that repeat the prompt are not contiguous
        if len(copied):
            parts += [documents[number].tokens for number in copied.tolist()]
            starts[copied] = int(sizes.sum()) + offsets_of(lengths[copied])[:-1]
        return cls(parts[0] if len(parts) == 1 else np.concatenate(parts), starts, lengths)

    def common(self, order: Integers) -> Integers:
        """(documents,) tokens that each document of `order` has in common with the one before it; 0 for the first."""
        return common_prefixes(self.tokens, self.starts, self.lengths, order)


class SharedPrefixes(ItemSource):
    """Makes the items of each epoch. An entry is a document, or a preference pair.

    Args:
        tokens: tokens of the documents; of pairs, two documents an entry.
        groups: (entries,) whole numbers: neighboring entries with the same one are an item, cut if it is larger than a
            pack. None = entries of a window of the order with common beginnings.
        options: of the plan: capacity, window and order.
        min_prefix: shorter beginnings are not shared.
        pairs: whether an entry is two documents.
        targets: (entries,) target tokens; None = all but the first token of each document.
        weights: (entries,) weights in the loss; None = 1.
        window: of the cost model's attention, in tokens; 0 = none.

    Attributes:
        lengths, targets, weights: of the entries.

    Raises:
        ValueError: options that items cannot have, or an entry with more slots than a pack.
    """

    def __init__(
        self,
        tokens: FlatTokens,
        *,
        groups: ArrayLike | None,
        options: PlanOptions,
        min_prefix: int = 16,
        pairs: bool = False,
        targets: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        window: int = 0,
    ) -> None:
        if min_prefix < 1:
            raise ValueError(f"data.min_prefix={min_prefix} must be at least 1")
        check_item_options(options, "data.share_prefixes")
        self._tokens, self._options, self._min_prefix, self._window = tokens, options, min_prefix, window
        self._answers = answers = 2 if pairs else 1
        self.lengths = self._of_entries(tokens.lengths)
        self.targets = check_targets(self.lengths - answers if targets is None else targets, self.lengths)
        self.weights = None if weights is None else check_weights(weights, len(self.lengths))
        self._groups = None if groups is None else _numbered(groups, len(self.lengths))
        inside = self._shared_inside()
        self._slots = check_lengths(self._of_entries(tokens.lengths - inside), options.capacity)
        each = AttentionPairs.of(tokens.lengths, inside, window)
        self._pairs, self._windowed = self._of_entries(each.pairs), self._of_entries(each.windowed)
        # (entries, 2) tokens of the first document of a pair, and tokens that the second shares with it
        self._two = np.stack([tokens.lengths[::2], inside[1::2]], axis=1) if pairs else None
        self._sort()

    def _of_entries(self, values: Integers) -> Integers:
        """(entries,) sums over the documents of each entry."""
        return values.reshape(-1, self._answers).sum(axis=1)

    def _shared_inside(self) -> Integers:
        """(documents,) tokens that the second document of a pair shares with the first; 0 for others."""
        if self._answers == 1:
            return np.zeros_like(self._tokens.lengths)
        common = self._tokens.common(np.arange(len(self._tokens.lengths)))
        common[::2] = 0
        return shared(common, self._min_prefix)

    def _sort(self) -> None:
        """Sort the documents by their tokens, for the items of all epochs, bounds of packs, and the key."""
        tokens, capacity = self._tokens, self._options.capacity
        order = sort_by_tokens(tokens.tokens, tokens.starts, tokens.lengths)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        self._first = np.arange(0, len(order), self._answers)  # document whose beginning an entry shares
        self._rank = rank[self._first]
        again = shared(tokens.common(order), self._min_prefix)
        self.least_slots = least_slots(tokens.lengths[order], again, capacity)
        own = np.sort(tokens.lengths[order] - np.maximum(again, np.append(again[1:], 0)))
        self._most = int(np.searchsorted(np.cumsum(own), capacity, side="right"))
        digest = hashlib.sha256(order.tobytes())
        for values in (again, *([] if self._groups is None else [self._groups])):
            digest.update(values.tobytes())
        self._key = {"min_prefix": self._min_prefix, "prefixes": digest.hexdigest()[:16]}

    @classmethod
    def of(
        cls, documents: Documents, share: str, options: PlanOptions, *, min_prefix: int = 16, window: int = 0
    ) -> SharedPrefixes:
        """Items of a view by `data.share_prefixes`: `pairs`, `groups` or `all`; other arguments as of the class.

        Raises:
            ValueError: `pairs`, but the documents are not pairs; see the class.
        """
        pairs = documents.size > 1
        if share == "pairs" and not pairs:
            raise ValueError(
                "data.share_prefixes=pairs is about preference pairs, which these documents are not: use groups or all"
            )
        tokens = FlatTokens.of_view(documents)
        groups = np.arange(len(documents)) if share == "pairs" else None
        return cls(
            tokens,
            groups=_groups_of(documents, tokens) if share == "groups" else groups,
            options=options,
            min_prefix=min_prefix,
            pairs=pairs,
            targets=documents.target_counts,
            weights=documents.weights,
            window=window,
        )

    def is_whole(self, widened: int) -> bool:
        """See `ItemSource`."""
        return self._groups is not None or self._window_tokens(widened) >= 2 * int(self.lengths.sum())

    def _window_tokens(self, widened: int) -> int:
        options = self._options
        return options.packs_per_step * options.mean * options.window * widened

    def items(
        self, seed: int = 0, epoch: int = 0, carried: ArrayLike | None = None, widened: int = 1
    ) -> SharedItems:
        """See `ItemSource`; `carried` are numbers of entries."""
        opening = check_carried(carried, len(self.lengths))
        sequence, part = self._order(seed, epoch, opening, self._window_tokens(widened))
        by_tokens = np.lexsort((self._rank[sequence], part))
        members, part = sequence[by_tokens], part[by_tokens]
        again = shared(self._tokens.common(self._first[members]), self._min_prefix)
        again[np.diff(part, prepend=-1) != 0] = 0
        slots, limit = self._slots[members], self._options.capacity
        if self._groups is None:
            begins = cut(slots, again, limit // TREES_PER_PACK)
        else:
            begins = _together(slots, again, part, limit)
        again = np.where(begins, 0, again)
        starts = np.flatnonzero(begins)
        order = np.argsort(by_tokens[starts], kind="stable")
        rearranged = Packs(members, np.append(starts, len(members)))
        repeats = AttentionPairs.of(again, window=self._window)

        def total(values: Integers) -> Integers:
            return np.add.reduceat(values, starts)[order]

        sizes = rearranged.sizes()[order]
        entries = np.arange(len(members)) + np.repeat(starts[order] - offsets_of(sizes)[:-1], sizes)
        return SharedItems(
            members=Packs(members[entries], offsets_of(sizes)),
            member_places=by_tokens[entries],
            shared=again[entries],
            slots=total(slots - again),
            sequence=np.arange(len(starts)),
            pairs=AttentionPairs(
                total(self._pairs[members] - repeats.pairs),
                total(self._windowed[members] - repeats.windowed),
            ),
            lengths=self.lengths,
            targets=self.targets,
            weights=self.weights,
            carried_in=opening,
            least_slots=self.least_slots,
            most_documents=self._most * (2 if self._options.tail == "carry" else 1),
            min_prefix=self._min_prefix,
            key=self._key,
            answers=self._two,
        )

    def _order(
        self, seed: int, epoch: int, opening: Integers, window_tokens: int
    ) -> tuple[Integers, Integers]:
        """The entries of an epoch in order, and the number of the window, or group, of each."""
        given = self._options.order == "given"
        if self._groups is None:
            count = len(self.lengths)
            own = np.arange(count) if given else permutation(seed, epoch, count)
            sequence = np.concatenate([opening, own])
            return sequence, (np.cumsum(self.lengths[sequence]) - 1) // window_tokens
        count = int(self._groups[-1]) + 1
        own = np.arange(count) if given else permutation(seed, epoch, count)
        place = np.empty(count, dtype=np.int64)
        place[own] = np.arange(count)
        sequence = np.concatenate([opening, np.argsort(place[self._groups], kind="stable")])
        changes = np.diff(self._groups[sequence], prepend=-1) != 0
        changes[len(opening) : len(opening) + 1] = True
        return sequence, np.cumsum(changes)


def _numbered(groups: ArrayLike, entries: int) -> Integers:
    """(entries,) the number of each entry's group, counted from 0: neighbors with the same number are one."""
    given = check_integers("groups", groups)
    if given.shape != (entries,):
        raise ValueError(f"groups must be {entries:,} numbers, one a document, got {len(given):,}")
    return np.cumsum(np.diff(given, prepend=given[:1]) != 0)


def _groups_of(documents: Documents, tokens: FlatTokens) -> Integers:
    """(entries,) the group of each entry: neighbors with the same prompt share it."""
    order = np.arange(0, len(tokens.starts), documents.size)
    common = tokens.common(order)
    prompts = np.array([documents.prompt_length(number) for number in range(len(documents))], dtype=np.int64)
    before = np.append(-1, prompts[:-1])
    return np.cumsum((prompts != before) | (common < prompts) | (prompts == 0))


def _together(slots: Integers, again: Integers, part: Integers, limit: int) -> NDArray[np.bool_]:
    """(members,) whether an item begins with each member: groups that fit stay whole, larger ones are cut."""
    begins = np.diff(part, prepend=-1) != 0
    starts = np.flatnonzero(begins)
    totals = np.add.reduceat(slots - again, starts)
    for group in np.flatnonzero(totals > limit).tolist():
        inside = slice(starts[group], starts[group + 1] if group + 1 < len(starts) else len(slots))
        begins[inside] = cut(slots[inside], again[inside], limit)
    return begins
