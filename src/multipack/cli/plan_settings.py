"""What the commands depend on that need no training: `multipack plan` and `multipack pack`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from multipack.data.lengths import LengthsConfig
from multipack.planning.cost import CostModel
from multipack.planning.options import PlanOptions
from multipack.planning.packing import Method
from multipack.shapes import SHAPES, ModelShape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multipack.planning.packing import Packs


@dataclass
class PlanCommand:
    """What `multipack plan` depends on, beside the lengths."""

    plan: PlanOptions = field(default_factory=PlanOptions)
    data: LengthsConfig = field(default_factory=LengthsConfig)
    model: ModelShape = field(default_factory=lambda: SHAPES["llama-8b"])
    cost: str = ""
    """File of a cost model that was fitted to measured times (JSON, as a run saves it); empty = the model's FLOPs."""
    world_size: int = 1
    """Data-parallel ranks that the report deals to."""
    sync: Literal["micro", "step", "pipeline"] = "micro"
    """When ranks meet: at every micro-batch (FSDP, pipelines) or once a step (DDP)."""
    seed: int = 0
    """Of the order of documents; any whole number."""
    epoch: int = 0
    """The epoch that is planned, from 0."""
    sample: int = 1000
    """Steps that are dealt for the report at most, evenly apart (with --explore a third of it); 0 = every step."""
    padded_batch_size: int = 8
    """Documents in a batch of the padded training that the plan is compared with."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, least in (("world_size", 1), ("padded_batch_size", 1), ("epoch", 0), ("sample", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        packs = self.plan.packs_per_step
        if not self.plan.micro_batches and self.world_size > packs:
            raise ValueError(
                f"world_size={self.world_size} ranks cannot share steps of plan.packs_per_step={packs} packs, because"
                f" each needs one: set plan.packs_per_step to {self.world_size} or more (or plan.micro_batches, the"
                f" packs of one rank), or world_size to {packs} or less"
            )
        if self.plan.cost != "flops":
            raise ValueError(
                f"plan.cost={self.plan.cost} is how a run learns what documents cost; here give cost=FILE, the cost"
                " model that a run or `multipack calibrate` has saved"
            )
        if self.cost and self.model != SHAPES["llama-8b"]:
            raise ValueError(
                f"cost={self.cost} says what documents cost, and so does model: set only one of them"
            )

    def cost_model(self) -> CostModel:
        """What documents cost: the model's FLOPs, or what was fitted to measured times.

        Raises:
            ValueError: the file holds no cost model.
            FileNotFoundError: there is no such file.
        """
        if self.cost and not Path(self.cost).is_file():
            raise FileNotFoundError(f"cost={self.cost} is no file; give one that holds a fitted cost model")
        return CostModel.load(self.cost) if self.cost else CostModel.from_shape(self.model)


@dataclass
class PackCommand:
    """What `multipack pack` depends on, beside the lengths."""

    capacity: int = 8192
    """Most tokens of a pack."""
    method: Method = "best_fit"
    """How packs are found; `fewest` searches for fewer than best fit, and for a proof that there cannot be fewer."""
    max_documents: int = 0
    """Most documents of a pack; 0 = no limit."""
    time_budget: float = 10.0
    """CPU seconds after which `fewest` returns what it has, and the bound that it has proven by then."""
    histogram: bool = False
    """The file counts documents by length: entry i is the number of documents of i + 1 tokens."""
    out: str = ""
    """File for the packs (.npz: order, offsets, lower_bound, capacity); empty = none is written."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.max_documents < 0:
            raise ValueError(f"max_documents must not be negative, got {self.max_documents}; 0 = no limit")
        if self.out and not self.out.endswith(".npz"):
            raise ValueError(f"out={self.out} must end with .npz, which is what is written")
        if self.out and Path(self.out).exists():
            raise ValueError(f"out={self.out} exists already: choose another name, or move it away")


def training_command(source: Path, wanted: PlanCommand) -> str:
    """The command that trains with a plan's settings, the documents left open where only lengths are known."""
    plan, usual = wanted.plan, PlanOptions()
    words = [f"data=store data.path={source}" if source.is_dir() else "data=…"]
    words += [
        f"data.{name}={str(value).lower()}"
        for name, value in asdict(wanted.data).items()
        if value not in ("auto", 0)
    ]
    for entry in fields(plan):
        value = getattr(plan, entry.name)
        decided = entry.name == "packs_per_step" and plan.micro_batches  # … by the other
        if entry.name == "capacity" or (value != getattr(usual, entry.name) and not decided):
            words.append(f"plan.{entry.name}={str(value).lower() if isinstance(value, bool) else value}")
    words += [f"train.seed={wanted.seed}"] if wanted.seed > 0 else []
    ranks = wanted.world_size
    launch = "" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m "
    if ranks > 8:
        launch = "torchrun --nnodes … --nproc-per-node … -m "
    return f"{launch}multipack train {' '.join(words)}"


def pack_rows(
    packs: Packs, lengths: NDArray[np.int64], wanted: PackCommand, seconds: float
) -> list[tuple[str, str]]:
    """Packs in words."""
    tokens, bound = int(lengths.sum()), packs.lower_bound or 0
    gap = len(packs) - bound
    proven = (
        "these are the fewest" if gap == 0 else f"at most {gap:,} more than needed ({gap / len(packs):.3%})"
    )
    return [
        ("documents", f"{len(lengths):,} of {int(lengths.min()):,} … {int(lengths.max()):,} tokens"),
        ("tokens", f"{tokens:,}"),
        ("packs", f"{len(packs):,} of at most {wanted.capacity:,} tokens, by {wanted.method}"),
        ("proven bound", f"no packing has fewer than {bound:,} packs: {proven}"),
        ("filled", f"{tokens / (len(packs) * wanted.capacity):.4%} of the slots hold tokens"),
        ("largest pack", f"{int(packs.sizes().max()):,} documents"),
        ("packed in", f"{seconds:.3f} s"),
        *([("written to", wanted.out)] if wanted.out else []),
    ]
