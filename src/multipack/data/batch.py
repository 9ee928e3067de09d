"""`PackedBatch`: one pack of documents as flat tensors, and the only place that holds document boundaries.

    documents      A A A A A   B B   C C C                      a pack of 10 tokens, padded to 12
    input_ids      a a a a a   b b   c c c   0 0                (T,) int64
    position_ids   0 1 2 3 4   0 1   0 1 2   0 1                (T,) restart at every document
    targets        a a a a −   b −   c c −   − −                (T,) already shifted; − is −100
    cu_seqlens     0 5 7 10 12                                  (documents + 1,) int32, padding counted as one
    weights        ¼ ¼ ¼ ¼ 0   1 0   ½ ½ 0   0 0                (T,) float32, if documents have equal weight; else None

Padding is one last document that attends to itself and is never a target. If documents are aligned to a multiple, each
also ends in padding of its own, which no token of it attends to:

    align=4        A A A A A 0 0 0   B B 0 0   C C C 0          cu_seqlens 0 8 12 16; targets −
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""Target that no loss counts."""


@dataclass(frozen=True)
class PackedBatch:
    """A pack as the model takes it. T is the number of slots, padding included.

    Attributes:
        input_ids: (T,) int64 tokens.
        targets: (T,) int64, shifted: the next token, or −100 at each document's last position, on prompts and on
            padding.
        position_ids: (T,) int64, counted from 0 in every document.
        cu_seqlens: (D + 1,) int32 starts of this pack's D documents, padding counted as one, and T.
        max_seqlen: slots of this pack's longest document, padding included, rounded up to a multiple of 128. Kernels
            start max_seqlen / 128 thread blocks for each of the D documents and each head.
        num_documents: documents in this pack, without padding.
        num_tokens: tokens in this pack, without padding.
        num_target_tokens: targets that are not −100.
        lengths: the same boundaries on the host: slots of each document, padding's last; their sum is T.
        longest: tokens of this pack's longest document, without padding.
        denominator: this pack's share of the loss's denominator: its targets or, with document weighting, its documents
            with a target; a piece of a split document counts as one, and a document of weight w as w documents.
        weights: (T,) float32 weight of each target in the summed loss, 0 without a target. None = every target has
            weight 1.
    """

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_documents: int
    num_tokens: int
    num_target_tokens: int
    lengths: tuple[int, ...]
    longest: int
    denominator: float
    weights: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory (torch's DataLoader calls this)."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = {name: change(value) for name, value in tensors.items()}
        return replace(self, **changed)

    @property
    def num_slots(self) -> int:
        """T: tokens and padding."""
        return int(self.input_ids.numel())


def check_tokens(input_ids: Tensor, vocabulary_size: int) -> None:
    """Check that tokens are inside the vocabulary; on a GPU the error would come later, without the token.

    Raises:
        ValueError: one is not.
    """
    if not input_ids.numel():
        return
    low, high = (int(x) for x in torch.aminmax(input_ids))
    if low < 0 or high >= vocabulary_size:
        raise ValueError(
            f"token {low if low < 0 else high} is outside the vocabulary of {vocabulary_size:,}:"
            " the documents and the model must come from one tokenizer"
        )
