"""Tools written here from their documentation, in a few lines each. One function a row of `tools.py`.

No code of a tool is copied. Their seconds are those of these functions, not of the tools.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import count

import numba
import numpy as np

from balance import WORKLOAD, karmarkar_karp
from multipack.planning.kernels import fit
from multipack.planning.packing import pack
from packing.epoch import Epoch, Integers, by_pack, flat, repeated, shuffled, whole_steps

ROWS = 1000
"""Documents that `datasets.map(batched=True)` hands over at a time by default."""

BATCH = 1024
"""Rollouts of a step in verl's examples (`data.train_batch_size`)."""


def _place(lengths: Integers, capacity: int, ranks: int, even: bool) -> tuple[Integers, int]:
    """Longest first into the least loaded pack (`even`) or the first that fits: packs, and how many; 0 if none fits."""
    order = np.argsort(-lengths)
    pack_of = np.empty(len(lengths), dtype=np.int64)
    pack_of[order], used = _place_sorted(lengths[order], capacity, ranks, even)
    return pack_of, used


@numba.njit(cache=True)
def _place_sorted(lengths: Integers, capacity: int, ranks: int, even: bool) -> tuple[Integers, int]:
    pack_of, loads, used = np.empty(len(lengths), dtype=np.int64), np.zeros(ranks, dtype=np.int64), 0
    for document in range(len(lengths)):
        chosen = 0
        if even:
            for other in range(1, ranks):
                if loads[other] < loads[chosen]:
                    chosen = other
        else:
            while chosen < ranks - 1 and loads[chosen] + lengths[document] > capacity:
                chosen += 1
        loads[chosen] += lengths[document]
        if loads[chosen] > capacity:
            return pack_of, 0
        pack_of[document] = chosen
        used = max(used, chosen + 1)
    return pack_of, used


def multipack_v2(
    lengths: Integers, capacity: int, ranks: int, seed: int | None, even: bool = True
) -> Epoch | None:
    """The multipack_sampler V2 for quadratic attention: it always draws an order.

    A step is the longest beginning of the remaining documents that can be placed, longest first, each into the least
    loaded of the ranks' packs; found by bisection. The epoch ends at a step of fewer documents than ranks.
    """
    if seed is None:
        return None
    order = shuffled(len(lengths), seed)
    inside, ends, start, packs = lengths[order], np.cumsum(lengths[order]), 0, []
    while True:
        before = ends[start - 1] if start else 0
        low, high = 0, int(np.searchsorted(ends, before + ranks * capacity, "right")) - start + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = _place(inside[start : start + middle], capacity, ranks, even)[1] > 0
            low, high = (middle, high) if fits else (low, middle)
        placed, used = _place(inside[start : start + low], capacity, ranks, even)
        if used < ranks:
            return Epoch(*flat(packs))
        packs += by_pack(placed, order[start : start + low])
        start += low


