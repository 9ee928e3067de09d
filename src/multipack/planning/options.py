"""What a caller may choose for a plan, checked; and the fingerprint that says whether two plans agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.cost import CostModel
from multipack.planning.packing import check_integer
from multipack.shapes import ModelShape

Integers = NDArray[np.int64]

Order = Literal["shuffled", "given"]
Tail = Literal["keep", "drop", "carry"]
Balance = Literal["cost", "joint", "tokens"]
LossWeighting = Literal["token", "document"]

ALGORITHM = 4
"""Changes whenever the same options give other steps; part of the fingerprint."""


@dataclass
class PlanConfig:
    """How documents are cut into steps and packs."""

    EXCLUSIVE: ClassVar[tuple[str, ...]] = ("packs_per_step", "micro_batches")
    """Only one of these may be given as a word."""

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
    cost: str = "flops"
    """What documents cost: the model's `flops`, seconds `measured` as a run starts, or a calibrated FILE.json."""
    max_documents: int = 0
    """Most documents of a pack; 0 = no limit."""
    group: bool = True
    """Packs that long documents make dear share steps: better balance, less random steps."""
    align: int = 1
    """Each document is padded to a multiple of this many tokens (2 · context · tensor parallel, fp8 tiles)."""
    effort: int = 1
    """Rearrangements tried when a step is dealt, in multiples of the default: balances better, takes longer."""

    def __post_init__(self) -> None:
        """Refuse what no plan can have, by the names that the settings have."""
        if self.cost not in ("flops", "measured") and not self.cost.endswith(".json"):
            raise ValueError(
                f"plan.cost={self.cost!r}: flops, measured, or a .json file that `multipack calibrate` has saved"
            )
        for name, least in (
            ("capacity", 2),
            ("packs_per_step", 1),
            ("window", 1),
            ("align", 1),
            ("effort", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"plan.{name} must be at least {least}, got {getattr(self, name)}")
        if self.align > self.capacity:
            raise ValueError(
                f"plan.align={self.align} exceeds plan.capacity={self.capacity}: not even a document of one token"
                " would fit; lower it, or raise the capacity"
            )
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
            "group": self.group,
            "align": self.align,
            "effort": self.effort,
        }


