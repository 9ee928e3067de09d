"""How the next token is chosen, and what ends a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when to stop."""

    max_tokens: int = 200
    """Most tokens to add."""
    temperature: float = 1.0
    """Logits are divided by it; 0 = always the likeliest token."""
    top_k: int = 0
    """Draw among so many likeliest tokens only; 0 = among all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens that together have this probability, after top_k; 1 = among all."""
    seed: int = 0
    """Of the draws: prompt i draws from a generator of its own, of seed + i."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which is cut before them."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("max_tokens", "temperature", "top_k"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1, got {self.top_p}; temperature=0 takes the likeliest alone"
            )
        if "" in self.stop:
            raise ValueError("a stop string is empty: it would end every text before its first letter")

    def generator(self, index: int) -> torch.Generator:
        """What prompt `index` draws from."""
        return torch.Generator().manual_seed(self.seed + index)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from (V,) float32 logits on the CPU.

    top_p is the nucleus of Holtzman et al. 2020, arXiv:1904.09751: of the tokens in falling order of probability, the
    fewest whose sum reaches p.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    candidates = None
    if 0 < sampling.top_k < logits.numel():
        logits, candidates = logits.topk(sampling.top_k)
    # The largest logit becomes 0 before the division, so that no temperature overflows.
    probabilities = F.softmax((logits - logits.max()) / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        probabilities, order = probabilities.sort(descending=True, stable=True)
        before = probabilities.double().cumsum(0) - probabilities
        probabilities = probabilities[before < sampling.top_p]
        candidates = order if candidates is None else candidates[order]
    drawn = int(torch.multinomial(probabilities, 1, generator=generator))
    return drawn if candidates is None else int(candidates[drawn])
