"""Steps without empty packs, for training frameworks (hosts) that cannot run an empty batch.

    order   a b c d e f g h i j …
    step 0  |ad|be|cg|                   `packs` packs, equal in cost, at most `capacity` tokens each
    step 1  |fj|hk|i·|                   the same number in every step; leftover documents are listed in `left`

A plan leaves packs of a step empty if the step has few, long documents. A rank without a batch would block the others,
so such a step takes a document from another step: a document always fits into an empty pack.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from multipack.planning.lengths import check_integer, check_lengths, name_documents
from multipack.planning.options import PlanOptions
from multipack.planning.packing import pack
from multipack.planning.plan import Plan, plan

Integers = NDArray[np.int64]


class FullSteps:
    """The steps of a plan with at least one document in every pack.

    Attributes:
        plan: the plan.
        packs: number of packs of each step; only the last step has fewer, if there are too few documents.
        left: (documents,) int64 numbers of the documents in no step.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.packs, self.left = plan, plan.packs_per_step, plan.dropped
        self._changed: dict[int, list[Integers]] = {}
        counts = np.diff(plan.pack_offsets[plan.step_offsets])
        for step in np.flatnonzero(counts < self.packs).tolist():
            while counts[step] < self.packs and self._give(step, counts):
                counts[step] += 1

    def __len__(self) -> int:
        return self.plan.num_steps

    def __getitem__(self, step: int) -> list[Integers]:
        """The packs of a step, as arrays of document numbers."""
        if step in self._changed:
            return self._changed[step]
        return [documents for documents in self.plan.deal(step, self.packs) if len(documents)]

    @property
    def tokens(self) -> int:
        """Number of tokens of all steps."""
        return int(self.plan.lengths.sum() - self.plan.lengths[self.left].sum())

    @property
    def is_full(self) -> bool:
        """Whether every step has all its packs."""
        return len(self.plan.lengths) - len(self.left) >= len(self) * self.packs

    def _give(self, step: int, counts: Integers) -> bool:
        """Add a document to a step as a pack of its own.

        The document is the first of `left`, or is taken from the nearest step with more documents than packs, or
        from the last step if there is none.

        Args:
            step: index of the step.
            counts: (steps,) number of documents of each step; updated for the step that a document is taken from.

        Returns:
            Whether there was a document to add.
        """
        spare = np.flatnonzero(counts > self.packs)
        giver = int(spare[np.abs(spare - step).argmin()]) if len(spare) else len(counts) - 1
        packs = self[step]
        if len(self.left):
            given, self.left = self.left[:1], self.left[1:]
        elif giver == step or counts[giver] == 1:
            return False
        else:
            given = self._take(giver)
            counts[giver] -= 1
        self._changed[step] = [*packs, given]
        return True

    def _take(self, step: int) -> Integers:
        """Remove the shortest document of a step's pack with the most documents; return it as a (1,) array."""
        packs = self[step]
        number = max(range(len(packs)), key=lambda index: len(packs[index]))
        taken = int(np.argmin(self.plan.lengths[packs[number]]))
        rest = np.delete(packs[number], taken)
        self._changed[step] = [
            *packs[:number],
            *([rest] if len(rest) else []),
            *packs[number + 1 :],
        ]
        return packs[number][taken : taken + 1]


