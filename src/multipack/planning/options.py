"""What a caller may choose for a plan, checked; and the fingerprint that says whether two plans agree."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.cost import CostModel, weigh
from multipack.planning.packing import check_integer
from multipack.shapes import ModelShape

Order = Literal["shuffled", "given"]
Tail = Literal["keep", "drop", "carry"]
Balance = Literal["cost", "joint", "tokens"]

ALGORITHM = 1
"""Changes whenever the same options give other steps; part of the fingerprint."""


@dataclass
class PlanConfig:
    """How documents are cut into steps and packs."""

    capacity: int = 2048
    """Most tokens of a pack: the hard limit, set by memory."""
    packs_per_step: int = 4
    """Packs of a global step, over all ranks and micro-batches."""
    micro_batches: int = 0
    """Packs of each rank in a step: sets packs_per_step = ranks × this; 0 = packs_per_step decides."""
    budget: int = 0
    """Mean tokens of a pack: below capacity, packs may differ in tokens to agree in cost; 0 = capacity."""
    window: int = 4
    """Steps planned together: more fill and balance better, fewer keep closer to the shuffled order."""
    order: Order = "shuffled"
    """`shuffled` by seed and epoch, or the documents' own order (`given`: curricula)."""
    tail: Tail = "keep"
    """`keep` every document; `drop` (and name) what fills no step, or `carry` it into the next epoch."""
    balance: Balance = "cost"
    """What packs agree in: model `cost`, tokens and squares alike (`joint`), or `tokens`."""
    max_documents: int = 0
    """Most documents of a pack; 0 = no limit."""

    def __post_init__(self) -> None:
        """Refuse what no plan can have, by the names that the settings have."""
        for name, least in (("capacity", 2), ("packs_per_step", 1), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"plan.{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("micro_batches", "budget", "max_documents"):
            if getattr(self, name) < 0:
                raise ValueError(f"plan.{name} must not be negative, got {getattr(self, name)}")
        if self.budget > self.capacity:
            raise ValueError(
                f"plan.budget={self.budget} is the mean of a pack and cannot exceed plan.capacity={self.capacity}"
            )

    def keywords(self, world_size: int = 1) -> dict[str, Any]:
        """These options as keyword arguments of `plan` and `PackedBatchSampler`, for a number of ranks."""
        packs = self.micro_batches * world_size if self.micro_batches else self.packs_per_step
        return {
            "capacity": self.capacity,
            "packs_per_step": packs,
            "budget": self.budget or None,
            "window": self.window,
            "order": self.order,
            "tail": self.tail,
            "balance": self.balance,
            "max_documents": self.max_documents or None,
        }


@dataclass(frozen=True)
class Options:
    """What a caller chose, checked."""

    capacity: int
    packs_per_step: int
    budget: int
    window: int
    order: Order
    tail: Tail
    balance: Balance
    max_documents: int | None
    steps: int | None
    cost_model: CostModel

    @classmethod
    def checked(
        cls,
        capacity: int,
        packs_per_step: int,
        budget: int | None,
        window: int,
        order: Order,
        tail: Tail,
        balance: Balance,
        max_documents: int | None,
        steps: int | None,
        cost_model: CostModel,
    ) -> Options:
        """Refuse what no plan can have."""
        named = {"packs_per_step": packs_per_step, "window": window}
        optional = {"budget": budget, "max_documents": max_documents, "steps": steps}
        named.update({name: value for name, value in optional.items() if value is not None})
        for name, value in named.items():
            check_integer(name, value)
        for name, choice, choices in (
            ("order", order, Order),
            ("tail", tail, Tail),
            ("balance", balance, Balance),
        ):
            if choice not in get_args(choices):
                raise ValueError(
                    f"{name}={choice!r} is unknown; choose one of {', '.join(get_args(choices))}"
                )
        if budget is not None and budget > capacity:
            raise ValueError(
                f"budget={budget:,} is the mean of a pack and cannot exceed its limit, capacity={capacity:,};"
                f" lower the budget or raise the capacity"
            )
        mean = capacity if budget is None else budget
        return cls(
            capacity, packs_per_step, mean, window, order, tail, balance, max_documents, steps, cost_model
        )

    def full_steps(self, tokens: int, entries: int) -> int:
        """Steps that so many tokens, or so many documents, fill."""
        by_tokens = tokens // (self.packs_per_step * self.budget)
        limit = self.max_documents
        return max(by_tokens, entries // (self.packs_per_step * limit) if limit else 0)

    def needed_steps(self, tokens: int, entries: int) -> int:
        """Steps that so many tokens and documents need at least."""
        by_tokens = -(-tokens // (self.packs_per_step * self.budget))
        limit = self.max_documents
        return max(by_tokens, -(-entries // (self.packs_per_step * limit)) if limit else 0)


def check_seed(seed: int) -> None:
    """Refuse a seed that is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an integer, got {seed!r}")


def cost_model_of(cost: CostModel | ModelShape | None) -> CostModel:
    """A cost model from what callers may give for one."""
    if isinstance(cost, CostModel):
        return cost
    if cost is None or isinstance(cost, ModelShape):
        return CostModel.from_shape(cost)
    raise ValueError(f"cost must be a CostModel, a ModelShape or None, got {type(cost).__name__}")


def balance_weights(options: Options, lengths: NDArray[np.int64]) -> tuple[int, int]:
    """(linear, quadratic) weights of the cost that packs shall agree in."""
    if options.balance == "tokens":
        return 1, 0
    if options.balance == "joint":
        tokens, squares = int(lengths.sum()), int(weigh(lengths, 0, 1).sum() - lengths.sum())
        return (2 * squares + tokens) // (2 * tokens), 1
    return options.cost_model.linear, 1


def check_targets(targets: ArrayLike, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Target counts as int64, between 0 and each document's length − 1."""
    counts = np.asarray(targets)
    if counts.shape != lengths.shape or counts.dtype.kind not in "iu":
        raise ValueError(
            f"targets must be {len(lengths):,} integers, one a document,"
            f" got {counts.dtype} of shape {counts.shape}"
        )
    counts = counts.astype(np.int64)
    wrong = np.flatnonzero((counts < 0) | (counts >= lengths))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"a document of l tokens has 0 … l − 1 targets: document {first} has {counts[first]} of"
            f" {lengths[first]} tokens, and {len(wrong) - 1:,} others are wrong too"
        )
    return counts


def check_carried(carried: ArrayLike | None, documents: int) -> NDArray[np.int64]:
    """Carried document numbers as int64; empty for None."""
    if carried is None:
        return np.empty(0, dtype=np.int64)
    numbers = np.asarray(carried)
    if numbers.size == 0:
        return np.empty(0, dtype=np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(f"carried must be document numbers, got {numbers.dtype} of shape {numbers.shape}")
    if numbers.min() < 0 or numbers.max() >= documents:
        raise ValueError(f"carried names documents outside 0 … {documents - 1}: {short(numbers.tolist())}")
    return numbers.astype(np.int64)


def most_documents_of(lengths: NDArray[np.int64], options: Options, times: int) -> int:
    """How many of the shortest documents, each at most so many times, fit in a pack."""
    count = min(len(lengths), options.capacity)
    shortest = np.sort(np.partition(lengths, count - 1)[:count])
    most = int(np.searchsorted(np.cumsum(np.repeat(shortest, times)), options.capacity, side="right"))
    return min(most, options.max_documents or most)


def fingerprint_of(lengths: NDArray[np.int64], targets: NDArray[np.int64] | None, options: Options) -> str:
    """`version-lengths-targets-options`, each but the first 16 digits of a SHA-256."""
    chosen = {
        name: getattr(options, name)
        for name in (
            "capacity",
            "packs_per_step",
            "budget",
            "window",
            "order",
            "tail",
            "balance",
            "max_documents",
            "steps",
        )
    }
    chosen["linear"] = options.cost_model.linear
    plain = {name: int(value) if isinstance(value, np.integer) else value for name, value in chosen.items()}
    parts = [
        lengths.astype("<i8", copy=False).tobytes(),
        b"" if targets is None else targets.astype("<i8", copy=False).tobytes(),
        json.dumps(plain, sort_keys=True).encode(),
    ]
    return "-".join([str(ALGORITHM), *(hashlib.sha256(part).hexdigest()[:16] for part in parts)])


def check_fingerprint(saved: Any, mine: str) -> None:
    """Refuse a saved state whose plan was another, saying in what.

    Raises:
        ValueError: the fingerprints differ.
    """
    if saved == mine:
        return
    theirs, ours = str(saved).split("-"), mine.split("-")
    parts = ("the planner's version", "the documents' lengths", "the target counts", "the plan's options")
    changed = [name for name, a, b in zip(parts, theirs, ours, strict=False) if a != b]
    what = " and ".join(changed) if len(theirs) == len(ours) else "everything"
    raise ValueError(
        f"the saved plan state belongs to another plan: {what} changed since (fingerprint {short(saved)}, now"
        f" {mine}); go on with what it was saved with, or start a new run"
    )


def short(value: Any) -> str:
    """A value as it may stand in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
