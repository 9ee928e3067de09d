"""OpenRLHF's functions of `openrlhf.utils.seqlen_balancing` with this balancer inside: change the import only.

    from multipack.integrations.openrlhf import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions

OpenRLHF asks for the number of micro-batches first and divides the sequences afterwards, without their limit. Give it
as `max_tokens=`, or call `multipack.balance`, which does both for all ranks: see docs/library.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from multipack.planning.balance import balance, least_packs, partition
from multipack.planning.lengths import check_integer, check_lengths


def get_minimum_num_micro_batch_size(
    total_lengths: ArrayLike, max_tokens_per_gpu: int, ring_attn_size: int, ds_tensor_parallel_size: int
) -> int:
    """Number of micro-batches into which best fit packs the sequences.

    Args:
        total_lengths: (sequences,) tokens of each sequence.
        max_tokens_per_gpu: maximum tokens of a micro-batch on one device.
        ring_attn_size: devices of a ring, which share a micro-batch.
        ds_tensor_parallel_size: devices of tensor parallelism, which share a micro-batch.

    Raises:
        ValueError: a sequence is longer than the limit.
    """
    devices = check_integer("ring_attn_size", ring_attn_size)
    devices *= check_integer("ds_tensor_parallel_size", ds_tensor_parallel_size)
    limit = check_integer("max_tokens_per_gpu", max_tokens_per_gpu) * devices
    lengths = check_lengths(total_lengths)
    if lengths.max() > limit:
        enough = -(-int(lengths.max()) // devices)
        raise ValueError(
            f"a sequence of {lengths.max():,} tokens does not fit into a micro-batch of {limit:,}: max_tokens_per_gpu="
            f"{max_tokens_per_gpu:,} on {devices} devices; raise max_tokens_per_gpu to {enough:,}"
        )
    return least_packs(lengths, limit)


def get_seqlen_balanced_partitions(
    seqlen_list: ArrayLike, k_partitions: int, equal_size: bool, max_tokens: int | None = None
) -> list[list[int]]:
    """Parts of equal sums, as lists of rising indices; none is empty.

    Args:
        seqlen_list: (sequences,) tokens of each sequence.
        k_partitions: number of parts.
        equal_size: every part has the same number of sequences.
        max_tokens: hard limit of a part, for parts that may differ in their number of sequences.

    Raises:
        ValueError: fewer sequences than parts, a number that cannot be divided equally, or a limit that k_partitions
            parts cannot hold.
    """
    if max_tokens is None or equal_size:
        return partition(seqlen_list, k_partitions, equal_size=equal_size)
    parts, limit = check_integer("k_partitions", k_partitions), check_integer("max_tokens", max_tokens)
    divided = balance(seqlen_list, parts, budget=limit)
    if divided.micro_batches > 1:
        needed = least_packs(np.asarray(seqlen_list, dtype=np.int64), limit)
        raise ValueError(
            f"{parts} parts of max_tokens={limit:,} do not hold all sequences; use {needed} parts"
        )
    return [micro_batches[0] for micro_batches in divided]
