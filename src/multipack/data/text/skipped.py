"""`Noted`: entries that a source leaves out, with the first places of each reason, and notes on its records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

MOST_PLACES = 20
"""Places that are kept for each reason."""


@dataclass
class Noted:
    """What people should know about the records of a source.

    Attributes:
        skipped: reason → number of entries that were left out for it.
        notes: note on records that are not trained as they look, such as chats whose template leaves out tool
            calls → their number, and the name of the first.
        places: reason → names of the first entries that were left out for it, such as `train.jsonl:17`.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        """Count and name an entry that is left out."""
        self.add(Noted(Counter({reason: 1}), places={reason: [name]}))

    def add(self, more: Noted, label: str = "") -> None:
        """Add what is known about further records, whose names begin with `label`."""
        self.skipped.update(more.skipped)
        for text, (count, name) in more.notes.items():
            before, first = self.notes.get(text, (0, label + name))
            self.notes[text] = (before + count, first)
        for reason, names in more.places.items():
            kept = self.places.setdefault(reason, [])
            kept += [label + name for name in names[: MOST_PLACES - len(kept)]]

    def lines(self) -> list[str]:
        """A line for each reason: `3 broken lines: train.jsonl:101, 517, 902`."""
        lines = []
        for reason, count in self.skipped.items():
            names = self.places.get(reason, [])[:count]
            more = f" and {count - len(names):,} more" if count > len(names) else ""
            lines.append(counted(count, reason) + (f": {grouped(names)}{more}" if names else ""))
        return lines


def counted(count: int, nouns: str) -> str:
    """Return `2,000 broken lines`, or `1 broken line`.

    Args:
        count: the number.
        nouns: text; its first word that ends in "s" is the plural noun, as in "documents without tokens".
    """
    singular = re.sub(r"(?<=s)es\b|s\b", "", nouns, count=1)
    return f"{count:,} {singular if count == 1 else nouns}"


def grouped(names: Iterable[str]) -> str:
    """Names of entries, with each file once: `a.jsonl:1, 5; b.jsonl:7`."""
    groups = groupby(names, lambda name: name.rpartition(":")[0])
    return "; ".join(
        (f"{file}:" if file else "") + ", ".join(name.rpartition(":")[2] for name in several)
        for file, several in groups
    )
