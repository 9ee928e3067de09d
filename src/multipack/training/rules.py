"""Rules of `optimizer.rules`: exceptions for parameters by patterns on their names. Needs no torch.

'optimizer.rules=[embedding lr=0.5, *.bias lr=2 weight_decay=0, blocks.0 freeze]'
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Rule:
    """An exception for the parameters that a pattern names; None = as for those without a rule.

    Attributes:
        text: as the user wrote it.
        pattern: a glob on parameters' names, or on names of modules, which stand for all that they hold.
        lr_scale: factor of the learning rate.
        weight_decay: decoupled weight decay.
        freeze: keep the weights as they are.
    """

    text: str
    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None
    freeze: bool = False

    def matches(self, name: str) -> bool:
        """Whether the rule names this parameter, or a module that holds it."""
        return fnmatchcase(name, self.pattern) or fnmatchcase(name, f"{self.pattern}.*")


def read_rule(text: str) -> Rule:
    """A rule from its text.

    Raises:
        ValueError: it has no pattern, says nothing, or says what no rule can say.
    """
    pattern, *words = text.split() or [""]
    said: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word == "freeze":
            said["freeze"] = True
        elif key in ("lr", "weight_decay") and equals:
            said["lr_scale" if key == "lr" else key] = _number(text, key, value)
        else:
            raise ValueError(
                f"optimizer.rules: {word!r} of {text!r} is none of lr=FACTOR, weight_decay=VALUE and freeze"
            )
    if not said or "=" in pattern:
        raise ValueError(
            f"optimizer.rules: {text!r} must name parameters and say what is different for them:"
            " PATTERN [lr=FACTOR] [weight_decay=VALUE] [freeze]"
        )
    if "freeze" in said and len(said) > 1:
        raise ValueError(
            f"optimizer.rules: {text!r} freezes its parameters, so that nothing else can be said of them"
        )
    return Rule(text, pattern, **said)


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"optimizer.rules: {key}={value} of {text!r} must be a number that is not negative")
    return number


def useless(rule: Rule, before: Sequence[Rule], names: Sequence[str]) -> str:
    """The message for a rule that decides about no parameter."""
    taken = [name for name in names if rule.matches(name)]
    if taken:
        earlier = next(other for other in before if other.matches(taken[0]))
        return (
            f"optimizer.rules: {rule.text!r} decides nothing, because earlier rules match all that it names"
            f" ({earlier.text!r} matches {taken[0]}): put it before them"
        )
    parts = [name.split(".") for name in names]
    known = dict.fromkeys(".".join(part[:count]) for part in parts for count in range(1, len(part) + 1))
    near = difflib.get_close_matches(rule.pattern, known, 3, 0.5) or list(known)[:3]
    return f"optimizer.rules: {rule.text!r} matches no parameter; there are {', '.join(near)}, …"
