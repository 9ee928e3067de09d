"""Up to which length the rotary positions of a document do not depend on its length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

CONTEXTS = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Scaling of rotary frequencies that depends on the length → the setting of config.json with the limit."""


class RotationLimit(NamedTuple):
    """The longest documents whose rotary positions do not depend on their length.

    transformers rotates all documents of a row by the longest one: a longer document changes the others.

    Attributes:
        tokens: of such a document.
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
        if (setting := CONTEXTS.get(kind := rope_type_of(each))) is not None:
            places = (values,) if kind == "dynamic" else (each, values)
            sizes = [place.get(name) for name in (setting, CONTEXTS["dynamic"]) for place in places]
            if size := next(filter(None, sizes), None):
                found.append(RotationLimit(int(size), kind, setting))
    return min(found, default=None)


def rope_type_of(scaling: Mapping[str, Any]) -> Any:
    """The scaling of rotary frequencies that a configuration names, in today's word for it."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return "longrope" if kind == "su" else kind
