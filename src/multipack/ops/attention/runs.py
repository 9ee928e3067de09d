"""Runs: neighboring documents of equal length, which one call of a batched attention kernel processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

ALL = slice(None)
"""All tokens of a document."""


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

    def view(self, x: Tensor, tokens: slice = ALL) -> Tensor:
        """(T, H, …) → (documents, l, H, …), a view of these l tokens of each document."""
        rows = x[self.first : self.first + self.documents * self.length]
        return rows.view(self.documents, self.length, *x.shape[1:])[:, tokens]

    def heads_first(self, x: Tensor, dtype: torch.dtype, tokens: slice = ALL) -> Tensor:
        """(T, H, D) → (documents, H, l, D) in `dtype`, the layout of torch's kernels."""
        return self.view(x, tokens).transpose(1, 2).to(dtype)

    def lse_heads_first(self, lse: Tensor, tokens: slice = ALL) -> Tensor:
        """(T, H) → (documents, H, l), stored as (documents, l, H).

        Torch's CPU kernel writes this layout. Its backward pass reads the strides in torch 2.13; other versions may
        assume the layout, and would return wrong gradients for another one without an error.
        """
        return self.view(lse, tokens).contiguous().transpose(1, 2)


def runs(lengths: Iterable[int]) -> Iterator[Run]:
    """Runs of documents with these lengths, in order; empty documents are skipped."""
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
