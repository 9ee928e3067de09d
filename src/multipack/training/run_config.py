"""`Config`, the configuration of a run, and its composition from words or from a saved run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from multipack.data.text.data_config import DataConfig, TokenizerConfig
from multipack.hub import is_name, lasting_name, model_folder
from multipack.parallel.parallel_config import ParallelConfig
from multipack.planning.options import PlanOptions
from multipack.run import (
    RunDirectory,
    check_format,
    find_run,
    holds_weights,
    is_export,
    is_peft,
    weights_folder,
)
from multipack.shapes import SHAPES, ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.training.other_names import translate
from multipack.training.settings import LogConfig, OptimizerConfig, PreferenceConfig, TrackConfig, TrainConfig
from multipack.words import (
    ConfigError,
    as_text,
    flatten,
    given_values,
    merge,
    read_yaml,
    retired_settings,
    split,
)

FIXED_AT_START = ("train.init_from", "preference.reference", "plan.packs_per_step", "plan.micro_batches")
"""Settings of a new run, which keep their saved values when `train.resume=auto` continues it."""

FIXED = ("plan.", "model.", "adapter.", "train.seed", "data.template_date", *FIXED_AT_START)
"""Settings, and beginnings of their names, that saved weights or the order of documents depend on.

Documents and tokenizer, which may move, are compared by their hashes when they are read."""

CHANGED_STEPS = ("optimizer.", "train.ema_decay", "train.min_improvement", "train.spike_factor")
"""Retired settings, and beginnings of their names, without which a resumed run would train otherwise."""

FREE = {
    # Which kernels compute, and where a model's code is read.
    *("model.attention", "model.kernels", "model.architecture"),
    "model.dropout",
    "model.scores",  # the objective sets it
    *("adapter.base", "adapter.base_hash", "adapter.dropout"),  # the base is compared by its hash
}
"""Exceptions from `FIXED`."""


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """The decoder's shape and its attention backend."""

    attention: str = "auto"
    """Attention backend: `auto` takes the first that supports device, dtype and shape."""

    kernels: Literal["auto", "torch", "liger"] = "auto"
    """Norms, SwiGLU, rotations and the loss by Liger's kernels or torch's; auto = Liger's where it can, on GPUs."""

    PRESET_HINT: ClassVar[str] = " or hf:FOLDER, a model of transformers"

    @classmethod
    def preset(cls, name: str) -> dict[str, Any] | None:
        """The values of a named shape, or of the model in hf:FOLDER; the vocabulary is left to the tokenizer."""
        if name.startswith("hf:"):
            from multipack.models.foreign import foreign_shape  # imports torch

            try:
                folder = str(model_folder(name.removeprefix("hf:"), "model"))
            except FileNotFoundError as error:
                raise ConfigError(str(error).replace("model=", "model=hf:", 1)) from error
            return {**foreign_shape(folder).to_dict(), "vocabulary_size": 0}
        if name not in SHAPES:
            return None
        return {**(ModelShape.preset(name) or {}), "vocabulary_size": 0}


@dataclass
class Config:
    """Configuration of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    plan: PlanOptions = field(default_factory=PlanOptions)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    out: str = ""
    """Run directory; empty = runs/<date>_<time>."""

    def __post_init__(self) -> None:
        """Check groups of settings individually, and choose the method of context parallelism."""
        self.data.check()
        self.tokenizer.check()
        # Only ulysses calls the backend that settings choose, and takes documents that share tokens.
        limited = self.model.attention != "auto" or self.data.share_prefixes != "off"
        self.parallel = self.parallel.resolved(self.model, limited)
        if self.model.attention != "auto":
            from multipack.ops.attention.table import find_backend  # imports torch

            find_backend(self.model.attention)

    @property
    def document_limit(self) -> int:
        """Maximum number of tokens of a document: the slots of a pack; with learned positions at most the context."""
        slots = self.plan.capacity
        return min(slots, self.model.context) if self.model.positions == "learned" else slots

    @property
    def pack_slots(self) -> int | None:
        """Number of slots of every pack if all packs have one shape; None if they differ, or `fixed_shape` is auto."""
        return self.plan.capacity if self.train.fixed_shape == "true" or self.parallel.pipeline > 1 else None

    def shape_with(self, vocabulary_size: int) -> ModelShape:
        """The decoder's shape with this vocabulary."""
        values = self.model.with_vocabulary(vocabulary_size).to_dict()
        del values["attention"], values["kernels"]
        return ModelShape(**values)


def compose(words: Iterable[str], base: dict[str, Any] | None = None) -> Config:
    """Build the configuration of a run from words, and the `base` of a saved run below them; see `multipack.words`.

    Raises:
        ConfigError: a word is invalid, or has no effect; the message names the field and the nearest legal name or
            value.
    """
    words = list(words)
    # kv_heads=0 follows model.heads; the default of an instance of ModelConfig is already resolved.
    config = merge(Config, words, base or {"model": {"kv_heads": 0}}, translate)
    check_adapter_words(words, config.adapter)
    return config


