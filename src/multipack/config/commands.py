"""What the commands depend on that need no training: `multipack plan` and `multipack pack`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from multipack.data.lengths import LengthsConfig
from multipack.planning.cost import CostModel
from multipack.planning.packing import Method
from multipack.planning.plan import PlanConfig
from multipack.shapes import SHAPES, ModelShape


@dataclass
class PlanCommand:
    """What `multipack plan` depends on, beside the lengths."""

    plan: PlanConfig = field(default_factory=PlanConfig)
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
