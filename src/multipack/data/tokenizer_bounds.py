"""Bounds of a `tokenizer.json`: what it may do to memory, checked before the tokenizers library reads it.

The library is trusted to refuse what is malformed, with two exceptions that end the process: a table of characters
that states more bytes than it has, and steps that lengthen texts again and again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import tokenizers

MOST_STEPS, MOST_GROWTH = 64, 1000
"""Steps of a normalizer or decoder, and characters that one step may write for a match, after the steps that follow.
Tables of NFKC write 18; files in use have fewer than 20 steps."""


def check_bounds(fields: dict[str, Any]) -> None:
    """Check the steps of a tokenizer that change texts.

    Raises:
        ValueError: a table of characters is cut or no UTF-8, a step writes too much, or tokens are random.
        Exception: whatever the library raises for a step that it does not know.
    """
    model = fields.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise ValueError(
            f"its model.dropout={model['dropout']!r:.40} leaves out merges at random, so that no two readings of the"
            " documents are equal: set it to null"
        )
    for name in ("normalizer", "decoder"):
        steps = list(_steps(fields.get(name)))
        if len(steps) > MOST_STEPS:
            raise ValueError(f"its {name} has {len(steps):,} steps; {MOST_STEPS} are the limit")
        texts = [_longest_output(step) for step in steps]  # all tables are checked before one is used
        for number, (step, text) in enumerate(zip(steps, texts, strict=True)):
            for later in steps[number + 1 :]:
                if len(text) > MOST_GROWTH:
                    break
                text = _applied(later, text)
            if len(text) > MOST_GROWTH:
                raise ValueError(
                    f"step {number} of its {name} ({step['type']}) writes at least {len(text):,} characters for a"
                    f" match; {MOST_GROWTH:,} are the limit"
                )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part, in order, those of sequences too; what is no step is left to the library."""
    for inner in ("normalizers", "decoders"):
        if isinstance(part, dict) and isinstance(part.get(inner), list):
            for each in part[inner]:
                yield from _steps(each)
            return
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        yield part


def _longest_output(step: dict[str, Any]) -> str:
    """The longest text that a step writes for a match."""
    if step["type"] == "Precompiled":
        return max(_table(step), key=len)
    written = step.get({"Replace": "content", "Prepend": "prepend"}.get(step["type"], ""))
    return written if isinstance(written, str) else ""


def _table(step: dict[str, Any]) -> list[str]:
    """The texts of a table of characters: a trie after its size in bytes, then texts that end in NUL."""
    table = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    size = int.from_bytes(table[:4], "little")
    if len(table) < 4 or size % 4 or not 4 <= size <= len(table) - 4:
        raise ValueError(f"its precompiled_charsmap states a trie of {size:,} bytes, and has {len(table):,}")
    return table[4 + size :].decode().split("\0")


def _applied(step: dict[str, Any], text: str) -> str:
    """The text after a step; decoders are applied to one token where they are normalizers too."""
    if step["type"] not in ("Replace", "Prepend", "Precompiled"):
        return text
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    library = tokenizers.Tokenizer.from_str(json.dumps({"model": model, "normalizer": step}))
    return str(library.normalizer.normalize_str(text))
