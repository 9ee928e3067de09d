"""Sampling of tokens from logits, and decoding of tokens to text while they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

UNFINISHED = "�"
"""The character that tokenizers decode incomplete or invalid bytes to."""
LOOK_BACK = 6
"""Number of earlier tokens that are decoded with a new one: with some tokenizers its text depends on them."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when to stop."""

    max_tokens: int = 200
    """Maximum number of new tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 = the most likely token (greedy)."""
    top_k: int = 0
    """Draw among this many most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Draw among the fewest most likely tokens that together have this probability, after top_k; 1 = all."""
    seed: int = 0
    """Seed of the draws: prompt i has its own generator with seed + i."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which is cut before them."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "temperature", "top_k"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1, got {self.top_p}; temperature=0 takes the most likely token"
            )
        if "" in self.stop:
            raise ValueError("stop has an empty string, which would end every text at once")

    def generator(self, index: int) -> torch.Generator:
        """The generator of prompt `index`."""
        return torch.Generator().manual_seed(self.seed + index)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from (V,) float32 logits on the CPU.

    top_p is the nucleus of Holtzman et al. 2020, arXiv:1904.09751: the fewest tokens, by falling probability, whose
    sum reaches p.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    candidates = None
    if 0 < sampling.top_k < logits.numel():
        logits, candidates = logits.topk(sampling.top_k)
    # The largest logit becomes 0 before the division, so that small temperatures do not overflow.
    probabilities = F.softmax((logits - logits.max()) / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        probabilities, order = probabilities.sort(descending=True, stable=True)
        before = probabilities.double().cumsum(0) - probabilities
        probabilities = probabilities[before < sampling.top_p]
        candidates = order if candidates is None else candidates[order]
    drawn = int(torch.multinomial(probabilities, 1, generator=generator))
    return drawn if candidates is None else int(candidates[drawn])


class TextDecoder(Protocol):
    """The part of a tokenizer that generation needs: the number of its tokens, and their text."""

    @property
    def vocabulary_size(self) -> int: ...  # noqa: D102

    def decode(self, ids: Sequence[int]) -> str: ...  # noqa: D102


class TextStream:
    """Decodes tokens one at a time to text of whole characters, up to a stop string.

    Characters and stop strings may span tokens: incomplete characters, and text that may be the beginning of a stop
    string, are held back. The stop string that is complete first ends the text (of two that end together, the longer
    one), regardless of how tokens divide the text.

    Args:
        tokenizer: of the model.
        prompt_ids: tokens before the text.
        stop: strings that end the text.

    Attributes:
        text: the text so far, without what is held back.
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: TextDecoder, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._recent = [int(token) for token in prompt_ids[-LOOK_BACK:]]
        self._known = tokenizer.decode(self._recent)  # the part of `_recent` that is in the text already
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes."""
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
        """End the text; return what was held back."""
        if self.stopped:
            return ""
        rest = self._take(self._tokenizer.decode(self._recent)[len(self._known) :])
        if not self.stopped:
            rest += self._held
            self.text += self._held
            self._held = ""
        return rest

    def _take(self, new: str) -> str:
        """Add text, and hold back the longest end that may begin a stop string."""
        pending = self._held + new
        found = [
            (pending.find(stop) + len(stop), pending.find(stop)) for stop in self._stop if stop in pending
        ]
        self.stopped = bool(found)
        kept = min(found)[1] if found else len(pending)
        if not found:
            longest = max(map(len, self._stop), default=1) - 1
            for begin in range(max(len(pending) - longest, 0), len(pending)):
                if any(stop.startswith(pending[begin:]) for stop in self._stop):
                    kept = begin
                    break
        self._held = pending[kept:]
        self.text += pending[:kept]
        return pending[:kept]
