"""The options of a plan, their checks, and the fingerprint that identifies a plan."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from multipack.planning import LARGEST_CAPACITY
from multipack.ranges import check_integer, short

if TYPE_CHECKING:  # numpy takes 0.1 s to import, and settings are read without it
    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

Order = Literal["shuffled", "given"]
Tail = Literal["keep", "drop", "carry"]
Balance = Literal["cost", "joint", "tokens"]
LossWeighting = Literal["token", "document"]
Sync = Literal["micro", "step"]
"""Where ranks wait for each other: at every micro-batch (`micro`) or once a step (`step`)."""

LARGEST = 1 << 22
"""Most packs of a step, steps of a window, and so on: larger numbers would ask for memory that no plan needs."""

ALGORITHM = 8
"""Version of the planner: changes whenever the same options give other steps. Part of the fingerprint."""


@dataclass(frozen=True)
class PlanOptions:
    """How documents are divided into steps and packs.

    `plan`, `PackedBatchSampler` and `PackStream` take an instance as `options=`, or the same names as keywords. None
    means the default where that is 0.
    """

    EXCLUSIVE: ClassVar[tuple[str, ...]] = ("packs_per_step", "micro_batches")
    """Only one of these may be given as a word."""
    RETIRED: ClassVar[dict[str, Any]] = {"effort": 1, "cost": "flops", "align": 1}
    """Settings that saved runs may have and that are gone → their former defaults."""

    capacity: int = 2048
    """Maximum tokens of a pack: the hard limit, set by memory."""
    packs_per_step: int = 4
    """Packs of a global step, over all ranks and micro-batches."""
    micro_batches: int = 0
    """Packs of each rank in a step: sets packs_per_step = ranks × this; 0 = packs_per_step applies."""
    budget: int = 0
    """Mean tokens of a pack. Below capacity, packs may differ in tokens to be equal in cost; 0 = capacity."""
    window: int = 4
    """Steps planned together: larger windows fill and balance better, smaller ones stay closer to the order."""
    order: Order = "shuffled"
    """`shuffled` by seed and epoch, or the documents' own order (`given`: curricula)."""
    tail: Tail = "keep"
    """`keep` every document; `drop` (and name) what fills no step, or `carry` it into the next epoch."""
    balance: Balance = "cost"
    """What is equalized between packs: model `cost`, tokens and their squares (`joint`), or `tokens`."""
    max_documents: int = 0
    """Maximum documents of a pack; 0 = no limit."""
    group: bool = True
    """Packs with costly long documents share steps: better balance, less random steps."""

    def __post_init__(self) -> None:
        """Check every field, and fields against each other.

        Raises:
            ValueError: the message names the setting, what was given and what is legal.
        """
        for name in ("packs_per_step", "window"):
            object.__setattr__(self, name, check_integer(f"plan.{name}", getattr(self, name), most=LARGEST))
        capacity = check_integer("plan.capacity", self.capacity, most=LARGEST_CAPACITY)
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "group", bool(self.group))
        for name in ("micro_batches", "budget", "max_documents"):
            object.__setattr__(
                self, name, check_integer(f"plan.{name}", getattr(self, name) or 0, 0, LARGEST_CAPACITY)
            )
        for name, choices in (("order", Order), ("tail", Tail), ("balance", Balance)):
            check_choice(f"plan.{name}", getattr(self, name), choices)
        if self.budget > self.capacity:
            raise ValueError(
                f"plan.budget={self.budget:,} is the mean of a pack and cannot exceed plan.capacity={self.capacity:,};"
                " lower the budget or raise the capacity"
            )

    @classmethod
    def of(cls, options: PlanOptions | None, named: Mapping[str, Any]) -> PlanOptions:
        """The options of a call that takes `options=` or keywords: `named` overrides `options`.

        Raises:
            TypeError: an unknown name; without `options`, no capacity or no packs_per_step.
            ValueError: a value that is not allowed; `micro_batches` while the number of ranks is unknown.
        """
        known = [field.name for field in fields(cls)]
        for name in named:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
                raise TypeError(f"a plan has no option {name}{hint}")
        missing = [name for name in ("capacity", "packs_per_step") if name not in named]
        if options is None and missing:
            raise TypeError(f"a plan needs {' and '.join(f'{name}=' for name in missing)}")
        chosen = replace(options or cls(), **named)
        if chosen.micro_batches:
            raise ValueError(
                "plan.micro_batches counts packs of a rank: give options.for_ranks(ranks), or packs_per_step"
            )
        return chosen

    def for_ranks(self, ranks: int) -> PlanOptions:
        """The same options with packs_per_step set for a number of data-parallel ranks, and micro_batches 0."""
        packs = self.micro_batches * ranks if self.micro_batches else self.packs_per_step
        return replace(self, packs_per_step=packs, micro_batches=0)

    @property
    def mean(self) -> int:
        """Tokens of a pack to aim at: the budget, or the capacity."""
        return self.budget or self.capacity

    def key(self, cost: dict[str, int], steps: int | None = None) -> dict[str, Any]:
        """Plain values that determine the steps, together with the documents: part of the fingerprint.

        Args:
            cost: plain values of the cost that packs are equalized in.
            steps: number of steps, if it is fixed.
        """
        names = {field.name for field in fields(self)} - {"micro_batches"}
        values = {name: getattr(self, name) for name in names}
        balanced = cost if self.balance == "cost" else self.balance
        # Documents could once be padded to multiples; the same plans keep their fingerprints.
        return values | {"budget": self.mean, "steps": steps, "cost": balanced, "align": 1}

    def full_steps(self, tokens: int, documents: int) -> int:
        """Steps that are filled by this many tokens, or by this many documents where their number is limited."""
        limit = self.max_documents or self.capacity
        return max(tokens // self.mean, documents // limit) // self.packs_per_step

    def needed_steps(self, tokens: int, documents: int) -> int:
        """Minimum steps for this many tokens and documents."""
        limit = self.max_documents or self.capacity
        return -(-max(-(-tokens // self.mean), -(-documents // limit)) // self.packs_per_step)

    def most_documents(self, slots: Integers, repeated: bool) -> int:
        """Maximum documents of a pack; `repeated`: a document may occur several times, because it is carried over."""
        if repeated:
            most = self.capacity // int(slots.min())
        else:
            count = min(len(slots), self.capacity)
            shortest = slots.copy()
            shortest.partition(count - 1)
            shortest = shortest[:count]
            shortest.sort()
            most = int(shortest.cumsum().searchsorted(self.capacity, side="right"))
        return min(most, self.max_documents or most)


def check_choice(name: str, value: Any, choices: Any) -> None:
    """`ValueError` if a value is not among the choices of a Literal; the message names the nearest one."""
    known = get_args(choices)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, 1, 0.0)[0]
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)} (nearest: {near})")


def check_item_options(options: PlanOptions, setting: str) -> None:
    """Refuse options that items of documents with shared beginnings cannot have.

    Args:
        options: of the plan.
        setting: the setting that asks for such items, for the message.

    Raises:
        ValueError: the message names the option and what to use.
    """
    if options.max_documents:
        raise ValueError(
            f"plan.max_documents={options.max_documents} counts documents, and {setting} places several at once: use"
            " plan.max_documents=0"
        )


def fingerprint_of(lengths: Integers, targets: Integers | None, key: dict[str, Any]) -> str:
    """`version-lengths-targets-options`: the version, and the first 16 digits of three SHA-256 sums."""
    arrays = [
        b"" if part is None else part.astype("<i8", "C", copy=False).data for part in (lengths, targets)
    ]
    parts = [*arrays, json.dumps(key, sort_keys=True).encode()]
    return "-".join([str(ALGORITHM), *(hashlib.sha256(part).hexdigest()[:16] for part in parts)])


def changed_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`capacity from 128 to 256` for each option of a plan that was another one; both are keys of plans."""
    changed = [name for name in now if name not in before or before[name] != now[name]]
    return [f"{name} from {short(before.get(name))} to {short(now[name])}" for name in changed]


def check_fingerprint(state: Mapping[str, Any], fingerprint: str, key: dict[str, Any]) -> None:
    """`ValueError`, which says what changed, if a saved state is of another plan."""
    saved = state["fingerprint"]
    if saved == fingerprint:
        return
    theirs, ours = str(saved).split("-"), fingerprint.split("-")
    before = state.get("options")
    named = changed_options(before, key) if isinstance(before, dict) else []
    parts = (
        f"the planner's version (from {' '.join(theirs[0].split())[:20]} to {ours[0]})",
        "the documents' lengths",
        "the target counts",
        f"the plan's options ({', '.join(named)})" if named else "the plan's options",
    )
    changed = [part for part, a, b in zip(parts, theirs, ours, strict=False) if a != b]
    raise ValueError(
        f"the saved plan state belongs to another plan: {' and '.join(changed)} changed since (fingerprint"
        f" {short(saved)}, now {fingerprint}); continue with the same documents and options, or start a new run"
    )


@contextmanager
def opened(state: Any, what: str, *names: str) -> Iterator[None]:
    """Context for loading a saved state: checks its keys, and turns errors of values of wrong types into a ValueError.

    Args:
        state: any value; states of earlier versions have a checksum, which is not read.
        what: its name in messages.
        names: keys that it must have.

    Raises:
        ValueError: the state lacks a key, or holds values of a wrong type.
    """
    try:
        if missing := [name for name in names if name not in state]:
            raise ValueError(f"{what} lacks {', '.join(missing)}")
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise ValueError(f"{what} is damaged: {reason}; continue from another checkpoint") from error
