"""Settings of `multipack plan` and `multipack pack`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from multipack.data.text.data_config import DataConfig, TokenizerConfig, source_of
from multipack.planning.cost import CostModel
from multipack.planning.options import PlanOptions, Sync
from multipack.planning.packing import Method
from multipack.run import is_export, is_peft
from multipack.shapes import SHAPES, ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.training.other_names import translate
from multipack.training.run_config import Config, compose, folder_of_weights, resolve_weights, saved_shape
from multipack.words import ConfigError, as_text, changed_words, flatten, merge, read_yaml, split


@dataclass
class PlanCommand:
    """Settings of `multipack plan`."""

    plan: PlanOptions = field(default_factory=PlanOptions)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelShape = field(default_factory=lambda: SHAPES["llama-8b"])
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
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
    """Maximum number of evenly spaced steps in the report; 0 = all steps."""
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

    def cost_model(self) -> CostModel:
        """Return the cost of documents: the model's FLOPs."""
        return CostModel.from_shape(self.model, adapter=self.adapter)


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


def compose_plan(words: Sequence[str]) -> tuple[Path | None, PlanCommand, list[str]]:
    """The file of lengths to plan, the settings, and those of `multipack train` among the words.

    Without a file (None) documents are planned: those of `data` or of a path. Of the settings of `multipack train`,
    `train.init_from` decides about model and tokenizer, `train.seed` and `parallel` about the plan; the others have no
    effect on it.

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
    settings = _with_files(settings)
    training = [word for word in settings if is_of_training(word)]
    settings = [word for word in settings if word not in training]
    has_documents = any(split(word)[0] in ("data", "data.source") for word in settings)
    base = _base(training, settings, has_documents) if training else {}
    command = merge(PlanCommand, settings, base, translate)
    if paths and not source:
        if command.data != DataConfig() or command.tokenizer != TokenizerConfig():
            raise ConfigError(
                f"settings of data and tokenizer are for documents, and {paths[0]} is a file of lengths"
            )
        return Path(paths[0]), command, training
    if not has_documents:
        raise ConfigError(
            "there is nothing to plan: give a .npy file of lengths, a token store, a file of documents, or data=…"
            " data.path=… as in training"
        )
    return None, command, training


def _with_files(words: Sequence[str]) -> list[str]:
    """The words, with the values of `config=FILE` as words before them, which they override."""
    pairs = [split(word) for word in words]
    files = [flatten(read_yaml(value)) for key, value in pairs if key == "config"]
    given = {name: as_text(value) for file in files for name, value in file.items() if value is not None}
    given |= {key: value for key, value in pairs if key != "config"}
    return [f"{key}={value}" for key, value in given.items()]


def is_of_training(word: str) -> bool:
    """Whether a word is a setting of `multipack train` and none of `multipack plan`."""
    key, _ = translate(*split(word))
    others = {each.name for each in fields(Config)} - {each.name for each in fields(PlanCommand)}
    return key.partition(".")[0] in (*others, "adapter") or key in ("model.attention", "model.kernels")


def _base(training: Sequence[str], settings: Sequence[str], has_documents: bool) -> dict[str, Any]:
    """Values of `PlanCommand` that follow from words of `multipack train`.

    Raises:
        ConfigError: a word is invalid, or there are no weights at `train.init_from`.
    """
    shared = [word for word in settings if split(word)[0].partition(".")[0] in ("data", "tokenizer")]
    config = resolve_weights(compose([*training, *(shared if has_documents else [])]))
    base: dict[str, Any] = {"seed": config.train.seed, "context": config.parallel.context}
    if config.adapter.name != "none":
        base["adapter"] = asdict(config.adapter)
    if any(word.startswith("parallel") for word in training):
        base["sync"] = config.parallel.sync
    if not config.train.init_from:
        return base
    if has_documents:
        base["tokenizer"] = asdict(config.tokenizer)
    if not any(word.startswith("model") for word in settings):
        base["model"] = _shape_values(folder_of_weights(config.train.init_from, "train.init_from"))
    return base


def _shape_values(folder: Path) -> dict[str, Any]:
    """The shape of the weights in a folder of Hugging Face, of adapters, or of a checkpoint."""
    if is_peft(folder):
        from multipack.models.peft_format import peft_base  # imports torch

        folder = peft_base(folder)
    if is_export(folder):
        return ModelShape.preset(str(folder / "config.json")) or {}
    return saved_shape(folder).to_dict()


def training_command(documents: str, command: PlanCommand, training: Sequence[str] = ()) -> str:
    """Return the shell command that trains with a plan's settings.

    Args:
        documents: "data=…" for a plan of lengths, else empty.
        command: the settings of the plan.
        training: further settings of `multipack train`.
    """
    words = [documents] if documents else [f"data={command.data.source}"]
    words += changed_words("data", command.data, replace(DataConfig(), source=command.data.source))
    more = [word for word in training if not word.startswith("train.seed=")]
    if command.context > 1 and not any(word.startswith("parallel.context=") for word in more):
        more.append(f"parallel.context={command.context}")
    if not any(word.startswith("train.init_from=") for word in more):
        words += changed_words("tokenizer", command.tokenizer, TokenizerConfig())
    words.append(f"plan.capacity={command.plan.capacity}")
    plan = replace(command.plan, capacity=PlanOptions().capacity)
    if plan.micro_batches:  # they determine packs_per_step
        plan = replace(plan, packs_per_step=PlanOptions().packs_per_step)
    words += changed_words("plan", plan, PlanOptions())
    words += [f"train.seed={command.seed}"] if command.seed > 0 else []
    processes = command.world_size * compose(w for w in more if w.startswith("parallel")).parallel.model_ranks
    launch = "" if processes == 1 else f"launch -n {processes} -- "
    return f"multipack {launch}train {' '.join([*words, *more])}"
