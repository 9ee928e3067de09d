"""`SourceDocument`: a document as text, as sources yield it and the tokenizer takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """A piece of a document's text, tokenized by itself.

    Attributes:
        text: the text.
        is_target: whether its tokens are targets.
        is_special: whether the text is the name of one special token (`<|im_end|>`) and stands for that token. In all
            other parts such a name is plain text.
    """

    text: str
    is_target: bool
    is_special: bool = False


@dataclass(frozen=True)
class SourceDocument:
    """A document, or in a stream a stretch of it, as text.

    Attributes:
        name: origin, for messages: `functools.py:reduce`, `train.jsonl:17`.
        parts: its text in pieces, in order.
        ended: whether the text ends here (False: a stretch of a file that continues in the next document).
        closed: whether the text marks its own end, as chat templates do: no end token is added.
    """

    name: str
    parts: tuple[Part, ...]
    ended: bool = True
    closed: bool = False

    @property
    def characters(self) -> int:
        """Length of the text."""
        return sum(len(part.text) for part in self.parts)
