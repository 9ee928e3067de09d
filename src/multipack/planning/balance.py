"""Documents divided among ranks once: rollouts of a reinforcement learning step, a batch that is at hand.

    lengths   7 5 4 3 3 2 2 1 1         2 ranks, budget 8
    rank 0    |AAAAAAA·|DDDFFGG·|       as many micro-batches on each rank, none empty,
    rank 1    |BBBBBHI·|CCCCEEE·|       none above the budget, every document once

`balance` is a pure function: processes that know the same lengths get the same result without a collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from multipack.planning.cost import CostModel
from multipack.planning.deal import Arrangement, costliest_first, least_maximum
from multipack.planning.histogram import count, simple_bound
from multipack.planning.kernels.placing import fill_empty, place_documents, place_inside, sums
from multipack.planning.lengths import (
    Integers,
    Packs,
    check_integer,
    check_integers,
    name_documents,
    packs_from,
    short,
)
from multipack.planning.options import check_choice
from multipack.planning.packing import pack
from multipack.shapes import ModelShape

Cost = CostModel | ModelShape | ArrayLike | Callable[[Integers], ArrayLike] | None
"""The cost of documents: a model's, one number a document, a function of the lengths, or None for their tokens."""

Together = Literal["rank", "micro_batch"]
"""Where the members of a group stay together: on one rank, or in one micro-batch."""

_FRACTIONS = 1 << 32
"""Costs that are not integers are rounded to this fraction of the largest."""


@dataclass(frozen=True, eq=False, repr=False)
class RankBatches:
    """The micro-batches of each rank, made by `balance`: `result[rank][m]` is a list of document numbers.

    Attributes:
        packs: micro-batches as flat arrays: pack rank · micro_batches + m is micro-batch m of a rank.
        ranks: number of ranks.
        micro_batches: number of micro-batches of each rank.
        least_micro_batches: proven lower bound on that number.
        loads: (ranks,) int64 cost of each rank's documents.
        least: proven lower bound on the largest load, for this number of micro-batches.
    """

    packs: Packs
    ranks: int
    micro_batches: int
    least_micro_batches: int
    loads: Integers
    least: int

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: int) -> list[list[int]]:
        """The micro-batches of a rank, the costliest first; document numbers rise inside each."""
        number = rank + self.ranks if rank < 0 else rank
        if not 0 <= number < self.ranks:
            raise IndexError(f"rank {rank} of {self.ranks}")
        first = number * self.micro_batches
        return [self.packs[first + m].tolist() for m in range(self.micro_batches)]

    def __iter__(self) -> Iterator[list[list[int]]]:
        return (self[rank] for rank in range(self.ranks))

    def __repr__(self) -> str:
        return (
            f"RankBatches({self.ranks} ranks of {self.micro_batches} micro-batches, {len(self.packs.order):,}"
            f" documents, max over mean {self.max_over_mean:.6f}, proven least {self.least_max_over_mean:.6f})"
        )

    @property
    def max_over_mean(self) -> float:
        """The largest load of a rank over the mean load: 1 if all are equal."""
        return self._over_mean(int(self.loads.max()))

    @property
    def least_max_over_mean(self) -> float:
        """A proven lower bound on `max_over_mean`: no division of these documents is better."""
        return self._over_mean(self.least)

    def _over_mean(self, load: int) -> float:
        total = int(self.loads.sum())
        return load * self.ranks / total if total else 1.0


