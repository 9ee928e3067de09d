"""What every source of documents gives: `SourceDocument`s, made of parts of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Part(NamedTuple):
    """A piece of a document's text, tokenized by itself.

    Attributes:
        text: what it says.
        is_target: whether its tokens are targets.
        is_special: whether the text is the name of one special token (`<|im_end|>`) and means that token. In all
            other parts such a name is plain text.
    """

    text: str
    is_target: bool
    is_special: bool = False


@dataclass(frozen=True)
class SourceDocument:
    """A document, or in a stream a stretch of it, as text.

    Attributes:
        name: where it stands, for people: `functools.py:reduce`, `train.jsonl:17`.
        parts: its text in pieces, in order.
        ended: whether text ends here (False: a stretch of a file that goes on in the next document).
        closed: whether its text says itself where it ends, as chat templates do: no end token is added.
        border: number of the part with which the second half of a preference pair (the rejected one) begins;
            0 = the document is no pair.
    """

    name: str
    parts: tuple[Part, ...]
    ended: bool = True
    closed: bool = False
    border: int = 0

    @property
    def characters(self) -> int:
        """Of all its text."""
        return sum(len(part.text) for part in self.parts)


class Source(ABC):
    """Documents to be tokenized. While it is iterated, `done` of `total` `unit`s tell how far it is.

    Attributes:
        is_stream: all documents together are one.
        unit: what `done` and `total` count.
        overlong: what becomes of documents longer than a pack, where `DataConfig.overlong` is auto.
        skipped: after a full iteration, what was left out: reason → how many.
        pairs: whether each document is a pair of answers, of which one is preferred.
        chat_template: the template of its chats (`ChatTemplate.to_json`); empty = it has none.
        special_tokens: names of the special tokens that its documents hold.
    """

    is_stream = False
    unit = "bytes"
    total = 0
    overlong: Literal["error", "split"] = "error"

    def __init__(self) -> None:
        self.skipped: dict[str, int] = {}

    @cached_property
    @abstractmethod
    def hash(self) -> str:
        """Sha256 of the content and of all settings that decide what the documents are."""

    @property
    def pairs(self) -> bool:
        """See above."""
        return False

    @property
    def chat_template(self) -> str:
        """See above."""
        return ""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """See above."""
        return ()

    @property
    @abstractmethod
    def done(self) -> int:
        """How much of `total` has been read."""

    @abstractmethod
    def __iter__(self) -> Iterator[SourceDocument]: ...

    @abstractmethod
    def describe(self, documents: int) -> str:
        """One line about this source, of which `documents` were kept."""

    def _skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
