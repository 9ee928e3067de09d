"""Lists of hosts, as schedulers and MPI write them, to names and back.

node[001-003,007],gpu2      →  node001 node002 node003 node007 gpu2      (SLURM_JOB_NODELIST)
r[0-1]n[1-2]                →  r0n1 r0n2 r1n1 r1n2                       (brackets multiply, the last one fastest)
a.site / a.site / b.site    →  a.site: 2, b.site: 1                      (PBS_NODEFILE: a line for each process)
a slots=4  # fast / b:2     →  a: 4, b: 2                                (hostfiles of Open MPI and of MPICH)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

MOST_HOSTS = 100_000
"""Names that one list may stand for: an expression of a few characters could ask for all memory."""

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NAME = re.compile(r"[^\s,\[\]#=]+")


def expand_hostlist(expression: str) -> list[str]:
    """The names that a list in Slurm's form stands for, in its order; repeated ones stay.

    Raises:
        ValueError: brackets that do not match, a range that is none, or more than `MOST_HOSTS` names.
    """
    names: list[str] = []
    for part in _split(expression):
        pieces: list[list[str]] = []
        for index, text in enumerate(_BRACKET.split(part)):
            pieces.append(_numbers(text, expression) if index % 2 else [text])
        if len(names) + math.prod(len(piece) for piece in pieces) > MOST_HOSTS:
            raise ValueError(f"the host list {expression!r} stands for more than {MOST_HOSTS:,} hosts")
        made = ["".join(chosen) for chosen in itertools.product(*pieces)]
        if not all(_NAME.fullmatch(name) for name in made):
            raise ValueError(f"the host list {expression!r} has {part!r}, which is no name of a host")
        names += made
    return names


def _split(expression: str) -> list[str]:
    """Parts between commas that are not in brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(expression):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            parts.append(expression[start:index])
            start = index + 1
    if depth != 0:
        raise ValueError(f"the host list {expression!r} has brackets that do not match")
    return [part.strip() for part in [*parts, expression[start:]] if part.strip()]


def _numbers(text: str, expression: str) -> list[str]:
    """What stands in one bracket: `001-003,007` → 001, 002, 003, 007; leading zeros are kept."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("", "")
        if not match or int(last) < int(first):
            raise ValueError(
                f"the host list {expression!r} has [{text}], where numbers and ranges such as 001-003 are expected"
            )
        if int(last) - int(first) + len(numbers) >= MOST_HOSTS:
            raise ValueError(f"the host list {expression!r} stands for more than {MOST_HOSTS:,} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def compress_hostlist(names: Iterable[str]) -> str:
    """Names in Slurm's form, in their order: what `expand_hostlist` makes into the same names."""
    groups: list[tuple[str, list[list[str]]]] = []  # (prefix, ranges as [first, last])
    for name in names:
        digits = re.search(r"[0-9]*$", name)
        number = digits[0] if digits else ""
        prefix = name[: len(name) - len(number)]
        if not number or not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, [[number, number]] if number else []))
            continue
        ranges = groups[-1][1]
        first, last = ranges[-1]
        if f"{int(last) + 1:0{len(first)}d}" == number:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(_compressed(prefix, ranges) for prefix, ranges in groups)


def _compressed(prefix: str, ranges: list[list[str]]) -> str:
    parts = [first if first == last else f"{first}-{last}" for first, last in ranges]
    if not parts:
        return prefix
    return f"{prefix}{parts[0]}" if ranges == [[parts[0], parts[0]]] else f"{prefix}[{','.join(parts)}]"


def parse_hostfile(text: str, source: str) -> dict[str, int]:
    """Host → processes that it takes, in the file's order.

    A host has as many slots as its lines say together; a line without a number says one.

    Args:
        text: the file's content.
        source: the file's name, for messages.

    Raises:
        ValueError: a line that is neither a host nor a comment, or no host at all; file and line are named.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, _, count = words[0].partition(":")
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key == "slots":
                count = value
            elif key not in ("max_slots", "max-slots"):  # Open MPI's limit, which we stay below anyway
                raise ValueError(
                    f"{source}, line {number}: {word!r} is not understood; write HOST slots=NUMBER"
                )
        if not _NAME.fullmatch(name) or (count and not (count.isascii() and count.isdigit() and int(count))):
            raise ValueError(
                f"{source}, line {number}: {line.strip()!r} is no host; write HOST, HOST slots=NUMBER or HOST:NUMBER"
            )
        slots[name] = slots.get(name, 0) + int(count or 1)
    if not slots:
        raise ValueError(f"{source} names no host; write one a line: HOST, or HOST slots=NUMBER")
    return slots
