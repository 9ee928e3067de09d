"""Rotary positions in config.json: their scaling, read and written, and lengths on which it depends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from multipack.shapes.json_values import number_of, real_of

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Bounds of llama3's scaling, in turns in the trained context. Frequencies of fewer turns than the first are divided,
of more turns than the second kept."""
YARN_TURNS = 32, 1
"""Bounds of yarn's scaling, in turns in the trained context. Frequencies of more turns than the first are kept, of
fewer turns than the second divided."""
TRAINED_CONTEXT, CONTEXT = "original_max_position_embeddings", "max_position_embeddings"
CONTEXTS = {"dynamic": CONTEXT, "longrope": TRAINED_CONTEXT}
"""Scaling of rotary frequencies that depends on the length → the setting of config.json with the limit."""


class _Scaling(NamedTuple):
    """A scaling of rotary frequencies that the decoder computes.

    Attributes:
        needed: settings without which it is not defined.
        constants: setting → the values with which the decoder computes the same.
        states_context: whether it states the trained context, which for longrope stands beside it.
        states_factor: whether it may state the factor of cosines and sines.
    """

    needed: tuple[str, ...] = ("factor",)
    constants: Mapping[str, tuple[Any, ...]] = {}
    states_context: bool = False
    states_factor: bool = False


_SCALINGS = {
    "default": _Scaling(needed=()),
    "linear": _Scaling(),
    "dynamic": _Scaling(),
    "llama3": _Scaling(
        needed=("factor", TRAINED_CONTEXT),
        constants={name: (value,) for name, value in LLAMA3_SCALING.items()},
        states_context=True,
    ),
    "yarn": _Scaling(
        constants={
            "beta_fast": (None, YARN_TURNS[0]),
            "beta_slow": (None, YARN_TURNS[1]),
            "truncate": (None, True),
        },
        states_context=True,
        states_factor=True,
    ),
    "longrope": _Scaling(needed=("short_factor", "long_factor"), states_factor=True),
}


class RotationLimit(NamedTuple):
    """The longest documents whose rotary positions do not depend on their length.

    transformers rotates all documents of a row by the longest one: a longer document changes the others.

    Attributes:
        tokens: the limit; longer documents are rotated by their length.
        rope_type: scaling of the rotary frequencies.
        setting: name of the setting that has `tokens`.
    """

    tokens: int
    rope_type: str
    setting: str

    def __str__(self) -> str:
        limit = f"{self.setting}={self.tokens:,}"
        return f"rope_type={self.rope_type} rotates documents longer than {limit} by their length"


def rotation_limit(config: Any) -> RotationLimit | None:
    """The limit of a model of transformers; None = its rotary positions do not depend on lengths.

    With rotary parameters for each type of layer it is the smallest of their limits.

    Args:
        config: the model's configuration, or the content of a config.json; anything else has no limit.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config().to_dict()
    values = config if isinstance(config, Mapping) else {}
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        return None
    found = []
    for each in [part for part in scaling.values() if isinstance(part, Mapping)] or [scaling]:
        if (setting := CONTEXTS.get(kind := _type_of(each))) is not None:
            places = (values,) if kind == "dynamic" else (each, values)
            sizes = [place.get(name) for name in (setting, CONTEXT) for place in places]
            if size := next(filter(None, sizes), None):
                found.append(RotationLimit(int(size), kind, setting))
    return min(found, default=None)


def _type_of(scaling: Mapping[str, Any]) -> Any:
    """The type of a scaling of rotary frequencies, by its current name."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return "longrope" if kind == "su" else kind


def of_full_layers(config: Mapping[str, Any], name: str) -> Any:
    """A setting of rotary positions; of layers without a window, if types of layers have different ones."""
    value = config.get(name)
    return value.get("full_attention", value) if isinstance(value, Mapping) else value


def is_computed(scaling: Any) -> bool:
    """Whether the decoder computes these rotary positions."""
    if scaling is None:
        return True
    row = _SCALINGS.get(str(_type_of(scaling))) if isinstance(scaling, Mapping) else None
    if row is None:
        return False
    lists = row.needed if _type_of(scaling) == "longrope" else ()
    return (
        all(scaling.get(name) is not None for name in row.needed)
        and all(isinstance(scaling.get(name), list) for name in lists)
        and all(scaling.get(name) in values for name, values in row.constants.items())
    )


