"""The configuration of a run: every room's dataclass put together, from YAML, presets and `key=value` words.

    multipack train  data=jsonl data.path=train.jsonl  model=gpt2 model.layers=6  plan.capacity=16384  out=runs/a
                     └ preset ┘                        └ preset ┘ └ one field ┘

Later words win over earlier ones, words over presets, presets over `config=FILE`, a file over the defaults. An
unknown key, a wrong type or an impossible value is an error at once, with the field and the nearest legal name.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from multipack.data.sources import DataConfig
from multipack.data.tokenizer import TokenizerConfig
from multipack.models.attention import find_backend
from multipack.parallel.engine import ParallelConfig
from multipack.planning.cost import CostModel
from multipack.planning.packing import Method
from multipack.planning.plan import PlanConfig
from multipack.run import find_run
from multipack.shapes import SHAPES, ModelShape
from multipack.training.optimizer import OptimizerConfig
from multipack.training.session import LogConfig, TrainConfig

Schema = TypeVar("Schema")


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """The decoder's shape and how it attends."""

    attention: str = "auto"
    """Attention backend: `auto` takes the first that supports device, dtype and shape."""


@dataclass
class Config:
    """Everything that a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)
    out: str = ""
    """Run directory; empty = runs/<date>_<time>."""

    def __post_init__(self) -> None:
        """Refuse what each room can tell by itself, before any work is done."""
        self.data.check()
        self.tokenizer.check()
        if self.model.attention != "auto":
            find_backend(self.model.attention)


@dataclass
class PlanCommand:
    """What `multipack plan` depends on, beside the lengths."""

    plan: PlanConfig = field(default_factory=PlanConfig)
    model: ModelShape = field(default_factory=lambda: SHAPES["llama-8b"])
    cost: str = ""
    """File of a cost model that was fitted to measured times (JSON, as a run saves it); empty = the model's FLOPs."""
    world_size: int = 1
    """Data-parallel ranks that the report deals to."""
    sync: Literal["micro", "step", "pipeline"] = "micro"
    """When ranks meet: at every micro-batch (FSDP, pipelines) or once a step (DDP)."""
    seed: int = 0
    """Of the order of documents."""
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
        if self.plan.cost == "measured" and not self.cost:
            raise ValueError(
                "plan.cost=measured is what a run measures when it starts; here give cost=FILE, the cost model that"
                " a run saved, or leave plan.cost=flops"
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


class ConfigError(ValueError):
    """A configuration that cannot be; the message names the field and what is legal."""


def _initial(value: str) -> str:
    choices = {"scratch": "false", "resume": "true"}
    if value not in choices:
        raise ConfigError(
            f"train.init_from={value}: legal are scratch and resume (here: train.resume=true or a run's path)"
        )
    return choices[value]


ALIASES: dict[str, tuple[str, Callable[[str], str]]] = {
    "train.max_iters": ("train.steps", str),
    "train.eval_interval": ("train.eval_every", str),
    "train.log_interval": ("log.every", str),
    "train.eval_iters": ("train.eval_packs", str),
    "train.init_from": ("train.resume", _initial),
    "train.backend": ("parallel.data", str.lower),
    "train.warmup_iters": ("optimizer.warmup_steps", str),
    "model.n_layer": ("model.layers", str),
    "model.n_head": ("model.heads", str),
    "model.block_size": ("data.block_size", str),
    "model.vocab_size": ("model.vocabulary_size", str),
    "optimizer.gas": ("plan.micro_batches", str),
    "optimizer.learning_rate": ("optimizer.lr", str),
    "optimizer.grad_clip": ("optimizer.clip", str),
    "optimizer.lr_decay_iters": ("optimizer.decay_steps", str),
}
"""wordplay's names → (the field of ours, how its value is written here)."""

VALUE_ALIASES: dict[tuple[str, str], str] = {
    ("train.dtype", "bfloat16"): "bf16",
    ("train.dtype", "float32"): "fp32",
    ("data", "shakespeare"): "shakespeare_char",
}
"""(setting, value as others write it) → value here."""

HINTS: dict[str, str] = {
    "model.batch_size": "plan.capacity counts tokens: set it to batch_size × block_size",
    "model.n_embd": "set model.d_model and model.d_ff (wordplay's d_ff is 4 × n_embd)",
}
"""Names without a single field of ours → what to set instead."""


def compose(words: Iterable[str], base: dict[str, Any] | None = None) -> Config:
    """Build the configuration of a run from command-line words.

    Args:
        words: `group=preset`, `group.key=value`, `out=DIR` or `config=FILE`, in any order.
        base: values that a saved run has, under the words.

    Raises:
        ConfigError: with the field and the nearest legal name or value.
    """
    return merge(Config, words, base)


def compose_run(words: Iterable[str]) -> Config:
    """The configuration of `multipack train`: a new run's, or a saved run's with `words` over it.

    Raises:
        ConfigError: also when `train.resume` and `out` do not name one run.
    """
    given = list(words)
    said = dict(_rename(*_split(word)) for word in given)
    resume, out = said.get("train.resume", "false"), said.get("out", "")
    if resume.lower() in ("false", ""):
        return compose(given)
    asked = out if resume.lower() == "true" else resume
    if not asked:
        raise ConfigError("train.resume=true needs out=RUN_DIR (or write train.resume=RUN_DIR)")
    try:
        run, checkpoint = find_run(asked)
        checkpoint = checkpoint or (run.latest_checkpoint() if run.latest.is_file() else None)
    except FileNotFoundError as error:
        raise ConfigError(f"train.resume={resume}: {error}") from error
    if out and Path(out).resolve() != run.path.resolve():
        raise ConfigError(
            f"out={out} is not the run of train.resume={resume}; a run continues in its own"
            f" directory: leave out= away, or copy {run.path} first"
        )
    # A checkpoint goes on with the settings that it was trained with, whatever the run's file says by now.
    before = saved(checkpoint / "config.yaml" if checkpoint else run.config)
    config = compose(given, before)
    _refuse_another_run(before, said)
    config.out = str(run.path)
    return config


def _refuse_another_run(before: dict[str, Any], said: dict[str, str]) -> None:
    """Name a setting of plan or model that would make the resumed run another one."""
    free = {"plan.packs_per_step", "plan.micro_batches", "model.attention", "model.dropout"}
    old = _flatten(before)
    for key, value in said.items():
        fixed = key.startswith(("plan.", "model.")) and key not in free
        if fixed and key in old and value not in (str(old[key]), str(old[key]).lower(), "0"):
            raise ConfigError(
                f"{key} was {old[key]} in that run and cannot become {value}: the saved weights and documents depend"
                " on it; leave it away, or start a new run with another out="
            )


def merge(schema: type[Schema], words: Iterable[str], base: dict[str, Any] | None = None) -> Schema:
    """Build any dataclass of dataclasses from words; see `compose`."""
    tree = OmegaConf.structured(schema)
    OmegaConf.set_readonly(tree, False)
    for name in tree:
        if isinstance(tree[name], DictConfig):
            OmegaConf.set_readonly(tree[name], False)
    pairs = [_rename(*_split(word)) for word in words]
    if base is not None:
        _apply(tree, _flatten(base))
    for key, value in pairs:
        if key == "config":
            _apply(tree, _flatten(_read_yaml(value)))
    for key, value in pairs:
        if key in tree and isinstance(tree[key], DictConfig):
            _apply(tree, _flatten(_preset(key, value, trains="tokenizer" in tree)))
    explicit = {key: value for key, value in pairs if "." in key or key in tree}
    _apply(tree, {k: v for k, v in explicit.items() if not isinstance(OmegaConf.select(tree, k), DictConfig)})
    if "plan.packs_per_step" in explicit:
        if "plan.micro_batches" in explicit:
            raise ConfigError("set plan.packs_per_step or plan.micro_batches (packs of one rank), not both")
        _apply(tree, {"plan.micro_batches": 0})  # the word wins over a file's
    unknown = [key for key, _ in pairs if key not in explicit and key != "config"]
    if unknown:
        raise ConfigError(_unknown(unknown[0], tree))
    try:
        return typing.cast(Schema, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        raise ConfigError(_reason(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def saved(path: str | Path) -> dict[str, Any]:
    """The values of a config.yaml, to be a `base`."""
    return _read_yaml(str(path))


def preset_names(group: str) -> list[str]:
    """Names that `group=NAME` understands."""
    if group == "model":
        return list(SHAPES)
    folder = resources.files("multipack") / "presets" / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()) if folder.is_dir() else []


def describe(schema: type) -> list[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every field below `schema`; meanings are the fields' docstrings."""
    rows: list[tuple[str, str, str, str]] = []
    hints = typing.get_type_hints(schema)
    documented = _field_docstrings(schema)
    instance = schema()
    for entry in fields(schema):
        value = getattr(instance, entry.name)
        if is_dataclass(value):
            below = describe(type(value))
            rows += [(f"{entry.name}.{key}", kind, default, meaning) for key, kind, default, meaning in below]
        else:
            rows.append(
                (entry.name, _type_name(hints[entry.name]), str(value), documented.get(entry.name, ""))
            )
    return rows


def _field_docstrings(schema: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        if not is_dataclass(cls):
            continue
        body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                assert isinstance(after.value, ast.Constant)
                assert isinstance(statement.target, ast.Name)
                found[statement.target.id] = " ".join(str(after.value.value).split())
    return found


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return "names"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true|false"}.get(
        getattr(hint, "__name__", str(hint)), str(hint)
    )


def _split(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word!r} is not a setting; write group=preset or group.key=value")
    _refuse_interpolation(key, value)
    return key.strip(), value


def _refuse_interpolation(key: str, value: Any) -> None:
    """Settings are values: `${…}` would let somebody else's file read this process's environment."""
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{key}={value}: settings cannot hold ${{…}}; write the value itself")


def _rename(key: str, value: str) -> tuple[str, str]:
    if key in HINTS:
        raise ConfigError(f"{key} has no field of its own here: {HINTS[key]}")
    if key in ALIASES:
        key, convert = ALIASES[key]
        value = convert(value)
    return key, VALUE_ALIASES.get((key, value), value)


def _preset(group: str, name: str, trains: bool) -> dict[str, Any]:
    """The values of a preset; `trains`: for a run, whose vocabulary is its tokenizer's, not the published one."""
    shape = SHAPES.get(name)
    if group == "model" and shape is None and not trains and Path(name).exists():
        shape = ModelShape.from_huggingface(name)
    if group == "model" and shape is not None:
        # Equal numbers of heads stay equal when one of them is changed.
        kv_heads = 0 if shape.kv_heads == shape.heads else shape.kv_heads
        vocabulary = 0 if trains else shape.vocabulary_size
        return {"model": {**shape.to_dict(), "vocabulary_size": vocabulary, "kv_heads": kv_heads}}
    if (
        group == "tokenizer"
        and name not in preset_names(group)
        and (name.endswith(".json") or Path(name).exists())
    ):
        return {"tokenizer": {"kind": "file", "path": name}}
    names = preset_names(group)
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {group}={near[0]}?" if near else ""
        also = " or the path of a tokenizer.json" if group == "tokenizer" else ""
        if group == "model" and not trains:
            also = " or the path of a Hugging Face config.json"
        if not names:
            raise ConfigError(f"{group}={name}: {group} has no presets; set its fields as {group}.key=value")
        raise ConfigError(f"{group}={name} is no preset; there are {', '.join(names)}{also}{hint}")
    return _parse_yaml(
        (resources.files("multipack") / "presets" / group / f"{name}.yaml").read_text("utf-8"), name
    )


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config={path} cannot be read: {error.strerror}") from error
    return _parse_yaml(text, path)


def _parse_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:
        raise ConfigError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} must hold `group:` and `key: value` lines")
    return typing.cast(dict[str, Any], parsed)


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _apply(tree: DictConfig, values: dict[str, Any]) -> None:
    for key, value in values.items():
        _refuse_interpolation(key, value)
        try:
            current = OmegaConf.select(tree, key, throw_on_missing=False)
            if not _known(tree, key):
                raise ConfigError(_unknown(key, tree))
            if OmegaConf.is_list(current) and isinstance(value, str):
                value = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
            OmegaConf.update(tree, key, value)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value}: {_reason(error)}") from error


def _known(tree: DictConfig, key: str) -> bool:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            return False
        node = node[part]
    return True


def _unknown(key: str, tree: DictConfig) -> str:
    known = list(_flatten(typing.cast(dict[str, Any], OmegaConf.to_container(tree))))
    known += [name for name, (ours, _) in ALIASES.items() if ours in known]
    groups = [str(name) for name in tree if isinstance(tree[name], DictConfig)]
    group, _, leaf = key.partition(".")
    if leaf:
        near = difflib.get_close_matches(
            key, [name for name in known if name.startswith(f"{group}.")], 1, 0.7
        )
        near = near or [name for name in known if name.split(".")[-1] == leaf]
        near = near or difflib.get_close_matches(key, known, 1, 0.75)
    else:
        near = [name for name in known if name.split(".")[-1] == key]
        alone = [name for name in known if "." not in name]
        near = near or difflib.get_close_matches(key, [*groups, *alone], 1, 0.6)
    command = "multipack train --settings" if "tokenizer" in tree else "--settings"
    return f"there is no setting {key}; " + (
        f"did you mean {near[0]}?" if near else f"`{command}` lists them all"
    )


def _reason(error: OmegaConfBaseException) -> str:
    return str(error).strip().splitlines()[0]
