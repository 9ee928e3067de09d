"""Documents as text in pieces that are targets or not, for people to look at."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from multipack.data.text.texts import TextPart
from multipack.data.text.tokenizer import Tokenizer
from multipack.data.views.documents import Document, Documents

MOST_TOKENS = 2000
"""Tokens of a document that are shown."""


class Shown(NamedTuple):
    """A document, or an answer of a pair, as text."""

    name: str  # its name, and which answer of a pair it is
    tokens: int  # number of its tokens
    targets: int  # number of its targets
    parts: tuple[TextPart, ...]  # its text, up to `MOST_TOKENS` tokens of it


def show(documents: Documents, index: int) -> list[Shown]:
    """Document `index` of a view as text; of a pair both answers, each after the prompt."""
    name, kind, tokenizer = documents.name(index), documents.store.kind, documents.store.tokenizer
    names = (f"{name}, chosen", f"{name}, rejected") if kind == "pairs" else (name,)
    if kind == "labels":
        label = "desirable" if documents.labels[index] else "undesirable"
        names = (f"{name}, {label}", f"{name}, another record's answer")
    members = zip(names, documents.members(index), strict=True)
    return [_shown(name, document, tokenizer) for name, document in members]


def _shown(name: str, document: Document, tokenizer: Tokenizer) -> Shown:
    tokens, is_target = document.tokens.tolist(), [False] * len(document.tokens)
    for start, stop in document.spans:
        is_target[start:stop] = [True] * (stop - start)
    is_target[:1] = [False]  # nothing comes before the first token
    parts, stop = list[TextPart](), 0
    kinds = zip(is_target, map(tokenizer.special_name, tokens), strict=True)
    for (marked, special), run in groupby(list(kinds)[:MOST_TOKENS]):
        start, stop = stop, stop + sum(1 for _ in run)
        text = special * (stop - start) or _decoded(tokenizer, tokens, start, stop)
        parts.append(TextPart(text, marked, bool(special)))
    return Shown(name, len(tokens), sum(is_target), tuple(parts))


def _decoded(tokenizer: Tokenizer, tokens: list[int], start: int, stop: int) -> str:
    """The text of tokens `start` to `stop`, with the leading white space that decoders drop."""
    before = tokenizer.decode(tokens[max(start - 1, 0) : start])
    text = tokenizer.decode(tokens[max(start - 1, 0) : stop])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(tokens[start:stop])
