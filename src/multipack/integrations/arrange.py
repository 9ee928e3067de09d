"""Documents in a given order → steps of so many packs, for hosts that cannot run an empty pack.

    order   a b c d e f g h i j …        the host's own shuffle
    step 0  |ad|be|cg|                   `packs` packs, alike in cost, at most `capacity` tokens each
    step 1  |fj|hk|i·|                   as many in every step; what fills no step is left, and named

A plan may leave packs of a step empty where it has few, long documents. A rank without a batch would wait for
ever, so documents are moved here from steps that have more than they need: a document always fits an empty pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappush, heapreplace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.lengths import check_lengths, name_documents
from multipack.planning.packing import Packs, pack
from multipack.planning.plan import Balance, Plan, plan

Integers = NDArray[np.int64]


class Steps:
    """The steps of one epoch, each a list of packs; dealt when they are asked for.

    Args:
        made: a plan whose `packs_per_step` is `packs`.
        packs: packs of each step.

    Attributes:
        plan: the plan.
        packs: packs of each step. Every step has so many, but for the last one where there are fewer
            documents than packs.
        left: (documents,) positions that no step took.
    """

    def __init__(self, made: Plan, packs: int) -> None:
        self.plan, self.packs, self.left = made, packs, made.dropped
        self._moved: dict[int, list[Integers]] = {}
        ends = made.pack_offsets[made.step_offsets]
        counts = np.diff(ends)
        if len(counts) and counts.min() < packs:
            self._fill(counts.copy())

    def __len__(self) -> int:
        return self.plan.num_steps

    def __getitem__(self, step: int) -> list[Integers]:
        """The packs of a step: positions in the lengths that were arranged."""
        if step in self._moved:
            return self._moved[step]
        return [documents for documents in self.plan.deal(step, self.packs) if len(documents)]

    def __iter__(self) -> Iterator[list[Integers]]:
        return (self[step] for step in range(len(self)))

    @property
    def tokens(self) -> int:
        """Tokens in the steps."""
        return int(self.plan.lengths.sum() - self.plan.lengths[self.left].sum())

    @property
    def full(self) -> bool:
        """Whether every step has all its packs."""
        return len(self.plan.lengths) - len(self.left) >= len(self) * self.packs

    def positions(self, first: int, last: int) -> Integers:
        """The positions that steps first … last − 1 hold."""
        if self._moved:
            held = [documents for step in range(first, last) for documents in self[step]]
            return np.concatenate(held) if held else np.empty(0, dtype=np.int64)
        ends = self.plan.pack_offsets[self.plan.step_offsets]
        return self.plan.order[ends[first] : ends[last]]

    def _fill(self, counts: Integers) -> None:
        """Give empty packs a document each: one that is left, else from the nearest step with one to spare.

        Where no step has one to spare, the last one gives, and is the only one that lacks documents then.
        """
        for step in np.flatnonzero(counts < self.packs).tolist():
            while counts[step] < self.packs:
                spare = np.flatnonzero(counts > self.packs)
                giver = int(spare[np.abs(spare - step).argmin()]) if len(spare) else len(counts) - 1
                self._moved.setdefault(step, self[step])
                if len(self.left):
                    given, self.left = self.left[:1], self.left[1:]
                elif giver == step or counts[giver] == 1:
                    return
                else:
                    given = self._take(giver)
                    counts[giver] -= 1
                self._moved[step] = [*self._moved[step], given]
                counts[step] += 1

    def _take(self, step: int) -> Integers:
        """Take the shortest document out of the pack that has most."""
        packs = self._moved.get(step) or self[step]
        fullest = max(packs, key=len)
        taken = int(np.argmin(self.plan.lengths[fullest]))
        rest = [np.delete(each, taken) if each is fullest else each for each in packs]
        self._moved[step] = [each for each in rest if len(each)]
        return fullest[taken : taken + 1]


def arrange(
    lengths: Integers,
    *,
    capacity: int,
    packs: int,
    window: int,
    balance: Balance,
    drop_last: bool = False,
    steps: int | None = None,
    max_documents: int | None = None,
) -> Steps:
    """Cut documents, in their order, into steps of `packs` packs.

    Args:
        lengths: (documents,) tokens of each, 1 … capacity.
        capacity: most tokens of a pack.
        packs: packs of a step.
        window: steps planned together.
        balance: what the packs of a step shall agree in.
        drop_last: full steps only: what best fit packs into fewer than `packs` packs at the end is left.
        steps: make exactly so many, and leave what does not fit.
        max_documents: most documents of a pack; None = no limit.

    Returns:
        The steps. `left` is empty unless `drop_last` or `steps` asked for fewer than hold every document.
        There is always one step, and never one more than documents could fill.
    """
    fewest = len(pack(lengths, capacity, "best_fit", max_documents))
    wanted = steps
    if steps is None and drop_last and fewest % packs:
        wanted = max(1, fewest // packs)

    def planned(number: int | None, keep: bool) -> Plan:
        return plan(
            lengths,
            capacity=capacity,
            packs_per_step=packs,
            order="given",
            tail="keep" if keep else "drop",
            window=window,
            balance=balance,
            steps=number,
            max_documents=max_documents,
        )

    if wanted is not None and wanted * packs < fewest:
        return Steps(planned(wanted, keep=False), packs)
    made = planned(None, keep=True)
    if wanted is None:
        # Other orders of the same documents shall fit into as many steps, and no step shall lack documents.
        wanted = min(max(made.num_steps, -(-fewest // packs)), -(-len(lengths) // packs))
        if wanted * packs > len(lengths) and len(lengths) // packs * packs >= fewest:
            wanted = len(lengths) // packs
    # To ask for a number of steps may widen the window, so it is only asked for where it differs.
    return Steps(made if wanted == made.num_steps else planned(wanted, keep=True), packs)


def fitting(
    lengths: ArrayLike, capacity: int, overlong: str, setting: str
) -> tuple[Integers, NDArray[np.bool_]]:
    """Lengths as int64, and which documents fit.

    Args:
        lengths: (documents,) tokens of each, a list or an array.
        capacity: most tokens of a pack.
        overlong: `error`, or `drop` documents that are longer.
        setting: what the host calls the capacity.

    Raises:
        ValueError: no lengths; documents are too long and `overlong` is `error`, or none is left.
    """
    if overlong not in ("error", "drop"):
        raise ValueError(f"overlong={overlong!r} is unknown; choose one of error, drop")
    checked = check_lengths(lengths)
    fits = checked <= capacity
    if overlong == "error" and not fits.all():
        raise ValueError(
            f"{name_documents(checked, ~fits)}, but {setting}={capacity:,}; raise {setting} to {checked.max():,},"
            " truncate or split these documents, or leave them out with overlong='drop'"
        )
    if not fits.any():
        raise ValueError(f"every document is longer than {setting}={capacity:,}: none is left to pack")
    return checked, fits


def in_order(lengths: Integers, bin_capacity: int, bin_size: int | None, bins: int | None = None) -> Packs:
    """Bins of documents in their own order: next fit, then cut or split to a number of bins.

    Args:
        lengths: (documents,) tokens of each.
        bin_capacity: most tokens of a bin.
        bin_size: most documents of a bin, or None.
        bins: make exactly so many, at most as many as there are documents: bins of the most documents
            are halved while they are too few, and the last ones are left out where they are too many.
    """
    made = pack(lengths, bin_capacity, "next_fit", bin_size)
    if bins is None or bins == len(made):
        return made
    if bins < len(made):
        return Packs(made.order[: made.offsets[bins]], made.offsets[: bins + 1])
    heap = [
        (int(first - last), int(first)) for first, last in zip(made.offsets, made.offsets[1:], strict=False)
    ]
    heapify(heap)
    starts = [start for _, start in heap]
    for _ in range(bins - len(made)):
        size, first = -heap[0][0], heap[0][1]
        middle = first + size // 2
        heapreplace(heap, (-(size // 2), first))
        heappush(heap, (-(size - size // 2), middle))
        starts.append(middle)
    return Packs(made.order, np.array([*sorted(starts), len(lengths)], dtype=np.int64))


def side_by_side(costs: Integers, ranks: int, window: int, full: bool) -> list[int]:
    """An order of the batches in which each `ranks` neighbors are alike in cost, and the groups stay in place.

    Hosts deal batches to ranks like cards. Only batches that were planned together change places; a last batch
    that is not full stays the last.
    """
    count = len(costs) - (not full)
    if ranks == 1:
        return list(range(len(costs)))
    chunk = max(ranks, window // ranks * ranks)
    turns: list[int] = []
    for first in range(0, count, chunk):
        members = first + np.argsort(-costs[first : min(first + chunk, count)], kind="stable")
        groups = [members[at : at + ranks] for at in range(0, len(members), ranks)]
        whole = [group for group in groups if len(group) == ranks]
        rest = [group for group in groups if len(group) < ranks]
        for group in [*sorted(whole, key=lambda group: float(group.mean())), *rest]:
            turns += np.sort(group).tolist()
    return [*turns, *range(count, len(costs))]