def compose_run(words: Iterable[str]) -> Config:
    """Compose the configuration of `multipack train`: of a new run, or of a saved run with `words` as changes.

    With `train.resume=auto` the same words begin a run in out= and later continue it, because launchers and schedulers
    restart a command with its words.

    Raises:
        ConfigError: see `compose`; or `train.resume` and `out` name different runs, there is no run to resume, or a
            word changes a setting that must not change.
    """
    given = list(words)
    values = given_values(given, translate)
    resume, out = str(values.get("train.resume", "false")), str(values.get("out", ""))
    restarts = resume.lower() == "auto"
    if restarts:
        if not out:
            raise ConfigError("train.resume=auto needs out=RUN_DIR: a restarted run must find its directory")
        resume = str(RunDirectory(out).config.is_file()).lower()
        given.append(f"train.resume={resume}")
    if resume.lower() in ("false", ""):
        config = resolve_weights(compose(given, initial_model(values)))
        check_documents_named(values, config.train.init_from)
        return config
    path = out if resume.lower() == "true" else resume
    if not path:
        raise ConfigError("train.resume=true needs out=RUN_DIR (or write train.resume=RUN_DIR)")
    try:
        run, checkpoint = find_run(path)
        checkpoint = checkpoint or (run.latest_checkpoint() if run.has_checkpoints else None)
        if checkpoint:
            check_format(checkpoint)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"train.resume={resume}: {error}") from error
    if out and Path(out).resolve() != run.path.resolve():
        raise ConfigError(
            f"out={out} is not the run of train.resume={resume}; a run continues in its own"
            f" directory: remove out=, or copy {run.path} first"
        )
    # The settings saved in the checkpoint, because later words may have changed those in the run directory.
    before = read_yaml(checkpoint / "config.yaml" if checkpoint else run.config)
    return _continued(compose(given, before), before, restarts, str(run.path))


def _continued(config: Config, before: dict[str, Any], restarts: bool, out: str) -> Config:
    """The saved configuration `before` with changes, which are checked; `restarts` keeps `FIXED_AT_START`."""
    old = flatten(before)
    for key, default in retired_settings(Config).items():
        if key.startswith(CHANGED_STEPS) and old.get(key, default) != default:
            raise ConfigError(
                f"{key}={old[key]} of that run is gone, and it would train otherwise: begin a new run, as with"
                f" train.init_from={out}"
            )
    if restarts:
        for key in FIXED_AT_START:
            group, _, name = key.partition(".")
            if key in old:
                setattr(config, group, replace(getattr(config, group), **{name: old[key]}))
    packs = old.get("plan.packs_per_step", config.plan.packs_per_step)
    if config.plan.micro_batches:  # `check`, which knows the number of ranks, compares them with these packs
        config.plan = replace(config.plan, packs_per_step=packs)
    # Presets leave the vocabulary to the tokenizer, and the family to the weights' folder.
    config.model = replace(
        config.model,
        vocabulary_size=config.model.vocabulary_size or old.get("model.vocabulary_size", 0),
        family=config.model.family or old.get("model.family", ""),
    )
    if not config.data.template_date:
        config.data = replace(config.data, template_date=old.get("data.template_date", ""))
    if config.adapter.name != "none":
        saved = old.get("adapter.base", "")
        kept = restarts and saved and (is_name(saved) or Path(saved).exists())
        base = saved if kept else _lasting(config.adapter.base or saved, "adapter.base")
        head = config.adapter.with_head("score") if old.get("model.scores") else config.adapter
        config.adapter = replace(head, base=base)
    # A saved run has packs_per_step in the place of micro_batches, as `resolve` of assemble.py writes it.
    _check_unchanged(old, flatten(asdict(config)) | {"plan.micro_batches": 0})
    config.out = out
    return config


