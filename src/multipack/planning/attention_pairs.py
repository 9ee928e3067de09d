"""`AttentionPairs`: the cost of attention in items of several documents."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def windowed_pairs(lengths: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """2·Σ_{t ≤ l} min(t, window) for each document."""
    inside = np.minimum(lengths, window)
    return inside * (inside + 1) + 2 * window * (lengths - inside)


class AttentionPairs(NamedTuple):
    """Attention of n items of documents that share their beginnings: (n,) int64 arrays.

    Attributes:
        pairs: query-key pairs, counted twice: Σ l(2p + l + 1) over nodes of l tokens behind p. One document: l(l + 1).
        windowed: pairs inside the cost model's window, counted twice: Σ 2·min(t, window) over tokens at position t.
    """

    pairs: NDArray[np.int64]
    windowed: NDArray[np.int64]

    @classmethod
    def of(
        cls, lengths: NDArray[np.int64], shared: NDArray[np.int64] | int = 0, window: int = 0
    ) -> AttentionPairs:
        """Attention of documents whose first `shared` tokens another document computes.

        Args:
            lengths: (n,) tokens of each document.
            shared: (n,) number of these tokens.
            window: of the cost model, in tokens; 0 = none.
        """
        shared = np.broadcast_to(shared, lengths.shape)
        pairs = lengths * (lengths + 1) - shared * (shared + 1)
        windowed = windowed_pairs(lengths, window) - windowed_pairs(shared, window)
        return cls(pairs, windowed)

    def take(self, items: NDArray[np.integer[Any]]) -> AttentionPairs:
        """Attention of these items."""
        return AttentionPairs(*(values[items] for values in self))
