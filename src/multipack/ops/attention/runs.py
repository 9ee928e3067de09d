"""Runs: neighboring documents of equal length, which one call of a dense kernel attends to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

ALL = slice(None)


class Run(NamedTuple):
    """Neighboring documents of equal length.

    Attributes:
        first: position of the first token.
        documents: their number.
        length: tokens of each.
    """

    first: int
    documents: int
    length: int

    def cut(self, x: Tensor, inside: slice = ALL) -> Tensor:
        """(T, H, …) → (documents, tokens inside, H, …), a view; `inside` selects tokens of each document."""
        rows = x[self.first : self.first + self.documents * self.length]
        return rows.view(self.documents, self.length, *x.shape[1:])[:, inside]

    def heads_first(self, x: Tensor, dtype: torch.dtype, inside: slice = ALL) -> Tensor:
        """(T, H, D) → (documents, H, tokens inside, D), the layout of torch's kernels."""
        return self.cut(x, inside).transpose(1, 2).to(dtype)


def runs(lengths: Iterable[int]) -> Iterator[Run]:
    """The documents in order; empty ones are skipped."""
    first = 0
    for length, equal in groupby(lengths):
        if length:
            documents = len(list(equal))
            yield Run(first, documents, length)
            first += documents * length


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """(T, K, D) → (T, H, D): each key head once for every query head that reads it."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
