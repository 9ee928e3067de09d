"""Rules of `optimizer.rules`: exceptions for parameters by patterns on their names. Needs no torch.

'optimizer.rules=[embedding lr=0.5, *.bias lr=2 weight_decay=0, blocks.0 freeze]'
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Rule:
    """An exception for some parameters.

    Attributes:
        text: the rule as the user wrote it.
        pattern: a glob on names of parameters, or of modules with all their parameters.
        lr_scale: factor of the learning rate.
        weight_decay: decoupled weight decay; None = as without a rule.
        freeze: whether the parameters are not trained.
    """

    text: str
    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None
    freeze: bool = False

    def matches(self, name: str) -> bool:
        """Whether the pattern matches this parameter or a module that holds it."""
        return fnmatchcase(name, self.pattern) or fnmatchcase(name, f"{self.pattern}.*")


def read_rule(text: str) -> Rule:
    """Parse a rule.

    Raises:
        ValueError: a missing pattern or setting, or an unknown or illegal setting.
    """
    pattern, *words = text.split() or [""]
    settings: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if word == "freeze":
            settings["freeze"] = True
        elif key in ("lr", "weight_decay") and re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value):
            settings["lr_scale" if key == "lr" else key] = float(value)
        else:
            raise ValueError(
                f"optimizer.rules: {word!r} of {text!r} is none of lr=FACTOR, weight_decay=VALUE (numbers that are not"
                " negative) and freeze"
            )
    if not settings or "=" in pattern:
        raise ValueError(
            f"optimizer.rules: {text!r} must have a pattern and at least one setting:"
            " PATTERN [lr=FACTOR] [weight_decay=VALUE] [freeze]"
        )
    if "freeze" in settings and len(settings) > 1:
        raise ValueError(f"optimizer.rules: {text!r} freezes its parameters: leave out its other settings")
    return Rule(text, pattern, **settings)


def unused_message(rule: Rule, before: Sequence[Rule], names: Sequence[str]) -> str:
    """The error message for a rule that applies to none of the parameters `names` after the rules `before`."""
    matched = [name for name in names if rule.matches(name)]
    if matched:
        earlier = next(other for other in before if other.matches(matched[0]))
        return (
            f"optimizer.rules: {rule.text!r} has no effect, because earlier rules match all its parameters"
            f" ({earlier.text!r} matches {matched[0]}): put it before them"
        )
    parts = [name.split(".") for name in names]
    known = dict.fromkeys(".".join(part[:count]) for part in parts for count in range(1, len(part) + 1))
    near = difflib.get_close_matches(rule.pattern, known, 3, 0.5) or list(known)[:3]
    return f"optimizer.rules: {rule.text!r} matches no parameter; there are {', '.join(near)}, …"
