"""Key-value cache: each new token of a sequence is computed without computing earlier tokens again.

    row 0   k k k k k + · ·      each layer holds (rows, K, capacity, D) keys and values; a row is a sequence.
    row 1   k k + · · · · ·      + is the column of its next token; · is unused: zeros, masked so that they have
    row 2   k k k k k k + ·      no weight.

Rows 0 … n − 1 are in use; when a sequence ends, the last row moves to its place. `admit` prepares the prefill: one pass
over a pack of new sequences. `advance` prepares a decoding step: one pass over the next token of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.data.views.documents import IGNORE
from multipack.ops.attention import attention
from multipack.ops.attention.explicit import weighted
from multipack.ops.attention.kernel import Limits
from multipack.ops.attention.runs import repeat_heads
from multipack.ops.autocast import autocast_dtype
from multipack.shapes import ModelShape

INITIAL_CAPACITY = 64
"""Initial capacity of a row in tokens; it doubles when it is full."""


class KeyValueCache:
    """Keys and values of all layers for up to `rows` sequences.

    Args:
        shape: of the decoder; its context is the maximum number of tokens of a sequence.
        rows: maximum number of sequences at a time.
        like: a parameter of the decoder, whose device and dtype (autocast's if enabled) the cache takes.

    Attributes:
        attention: for each block a function that replaces `attention`: it stores the keys and values of the pass and
            attends to all tokens of each sequence.
        lengths: number of tokens of each row in use, including tokens of the current pass.
        stored: for each block (2, rows, K, capacity, D): keys, and values.
    """

    def __init__(self, shape: ModelShape, rows: int, like: Tensor) -> None:
        self.rows, self.limit = rows, shape.context
        self.windows = {shape.window_of(layer) for layer in range(shape.layers)}
        self.lengths: list[int] = []
        size = 2, rows, shape.kv_heads, 0, shape.head_width
        self.stored = [
            torch.zeros(size, dtype=autocast_dtype(like), device=like.device) for _ in range(shape.layers)
        ]
        self.attention: list[Callable[..., Tensor]] = [partial(self._attend, n) for n in range(shape.layers)]

    @property
    def capacity(self) -> int:
        """Number of tokens that a row has room for."""
        return self.stored[0].shape[3]

    def admit(self, batch: PackedBatch) -> None:
        """Prepare a pass over a pack of whole sequences, each of which gets a new row."""
        lengths = torch.tensor(batch.lengths, device=batch.input_ids.device)
        rows = len(self.lengths) + torch.arange(len(lengths), device=lengths.device)
        # Where the pass stores keys and values: row and column of each token.
        self._slots = rows.repeat_interleave(lengths), batch.position_ids
        # By window: columns that a decoding step reads, and which of them each row sees; empty in a prefill: its tokens
        # see each other.
        self._visible: dict[int, tuple[int, int, Tensor | None]] = {}
        self._reserve([*self.lengths, *batch.lengths])

    def advance(self, tokens: Sequence[int]) -> PackedBatch:
        """Prepare a pass over the next token of every row.

        Args:
            tokens: the next token of row 0, 1, ….

        Returns:
            The pack of these tokens: one document of one token per row, whose position follows the row's tokens.
        """
        count, device = len(tokens), self.stored[0].device
        last, even = max(self.lengths) + 1, len(set(self.lengths)) == 1
        starts = {
            window: [max(n + 1 - window, 0) if window else 0 for n in self.lengths] for window in self.windows
        }
        # One copy to the device for tokens, positions and the first column that each row sees.
        moved = torch.tensor([list(tokens), self.lengths, *starts.values()]).to(device)
        input_ids, positions = moved[0], moved[1]
        self._slots = torch.arange(count, device=device), positions
        for (window, begins), begin in zip(starts.items(), moved[2:], strict=True):
            first, mask = min(begins), None
            if not even:
                columns = torch.arange(first, last, device=device)
                mask = (begin[:, None] <= columns) & (columns <= positions[:, None])
                mask = mask[:, None, None]
            self._visible[window] = first, last, mask
        self._reserve([length + 1 for length in self.lengths])
        return PackedBatch(
            input_ids=input_ids,
            targets=torch.full_like(input_ids, IGNORE),
            position_ids=positions,
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32, device=device),
            max_seqlen=1,
            num_documents=count,
            num_tokens=count,
            num_target_tokens=0,
            lengths=(1,) * count,
            longest=max(self.lengths),
            denominator=0,
        )

    def remove(self, row: int) -> None:
        """Remove a sequence; the last row in use moves to `row`."""
        length = self.lengths.pop()
        if row < len(self.lengths):
            for stored in self.stored:
                stored[:, row, :, :length] = stored[:, len(self.lengths), :, :length]
            self.lengths[row] = length

    def _reserve(self, lengths: list[int]) -> None:
        """Make room for rows of these lengths."""
        self.lengths, longest = lengths, max(lengths)
        if longest <= self.capacity:
            return
        capacity = min(max(longest, 2 * self.capacity, INITIAL_CAPACITY), self.limit)
        for layer, stored in enumerate(self.stored):
            # Zeros, because the probability 0 of a masked column times a NaN in uninitialized memory would be NaN.
            self.stored[layer] = stored.new_zeros(*stored.shape[:3], capacity, stored.shape[4])
            self.stored[layer][:, :, :, : stored.shape[3]] = stored

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PackedBatch,
        backend: str,
        window: int | None,
        **scores: Any,
    ) -> Tensor:
        """`attention` from the tokens of the pass to their whole sequences; `backend` computes new sequences."""
        rows, columns = self._slots
        keys, values = self.stored[layer]
        keys[rows, :, columns], values[rows, :, columns] = key, value
        if not self._visible:
            return attention(query, key, value, batch, backend, window, **scores)
        first, last, mask = self._visible[window or 0]
        keys, values = (x[: len(query), :, first:last] for x in (keys, values))
        if (limits := Limits(**scores)).explicit:
            keys, values = (repeat_heads(x, query) for x in (keys, values))
            return weighted(query[:, :, None], keys, values, mask, limits)[0].squeeze(2).to(query.dtype)
        # The H / K query heads of a key head become its queries, so keys are not copied.
        queries = query.reshape(len(query), key.shape[1], -1, query.shape[2])
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).flatten(1, 2)
