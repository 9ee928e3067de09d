"""verl's functions of `verl.utils.seqlen_balancing` with this balancer inside: change the import, keep the calls.

    from multipack.integrations.verl import get_seqlen_balanced_partitions, rearrange_micro_batches

The results have the same form, with three differences: no part is empty, even if items weigh nothing; a micro-batch
never has more than `max_token_len` tokens; wrong arguments raise on all ranks, so that none waits for the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.integrations.host_sampler import least_of_ranks
from multipack.planning.balance import Cost, balance, least_packs, partition
from multipack.planning.cost import CostModel
from multipack.planning.lengths import check_integer

WORKLOAD = CostModel(None, linear=24_575)
"""verl's workload of a sequence of l tokens: 24,576·l + l²."""


def get_seqlen_balanced_partitions(
    seqlen_list: ArrayLike, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Parts of equal sums, as lists of rising indices; none is empty.

    Args:
        seqlen_list: (items,) lengths or workloads, integers of at least 0.
        k_partitions: number of parts.
        equal_size: every part has the same number of items.

    Raises:
        ValueError: fewer items than parts, or a number that cannot be divided into parts of equal size.
    """
    return partition(seqlen_list, k_partitions, equal_size=equal_size)


def get_group_balanced_partitions(
    seqlen_list: ArrayLike, uid_list: ArrayLike, k_partitions: int
) -> list[list[int]]:
    """Parts of equal workload, as lists of rising indices; items of one uid, adjacent or not, are in one part.

    Unlike in verl, the number of groups need not be a multiple of `k_partitions`; parts may differ in groups.

    Raises:
        ValueError: fewer groups than parts.
    """
    divided = balance(seqlen_list, k_partitions, budget=None, cost=WORKLOAD, groups=uid_list)
    return [micro_batches[0] for micro_batches in divided]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    *,
    cost: Cost = WORKLOAD,
) -> tuple[list[Any], list[list[int]]]:
    """Divide this rank's batch into micro-batches of at most `max_token_len` tokens and equal workload.

    Args:
        batch: TensorDict with `input_ids` that are nested, or with an `attention_mask` (batch, length).
        max_token_len: maximum tokens of a micro-batch, without padding.
        dp_group: process group whose ranks get the same number of micro-batches. None = this rank alone, without any
            communication, as in verl 0.9; earlier versions of verl meant all ranks (`torch.distributed.group.WORLD`).
        num_batches_divided_by: the number of micro-batches is rounded up to a multiple of this (virtual pipelines).
        same_micro_num_in_dp: agree on the number with the other ranks of `dp_group`, by one all-reduce.
        min_num_micro_batch: minimum number of micro-batches.
        use_dynamic_bsz_balance: the costliest micro-batches are in the middle, the cheapest at both ends.
        force_group_size: number of consecutive sequences that stay in one micro-batch (pairs of a reward model).
        cost: cost that is balanced between micro-batches; default: verl's workload. See `multipack.balance`.

    Returns:
        The micro-batches, and for each of them the indices of its sequences in the batch. There are at least
        ⌈tokens / max_token_len⌉, and more where that many cannot hold the sequences.

    Raises:
        ValueError: a group is longer than `max_token_len`, a rank has fewer groups than micro-batches, or the number of
            its sequences is not a multiple of `force_group_size`.
    """
    lengths, size = _lengths_of(batch), check_integer("force_group_size", force_group_size)
    budget = check_integer("max_token_len", max_token_len)
    minimum = check_integer("min_num_micro_batch", min_num_micro_batch or 1)
    multiple = check_integer("num_batches_divided_by", num_batches_divided_by or 1)
    members = np.arange(len(lengths)) // size
    tokens = np.bincount(members, lengths).astype(np.int64)  # of each group
    longest, fewest, groups = int(tokens.max(initial=0)), 1, len(tokens)
    if 0 < longest <= budget:
        fewest = least_packs(tokens, budget)
    is_whole = int(len(lengths) % size == 0)
    if same_micro_num_in_dp and dp_group is not None:
        least = least_of_ranks(-longest, -fewest, groups, is_whole, group=dp_group)
        longest, fewest, groups, is_whole = -least[0], -least[1], least[2], least[3]
    if not is_whole:
        raise ValueError(f"the sequences of a rank are no multiple of force_group_size={size}")
    what = "sequence" if size == 1 else f"group of force_group_size={size} sequences"
    if longest > budget:
        raise ValueError(
            f"a {what} of {longest:,} tokens does not fit into max_token_len={budget:,}; set max_token_len (in verl's"
            f" settings ppo_max_token_len_per_gpu and the like) to at least {longest:,}"
        )
    number = -(-max(fewest, minimum) // multiple) * multiple
    if number > groups:
        raise ValueError(
            f"{groups} {'sequences' if size == 1 else 'groups'} on a rank cannot fill {number} micro-batches, and none"
            " may be empty; raise max_token_len, lower min_num_micro_batch or num_batches_divided_by, or give each rank"
            " more sequences"
        )
    divided = balance(lengths, number, budget=budget, cost=cost, groups=members, together="micro_batch")
    indices = [micro_batches[0] for micro_batches in divided]
    if use_dynamic_bsz_balance:
        falling = [indices[part] for part in np.argsort(-divided.loads, kind="stable")]
        indices = falling[::2][::-1] + falling[1::2]
    return [_selected(batch, own) for own in indices], indices


def _lengths_of(batch: Any) -> NDArray[np.int64]:
    """(sequences,) tokens of each sequence, without padding."""
    try:
        ids = batch["input_ids"]
        lengths = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"the batch is {type(batch).__name__} without {error}: give a TensorDict with input_ids that are nested, or"
            " with an attention_mask"
        ) from error
    return np.asarray(lengths.cpu(), dtype=np.int64)


def _selected(batch: Any, indices: list[int]) -> Any:
    """The sequences of a batch with these indices: by verl's own function, which knows nested tensors, if it exists."""
    import torch

    try:
        from verl.utils.tensordict_utils import index_select_tensor_dict
    except ImportError:
        return batch[torch.tensor(indices)]
    return index_select_tensor_dict(batch, indices)
