"""Axolotl's packing functions, with its signatures: lengths in, lists of bins out; a bin is a list of positions.

They pack with `multipack.plan` and `multipack.planning.packing.pack`, whose time grows with the documents and not with
documents × bins. A document longer than a bin is refused, where the originals put it into a bin of its own.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import ArrayLike

from multipack.integrations.arrange import arrange
from multipack.planning.lengths import check_integer, check_lengths
from multipack.planning.packing import pack

LOG = logging.getLogger(__name__)

Bins = list[list[int]]


def ffd_check(sequence_lengths: ArrayLike, bin_capacity: int, num_bins: int) -> bool:
    """Whether first fit decreasing puts these sequences into at most `num_bins` bins.

    Args:
        sequence_lengths: (sequences,) tokens of each.
        bin_capacity: most tokens of a bin.
        num_bins: bins that there are.
    """
    lengths = np.asarray(sequence_lengths)
    if lengths.size == 0:
        return True
    if lengths.max() > bin_capacity:
        return False
    return len(pack(lengths, bin_capacity, "first_fit_decreasing")) <= num_bins


def ffd_with_result(a: ArrayLike, c: int, start_index: int) -> Bins:
    """The bins of first fit decreasing.

    Args:
        a: (sequences,) tokens of each.
        c: most tokens of a bin.
        start_index: added to every position.

    Returns:
        Bins in the order in which they were opened, each with its longest sequence first.
    """
    lengths = np.asarray(a)
    if lengths.size == 0:
        return []
    bins = pack(lengths, c, "first_fit_decreasing")
    return [(held[np.argsort(-lengths[held], kind="stable")] + start_index).tolist() for held in bins]


def pack_group(
    sequence_lengths: ArrayLike,
    group_offset: int,
    bin_capacity: int,
    max_bins: int,
    bin_size: int,
    safe_mode: bool = True,
) -> Bins:
    """Pack a group of sequences into as few bins as best fit decreasing needs.

    Args:
        sequence_lengths: (sequences,) tokens of each.
        group_offset: added to every position.
        bin_capacity: most tokens of a bin.
        max_bins: most bins, where `safe_mode` is on.
        bin_size: most sequences of a bin.
        safe_mode: keep to `max_bins`: the fullest bins stay, and the sequences of the others are skipped (with a
            warning that counts them).
    """
    lengths = np.asarray(sequence_lengths)
    if lengths.size == 0:
        return []
    bins = pack(lengths, bin_capacity, "best_fit", bin_size or None)
    kept = np.arange(len(bins))
    if safe_mode and len(bins) > max_bins:
        fullest = np.argsort(-bins.totals(lengths), kind="stable")
        kept = np.sort(fullest[:max_bins])
        skipped = int(bins.sizes()[fullest[max_bins:]].sum())
        LOG.warning(
            "pack_group: %d of %d sequences found no room in max_bins=%d and were skipped; raise max_bins, or"
            " set safe_mode=False",
            skipped,
            len(lengths),
            max_bins,
        )
    return [(bins[number] + group_offset).tolist() for number in kept.tolist()]


def pack_parallel(
    sequence_lengths: ArrayLike,
    bin_capacity: int,
    group_size: int,
    bin_size: int,
    num_processes: int | None = None,
    safe_mode: bool = True,
    mp_start_method: str | None = "fork",
) -> Bins:
    """Pack sequences into bins, group after group.

    Args:
        sequence_lengths: (sequences,) tokens of each.
        bin_capacity: most tokens of a bin.
        group_size: sequences that are packed together.
        bin_size: most sequences of a bin.
        num_processes: no longer needed: a million sequences take a fraction of a second in this process.
        safe_mode: no longer needed: a group may have as many bins as sequences, so nothing is ever skipped.
        mp_start_method: no longer needed, as no process is started.
    """
    lengths = np.asarray(sequence_lengths)
    size = check_integer("group_size", group_size)
    bins: Bins = []
    for first in range(0, len(lengths), size):
        group = lengths[first : first + size]
        bins += pack_group(group, first, bin_capacity, len(group), bin_size, safe_mode)
    return bins


def allocate_sequentially(
    sequence_lengths: ArrayLike, rank: int, bin_capacity: int, num_ranks: int
) -> tuple[Bins, int, int]:
    """Fill bins in the sequences' own order, and deal them to ranks in turn.

    Args:
        sequence_lengths: (sequences,) tokens of each.
        rank: whose bins are returned: every `num_ranks`-th. Ranks may differ by one bin.
        bin_capacity: most tokens of a bin.
        num_ranks: ranks.

    Returns:
        (this rank's bins, tokens of all sequences, slots of all ranks' bins).
    """
    lengths = np.asarray(sequence_lengths)
    if lengths.size == 0:
        return [], 0, 0
    bins = pack(lengths, bin_capacity, "next_fit")
    mine = [bins[number].tolist() for number in range(rank, len(bins), num_ranks)]
    return mine, int(lengths.sum()), len(bins) * bin_capacity


def allocate(
    lengths: ArrayLike, lengths_cumsum: ArrayLike | None, rank: int, c: int, n: int
) -> tuple[Bins, int, int]:
    """Cut sequences, in their order, into steps of a bin for each rank. The bins of a step are alike in tokens.

    Args:
        lengths: (sequences,) tokens of each.
        lengths_cumsum: no longer needed.
        rank: whose bins are returned; all ranks get as many.
        c: most tokens of a bin.
        n: ranks.

    Returns:
        (this rank's bins, tokens of all ranks' bins, slots of all ranks' bins). The original left out what fills no
        step at the end; here every sequence has its bin.

    Raises:
        ValueError: there are too few sequences to give every rank a bin in every step.
    """
    checked = check_lengths(lengths, c)
    steps = arrange(checked, capacity=c, packs=n, window=4, balance="tokens")
    if not steps.full:
        raise ValueError(
            f"{len(checked):,} sequences cannot give each of n={n} ranks a bin in each of {len(steps):,} steps;"
            " use fewer ranks"
        )
    return [bins[rank].tolist() for bins in steps], steps.tokens, len(steps) * c * n
