"""Key-value cache: each new token of a sequence is computed without computing earlier tokens again.

    row 0   k k k k k + · ·      each layer holds (rows, K, capacity, D) keys and values; a row is a sequence.
    row 1   k k + · · · · ·      + is the column of its next token; · is unused: zeros, masked so that they have
    row 2   k k k k k k + ·      no weight.

Rows 0 … n − 1 are in use; when a sequence ends, the last row moves to its place. New sequences are read as one pack,
announced by `admit`; then each pass, announced by `advance`, adds one token to every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.batch import IGNORE, PackedBatch
from multipack.ops.attention import attention

SMALLEST = 64
"""Initial capacity of a row in tokens; it doubles when it is full."""


class KeyValueCache:
    """Keys and values of all layers for up to `rows` sequences.

    Args:
        layers: number of blocks.
        rows: maximum number of sequences at a time.
        limit: maximum number of tokens of a sequence: the model's context.

    Attributes:
        layers: one `LayerCache` per block.
        lengths: number of tokens of each row in use, including those of the current pass.
        fresh: whether the current pass reads whole new sequences, whose tokens see only their own sequence.
    """

    def __init__(self, layers: int, rows: int, limit: int) -> None:
        self.rows, self.limit = rows, limit
        self.layers = tuple(LayerCache(self) for _ in range(layers))
        self.lengths: list[int] = []
        self.fresh = True
        self.capacity = 0
        self._singles = _single_tokens(0, torch.device("cpu"))
        self._slots: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._seen: dict[int | None, tuple[int, int, Tensor | None]] = {}

    def admit(self, batch: PackedBatch) -> None:
        """Announce a pack of whole sequences, each of which gets a new row.

        Raises:
            ValueError: there are more than `rows` sequences, or one has more than `limit` tokens.
        """
        first, lengths = len(self.lengths), torch.tensor(batch.lengths, device=batch.input_ids.device)
        rows = torch.arange(first, first + len(lengths), device=lengths.device)
        self._announce([*self.lengths, *batch.lengths], fresh=True)
        self._slots = rows.repeat_interleave(lengths), batch.position_ids

    def advance(self, tokens: Sequence[int], device: torch.device) -> PackedBatch:
        """Announce the next token of every row.

        Args:
            tokens: the next token of row 0, 1, ….
            device: device of the pack.

        Returns:
            The pack of these tokens: one document of one token per row, whose position follows the row's tokens.

        Raises:
            ValueError: a row has `limit` tokens.
        """
        # One copy to the device for tokens and positions.
        input_ids, positions = torch.tensor([list(tokens), self.lengths]).to(device)
        self._announce([length + 1 for length in self.lengths], fresh=False)
        count = len(self.lengths)
        if count != self._singles.num_slots:
            self._singles = _single_tokens(count, device)
        self._slots = self._singles.input_ids, positions
        return replace(self._singles, input_ids=input_ids, position_ids=positions)

    def remove(self, row: int) -> None:
        """Remove a sequence; the last row in use moves to `row`."""
        last = len(self.lengths) - 1
        for layer in self.layers:
            layer.move(last, row, self.lengths[last])
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def seen(self, window: int | None) -> tuple[int, int, Tensor | None]:
        """The columns that the newest token of each row sees, computed once per pass for all layers.

        Args:
            window: tokens that a token sees, itself included; None = all.

        Returns:
            (first, last, mask): columns first … last − 1, and a (rows in use, 1, 1, last − first) bool mask, True
            where a row sees a column; None = every row sees all of them.
        """
        if window not in self._seen:
            starts = [0 if window is None else max(length - window, 0) for length in self.lengths]
            first, last = min(starts), max(self.lengths)
            mask = None
            if len(set(self.lengths)) > 1:
                device = self._slots[0].device
                begin, end = (torch.tensor(x, device=device)[:, None] for x in (starts, self.lengths))
                columns = torch.arange(first, last, device=device)
                mask = ((begin <= columns) & (columns < end))[:, None, None, :]
            self._seen[window] = first, last, mask
        return self._seen[window]

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Row and column of each token of the current pass: two (T,) int64 tensors."""
        return self._slots

    def _announce(self, lengths: Sequence[int], fresh: bool) -> None:
        longest = max(lengths, default=0)
        if len(lengths) > self.rows or longest > self.limit:
            raise ValueError(
                f"the cache holds {self.rows} sequences of {self.limit:,} tokens each,"
                f" not {len(lengths)} of up to {longest:,}"
            )
        if longest > self.capacity:
            self.capacity = min(max(longest, 2 * self.capacity, SMALLEST), self.limit)
        self.lengths, self.fresh = list(lengths), fresh
        self._seen.clear()


class LayerCache:
    """Keys and values of one layer, in the dtype in which they were computed (autocast's if enabled)."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self.keys = self.values = torch.empty(0)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, backend: str, window: int | None
    ) -> Tensor:
        """Store the pack's keys and values, then attend to all tokens that each token sees.

        Args:
            query: (T, H, D).
            key: (T, K, D).
            value: (T, K, D).
            batch: the pack that was announced to the cache.
            backend: attention backend for whole sequences.
            window: tokens that each position sees, itself included; None = all.

        Returns:
            (T, H, D), equal to the result of `attention` over the whole sequences at these tokens.
        """
        self._reserve(key)
        rows, columns = self._cache.slots
        self.keys[rows, :, columns] = key
        self.values[rows, :, columns] = value
        if self._cache.fresh:
            return attention(query, key, value, batch, backend, window=window)
        first, last, mask = self._cache.seen(window)
        # The H / K query heads of a key head become its queries, so keys are not copied.
        queries = query.reshape(len(query), key.shape[1], -1, query.shape[2])
        keys, values = (held[: len(query), :, first:last] for held in (self.keys, self.values))
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).flatten(1, 2)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the `length` tokens of one row over another."""
        if source != target:
            for held in (self.keys, self.values):
                held[target, :, :length] = held[source, :, :length]

    def _reserve(self, key: Tensor) -> None:
        size = (self._cache.rows, key.shape[1], self._cache.capacity, key.shape[2])
        if self.keys.shape == size:
            return
        # Zeros, because a masked column's weight 0 times a NaN in uninitialized memory would be NaN.
        keys, values = key.new_zeros(size), key.new_zeros(size)
        if self.keys.numel():
            keys[:, :, : self.keys.shape[2]] = self.keys
            values[:, :, : self.values.shape[2]] = self.values
        self.keys, self.values = keys, values


def _single_tokens(count: int, device: torch.device) -> PackedBatch:
    """A pack of `count` documents of one token each, whose token ids are the row numbers."""
    return PackedBatch(
        input_ids=torch.arange(count, device=device),
        targets=torch.full((count,), IGNORE, device=device),
        position_ids=torch.zeros(count, dtype=torch.int64, device=device),
        cu_seqlens=torch.arange(count + 2, dtype=torch.int32, device=device).clamp(max=count),
        max_seqlen=1,
        num_documents=count,
        num_tokens=count,
        num_target_tokens=0,
        lengths=(1,) * count,
        longest=1,
        num_target_documents=0,
    )
