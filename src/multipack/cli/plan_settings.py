"""Settings of `multipack plan` and `multipack pack`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from multipack.data.stored_lengths import LengthsConfig
from multipack.planning.cost import CostModel
from multipack.planning.options import PlanOptions, Sync
from multipack.planning.packing import Method
from multipack.shapes import SHAPES, ModelShape
from multipack.words import changed_words


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
    sync: Sync = "micro"
    """Sync points: every micro-batch (`micro`: FSDP; `pipeline`), or once per `step` (DDP)."""
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


def training_command(source: Path, command: PlanCommand) -> str:
    """Return the shell command that trains with a plan's settings; with `data=…` if `source` holds only lengths."""
    words = [f"data=store data.path={source}" if source.is_dir() else "data=…"]
    words += changed_words("data", command.data, LengthsConfig())
    words.append(f"plan.capacity={command.plan.capacity}")
    plan = replace(command.plan, capacity=PlanOptions().capacity)
    if plan.micro_batches:  # they determine packs_per_step
        plan = replace(plan, packs_per_step=PlanOptions().packs_per_step)
    words += changed_words("plan", plan, PlanOptions())
    words += [f"train.seed={command.seed}"] if command.seed > 0 else []
    ranks = command.world_size
    hosts = "" if ranks <= 8 else "--nnodes … "
    launch = "" if ranks == 1 else f"torchrun {hosts}--nproc-per-node {'…' if hosts else ranks} -m "
    return f"{launch}multipack train {' '.join(words)}"
