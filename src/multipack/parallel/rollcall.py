"""Who is here: ranks answer through the store by which they found each other, without any collective.

A collective that lacks a rank can only wait, and its error, when it comes, names nobody. The store knows who has
answered, on every backend:

    rank 0  answers ─┐
    rank 1  answers ─┼─ store ─▶ each rank reads all answers, or after a while who is missing: rank 2
    rank 2    ·      ┘

An answer is a line of text; ranks that send what they are about to do learn at once whether all are about to do the
same. One roll call is a handful of round trips to the store: right before an expensive step, not in a hot loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Group = dist.ProcessGroup | None
"""The ranks that take part; None = all ranks of the run."""

_GAVE_UP = "\0gave up waiting for "


def place_in(group: Group = None) -> tuple[int, int]:
    """This process's rank within a group, and how many ranks the group has; (0, 1) for a process on its own.

    Raises:
        ValueError: this process is not in the group.
    """
    if not dist.is_initialized():
        if group is not None:
            raise ValueError(
                "a group was given, but this process has not joined any other: see world.connected"
            )
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group that was given, so it must not call")
    return rank, dist.get_world_size(group)


def ranks_of(group: Group = None) -> list[int]:
    """The ranks of a group, in its order, numbered as in the whole run."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def roll_call(
    answer: str, group: Group = None, seconds: float | None = None, purpose: str = "roll"
) -> list[str]:
    """Wait for every rank of a group, and exchange a line of text.

    Args:
        answer: what this rank says.
        group: who is called.
        seconds: how long to wait for the others; None, and at most, the timeout that the run was joined with.
        purpose: roll calls of unlike purposes do not answer each other.

    Returns:
        Every rank's answer, in the group's order.

    Raises:
        TimeoutError: ranks did not answer in time, or gave up before this one came; they are named. Also if the
            store is gone.
        ValueError: this process is not in the group.
    """
    rank, size = place_in(group)
    if size == 1:
        return [answer]
    called: Any = group or dist.group.WORLD
    store = called.get_group_store()
    waits = store.timeout if seconds is None else min(store.timeout, timedelta(seconds=seconds))
    names, book = ranks_of(group), f"multipack/{purpose}"
    try:
        number = store.add(f"{book}/{rank}", 1)
        keys = [f"{book}/{number}/{other}" for other in range(size)]
        store.set(keys[rank], answer)
        if number > 2:  # whoever is in this call has seen all answers to the last but one
            store.delete_key(f"{book}/{number - 2}/{rank}")
        absent = _absent(store, keys, waits)
        if absent:
            missing = _named([names[other] for other in absent])
            store.set(keys[rank], f"{_GAVE_UP}{missing}")
            raise TimeoutError(
                f"{missing} of {_named(names)} did not take part within {waits.total_seconds():g} s"
                f" (rank {names[rank]} did, and waited)"
            )
        answers = [text.decode() for text in store.multi_get(keys)]
    except dist.DistNetworkError as error:
        raise TimeoutError(
            f"rank {names[rank]} cannot reach the store that ranks meet at: the process that holds it"
            " (rank 0 or its launcher) is gone"
        ) from error
    for other, text in zip(names, answers, strict=True):
        if text.startswith(_GAVE_UP):
            raise TimeoutError(f"rank {other} {text[1:]} before rank {names[rank]} took part")
    return answers


def agree(answer: str, group: Group = None) -> None:
    """Check that every rank says the same.

    Raises:
        ValueError: on every rank alike, if they do not; what was said is listed, and by whom.
        TimeoutError: as `roll_call`.
    """
    answers = roll_call(answer, group)
    if len(set(answers)) == 1:
        return
    said: dict[str, list[int]] = {}
    for rank, text in zip(ranks_of(group), answers, strict=True):
        said.setdefault(text, []).append(rank)
    listed = "; ".join(f"{_named(ranks)}: {text}" for text, ranks in said.items())
    raise ValueError(f"ranks must call the same with tensors of one shape and dtype, but {listed}")


def _absent(store: Any, keys: Sequence[str], waits: timedelta) -> list[int]:
    """Wait for keys; the positions of those that did not come."""
    try:
        store.wait(list(keys), waits)
    except dist.DistStoreError:
        return [place for place, key in enumerate(keys) if not store.check([key])]
    return []


def _named(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 3`, `ranks 0–7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
