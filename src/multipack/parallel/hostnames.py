"""Host names from Slurm's list form: `node[001-003,007],gpu2` is node001, node002, node003, node007 and gpu2.

`scontrol show hostnames` does the same, but containers often lack it.
"""

from __future__ import annotations

import itertools
import math
import re

MOST_HOSTS = 100_000
"""Maximum number of names in a list: a few characters could otherwise fill the memory."""

_BRACKET = re.compile(r"\[([\d,\s-]+)\]")
_NAME = re.compile(r"[^\s,\[\]#=]+")


def expand_hostlist(expression: str) -> list[str]:
    """Return the names in a list in Slurm's form, in order and with repetitions.

    Raises:
        ValueError: unmatched brackets, an invalid range, or more than `MOST_HOSTS` names.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", expression):
        texts = enumerate(_BRACKET.split(part.strip()))
        pieces = [_numbers(text, expression) if index % 2 else [text] for index, text in texts]
        if len(names) + math.prod(len(piece) for piece in pieces) > MOST_HOSTS:
            raise ValueError(f"the host list {expression!r} has more than {MOST_HOSTS:,} hosts")
        names += [name for chosen in itertools.product(*pieces) if (name := "".join(chosen))]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"the host list {expression!r} contains {name!r}, which is not a host name")
    return names


def _numbers(text: str, expression: str) -> list[str]:
    """Numbers in one bracket, with their leading zeros: `001-003,007` is 001, 002, 003, 007."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise ValueError(
                f"the host list {expression!r} contains [{text}]; expected ranges such as 001-003"
            )
        if int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"the host list {expression!r} has more than {MOST_HOSTS:,} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
