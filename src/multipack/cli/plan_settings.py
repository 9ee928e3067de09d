"""Settings of `multipack plan` (a run's, and its report's) and of `multipack pack`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from multipack.data.text.data_config import source_of
from multipack.planning.options import Sync
from multipack.planning.packing import Method
from multipack.ranges import Count, Positive, check_ranges
from multipack.run import is_export, is_peft
from multipack.shapes import SHAPES, ModelShape
from multipack.training.other_names import translate
from multipack.training.run_config import (
    Config,
    ModelConfig,
    check_adapter_words,
    folder_of_weights,
    resolve_weights,
    saved_shape,
)
from multipack.words import ConfigError, given_values, merge, split

SHORT = {"seed": "train.seed", "context": "parallel.context"}
"""Short names of settings of a run, of which the report makes much."""


def plan_names(key: str, value: Any) -> tuple[str, Any]:
    """Translate a name and a value of `multipack plan`, which may be short or another tool's."""
    return translate(SHORT.get(key, key), value)


@dataclass(frozen=True)
class CostedModel(ModelConfig):
    """The decoder whose cost is planned, with its vocabulary."""

    PRESET_HINT: ClassVar[str] = ModelShape.PRESET_HINT

    @classmethod
    def preset(cls, name: str) -> dict[str, Any] | None:
        """The values of a named shape, or of a config.json of Hugging Face."""
        return ModelShape.preset(name)


@dataclass
class PlanCommand(Config):
    """Settings of `multipack plan`: of the run that is planned, and of the report."""

    model: CostedModel = field(default_factory=lambda: CostedModel(**SHAPES["llama-8b"].to_dict()))
    world_size: Positive = 1
    """Data-parallel ranks of the report."""
    sync: Sync = "micro"
    """Sync points: every micro-batch (`micro`: FSDP; `pipeline`), or once per `step` (DDP)."""
    epoch: Count = 0
    """Index of the epoch, from 0."""

    def __post_init__(self) -> None:
        """Check ranges and combinations."""
        super().__post_init__()
        if self.data.stream:
            raise ValueError(
                "data.stream=true: documents that arrive during training cannot be planned before"
            )
        check_ranges(self)
        packs = self.plan.packs_per_step
        if not self.plan.micro_batches and self.world_size > packs:
            raise ValueError(
                f"world_size={self.world_size} ranks need as many packs per step, but plan.packs_per_step={packs}: use"
                f" plan.packs_per_step={self.world_size} (or plan.micro_batches, packs per rank), or world_size={packs}"
            )


@dataclass
class PackPlan:
    """The packs of `multipack pack`."""

    capacity: int = 8192
    """Maximum tokens of a pack."""
    max_documents: Count = 0
    """Maximum documents of a pack; 0 = no limit."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_ranges(self, "plan.")


@dataclass
class PackCommand:
    """Settings of `multipack pack`."""

    plan: PackPlan = field(default_factory=PackPlan)
    method: Method = "best_fit"
    """Algorithm; `fewest` searches for the minimum number of packs, and for a proof of it."""
    time_budget: float = 10.0
    """CPU seconds after which `fewest` returns its best packs and lower bound."""
    out: str = ""
    """File for the packs (.npz: order, offsets, lower_bound, capacity); empty = no file."""

    def __post_init__(self) -> None:
        """Check the file."""
        if self.out and not self.out.endswith(".npz"):
            raise ValueError(f"out={self.out} must end with .npz")
        if self.out and Path(self.out).exists():
            raise ValueError(f"out={self.out} exists: choose another name, or move it away")


def compose_plan(words: Sequence[str]) -> tuple[Path | None, PlanCommand, str]:
    """The file of lengths to plan, the settings, and the shell command that trains with this plan.

    Without a file (None) the documents of `data` or of a path are planned. `words` are words of `multipack train` and
    of the report, see `plan_names`.

    Raises:
        ConfigError: a word is invalid, or no word names documents to plan.
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
    given = given_values(settings, plan_names)
    groups = {key.partition(".")[0] for key in given}
    start = str(given.get("train.init_from", ""))
    base = {"model": _shape_values(start)} if start and "model" not in groups else {}
    command = merge(PlanCommand, settings, base, plan_names)
    check_adapter_words(settings, command.adapter)
    resolve_weights(command)
    if paths and not source and groups & {"data", "tokenizer"}:
        raise ConfigError(
            f"settings of data and tokenizer are for documents, and {paths[0]} is a file of lengths"
        )
    if not paths and not {"data", "data.source"} & given.keys():
        raise ConfigError(
            "there is nothing to plan: give a .npy file of lengths, a token store, a file of documents, or data=…"
            " data.path=… as in training"
        )
    named = given_values(settings, translate)  # without the short names of a plan's own settings
    if "sync" not in given and any(key.partition(".")[0] == "parallel" for key in named):
        command.sync = command.parallel.sync
    file = Path(paths[0]) if paths and not source else None
    return file, command, _training_command(["data=…", *settings] if file else settings, command)


def _shape_values(path: str) -> dict[str, Any]:
    """The shape of weights in a folder of Hugging Face, of adapters, or in a checkpoint."""
    folder = folder_of_weights(path, "train.init_from")
    if is_peft(folder):
        from multipack.models.peft_format import peft_chain  # imports torch

        folder = peft_chain(folder)[-1]
    if is_export(folder):
        return ModelShape.preset(str(folder / "config.json")) or {}
    return saved_shape(folder).to_dict()


def _training_command(settings: Sequence[str], command: PlanCommand) -> str:
    """The shell command that trains with a plan's settings, without the decoder whose cost is planned."""
    known = {each.name for each in fields(Config)} - {"model"} | {"config"}
    given = [plan_names(*split(word)) for word in settings]
    words = [
        f"{key}={value}"
        for key, value in given
        if key.partition(".")[0] in known or key in ("model.attention", "model.kernels")
    ]
    words += [] if "plan.capacity" in dict(given) else [f"plan.capacity={command.plan.capacity}"]
    processes = command.world_size * command.parallel.model_ranks
    launch = "" if processes == 1 else f"launch -n {processes} -- "
    return f"multipack {launch}train {' '.join(words)}"