def full_steps(
    lengths: Integers,
    options: PlanOptions,
    *,
    drop_last: bool = False,
    steps: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> FullSteps:
    """Plan an epoch with at least one document in every pack.

    Args:
        lengths: (documents,) number of tokens of each document.
        options: options of the plan; `tail` is set here.
        drop_last: leave out the last documents if their packs do not fill a step.
        steps: number of steps; documents that do not fit are left out. None = the fewest that hold all documents.
        seed: seed of the order.
        epoch: epoch of the order.
    """

    def planned(number: int | None, tail: Literal["keep", "drop"]) -> Plan:
        return plan(lengths, options=replace(options, tail=tail), steps=number, seed=seed, epoch=epoch)

    packs = options.packs_per_step
    fewest = len(pack(lengths, options.capacity, max_documents=options.max_documents or None))
    if steps is None and drop_last and fewest % packs:
        steps = max(1, fewest // packs)
    if steps is not None and steps * packs < fewest:
        return FullSteps(planned(steps, "drop"))
    made = planned(None, "keep")
    if steps is None:
        # Other orders of the same documents need the same number of steps, and no step may lack documents.
        steps = min(max(made.num_steps, -(-fewest // packs)), -(-len(lengths) // packs))
        if steps * packs > len(lengths) and len(lengths) // packs * packs >= fewest:
            steps = len(lengths) // packs
    return FullSteps(made if steps == made.num_steps else planned(steps, "keep"))


def fitting_documents(
    lengths: ArrayLike, capacity: int, overlong: str, setting: str
) -> tuple[Integers, NDArray[np.bool_]]:
    """Check lengths, and find the documents that fit into a pack.

    Args:
        lengths: (documents,) number of tokens of each document.
        capacity: maximum number of tokens of a pack.
        overlong: `error` or `drop`, for longer documents.
        setting: the host's name of the capacity, for error messages.

    Returns:
        (documents,) int64 lengths, and (documents,) bool, True for documents that fit.

    Raises:
        ValueError: there are no documents, one is too long and `overlong` is `error`, or none fits.
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


def dropped_message(lengths: Integers, fits: NDArray[np.bool_], setting: str, capacity: int) -> str:
    """A warning with the number of documents that `overlong="drop"` leaves out; empty if there are none."""
    if fits.all():
        return ""
    return (
        f"{int((~fits).sum()):,} of {len(fits):,} documents ({int(lengths[~fits].sum()):,} tokens) are longer than"
        f" {setting}={capacity:,} and are left out, because overlong='drop'"
    )


def check_state(state: dict[str, Any], own: dict[str, Any], more: tuple[str, ...]) -> None:
    """Check that a saved state belongs to this sampler.

    Args:
        state: the saved state.
        own: values that must be equal, by name.
        more: other keys that must be present.

    Raises:
        ValueError: a key is missing or a value differs; the message names it.
    """
    missing = [name for name in (*own, *more) if name not in state]
    if missing:
        raise ValueError(f"the saved sampler state lacks {', '.join(missing)}")
    changed = [f"{name}={state[name]!r} (now {own[name]!r})" for name in own if state[name] != own[name]]
    if changed:
        raise ValueError(
            f"the saved sampler state belongs to another sampler: {', '.join(changed)}; continue with the same"
            " documents, options and versions, or start a new run"
        )


def world_size() -> int:
    """Number of ranks of torch.distributed; 1 if it is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def replicas_and_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """The number of ranks and this process's rank; None values are taken from torch.distributed.

    Raises:
        ValueError: torch.distributed is not initialized and this is not a single process, or the rank is out of range.
    """
    if num_replicas is None or rank is None:
        if dist.is_available() and dist.is_initialized():
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        elif (num_replicas or 1) > 1 or os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                "torch.distributed is not initialized, so this process does not know its rank: call"
                " torch.distributed.init_process_group first, or give both num_replicas and rank"
            )
        else:
            num_replicas, rank = 1, rank or 0
    replicas = check_integer("num_replicas", num_replicas)
    number = check_integer("rank", rank, 0)
    if number >= replicas:
        raise ValueError(f"rank={number} is outside num_replicas={replicas}: ranks count from 0")
    return replicas, number


def reduced(value: float, how: Literal["min", "max"]) -> float:
    """Reduce a value over all ranks to its minimum or maximum. A collective."""
    if world_size() == 1:
        return float(value)
    on_host = dist.get_backend() in ("gloo", "mpi", "ucc", "undefined")
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
    box = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MIN if how == "min" else dist.ReduceOp.MAX)
    return float(box.item())
