"""Build any dataclass of dataclasses from `key=value` words, presets and YAML. This module defines no setting.

    data=jsonl  data.path=train.jsonl  config=FILE.yaml  out=runs/a
    └ preset ┘  └ field of a group ┘   └ YAML values ─┘  └ field ┘

Precedence, highest first: words, presets, `config=FILE`, `base`, defaults. In a file, `group: NAME` is a preset. An
unknown key, a wrong type or an illegal value raises a ConfigError that names the field and the nearest legal choice.

A group (a dataclass that is a field of the schema) may define

- `preset(name) -> dict | None` and `preset_names() -> list[str]`: the values of `group=NAME`, and legal names; a key
  with a dot is a field of another group,
- `PRESET_HINT`: text for error messages on what `group=` accepts besides preset names,
- `EXCLUSIVE`: names of fields of which only one may be given as a word. A later field takes precedence over the earlier
  ones unless it is 0, so a word for one of them sets the later ones to 0,
- `RETIRED`: fields of earlier versions → their former defaults, or `...` where no value changes what is trained.
  `base`, the values of a saved run, may have them, and a file with these values.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from multipack.atomic import read_file
from multipack.ranges import ranges_of

Schema = TypeVar("Schema")
Pair = tuple[str, str]
"""(key, value) of a word."""
Translate = Callable[[str, Any], tuple[str, Any]]
"""(key, value) of a word or of a file → (key, value) of the schema."""
LARGEST = 1 << 62
"""Largest whole number of a setting."""
_MOST_BYTES, _MOST_LEVELS = 1 << 20, 32
"""Bytes and nested levels of a YAML file: its parser would crash on a file of thousands of levels."""


class ConfigError(ValueError):
    """An illegal configuration; the message names the field and the legal choices, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in message))


