"""Settings of `multipack plan` and `multipack pack`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from multipack.data.corpus_report import LengthsConfig
from multipack.planning.cost import CostModel
from multipack.planning.options import PlanOptions
from multipack.planning.packing import Method
from multipack.shapes import SHAPES, ModelShape
from multipack.words import changed_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multipack.planning.packing import Packs


@dataclass
class PlanCommand:
    """Settings of `multipack plan`."""

    plan: PlanOptions = field(default_factory=PlanOptions)
    data: LengthsConfig = field(default_factory=LengthsConfig)
    model: ModelShape = field(default_factory=lambda: SHAPES["llama-8b"])
    cost: str = ""
    """File of a cost model fitted to measured times (JSON of `multipack calibrate`); empty = the model's FLOPs."""
    world_size: int = 1
    """Data-parallel ranks of the report."""
    sync: Literal["micro", "step", "pipeline"] = "micro"
    """Sync points of ranks: every micro-batch (FSDP), pipeline, or once per step (DDP)."""
    seed: int = 0
    """Random seed of the order of documents."""
    epoch: int = 0
    """Index of the epoch, from 0."""
    sample: int = 1000
    """Maximum number of evenly spaced steps in the report (with --explore, a third of it); 0 = all steps."""
    padded_batch_size: int = 8
    """Documents per batch of the padded training to compare with."""

    def __post_init__(self) -> None:
        """Check ranges and combinations."""
        for name, least in (("world_size", 1), ("padded_batch_size", 1), ("epoch", 0), ("sample", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        packs = self.plan.packs_per_step
        if not self.plan.micro_batches and self.world_size > packs:
            raise ValueError(
                f"world_size={self.world_size} ranks need as many packs per step, but plan.packs_per_step={packs}: use"
                f" plan.packs_per_step={self.world_size} (or plan.micro_batches, packs per rank), or world_size={packs}"
            )
        if self.plan.cost != "flops":
            raise ValueError(
                f"plan.cost={self.plan.cost} is for training; use cost=FILE with a cost model of `multipack calibrate`"
            )
        if self.cost and self.model != SHAPES["llama-8b"]:
            raise ValueError(f"cost={self.cost} and model both determine the cost: set only one of them")

    def cost_model(self) -> CostModel:
        """Return the cost of documents: the model's FLOPs, or a fit to measured times.

        Raises:
            ValueError: the file holds no cost model.
            FileNotFoundError: there is no such file.
        """
        if not self.cost:
            return CostModel.from_shape(self.model)
        if not Path(self.cost).is_file():
            raise FileNotFoundError(
                f"cost={self.cost} is not a file; use a cost model of `multipack calibrate`"
            )
        return CostModel.load(self.cost)


@dataclass
class PackCommand:
    """Settings of `multipack pack`."""

    capacity: int = 8192
    """Maximum tokens of a pack."""
    method: Method = "best_fit"
    """Algorithm; `fewest` searches for the minimum number of packs, and for a proof of it."""
    max_documents: int = 0
    """Maximum documents of a pack; 0 = no limit."""
    time_budget: float = 10.0
    """CPU seconds after which `fewest` returns its best packs and lower bound."""
    histogram: bool = False
    """The file counts documents by length: entry i is the number of documents of i + 1 tokens."""
    out: str = ""
    """File for the packs (.npz: order, offsets, lower_bound, capacity); empty = no file."""

    def __post_init__(self) -> None:
        """Check ranges and combinations."""
        if self.max_documents < 0:
            raise ValueError(f"max_documents={self.max_documents} must not be negative; 0 = no limit")
        if self.out and not self.out.endswith(".npz"):
            raise ValueError(f"out={self.out} must end with .npz")
        if self.out and Path(self.out).exists():
            raise ValueError(f"out={self.out} exists: choose another name, or move it away")


def training_command(source: Path, wanted: PlanCommand) -> str:
    """Return the command that trains with a plan's settings; `data=…` if only lengths are known."""
    words = [f"data=store data.path={source}" if source.is_dir() else "data=…"]
    words += changed_words("data", wanted.data, LengthsConfig())
    words.append(f"plan.capacity={wanted.plan.capacity}")
    plan = replace(wanted.plan, capacity=PlanOptions().capacity)
    if plan.micro_batches:  # they determine packs_per_step
        plan = replace(plan, packs_per_step=PlanOptions().packs_per_step)
    words += changed_words("plan", plan, PlanOptions())
    words += [f"train.seed={wanted.seed}"] if wanted.seed > 0 else []
    ranks = wanted.world_size
    hosts = "" if ranks <= 8 else "--nnodes … "
    launch = "" if ranks == 1 else f"torchrun {hosts}--nproc-per-node {'…' if hosts else ranks} -m "
    return f"{launch}multipack train {' '.join(words)}"


def pack_rows(
    packs: Packs, lengths: NDArray[np.int64], wanted: PackCommand, seconds: float
) -> list[tuple[str, str]]:
    """Return the rows of a packing."""
    tokens, bound = int(lengths.sum()), packs.lower_bound or 0
    gap = len(packs) - bound
    proven = (
        "this is the minimum" if gap == 0 else f"at most {gap:,} more than needed ({gap / len(packs):.3%})"
    )
    return [
        ("documents", f"{len(lengths):,} of {int(lengths.min()):,} … {int(lengths.max()):,} tokens"),
        ("tokens", f"{tokens:,}"),
        ("packs", f"{len(packs):,} of at most {wanted.capacity:,} tokens, by {wanted.method}"),
        ("proven bound", f"{bound:,} packs are a lower bound: {proven}"),
        ("filled", f"{tokens / (len(packs) * wanted.capacity):.4%} of the slots hold tokens"),
        ("largest pack", f"{int(packs.sizes().max()):,} documents"),
        ("packed in", f"{seconds:.3f} s"),
        *([("written to", wanted.out)] if wanted.out else []),
    ]