def initial_model(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Model settings of the weights in train.init_from, without the vocabulary; None if `settings` set a shape."""
    path = settings.get("train.init_from", "")
    free = {"model.attention", "model.kernels", "model.dropout"}
    shaped = any(key == "model" or (key.startswith("model.") and key not in free) for key in settings)
    if not path or shaped:
        return None
    shape = trained_shape(folder_of_weights(path, "train.init_from"))
    return {"model": {**shape.to_dict(), "vocabulary_size": 0}}


def trained_shape(path: Path, foreign: bool = False) -> ModelShape:
    """The decoder's shape of a run, a checkpoint or a Hugging Face folder (`foreign`: of a model of transformers).

    Raises:
        FileNotFoundError: there is no run, complete checkpoint or Hugging Face folder at `path`.
        ValueError: files are damaged, or do not describe a model.
    """
    if not is_export(path):
        return saved_shape(weights_folder(path))
    if is_peft(path):
        from multipack.models.peft_format import peft_base, peft_shape  # imports torch

        return peft_shape(path, trained_shape(peft_base(path), foreign))
    if foreign:
        from multipack.models.foreign import foreign_shape

        return foreign_shape(str(path))
    from multipack.models.huggingface import decoder_shape

    return decoder_shape(path / "config.json")


def saved_shape(checkpoint: Path) -> ModelShape:
    """The decoder's shape in the config.yaml of a checkpoint.

    Raises:
        ConfigError: the file cannot be read, or does not describe a model.
    """
    file = checkpoint / "config.yaml"
    model = read_yaml(file).get("model")
    try:
        if not isinstance(model, dict):
            raise ConfigError("it has no group `model`")
        config = compose([], {"model": {"kv_heads": 0, **model, "attention": "auto", "kernels": "auto"}})
        shape = config.shape_with(config.model.vocabulary_size)
        if shape.architecture and (checkpoint / "config.json").is_file():
            return replace(shape, architecture=str(checkpoint))
        return shape
    except ConfigError as error:
        raise ConfigError(f"{file} does not describe a model: {error}") from error


def saved_adapter(saved: Mapping[str, Any]) -> AdapterConfig:
    """The adapter settings of a saved run; raises a ConfigError if they are illegal."""
    return compose([], {"model": {"kv_heads": 0}, "adapter": saved.get("adapter", {})}).adapter


def resolve_weights(config: Config) -> Config:
    """Replace runs by their checkpoints that are the latest now, and choose the tokenizer; changes `config`.

    The tokenizer of `train.init_from` is used if neither the settings nor a store choose one.

    Raises:
        ConfigError: there are no weights, or `train.init_from` and `adapter.base` name different ones.
    """
    train, preference, architecture = config.train, config.preference, config.model.architecture
    if preference.reference:
        preference.reference = _lasting(preference.reference, "preference.reference")
    given = train.init_from
    if architecture and not train.init_from and holds_weights(Path(architecture)):
        train.init_from = architecture
    if train.init_from:
        folder = folder_of_weights(train.init_from, "train.init_from")
        train.init_from = lasting_name(folder)
        file = folder / "tokenizer.json"
        if is_peft(folder):
            from multipack.models.peft_format import tokenizer_folder  # imports torch

            file = tokenizer_folder(folder) / "tokenizer.json"
        free = config.tokenizer.kind == "auto" and config.data.source not in ("store", "mixture")
        if free and file.is_file():
            config.tokenizer = TokenizerConfig("file", str(file))
    if config.adapter.name != "none" and (base := config.adapter.base or given or train.init_from):
        config.adapter.base = _lasting(base, "adapter.base")
        other = given and folder.resolve() != folder_of_weights(base, "adapter.base").resolve()
        if other and train.resume == "false":
            raise ConfigError(
                f"train.init_from={given} is not read with adapter.base={base}: leave one of them out"
            )
    return config


def _lasting(model: str, setting: str) -> str:
    """The value of a setting to save: name and revision on the hub, or the weights' absolute folder."""
    return lasting_name(folder_of_weights(model, setting).resolve())


def folder_of_weights(path: str, setting: str) -> Path:
    """The folder of the weights that a setting names; `ConfigError` if there are none."""
    try:
        folder = model_folder(path, setting)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    try:
        return weights_folder(folder)
    except FileNotFoundError as error:
        raise ConfigError(f"{setting}={path}: {error}") from error


def check_documents_named(given: Mapping[str, Any], weights: str) -> None:
    """Check that somebody who brings weights, adapters or preferences also names documents.

    The default documents, Python's standard library, are for a first run; `data=stdlib` asks for them. `given` has the
    values of words and files by full name; `weights` are the ones to start from, empty for new ones.
    """
    if "data" in given or any(key.startswith("data.") for key in given):
        return
    names = [key for key in given if key.startswith(("adapter", "preference"))]
    if weights or names:
        setting = f"train.init_from={weights}" if weights else f"{names[0]}={given[names[0]]}"
        raise ConfigError(
            f"{setting} comes without documents: name them, such as data=jsonl data.path=FILE (data=stdlib trains on"
            " Python's standard library)"
        )


def check_adapter_words(words: Iterable[str], adapter: AdapterConfig) -> None:
    """Raise a ConfigError that names a word on adapters if the run has none."""
    for word in words if adapter.name == "none" else ():
        if translate(*split(word))[0].startswith("adapter.") and not word.startswith("adapter.name"):
            raise ConfigError(f"{word} has no effect without adapters (adapter.name=none): set adapter=lora")


def _check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a resumed run has the settings that its weights and its order of documents depend on.

    Both have values by full name; the saved run lacks settings that are newer.
    """
    for key, value in now.items():
        if key.startswith(FIXED) and key not in FREE and key in before and not _equal(before[key], value):
            raise ConfigError(
                f"{key} was {as_text(before[key]) or 'empty'} in that run and cannot become"
                f" {as_text(value) or 'empty'}: the saved weights and"
                " the order of documents depend on it; leave it out, or start a new run with another out="
            )


def _equal(before: Any, now: Any) -> bool:
    """Whether values are equal; a file may hold text in place of a number, and a list in place of a tuple."""
    if isinstance(now, tuple | list):
        return isinstance(before, tuple | list) and list(before) == list(now)
    return bool(before == now) or str(before) == str(now)