@dataclass(frozen=True)
class Options:
    """What a caller chose, checked: all that decides which steps documents make, but their order."""

    capacity: int
    packs_per_step: int
    budget: int | None
    window: int
    order: Order
    tail: Tail
    balance: Balance
    max_documents: int | None
    steps: int | None
    group: bool
    align: int
    cost_model: CostModel

    def __post_init__(self) -> None:
        """Refuse what no plan can have; whole numbers become Python's own."""
        for name in ("capacity", "packs_per_step", "window", "align", "budget", "max_documents", "steps"):
            value = getattr(self, name)
            if value is not None or name in ("capacity", "packs_per_step", "window", "align"):
                object.__setattr__(self, name, check_integer(name, value))
        for name, choices in (("order", Order), ("tail", Tail), ("balance", Balance)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(get_args(choices))}"
                )
        if not isinstance(self.group, bool | np.bool_):
            raise ValueError(f"group must be true or false, got {self.group!r}")
        object.__setattr__(self, "group", bool(self.group))
        if self.budget is not None and self.budget > self.capacity:
            raise ValueError(
                f"budget={self.budget:,} is the mean of a pack and cannot exceed its limit,"
                f" capacity={self.capacity:,}; lower the budget or raise the capacity"
            )

    @property
    def mean(self) -> int:
        """Tokens of a pack to aim at: the budget, or the capacity."""
        return self.capacity if self.budget is None else self.budget

    def key(self, balanced: CostModel) -> dict[str, Any]:
        """Plain values that, with the documents, decide the steps; equal ones give equal plans."""
        plain = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "cost_model"
        }
        return {
            **plain,
            "budget": self.mean,
            "cost": balanced.key() if self.balance == "cost" else self.balance,
        }

    def full_steps(self, tokens: int, entries: int) -> int:
        """Steps that so many tokens, or so many documents, fill."""
        by_tokens = tokens // (self.packs_per_step * self.mean)
        limit = self.max_documents
        return max(by_tokens, entries // (self.packs_per_step * limit) if limit else 0)

    def needed_steps(self, tokens: int, entries: int) -> int:
        """Steps that so many tokens and documents need at least."""
        by_tokens = -(-tokens // (self.packs_per_step * self.mean))
        limit = self.max_documents
        return max(by_tokens, -(-entries // (self.packs_per_step * limit)) if limit else 0)


def check_loss_weighting(loss_weighting: str) -> None:
    """Refuse an unknown way of weighing targets."""
    if loss_weighting not in get_args(LossWeighting):
        raise ValueError(
            f"loss_weighting={loss_weighting!r} is unknown; choose one of {', '.join(get_args(LossWeighting))}"
        )


def check_seed(seed: int) -> int:
    """A seed as Python's own integer.

    Raises:
        ValueError: no integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    return int(seed)


def cost_model_of(cost: CostModel | ModelShape | None) -> CostModel:
    """A cost model from what callers may give for one."""
    if isinstance(cost, CostModel):
        return cost
    if cost is None or isinstance(cost, ModelShape):
        return CostModel.from_shape(cost)
    raise ValueError(f"cost must be a CostModel, a ModelShape or None, got {type(cost).__name__}")


def balanced_cost(options: Options, slots: Integers) -> CostModel:
    """The cost that packs shall agree in.

    Raises:
        ValueError: all documents together cost more than int64 can hold.
    """
    chosen = options.cost_model
    if options.balance == "tokens":
        chosen = CostModel(None, linear=1, quadratic=0)
    elif options.balance == "joint":
        CostModel(None, linear=1).check(slots)  # so that the sum of squares is exact
        tokens, squares = int(slots.sum()), int(np.dot(slots, slots))
        chosen = CostModel(None, linear=(2 * squares + tokens) // (2 * tokens))
    chosen.check(slots)
    return chosen


def align_lengths(lengths: Integers, options: Options) -> Integers:
    """(documents,) slots that each document takes: its length, padded to a multiple of `align`.

    Raises:
        ValueError: a document that fits its pack without padding, and does not with it.
    """
    if options.align == 1:
        return lengths
    slots = -(-lengths // options.align) * options.align
    if slots.max() > options.capacity:
        longest = int(lengths.max())
        raise ValueError(
            f"documents of {longest:,} tokens take {slots.max():,} slots with align={options.align}, but a pack"
            f" holds capacity={options.capacity:,}; raise the capacity to {slots.max():,}, or cut documents to"
            f" {options.capacity // options.align * options.align:,} tokens"
        )
    return slots


def check_targets(targets: ArrayLike, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Target counts as int64, between 0 and each document's length − 1."""
    counts = _array("targets", targets)
    if counts.shape != lengths.shape or counts.dtype.kind not in "iu":
        raise ValueError(
            f"targets must be {len(lengths):,} integers, one a document,"
            f" got {counts.dtype} of shape {counts.shape}"
        )
    counts = counts.astype(np.int64)
    wrong = np.flatnonzero((counts < 0) | (counts >= lengths))
    if len(wrong):
        first = int(wrong[0])
        others = f", and {len(wrong) - 1:,} others are wrong too" if len(wrong) > 1 else ""
        raise ValueError(
            f"a document of l tokens has 0 … l − 1 targets: document {first} has {counts[first]} of"
            f" {lengths[first]} tokens{others}"
        )
    return counts


def _array(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be a flat list of integers: {error}") from None


def check_carried(carried: ArrayLike | None, documents: int) -> NDArray[np.int64]:
    """Carried document numbers as int64; empty for None."""
    if carried is None:
        return np.empty(0, dtype=np.int64)
    numbers = _array("carried", carried)
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


def fingerprint_of(
    lengths: NDArray[np.int64], targets: NDArray[np.int64] | None, options: dict[str, Any]
) -> str:
    """`version-lengths-targets-options`, each but the first 16 digits of a SHA-256."""
    arrays = [np.ascontiguousarray(part, dtype="<i8").data for part in (lengths, targets) if part is not None]
    parts = [arrays[0], b"" if targets is None else arrays[1], json.dumps(options, sort_keys=True).encode()]
    return "-".join([str(ALGORITHM), *(hashlib.sha256(part).hexdigest()[:16] for part in parts)])


def check_fingerprint(state: Mapping[str, Any], fingerprint: str, options: dict[str, Any]) -> None:
    """Refuse a saved state whose plan was another, saying in what.

    Raises:
        ValueError: the fingerprints differ.
    """
    saved = state["fingerprint"]
    if saved == fingerprint:
        return
    theirs, ours = str(saved).split("-"), fingerprint.split("-")
    found = state.get("options")
    before: dict[str, Any] = found if isinstance(found, dict) else {}
    differing = [name for name in options if before.get(name) != options[name]]
    named = ", ".join(
        f"{name} from {before[name]!r} to {options[name]!r}" for name in differing if name in before
    )
    parts = (
        f"the planner's version (from {theirs[0]} to {ours[0]})",
        "the documents' lengths",
        "the target counts",
        f"the plan's options ({named})" if named else "the plan's options",
    )
    changed = [name for name, a, b in zip(parts, theirs, ours, strict=False) if a != b]
    what = " and ".join(changed) if len(theirs) == len(ours) else "everything"
    raise ValueError(
        f"the saved plan state belongs to another plan: {what} changed since (fingerprint {short(saved)}, now"
        f" {fingerprint}); go on with what it was saved with, or start a new run"
    )


def short(value: Any) -> str:
    """A value as it may stand in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