def multipack_v2_linear(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch | None:
    """The same for linear attention: first fit; the epoch ends at a step of fewer packs than ranks."""
    return multipack_v2(lengths, capacity, ranks, seed, even=False)


def torchtune(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """PackedDataset of torchtune: next fit in the data's order; the packs are shuffled.

    Raises:
        ValueError: a document is longer than the capacity, as there.
    """
    if lengths.max() > capacity:
        raise ValueError(f"a document of {lengths.max():,} tokens is longer than a pack")
    placed, _ = fit.next_fit(lengths, capacity, len(lengths))
    return Epoch(*flat(repeated(by_pack(placed, np.arange(len(lengths))), ranks, seed)))


def nemo(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch | None:
    """NeMo's first_fit_shuffle: first fit in a random order; Megatron's sampler leaves out an incomplete last step."""
    if seed is None:
        return None
    order = shuffled(len(lengths), seed)
    packs = by_pack(fit.first_fit(_cut(lengths[order], capacity), capacity, len(lengths))[0], order)
    return _truncated(whole_steps(packs, ranks), lengths, capacity)


def spfhp(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch | None:
    """Krell's shortest-pack-first histogram packing: longest first, each into the pack of the most room."""
    if seed is None:
        return None
    order = np.argsort(-lengths, kind="stable")
    packs = by_pack(_worst_fit(_cut(lengths[order], capacity), capacity), order)
    return _truncated(repeated(packs, ranks, seed), lengths, capacity)


@numba.njit(cache=True)
def _worst_fit(lengths: Integers, capacity: int) -> Integers:
    """Each document into a pack of the most room, or into a new one. Packs of equal room are a stack."""
    pack_of = np.empty(len(lengths), dtype=np.int64)
    last, below = np.full(capacity + 1, -1, dtype=np.int64), np.empty(len(lengths), dtype=np.int64)
    most, packs = 0, 0
    for document in range(len(lengths)):
        while most > 0 and last[most] < 0:
            most -= 1
        if last[most] >= 0 and most >= lengths[document]:
            room, chosen = most, last[most]
            last[most] = below[chosen]
        else:
            room, chosen = capacity, packs
            packs += 1
        pack_of[document] = chosen
        room -= lengths[document]
        below[chosen], last[room] = last[room], chosen
        most = max(most, room)
    return pack_of


def lpfhp(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch | None:
    """Krell's longest-pack-first histogram packing: longest first, each into the pack of the least room that fits."""
    if seed is None:
        return None
    packs = list(pack(_cut(lengths, capacity), capacity, "best_fit"))
    return _truncated(repeated(packs, ranks, seed), lengths, capacity)


def llama_factory(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """LLaMA-Factory's packing: of every 1,000 documents, one pack after another is filled with the longest that fit.

    Longer documents than a pack are dropped with a warning.
    """
    packs = []
    for start in range(0, len(lengths), ROWS):
        window = np.arange(start, min(start + ROWS, len(lengths)))
        window = window[lengths[window] <= capacity]
        window = window[np.argsort(lengths[window], kind="stable")]
        numbers, sizes = window.tolist(), lengths[window].tolist()
        while numbers:
            packed, room = [], capacity
            while at := bisect.bisect_right(sizes, room):
                room -= sizes.pop(at - 1)
                packed.append(numbers.pop(at - 1))
            packs.append(np.array(packed))
    return Epoch(*flat(repeated(packs, ranks, seed)))


def verl(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """Dynamic batches of verl: a batch is divided among ranks, and each share into micro-batches, by Karmarkar-Karp.

    Ranks get equal numbers of documents; micro-batches are ⌈tokens / capacity⌉ of the largest share, and more until
    none is over the capacity (from 0.9; before, they were over it). Incomplete batches are left out.

    Raises:
        ValueError: a document is longer than the capacity; verl has an assertion.
    """
    if lengths.max() > capacity:
        raise ValueError(f"a document of {lengths.max():,} tokens is longer than max_token_len={capacity:,}")
    size, packs, steps = min(BATCH, len(lengths) // ranks * ranks), [], []
    cost = WORKLOAD.cost(lengths)
    order = shuffled(len(lengths), seed)
    for step in range(len(order) // size):
        batch = order[step * size : (step + 1) * size]
        shares = [batch[share] for share in karmarkar_karp(cost[batch], ranks, equal=True)]
        least = max(-(-int(lengths[share].sum()) // capacity) for share in shares)
        for number in count(least):
            parts = [[share[part] for part in karmarkar_karp(cost[share], number)] for share in shares]
            if all(lengths[part].sum() <= capacity for each in parts for part in each):
                break
        for each in parts:
            each.sort(key=lambda part: -int(cost[part].sum()))  # the costliest of all ranks run together
        packs += [each[micro_batch] for micro_batch in range(number) for each in parts]
        steps += [step] * number
    return Epoch(*flat(packs), step_of=np.array(steps))


def _cut(lengths: Integers, capacity: int) -> Integers:
    return np.minimum(lengths, capacity)


def _truncated(packs: Sequence[Integers], lengths: Integers, capacity: int) -> Epoch:
    """An epoch of tools whose preparation cuts documents to the capacity."""
    order, offsets = flat(packs)
    return Epoch(order, offsets, tokens=_cut(lengths[order], capacity))
