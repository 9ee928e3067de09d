"""Drop-in for Axolotl: its `MultipackBatchSampler`, its documented packing functions, and a plugin that installs them.

One line of Axolotl's YAML replaces the sampler wherever Axolotl makes one:

    plugins: [multipack.integrations.axolotl.MultipackPlugin]

In other code that uses Axolotl's sampler:

    - from axolotl.utils.samplers.multipack import MultipackBatchSampler
    + from multipack.integrations.axolotl import MultipackBatchSampler
"""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import ArrayLike

from multipack.integrations.axolotl_sampler import Bins, MultipackBatchSampler
from multipack.machine import import_extra
from multipack.planning.lengths import check_integer, check_integers
from multipack.planning.packing import pack

__all__ = ["MultipackBatchSampler", "allocate_sequentially", "ffd_check", "pack_group", "pack_parallel"]

LOG = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    if name != "MultipackPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_extra("axolotl", "MultipackPlugin", "axolotl")
    from multipack.integrations.axolotl_plugin import MultipackPlugin

    return MultipackPlugin


def ffd_check(sequence_lengths: ArrayLike, bin_capacity: int, num_bins: int) -> bool:
    """Whether first fit decreasing packs these sequences into at most `num_bins` bins."""
    lengths = check_integers("sequence_lengths", sequence_lengths)
    capacity, most = check_integer("bin_capacity", bin_capacity), check_integer("num_bins", num_bins, 0)
    if lengths.size == 0:
        return True
    if lengths.max() > capacity:
        return False
    return len(pack(lengths, capacity, "first_fit_decreasing")) <= most


def pack_group(
    sequence_lengths: ArrayLike,
    group_offset: int,
    bin_capacity: int,
    max_bins: int,
    bin_size: int,
    safe_mode: bool = True,
) -> Bins:
    """Pack a group of sequences by best fit.

    Args:
        sequence_lengths: (sequences,) tokens of each.
        group_offset: added to every position.
        bin_capacity: maximum tokens of a bin. A longer sequence is an error.
        max_bins: maximum number of bins if `safe_mode`; a warning counts the sequences of further bins.
        bin_size: maximum sequences of a bin.
        safe_mode: apply `max_bins`.
    """
    lengths = check_integers("sequence_lengths", sequence_lengths)
    capacity, most = check_integer("bin_capacity", bin_capacity), check_integer("max_bins", max_bins, 0)
    first = check_integer("group_offset", group_offset, 0)
    limit = check_integer("bin_size", bin_size) if bin_size else None
    if lengths.size == 0:
        return []
    bins = pack(lengths, capacity, "best_fit", limit)
    kept = min(len(bins), most) if safe_mode else len(bins)
    if skipped := len(lengths) - int(bins.offsets[kept]):
        LOG.warning(
            "pack_group: %d of %d sequences do not fit into max_bins=%d and are skipped; raise max_bins, or set"
            " safe_mode=False",
            *(skipped, len(lengths), max_bins),
        )
    return [(bins[number] + first).tolist() for number in range(kept)]


def pack_parallel(
    sequence_lengths: ArrayLike,
    bin_capacity: int,
    group_size: int,
    bin_size: int,
    num_processes: int | None = None,
    safe_mode: bool = True,
    mp_start_method: str | None = "fork",
) -> Bins:
    """`pack_group` for each `group_size` sequences. The last three arguments are not needed: no process is started."""
    lengths = check_integers("sequence_lengths", sequence_lengths)
    size = check_integer("group_size", group_size)
    bins = []
    for first in range(0, len(lengths), size):
        group = lengths[first : first + size]
        bins += pack_group(group, first, bin_capacity, len(group), bin_size, safe_mode)
    return bins


def allocate_sequentially(
    sequence_lengths: ArrayLike, rank: int, bin_capacity: int, num_ranks: int
) -> tuple[Bins, int, int]:
    """Fill bins in the order of the sequences and assign them to ranks in turn.

    Returns:
        (this rank's bins, tokens of all sequences, slots of all ranks' bins).
    """
    lengths = check_integers("sequence_lengths", sequence_lengths)
    capacity, ranks = check_integer("bin_capacity", bin_capacity), check_integer("num_ranks", num_ranks)
    own_rank = check_integer("rank", rank, 0, ranks - 1)
    if lengths.size == 0:
        return [], 0, 0
    bins = pack(lengths, capacity, "next_fit")
    own = [bins[number].tolist() for number in range(own_rank, len(bins), ranks)]
    return own, int(lengths.sum()), len(bins) * capacity