def is_of_family(scaling: Any, rope_types: tuple[str, ...], fields: set[str]) -> bool:
    """Whether the decoder computes these rotary positions, and transformers does so for the family.

    `fields` are the fields of `ModelShape` that its files state.
    """
    if not is_computed(scaling):
        return False
    values = scaling or {}
    beyond = {"partial_rotary_factor": "rope_width", "llama_4_scaling_beta": "attention_growth"}
    has_beyond = any(
        values.get(name) not in (None, 1.0) and field not in fields for name, field in beyond.items()
    )
    return not has_beyond and str(_type_of(values)) in ("default", *rope_types)


def read_rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions, of layers without a window, whichever of the two spellings states them.

    Takes the spellings that `written_rotation` writes.

    Raises:
        ValueError: the spellings differ.
    """
    both = [
        found
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(found := of_full_layers(config, name), Mapping) and found
    ]
    sources = [*both, config] if config.get("rope_parameters") else [config, *both]
    theta = next(filter(None, (real_of(each, ("rope_theta",), 0.0) for each in sources)), 10_000.0)
    read = [_read_scaling({**config, **each}) for each in both]
    if any(each != read[0] for each in read):
        raise ValueError("the configuration's rope_parameters and rope_scaling differ")
    return {"rope_theta": theta, **(read[0] if read else {})}


def _read_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of scaled rotary frequencies; none if they are not scaled, or in an unknown way."""
    kind = _type_of(config)
    if kind == "default" or not is_computed(config):
        return {}
    fields: dict[str, Any] = {"rope_type": kind, "rope_factor": real_of(config, ("factor",), 1.0)}
    row = _SCALINGS[kind]
    if row.states_context or kind == "longrope":
        fields["rope_context"] = number_of(config, (TRAINED_CONTEXT, CONTEXT))
    if row.states_factor:
        fields["rope_attention"] = real_of(config, ("attention_factor",), 0.0)
    if kind == "longrope":
        growth = number_of(config, (CONTEXT,)) / max(fields["rope_context"], 1)
        fields["rope_factor"] = real_of(config, ("factor",), growth)
        divisors = [*config["short_factor"], *config["long_factor"]]
        # Under its name each is checked to be a number.
        fields["rope_factors"] = [real_of({"long_factor": each}, ("long_factor",), 0.0) for each in divisors]
    both = [real_of(config, (name,), 0.0) for name in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and not fields["rope_attention"] and all(both):
        first, second = (0.1 * each * math.log(fields["rope_factor"]) + 1.0 for each in both)
        fields["rope_attention"] = first / second
    return fields


def written_rotation(shape: Any, fields: set[str]) -> dict[str, Any]:
    """The settings of a shape's rotary positions in both spellings.

    transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`.
    """
    scaling: dict[str, Any] = {}
    before: dict[str, Any] = {}
    if shape.rope_factor != 1.0:
        row = _SCALINGS[shape.rope_type]
        scaling = {"rope_type": shape.rope_type, "factor": shape.rope_factor}
        if row.states_context:
            scaling[TRAINED_CONTEXT] = shape.rope_context
        if row.states_factor and shape.rope_attention:
            scaling["attention_factor"] = shape.rope_attention
        if shape.rope_type == "llama3":
            scaling |= LLAMA3_SCALING
        if shape.rope_type == "longrope":
            half = len(shape.rope_factors) // 2
            scaling["short_factor"] = [*shape.rope_factors[:half]]
            scaling["long_factor"] = [*shape.rope_factors[half:]]
            before[TRAINED_CONTEXT] = shape.rope_context
            if shape.rope_factor == shape.context / shape.rope_context:
                del scaling["factor"]  # transformers 4 expects no more of Phi-3 than the lists
    if shape.attention_growth:
        scaling = {"rope_type": "default", **scaling, "llama_4_scaling_beta": shape.attention_growth}
        scaling[TRAINED_CONTEXT] = shape.rope_context
    plain = {"rope_type": "default", "rope_theta": shape.rope_theta}
    both: dict[str, Any] = {**plain, **scaling, **before}
    if "rope_width" in fields:
        both["partial_rotary_factor"] = shape.rotary_width / shape.head_width
    if "window_theta" in fields:
        local = {**plain, "rope_theta": shape.window_theta or shape.rope_theta}
        both = {"full_attention": both, "sliding_attention": local}
    old = {"rope_theta": shape.rope_theta, **({"rope_scaling": scaling} if scaling else {})}
    return {**old, **before, "rope_parameters": both}
