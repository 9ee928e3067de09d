"""Architectures of transformers by what keeps their documents apart: the census of leaks, in groups."""

from __future__ import annotations

import json
import re
from typing import Any

from result import RESULTS
from support_tables.table import ABSENT, Table

ATTENTIONS = ("eager", "sdpa", "multipack")


def answer_of(found: dict[str, Any] | None) -> str:
    """The answer of a probe: empty, or what is wrong, without the names of modules and functions."""
    verdict = found["verdict"] if found else "absent"
    if verdict in ("ok", "absent"):
        return "" if verdict == "ok" else ABSENT
    text = str(found["text"]) if found else ""
    before, _, error = text.partition("the model refuses the packed batch: ")
    return re.sub(r"^\w+Error: | \(\w+\)", "", error) if error else before.partition(":")[0]


def answers(row: dict[str, Any]) -> list[str]:
    """Under the attentions of `ATTENTIONS`, and whether a 4-D mask helps."""
    masks = [row[name].get("4d_mask", {}).get("verdict") for name in ATTENTIONS if name in row]
    found = [answer_of(row.get(name, {}).get("packed")) for name in ATTENTIONS]
    return [*found, "" if "ok" in masks else ABSENT]


def models() -> Table:
    """Groups of architectures with the same answers."""
    text = (
        "Causal architectures of transformers, from [the census of leaks](leak-census.md), which names the modules."
        " ✓: no document changes another one. `PackedTrainer`, `PackedSFTTrainer` and `multipack probe` refuse the"
        ' others at the start, with the sentence and the module. `4d_mask`: `PackedDataCollator("4d_mask")`, where only'
        " that helps. –: the architecture has no such attention."
    )
    made = Table("Models", text, ["architectures", "eager", "sdpa", "multipack", "`4d_mask`"])
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in json.loads((RESULTS / "leak_census.json").read_text())["rows"]:
        if "not_built" not in row:
            groups.setdefault(tuple(answers(row)), []).append(row["name"])
    for found, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        made.rows[f"{', '.join(sorted(names))} ({len(names)})"] = list(found)
    return made
