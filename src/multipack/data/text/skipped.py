"""Entries that a source leaves out, with the first places of each reason, and notes on its records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

MOST_PLACES = 20
"""Places that are kept for each reason."""
Places = dict[str, list[str]]
"""Reason → names of the first entries that were left out for it, such as `train.jsonl:17`."""
Notes = dict[str, tuple[int, str]]
"""Note on records, for people → number of these records, and the name of the first."""


def counted(count: int, nouns: str) -> str:
    """Return `2,000 broken lines`, or `1 broken line`.

    Args:
        count: the number.
        nouns: text; its first word that ends in "s" is the plural noun, as in "documents without tokens".
    """
    singular = re.sub(r"(?<=s)es\b|s\b", "", nouns, count=1)
    return f"{count:,} {singular if count == 1 else nouns}"


def add_places(places: Places, reason: str, names: Iterable[str]) -> None:
    """Add names of entries that were left out, up to `MOST_PLACES`."""
    kept = places.setdefault(reason, [])
    kept.extend([*names][: MOST_PLACES - len(kept)])


def add_notes(notes: Notes, more: Notes, label: str = "") -> None:
    """Add the notes of further records, whose names begin with `label`."""
    for text, (count, name) in more.items():
        before, first = notes.get(text, (0, label + name))
        notes[text] = (before + count, first)


def skipped_lines(skipped: Mapping[str, int], places: Mapping[str, list[str]]) -> list[str]:
    """A line for each reason: `3 broken lines: train.jsonl:101, 517, 902`."""
    lines = []
    for reason, count in skipped.items():
        names = places.get(reason, [])[:count]
        more = f" and {count - len(names):,} more" if count > len(names) else ""
        lines.append(counted(count, reason) + (f": {grouped(names)}{more}" if names else ""))
    return lines


def grouped(names: Iterable[str]) -> str:
    """Names of entries, with each file once: `a.jsonl:1, 5; b.jsonl:7`."""
    groups = groupby(names, lambda name: name.rpartition(":")[0])
    return "; ".join(
        (f"{file}:" if file else "") + ", ".join(name.rpartition(":")[2] for name in several)
        for file, several in groups
    )


def checked_places(value: Any) -> Places:
    """Places read from a file; `TypeError` or `ValueError` if they are anything else."""
    return {str(reason): [str(name) for name in names][:MOST_PLACES] for reason, names in dict(value).items()}