def balance(
    lengths: ArrayLike,
    ranks: int,
    *,
    budget: int | None,
    cost: Cost = None,
    groups: ArrayLike | None = None,
    together: Together = "rank",
) -> RankBatches:
    """Divide documents among ranks and micro-batches, with equal costs of ranks under a limit of tokens.

    Every document is in exactly one micro-batch. All ranks have the same number of micro-batches: the least for which
    an arrangement within the budget was found. None is empty.

    Args:
        lengths: (documents,) tokens of each document; 0 is allowed.
        ranks: number of ranks.
        budget: maximum tokens of a micro-batch; None = no limit, and one micro-batch a rank.
        cost: what is balanced between ranks: None = tokens; a `CostModel` or `ModelShape`; (documents,) costs, at
            least 0; or a function of the lengths that returns them.
        groups: (documents,) the group of each document: integers or strings. A group is not divided among ranks.
        together: `rank`, or `micro_batch`: a group is not divided among micro-batches either.

    Raises:
        ValueError: a value that is not allowed, a document or group above the budget, or too few documents or groups
            for all micro-batches; the message names them and says what to change.
    """
    ranks = check_integer("ranks", ranks)
    tokens = _check_lengths(lengths, ranks)
    limit = int(tokens.sum()) if budget is None else check_integer("budget", budget)
    check_choice("together", together, Together)
    costs = _check_cost(cost, tokens, ranks)
    if tokens.max() > limit:
        raise ValueError(
            f"{name_documents(tokens, tokens > limit)}, but a micro-batch holds budget={limit:,}; raise the budget to"
            f" {int(tokens.max()):,}, or truncate or remove these documents"
        )
    limit = max(min(limit, int(tokens.sum())), 1)
    if groups is None or (ranks == 1 and together == "rank"):
        return _divide(tokens, costs, ranks, limit, "documents")
    members = _check_groups(groups, len(tokens))
    if together == "rank":
        return _divide_groups(tokens, costs, members, ranks, limit)
    inside = sums(members, tokens, int(members.max()) + 1)
    work = sums(members, costs, len(inside))
    if inside.max() > limit:
        worst = int(np.argmax(inside))
        raise ValueError(
            f"the group of document {int(np.argmax(members == worst))} has {inside[worst]:,} tokens, but a micro-batch"
            f" holds budget={limit:,}; raise the budget to {int(inside.max()):,}, or set together='rank'"
        )
    return _of_documents(_divide(inside, work, ranks, limit, "groups"), members)