def merge(
    schema: type[Schema],
    words: Iterable[str],
    base: dict[str, Any] | None = None,
    translate: Translate = lambda key, value: (key, value),
) -> Schema:
    """Build a dataclass of dataclasses from words.

    Args:
        schema: the dataclass; every field has a default.
        words: `group=preset`, `group.key=value`, `key=value` or `config=FILE`, in any order.
        base: values that replace defaults, nested by groups.
        translate: names of other tools → names of the schema.

    Raises:
        ConfigError: a word is invalid, or two names of one setting have different values; the message names the field
            and the nearest legal name or value.
    """
    groups = _groups(schema)
    pairs = _translated(map(split, words), translate)
    ignored = set(dict(pairs))  # a saved value need not be legal any more if a word replaces it
    retired = _retired(groups)
    ignored |= retired.keys()
    saved = [pair for pair in flatten(base or {}).items() if pair[0] not in ignored]
    files = [
        _translated(
            (pair for pair in flatten(read_yaml(path)).items() if not _is_without_effect(pair, retired)),
            translate,
        )
        for key, path in pairs
        if key == "config"
    ]
    given = [pair for pair in pairs if pair[0] != "config"]
    layers = [layer for source in (saved, *files, given) for layer in _presets_and_values(source, groups)]
    layers.append(_excluded(groups, dict(given)))
    defaults, known = _defaults(typing.cast(Any, schema))
    # Only what changes is copied and converted, which takes most of the time.
    changed = {key.partition(".")[0] for layer in layers for key in layer}
    tree = OmegaConf.masked_copy(defaults, [str(name) for name in defaults if name in changed])
    for layer in layers:
        for key in layer.keys() & retired.keys():
            raise ConfigError(f"{key}={layer[key]}: this setting is gone, leave it out")
        _apply(tree, known, layer)
    try:
        return schema(**typing.cast(dict[str, Any], OmegaConf.to_object(tree)))
    except OmegaConfBaseException as error:
        raise ConfigError(_reason(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def given_values(words: Iterable[str], translate: Translate) -> dict[str, Any]:
    """Return the values in words and, below them, in their `config=FILE`, by full name; presets by their group."""
    pairs = _translated(map(split, words), translate)
    files = [flatten(read_yaml(path)) for key, path in pairs if key == "config"]
    values = [pair for file in files for pair in _translated(file.items(), translate) if pair[1] != {}]
    return dict([*values, *pairs])


def _presets_and_values(pairs: Sequence[tuple[str, Any]], groups: dict[str, type]) -> list[dict[str, Any]]:
    """The values of presets among (key, value) pairs, then the other values, which take precedence."""
    presets = [(key, value) for key, value in pairs if key in groups and value != {}]
    values = {key: value for key, value in pairs if key not in groups}
    return [*(_preset(group, groups[group], str(name)) for group, name in presets), values]


def _translated(pairs: Iterable[tuple[str, Any]], translate: Translate) -> list[tuple[str, Any]]:
    """Translate (key, value) pairs; a ConfigError if two names of one setting have different values."""
    found: list[tuple[str, Any]] = []
    names: dict[str, tuple[str, Any]] = {}
    for name, given in pairs:
        key, value = translate(name, given)
        other, before = names.setdefault(key, (name, value))
        if other != name and str(before) != str(value):
            raise ConfigError(f"{other}={before} and {name}={given} both set {key}: leave one of them out")
        found.append((key, value))
    return found


def split(word: str) -> Pair:
    """Split a word into its key and its value.

    Raises:
        ConfigError: the word is not `key=value`.
    """
    key, equals, value = word.partition("=")
    if not equals and "." in key and "/" not in key:
        raise ConfigError(f"{key} has no value: write {key}=VALUE, without spaces")
    if not equals or not key:
        raise ConfigError(f"{word!r} is not a setting; write group=preset or group.key=value")
    return key.strip(), value


def retired_settings(schema: type) -> dict[str, Any]:
    """Full name of each setting of earlier versions → its former default; see `RETIRED` above."""
    return _retired(_groups(schema))


def preset_names(schema: type) -> dict[str, list[str]]:
    """Group → names of its presets, which `group=NAME` accepts."""
    return {group: _preset_names(kind) for group, kind in _groups(schema).items()}


def describe(schema: type, values: Any = None) -> list[tuple[str, str, str, str]]:
    """Describe all fields of a schema and of its groups.

    Args:
        schema: a dataclass of dataclasses.
        values: an instance with the defaults; None = `schema()`.

    Returns:
        (key, type, default, meaning) of each field; the meaning is the field's docstring.
    """
    rows: list[tuple[str, str, str, str]] = []
    hints, ranges = typing.get_type_hints(schema), ranges_of(schema)
    documented = _field_docstrings(schema)
    instance = schema() if values is None else values
    for entry in fields(schema):
        value = getattr(instance, entry.name)
        if is_dataclass(value):
            below = describe(type(value), value)
            rows += [(f"{entry.name}.{key}", kind, default, meaning) for key, kind, default, meaning in below]
        else:
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            kind = _type_name(hints[entry.name])
            kind += f", {ranges[entry.name]}" if entry.name in ranges else ""
            rows.append((entry.name, kind, shown, documented.get(entry.name, "")))
    return rows


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the values of a YAML file, nested by groups.

    Raises:
        ConfigError: the file cannot be read, or is not YAML with `group:` and `key: value` lines.
    """
    try:
        text = read_file(Path(path), _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"config={path} cannot be read: {reason}") from error
    return _parse_yaml(text, str(path))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested groups by full name, `group.key`; {} is a value.

    Raises:
        ConfigError: a name occurs twice, as in `plan.capacity: 5` and `plan: {capacity: 6}`.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_group = isinstance(value, dict) and value
        more = flatten(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
        for name in more.keys() & flat:
            raise ConfigError(f"{name}={more[name]} and {name}={flat[name]} are both given: leave one out")
        flat |= more
    return flat


def as_text(value: Any) -> str:
    """Return a value as in a word."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(as_text, value))}]" if isinstance(value, list | tuple) else str(value)


def byte_count(text: str) -> float:
    """Return the number of bytes of a size such as `80GiB`, `1.5 MB` or `64B`; 0 if the text is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B", text.strip())
    if found is None:
        return 0.0
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** " KMGT".index(found[2] or " ")


def changed_words(group: str, value: Any, default: Any) -> list[str]:
    """Return the words `group.field=value` of the fields of a dataclass that differ from `default`."""
    values = {each.name: getattr(value, each.name) for each in fields(default)}
    return [
        f"{group}.{name}={as_text(field)}"
        for name, field in values.items()
        if field != getattr(default, name)
    ]


@functools.cache  # OmegaConf needs ten times as long as a copy
def _defaults(schema: type) -> tuple[DictConfig, dict[str, Any]]:
    """The defaults as a tree, and by full name."""
    tree = OmegaConf.structured(schema)
    for node in (tree, *(tree[name] for name in _groups(schema))):
        OmegaConf.set_readonly(node, False)  # groups may be frozen dataclasses
    return tree, flatten(typing.cast(dict[str, Any], OmegaConf.to_container(tree)))


def _groups(schema: type) -> dict[str, type]:
    hints = typing.get_type_hints(schema)
    return {entry.name: hints[entry.name] for entry in fields(schema) if is_dataclass(hints[entry.name])}


def _retired(groups: dict[str, type]) -> dict[str, Any]:
    """Full name of a field of earlier versions → its former default."""
    return {
        f"{group}.{name}": default
        for group, kind in groups.items()
        for name, default in getattr(kind, "RETIRED", {}).items()
    }


def _is_without_effect(pair: tuple[str, Any], retired: dict[str, Any]) -> bool:
    name, value = pair
    return name in retired and retired[name] in (value, ...)


def _excluded(groups: dict[str, type], given: dict[str, str]) -> dict[str, Any]:
    """Full name → 0 of the fields that a word for another field sets to 0; see `EXCLUSIVE` above."""
    zeros: dict[str, Any] = {}
    for group, kind in groups.items():
        names = [f"{group}.{name}" for name in getattr(kind, "EXCLUSIVE", ())]
        chosen = [name for name in names if name in given]
        if len(chosen) > 1:
            raise ConfigError(f"set {' or '.join(chosen)}, not both")
        if chosen:
            zeros |= dict.fromkeys(names[names.index(chosen[0]) + 1 :], 0)
    return zeros


def _preset_names(kind: Any) -> list[str]:
    return list(kind.preset_names()) if hasattr(kind, "preset_names") else []


def _preset(group: str, kind: Any, name: str) -> dict[str, Any]:
    """The values that `group=NAME` sets, by full name."""
    found = kind.preset(name) if hasattr(kind, "preset") else None
    if found is not None:
        return {key if "." in key else f"{group}.{key}": value for key, value in found.items()}
    names = _preset_names(kind)
    if not names:
        raise ConfigError(f"{group}={name}: {group} has no presets; set its fields as {group}.key=value")
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {group}={near[0]}?" if near else ""
    also = getattr(kind, "PRESET_HINT", "")
    raise ConfigError(f"{group}={name} is not a preset; there are {', '.join(names)}{also}{hint}")


def _parse_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        level = 0
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            level += isinstance(event, yaml.CollectionStartEvent)
            level -= isinstance(event, yaml.CollectionEndEvent)
            if level > _MOST_LEVELS:
                raise ValueError(f"more than {_MOST_LEVELS} nested levels")
        parsed = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:
        reason = " ".join(str(error).split()) or "it holds no groups"
        raise ConfigError(f"{name} is not YAML: {reason}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} must hold `group:` and `key: value` lines")
    return typing.cast(dict[str, Any], parsed)


def _apply(tree: DictConfig, known: dict[str, Any], values: dict[str, Any]) -> None:
    """Set fields by their full names, with defaults `known`; OmegaConf converts and checks types."""
    for key, value in values.items():
        if key not in known:
            raise ConfigError(_unknown(key, list(known)))
        if _interpolates(value):
            raise ConfigError(f"{key}={value}: settings cannot hold ${{…}}; write the value itself")
        if isinstance(known[key], bool) and type(value) in (int, float) and value not in (0, 1):
            raise ConfigError(f"{key}={value}: must be true or false")
        if isinstance(known[key], str) and isinstance(value, bool):  # YAML's true and false
            value = str(value).lower()
        if isinstance(known[key], list | tuple) and isinstance(value, str):
            value = [part for part in map(_unquoted, value.strip().strip("[]").split(",")) if part]
        try:
            OmegaConf.update(tree, key, value)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value}: {_reason(error)}") from error
        # OmegaConf takes ??? as a missing value.
        if value == "???" or not _is_plain(OmegaConf.select(tree, key)):
            raise ConfigError(
                f"{key}={str(value)[:40]}: must be a finite value (whole numbers: below 2^62), or a list of such values"
            )


def _is_plain(value: Any) -> bool:
    """Whether a value is no list in a list, and its numbers are finite, whole ones smaller than `LARGEST`."""
    if isinstance(value, ListConfig):
        return not any(map(OmegaConf.is_config, value)) and all(map(_is_plain, value))
    if isinstance(value, int):
        return abs(value) < LARGEST
    return not isinstance(value, float) or math.isfinite(value)


def _interpolates(value: Any) -> bool:
    """Whether a value has an interpolation, which could read environment variables, at any depth."""
    if isinstance(value, dict):
        return any(map(_interpolates, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return any(map(_interpolates, value))
    return isinstance(value, str) and "${" in value


def _unquoted(part: str) -> str:
    part = part.strip()
    quoted = len(part) > 1 and part[0] == part[-1] and part[0] in "\"'"
    return part[1:-1] if quoted else part


def _unknown(key: str, known: list[str]) -> str:
    """The message for an unknown key, with the nearest known one."""
    group, _, leaf = key.rpartition(".")
    every = {name.rpartition(".")[2]: name for name in known}
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == group}
    if not group:
        siblings |= {name.partition(".")[0]: name.partition(".")[0] for name in known}
    near = [every[leaf]] if leaf in every else []
    near += [
        names[leaves[0]]
        for names in (siblings, every if group else {})
        if (leaves := difflib.get_close_matches(leaf, names, 1, 0.7))
    ]
    hint = f"did you mean {near[0]}?" if near else "the command's option --settings lists them all"
    return f"there is no setting {key}; {hint}"


_KINDS = {"converted to Integer": "must be a whole number", "converted to Float": "must be a number"}
"""End of OmegaConf's message → ours."""


def _reason(error: OmegaConfBaseException) -> str:
    text = str(error).strip().partition("\n    full_key")[0]
    found = next((kind for kind in _KINDS if text.endswith(kind)), None)
    return _KINDS[found] if found else text


@functools.cache  # reads and parses source files
def _field_docstrings(schema: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for cls in filter(is_dataclass, reversed(schema.__mro__)):
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
    if typing.get_origin(hint) in (list, tuple):
        return "numbers" if typing.get_args(hint)[0] is float else "names"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true|false"}.get(
        getattr(hint, "__name__", str(hint)), str(hint)
    )
