"""Shared parts of the drop-in samplers: documents that fit, plans, the position in an epoch, saved states, ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from multipack.planning.deal import DEALING
from multipack.planning.lengths import check_integer, check_lengths, name_documents
from multipack.planning.options import PlanOptions, check_choice, fingerprint_of
from multipack.planning.packing import pack
from multipack.planning.plan import Plan, plan

Integers = NDArray[np.int64]
Batch = TypeVar("Batch")
Overlong = Literal["error", "drop", "alone"]
"""Documents longer than a pack: raise an error, leave them out, or give each a separate, larger pack."""


class HostSampler:
    """The position in an epoch, and states that restore it.

    Attributes:
        lengths: (documents,) int64 tokens of each document; with `overlong="alone"` at most a pack's.
        fits: (documents,) bool, whether a document is packed or left out.
        overlong_documents: (documents,) int64 numbers of the documents that are longer than a pack.
        epoch: the current epoch.
    """

    def __init__(self, lengths: ArrayLike, capacity: int, overlong: Overlong, setting: str) -> None:
        """Check the lengths, with a warning if documents are too long; `setting` is the host's name of the capacity."""
        check_choice("overlong", overlong, Overlong)
        self.lengths = check_lengths(lengths)
        long = self.lengths > capacity
        self.fits, self.overlong_documents = ~long | (overlong == "alone"), np.flatnonzero(long)
        self.epoch = 0
        self._position = 0  # batches of this epoch that were yielded
        self._resume = 0  # first batch of the next iterator
        if not long.any():
            return
        if overlong == "error":
            raise ValueError(
                f"{name_documents(self.lengths, long)}, but {setting}={capacity:,}; raise {setting} to"
                f" {self.lengths.max():,}, truncate or split these documents, or leave them out with overlong='drop'"
            )
        if not self.fits.any():
            raise ValueError(f"every document is longer than {setting}={capacity:,}: none is left to pack")
        effect = "are left out" if overlong == "drop" else "each have a separate bin that exceeds it"
        warnings.warn(
            f"{len(self.overlong_documents):,} of {len(long):,} documents ({int(self.lengths[long].sum()):,} tokens)"
            f" are longer than {setting}={capacity:,} and {effect}, because overlong={overlong!r}",
            stacklevel=3,
        )
        if overlong == "alone":
            self.lengths = np.minimum(self.lengths, capacity)

    def num_batches(self) -> int:
        """Number of batches of an epoch, equal to `len`."""
        return len(self)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank after the last batch that was yielded."""
        state: dict[str, Any] = self.state_at(self._position)  # type: ignore[attr-defined]
        return state

    def _identity(self, lengths: Integers, names: tuple[str, ...]) -> dict[str, Any]:
        """Values that a saved state must have: a fingerprint of the lengths, and the named options."""
        options = {"dealing": DEALING, **{name: getattr(self, name) for name in names}}
        return {"fingerprint": fingerprint_of(lengths, None, options), "options": options}

    def _go_to(self, epoch: int, batch: int = 0) -> None:
        """Begin the next iterator at a batch of an epoch."""
        self.epoch, self._position, self._resume = epoch, batch, batch

    def _walk(self, batch_of: Callable[[int], Batch], batches: int) -> Iterator[Batch]:
        """Yield batches from where the state or the epoch begins, and count them."""
        epoch, start, self._resume = self.epoch, self._resume, 0
        self._position = start
        for number in range(start, batches):
            if self.epoch == epoch:
                self._position = number + 1
            yield batch_of(number)


def full_steps(
    lengths: Integers,
    options: PlanOptions,
    *,
    drop_last: bool = False,
    steps: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Plan an epoch with at least one document in every pack: a rank without a batch would block the others.

    Args:
        lengths: (documents,) number of tokens of each document.
        options: of the plan; `tail` is set here.
        drop_last: leave out the last documents if their packs do not fill a step.
        steps: documents that do not fit into this number are left out. None = the fewest that hold all documents.
        seed: of the order.
        epoch: of the order.

    Returns:
        The plan. A step has fewer documents than packs only if there are too few documents for all steps.
    """

    def planned(number: int | None, tail: Literal["keep", "drop"]) -> Plan:
        return plan(lengths, options=replace(options, tail=tail), steps=number, seed=seed, epoch=epoch)

    packs = options.packs_per_step
    # Sorted lengths, so that the number does not depend on the order.
    fewest = len(pack(np.sort(lengths), options.capacity, max_documents=options.max_documents or None))
    if steps is None and drop_last and fewest % packs:
        steps = max(1, fewest // packs)
    if steps is not None and steps * packs < fewest:
        return planned(steps, "drop")
    made = planned(None, "keep")
    if steps is None:
        # Other orders of the same documents need the same number of steps, and no step may lack documents.
        steps = min(max(made.num_steps, -(-fewest // packs)), -(-len(lengths) // packs))
        if steps * packs > len(lengths) and len(lengths) // packs * packs >= fewest:
            steps = len(lengths) // packs
    if steps == made.num_steps:
        return made
    try:
        return planned(steps, "keep")
    except ValueError:  # in this order, the planner needs more packs than `pack`
        return planned(steps, "drop")


def saved_integer(state: Mapping[str, Any], name: str, least: int = 0, most: int | None = None) -> int:
    """An integer of a saved state."""
    return check_integer(f"the saved sampler state's {name}", state[name], least, most)


def world_size() -> int:
    """Number of ranks of torch.distributed; 1 if it is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def replicas_and_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """The number of ranks and this process's rank; None values are taken from torch.distributed, if initialized."""
    if num_replicas is None or rank is None:
        initialized = dist.is_available() and dist.is_initialized()
        if not initialized and ((num_replicas or 1) > 1 or os.environ.get("WORLD_SIZE", "1") != "1"):
            raise ValueError(
                "torch.distributed is not initialized, so this process does not know its rank: call"
                " torch.distributed.init_process_group first, or give both num_replicas and rank"
            )
        num_replicas = world_size() if num_replicas is None else num_replicas
        rank = rank if rank is not None else dist.get_rank() if initialized else 0
    replicas = check_integer("num_replicas", num_replicas)
    number = check_integer("rank", rank, 0)
    if number >= replicas:
        raise ValueError(f"rank={number} is outside num_replicas={replicas}: ranks count from 0")
    return replicas, number


def least_of_ranks(*values: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """The minimum of each value over the ranks of a group, None = all. A collective."""
    if world_size() == 1:
        return list(values)
    on_host = dist.get_backend(group) in ("gloo", "mpi", "ucc", "undefined")
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
    box = torch.tensor(values, device=device)
    dist.all_reduce(box, dist.ReduceOp.MIN, group)
    return [int(value) for value in box.tolist()]