def partition(weights: ArrayLike, parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Parts of equal sums, as lists of rising item numbers; none is empty.

    Args:
        weights: (items,) integers of at least 0.
        parts: number of parts.
        equal_size: every part has the same number of items.

    Raises:
        ValueError: fewer items than parts, or a number that cannot be divided into parts of equal size.
    """
    parts = check_integer("parts", parts)
    checked = _check_lengths(weights, parts, "weights")
    if equal_size and len(checked) % parts:
        raise ValueError(
            f"{len(checked):,} items cannot be divided into {parts} parts of equal size; set equal_size=False, or give"
            f" a multiple of {parts} items"
        )
    size = len(checked) // parts if equal_size else 0
    made = _divide(checked, checked, parts, max(int(checked.sum()), 1), "items", size)
    return [micro_batches[0] for micro_batches in made]


def least_packs(lengths: Integers, budget: int) -> int:
    """Number of packs of at most `budget` tokens that best fit needs; documents of 0 tokens need none."""
    return int(_best_fit(lengths, budget).max()) + 1


def _divide(
    lengths: Integers, costs: Integers, ranks: int, budget: int, items: str, size: int = 0
) -> RankBatches:
    """The result of `balance` for items that stay whole; `size` is the most items of a micro-batch, 0 for no limit."""
    order = costliest_first(lengths, costs)
    lengths, costs = lengths[order], costs[order]
    fewest = _fewest(lengths, ranks, budget)
    for micro_batches in itertools.count(fewest):
        if len(lengths) < ranks * micro_batches:
            raise ValueError(_too_few(lengths, ranks, micro_batches, budget, items))
        # The micro-batches of one rank are balanced like ranks.
        across, inside = (ranks, micro_batches) if ranks > 1 else (micro_batches, 1)
        shared = Arrangement(lengths, costs, across, inside, budget, size)
        goal = _least_load(lengths, costs, across, inside, budget)
        placed = _arranged(shared, goal, np.full(len(lengths), -1, dtype=np.int64))
        if placed.min() < 0:
            own = _best_fit(lengths, budget)
            placed = _arranged(shared, goal, own) if own.max() < shared.packs else placed
        if placed.min() >= 0:
            break
    least = goal if ranks > 1 else int(costs.sum())
    return _finished(order, placed, costs, (ranks, micro_batches), fewest, least)


def _divide_groups(
    lengths: Integers, costs: Integers, members: Integers, ranks: int, budget: int
) -> RankBatches:
    """The result of `balance` for documents whose groups stay on one rank; `members` are the documents' groups."""
    num_groups = int(members.max()) + 1
    sizes, inside = np.bincount(members), sums(members, lengths, num_groups)
    if num_groups < ranks:
        raise ValueError(_too_few(inside, ranks, 1, int(inside.sum()), "groups"))
    order = costliest_first(lengths, costs)
    lengths, costs, members = lengths[order], costs[order], members[order]
    fewest = max(_fewest(lengths, ranks, budget), -(-int(inside.max()) // budget))
    micro_batches = fewest - 1
    while True:
        micro_batches += 1
        if len(lengths) < ranks * micro_batches:
            raise ValueError(
                f"{len(lengths):,} documents in {num_groups:,} groups cannot fill {micro_batches} micro-batches of"
                f" budget={budget:,} tokens on each of {ranks} ranks, and none may be empty; raise the budget, use"
                " fewer ranks, or divide large groups"
            )
        # Equal costs may leave a rank with too little room or with too few documents.
        for weights in (sums(members, costs, num_groups), inside, sizes):
            by_weight = costliest_first(inside, weights)
            heavy, room = (inside[by_weight], weights[by_weight]), micro_batches * budget
            shared = Arrangement(*heavy, ranks, 1, room)
            rank_of = np.empty(num_groups, dtype=np.int64)
            goal = _least_load(*heavy, ranks, 1, room)
            rank_of[by_weight] = _arranged(shared, goal, np.full(num_groups, -1, dtype=np.int64))
            placed = _on_ranks(lengths, costs, rank_of[members], ranks, micro_batches, budget)
            if placed.min() >= 0 and np.bincount(placed, minlength=ranks * micro_batches).min() > 0:
                work = np.sort(sums(members, costs, num_groups))[::-1]
                two = int(work[ranks - 1 : ranks + 1].sum()) if num_groups > ranks else 0
                least = max(_least_load(lengths, costs, ranks, micro_batches, budget), int(work[0]), two)
                return _finished(order, placed, costs, (ranks, micro_batches), fewest, least)


def _on_ranks(
    lengths: Integers, costs: Integers, own: Integers, ranks: int, micro_batches: int, budget: int
) -> Integers:
    """(documents,) pack of each document, micro-batch-major, on its rank `own`; −1 = none."""
    found = place_inside(lengths, costs, own, ranks, micro_batches, budget, len(lengths))
    for rank in np.unique(own[(found < 0) & (own >= 0)]):
        inside = np.flatnonzero(own == rank)
        packs = _best_fit(lengths[inside], budget)
        if packs.max() < micro_batches:
            fill_empty(packs, micro_batches)
            found[inside] = packs
    return np.where(found < 0, -1, found * ranks + own)


def _arranged(shared: Arrangement, goal: int, own: Integers) -> Integers:
    """The best arrangement; −1 for documents without a pack if none fits."""
    if shared.ranks == 1:
        return place_documents(shared.lengths, shared.costs, shared.packs, shared.capacity, shared.limit)
    return shared.arrange(goal, own)


def _finished(
    order: Integers, placed: Integers, costs: Integers, shape: tuple[int, int], fewest: int, least: int
) -> RankBatches:
    """The result of an arrangement: `placed` is the micro-batch-major pack of each document of `order`."""
    ranks, micro_batches = shape
    loads = sums(placed, costs, ranks * micro_batches).reshape(micro_batches, ranks)
    place_of = np.empty_like(loads)
    by_load = np.argsort(-loads, axis=0, kind="stable")  # the costliest of all ranks run at the same time
    np.put_along_axis(place_of, by_load, np.arange(micro_batches)[:, None], axis=0)
    number = np.arange(ranks) * micro_batches + place_of
    pack_of = np.empty_like(placed)
    pack_of[order] = number.ravel()[placed]
    packs = packs_from(pack_of, ranks * micro_batches)
    return RankBatches(packs, ranks, micro_batches, fewest, loads.sum(axis=0), least)


def _of_documents(divided: RankBatches, members: Integers) -> RankBatches:
    """The result for documents from the result for their groups."""
    pack_of = np.empty(len(divided.packs.order), dtype=np.int64)
    pack_of[divided.packs.order] = np.repeat(np.arange(len(divided.packs)), divided.packs.sizes())
    return replace(divided, packs=packs_from(pack_of[members], len(divided.packs)))


def _fewest(lengths: Integers, ranks: int, budget: int) -> int:
    """A proven lower bound on the micro-batches of each rank, at least 1."""
    if lengths.sum() <= ranks * budget and 2 * lengths.max() <= budget:
        return 1  # `simple_bound` would be the bound of the tokens
    held = lengths[lengths > 0]
    return -(-simple_bound(count(held), budget, len(held)) // ranks)


def _best_fit(lengths: Integers, budget: int) -> Integers:
    """(documents,) pack of each document by best fit; documents of 0 tokens are in the first one."""
    held, pack_of = np.flatnonzero(lengths), np.zeros(len(lengths), dtype=np.int64)
    if len(held):
        packs = pack(lengths[held], min(budget, int(lengths.sum())))
        pack_of[held[packs.order]] = np.repeat(np.arange(len(packs)), packs.sizes())
    return pack_of


def _least_load(lengths: Integers, costs: Integers, ranks: int, micro_batches: int, budget: int) -> int:
    """A proven lower bound on the largest load of a rank, for documents in falling order of cost.

    Beside the bound of `least_maximum`: the rank with the costliest document has a document for each other micro-batch.
    """
    alone = int(costs[0]) + int(costs[len(costs) - micro_batches + 1 :].sum())
    return max(least_maximum(lengths, costs, ranks, micro_batches * budget), alone)


def _too_few(lengths: Integers, ranks: int, micro_batches: int, budget: int, items: str) -> str:
    """The message where there are fewer items than micro-batches."""
    most, packs = len(lengths), least_packs(lengths, budget)
    fewer = max(number for number in range(1, ranks) if number * -(-packs // number) <= most)
    advice = f"use at most {fewer} rank{'s' if fewer > 1 else ''}"
    if micro_batches == 1:
        return f"{most:,} {items} cannot be divided among {ranks} ranks, none of them empty; {advice}"
    slots, low, high = most // ranks * ranks, budget, int(lengths.sum())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if least_packs(lengths, middle) <= slots else (middle + 1, high)
    return (
        f"{most:,} {items} cannot fill {micro_batches} micro-batches of budget={budget:,} tokens on each of {ranks}"
        f" ranks, and none may be empty; {advice}, or raise the budget to {high:,}"
    )


def _check_lengths(lengths: ArrayLike, ranks: int, name: str = "lengths") -> Integers:
    """Lengths of at least 0 as int64, whose sum times the ranks does not overflow."""
    checked = check_integers(name, lengths)
    if not len(checked):
        raise ValueError(f"{name} is empty: there is nothing to divide")
    if checked.min() < 0:
        first = int(np.argmax(checked < 0))
        raise ValueError(f"{name} must be at least 0: {name}[{first}] is {checked[first]}")
    if float(checked.sum(dtype=np.float64)) * ranks >= 1 << 61:
        raise ValueError(f"the sum of {name} times {ranks} must be below 2^61; divide them by a constant")
    return checked


def _check_cost(cost: Cost, tokens: Integers, ranks: int) -> Integers:
    """(documents,) int64 costs of at least 0."""
    if cost is None:
        return tokens
    if isinstance(cost, CostModel | ModelShape):
        model = cost if isinstance(cost, CostModel) else CostModel.from_shape(cost)
        held, cost = np.flatnonzero(tokens), np.zeros_like(tokens)
        if len(held):
            cost[held] = model.cost(tokens[held])
    given = np.asarray(cost(tokens) if callable(cost) else cost)
    if given.shape != tokens.shape or given.dtype.kind not in "iuf":
        raise ValueError(
            f"cost must be a CostModel, a function of the lengths, or {len(tokens):,} numbers, one a document, got"
            f" {given.dtype} of shape {given.shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if len(wrong):
        raise ValueError(
            f"costs must be finite and at least 0: that of document {wrong[0]} is {given[wrong[0]]}"
        )
    if given.dtype.kind == "f" and given.max() > 0:
        given = np.rint(given / given.max() * _FRACTIONS)
    if float(given.sum(dtype=np.float64)) * ranks >= 1 << 61:
        raise ValueError(f"the sum of the costs times {ranks} must be below 2^61; divide them by a constant")
    return given.astype(np.int64)


def _check_groups(groups: ArrayLike, documents: int) -> Integers:
    """(documents,) number of each document's group, from 0."""
    given = np.asarray(groups)
    if given.shape != (documents,):
        raise ValueError(f"groups must be {documents:,} values, one a document, got shape {given.shape}")
    try:
        return np.unique(given, return_inverse=True)[1].astype(np.int64)
    except TypeError:
        raise ValueError(f"groups must be integers or strings, got {short(groups)}") from None
