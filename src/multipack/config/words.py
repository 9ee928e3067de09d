"""Dataclasses of dataclasses built from `key=value` words, presets and YAML; and what settings there are.

Later words win over earlier ones, words over presets, presets over `config=FILE`, a file over the defaults. An
unknown key, a wrong type or an impossible value is an error at once, with the field and the nearest legal name.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from multipack.shapes import SHAPES, ModelShape

Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """A configuration that cannot be; the message names the field and what is legal."""


ALIASES: dict[str, tuple[str, Callable[[str], str]]] = {
    "train.max_iters": ("train.steps", str),
    "train.eval_interval": ("train.eval_every", str),
    "train.log_interval": ("log.every", str),
    "train.eval_iters": ("train.eval_packs", str),
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


def merge(schema: type[Schema], words: Iterable[str], base: dict[str, Any] | None = None) -> Schema:
    """Build any dataclass of dataclasses from words; see `compose`."""
    tree = OmegaConf.structured(schema)
    OmegaConf.set_readonly(tree, False)
    for name in tree:
        if isinstance(tree[name], DictConfig):
            OmegaConf.set_readonly(tree[name], False)
    if "model" in tree and tree.model.kv_heads == tree.model.heads:
        tree.model.kv_heads = 0  # equal numbers of heads stay equal when one of them is changed
    pairs = [rename(*split(word)) for word in words]
    if base is not None:
        _apply(tree, flatten(base))
    for key, value in pairs:
        if key == "config":
            _apply(tree, flatten(read_yaml(value)))
    for key, value in pairs:
        if key in tree and isinstance(tree[key], DictConfig):
            _apply(tree, flatten(_preset(key, value, trains="tokenizer" in tree)))
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


def preset_names(group: str) -> list[str]:
    """Names that `group=NAME` understands."""
    if group == "model":
        return list(SHAPES)
    folder = resources.files("multipack") / "presets" / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()) if folder.is_dir() else []


def describe(schema: type, values: Any = None) -> list[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every field below `schema`; meanings are the fields' docstrings.

    Args:
        schema: a dataclass of dataclasses.
        values: an instance that holds the defaults; None = what `schema()` makes.
    """
    rows: list[tuple[str, str, str, str]] = []
    hints = typing.get_type_hints(schema)
    documented = _field_docstrings(schema)
    instance = schema() if values is None else values
    for entry in fields(schema):
        value = getattr(instance, entry.name)
        if is_dataclass(value):
            below = describe(type(value), value)
            rows += [(f"{entry.name}.{key}", kind, default, meaning) for key, kind, default, meaning in below]
        else:
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            rows.append((entry.name, _type_name(hints[entry.name]), shown, documented.get(entry.name, "")))
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
        return "numbers" if typing.get_args(hint) == (float,) else "names"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true|false"}.get(
        getattr(hint, "__name__", str(hint)), str(hint)
    )


def split(word: str) -> tuple[str, str]:
    """A word's key and value.

    Raises:
        ConfigError: the word is no `key=value`, or its value would read something else.
    """
    key, equals, value = word.partition("=")
    if not equals and "." in key and "/" not in key:
        raise ConfigError(f"{key} has no value: write {key}=VALUE, without spaces")
    if not equals or not key:
        raise ConfigError(f"{word!r} is not a setting; write group=preset or group.key=value")
    _refuse_interpolation(key, value)
    return key.strip(), value


def _refuse_interpolation(key: str, value: Any) -> None:
    """Settings are values: `${…}` would let somebody else's file read this process's environment."""
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{key}={value}: settings cannot hold ${{…}}; write the value itself")


def rename(key: str, value: str) -> tuple[str, str]:
    """Key and value as they are called here, from as others call them."""
    if key in HINTS:
        raise ConfigError(f"{key} has no field of its own here: {HINTS[key]}")
    if key in ALIASES:
        key, convert = ALIASES[key]
        value = convert(value)
    if key == "train.init_from" and value in ("scratch", "resume"):  # wordplay's; all others are paths
        key, value = "train.resume", str(value == "resume").lower()
    return key, VALUE_ALIASES.get((key, value), value)


def _preset(group: str, name: str, trains: bool) -> dict[str, Any]:
    """The values of a preset; `trains`: for a run, whose vocabulary is its tokenizer's, not the published one."""
    shape = SHAPES.get(name)
    if group == "model" and shape is None and not trains and Path(name).exists():
        shape = ModelShape.from_huggingface(name)
    if group == "model" and shape is not None:
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


def read_yaml(path: str) -> dict[str, Any]:
    """The values of a YAML file."""
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


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested groups by their full names, `group.key`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
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
                value = [part for part in map(_bare, value.strip().strip("[]").split(",")) if part]
            OmegaConf.update(tree, key, value)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value}: {_reason(error)}") from error


def _bare(part: str) -> str:
    """An entry of a list, without the quotes that a shell left around it."""
    part = part.strip()
    quoted = len(part) > 1 and part[0] == part[-1] and part[0] in "\"'"
    return part[1:-1] if quoted else part


def _known(tree: DictConfig, key: str) -> bool:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            return False
        node = node[part]
    return True


def _unknown(key: str, tree: DictConfig) -> str:
    known = list(flatten(typing.cast(dict[str, Any], OmegaConf.to_container(tree))))
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
