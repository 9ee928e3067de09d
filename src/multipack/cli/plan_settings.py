"""Settings of `multipack plan` and `multipack pack`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from multipack.data.data_config import DataConfig, TokenizerConfig, source_of
from multipack.planning.cost import CostModel
from multipack.planning.options import PlanOptions, Sync
from multipack.planning.packing import Method
from multipack.shapes import SHAPES, ModelShape
from multipack.training.other_names import translate
from multipack.words import ConfigError, changed_words, merge, split


@dataclass
class PlanCommand:
    """Settings of `multipack plan`."""

    plan: PlanOptions = field(default_factory=PlanOptions)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelShape = field(default_factory=lambda: SHAPES["llama-8b"])
    cost: str = ""
    """File of a cost model fitted to measured times (JSON of `multipack calibrate`); empty = the model's FLOPs."""
    world_size: int = 1
    """Data-parallel ranks of the report."""
    context: int = 1
    """Context ranks, which divide each pack: above 1, the report compares how even a ring, Ulysses and planned are."""
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
        self.data.check()
        self.tokenizer.check()
        if self.data.stream:
            raise ValueError(
                "data.stream=true: documents that arrive during training cannot be planned before"
            )
        ranges = {"world_size": 1, "context": 1, "padded_batch_size": 1, "epoch": 0, "sample": 0}
        for name, least in ranges.items():
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
class PackPlan:
    """The packs of `multipack pack`."""

    capacity: int = 8192
    """Maximum tokens of a pack."""
    max_documents: int = 0
    """Maximum documents of a pack; 0 = no limit."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.max_documents < 0:
            raise ValueError(f"plan.max_documents={self.max_documents} must not be negative; 0 = no limit")


@dataclass
class PackCommand:
    """Settings of `multipack pack`."""

    plan: PackPlan = field(default_factory=PackPlan)
    method: Method = "best_fit"
    """Algorithm; `fewest` searches for the minimum number of packs, and for a proof of it."""
    time_budget: float = 10.0
    """CPU seconds after which `fewest` returns its best packs and lower bound."""
    histogram: bool = False
    """The file counts documents by length: entry i is the number of documents of i + 1 tokens."""
    out: str = ""
    """File for the packs (.npz: order, offsets, lower_bound, capacity); empty = no file."""

    def __post_init__(self) -> None:
        """Check the file."""
        if self.out and not self.out.endswith(".npz"):
            raise ValueError(f"out={self.out} must end with .npz")
        if self.out and Path(self.out).exists():
            raise ValueError(f"out={self.out} exists: choose another name, or move it away")


def compose_plan(words: Sequence[str]) -> tuple[Path | None, PlanCommand]:
    """The file of lengths to plan, and the settings; None if documents are planned: those of `data` or of a path.

    Raises:
        ConfigError: a word is invalid, or nothing is given to plan.
    """
    paths = [
        word for number, word in enumerate(words) if "=" not in word and (not number or Path(word).exists())
    ]
    settings = [word for word in words if word not in paths]
    if len(paths) > 1:
        raise ConfigError(f"{' and '.join(paths)} are given: plan the documents or lengths of one of them")
    source = source_of(paths[0]) if paths else ""
    if source:
        settings = [f"data={source}", f"data.path={paths[0]}", *settings]
    command = merge(PlanCommand, settings, translate=translate)
    has_documents = any(split(word)[0] in ("data", "data.source") for word in settings)
    if paths and not source:
        if command.data != DataConfig() or command.tokenizer != TokenizerConfig():
            raise ConfigError(
                f"settings of data and tokenizer are for documents, and {paths[0]} is a file of lengths"
            )
        return Path(paths[0]), command
    if not has_documents:
        raise ConfigError(
            "there is nothing to plan: give a .npy file of lengths, a token store, a file of documents, or data=…"
            " data.path=… as in training"
        )
    return None, command


def training_command(documents: str, command: PlanCommand) -> str:
    """Return the shell command that trains with a plan's settings; `documents` is "data=…" for lengths only."""
    words = [documents] if documents else [f"data={command.data.source}"]
    data = changed_words("data", command.data, replace(DataConfig(), source=command.data.source))
    words += [*data, *changed_words("tokenizer", command.tokenizer, TokenizerConfig())]
    words.append(f"plan.capacity={command.plan.capacity}")
    plan = replace(command.plan, capacity=PlanOptions().capacity)
    if plan.micro_batches:  # they determine packs_per_step
        plan = replace(plan, packs_per_step=PlanOptions().packs_per_step)
    words += changed_words("plan", plan, PlanOptions())
    words += [f"train.seed={command.seed}"] if command.seed > 0 else []
    launch = "" if command.world_size == 1 else f"launch -n {command.world_size} -- "
    return f"multipack {launch}train {' '.join(words)}"
