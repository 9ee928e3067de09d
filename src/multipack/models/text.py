"""Text of tokens that come one at a time: whole characters only, and never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from multipack.data.tokenizer import Tokenizer

UNFINISHED = "�"
"""What a decoder writes for bytes that are no character, or not yet one."""
LOOK_BACK = 6
"""Tokens of the prompt that are decoded with the first new ones: decoders that join words look at what came before."""


class TextStream:
    """Turns tokens into text as they come.

    A character may take several tokens, and a stop string may: what could still become another character, or the
    beginning of a stop string, is held back until it is certain. Where stop strings overlap, the one that is
    complete first counts (of two that end together, the longer one), however tokens cut the text.

    Args:
        tokenizer: of the model.
        prompt_ids: what the text goes on from.
        stop: strings that end the text.

    Attributes:
        text: all that is certain so far.
        stopped: whether a stop string was met.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._recent = [int(token) for token in prompt_ids[-LOOK_BACK:]]
        self._known = tokenizer.decode(self._recent)  # the text of `_recent` that was taken already
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one more token; return the text that became certain by it."""
        if self.stopped:
            return ""
        before = len(self._recent)
        self._recent.append(token)
        decoded = self._tokenizer.decode(self._recent)
        if decoded.endswith(UNFINISHED):
            return ""
        new = decoded[len(self._known) :]
        self._recent = self._recent[max(before - LOOK_BACK, 0) :]
        self._known = self._tokenizer.decode(self._recent)
        return self._take(new)

    def finish(self) -> str:
        """No more tokens come: return what was held back."""
        if self.stopped:
            return ""
        rest = self._take(self._tokenizer.decode(self._recent)[len(self._known) :])
        if self.stopped:
            return rest
        held, self._held = self._held, ""
        self.text += held
        return rest + held

    def _take(self, new: str) -> str:
        pending = self._held + new
        met = [(pending.find(each) + len(each), pending.find(each)) for each in self._stop if each in pending]
        if met:
            self.stopped = True
            certain = pending[: min(met)[1]]
        else:
            certain = pending[: len(pending) - self._begun(pending)]
        self._held = pending[len(certain) :]
        self.text += certain
        return certain

    def _begun(self, pending: str) -> int:
        """Characters at the end of `pending` that may be the beginning of a stop string."""
        longest = min(max((len(each) for each in self._stop), default=1) - 1, len(pending))
        sizes = range(longest, 0, -1)
        return next(
            (size for size in sizes if any(each.startswith(pending[-size:]) for each in self._stop)), 0
        )
