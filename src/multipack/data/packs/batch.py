"""`PackedBatch`: one pack of documents as flat tensors, and the only place that holds document boundaries.

    documents      A A A A A   B B   C C C                      a pack of 10 tokens, padded to 12
    input_ids      a a a a a   b b   c c c   0 0                (T,) int64
    position_ids   0 1 2 3 4   0 1   0 1 2   0 1                (T,) restart at every document
    targets        a a a a −   b −   c c −   − −                (T,) already shifted; − is −100
    cu_seqlens     0 5 7 10 12                                  (documents + 1,) int32, padding counted as one
    weights        ¼ ¼ ¼ ¼ 0   1 0   ½ ½ 0   0 0                (T,) float32, if documents have equal weight; else None

Padding is one last document that attends to itself and is never a target.

Documents with a common beginning may share it: the pack holds its tokens once. The bounds are then bounds of the
nodes of a tree (prefix_tree.py), `targets` is a list, and `PackedBatch.tree` has the rest:

    documents      p p p a a,  p p p b,  c c
    input_ids      p p p a a b c c                              (T,) node after node
    position_ids   0 1 2 3 4 3 0 1                              (T,) depth in the documents
    cu_seqlens     0 3 5 6 8                                    (nodes + 1,)
    key_slots      0 1 2   0 1 2 3 4   0 1 2 5   6 7            the path of each node: what its queries see
    targets        p p a a   p p b   c                          (n,) document after document, at the slots
                   0 1 2 3   0 1 2   6                          tree.target_slots
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from multipack.data.views.documents import IGNORE
from multipack.data.views.prefix_tree import PrefixTree
from multipack.planning.lengths import Integers

TILE_TOKENS = 128
"""Queries that one thread block of an attention kernel processes: `max_seqlen` is a multiple of it."""


class Movable:
    """A dataclass with tensors, which move together."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same with all tensors on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same in page-locked memory (torch's DataLoader calls this)."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, Movable):
                changed[name] = value._each(change)
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class PackedTree(Movable):
    """Paths and targets of a pack whose documents share tokens, as N nodes of a `PrefixTree`.

    The queries of a node see the keys of its path: all keys of the nodes before it, and causally its own. All paths
    have K = Σ (tokens from the root to the node's end) keys.

    Attributes:
        key_slots: (K,) int64 slots of the paths, node after node.
        cu_seqlens_k: (N + 1,) int32 starts of the paths in `key_slots`, and K.
        max_seqlen_k: tokens of the longest path, rounded up like `max_seqlen`.
        lengths_k: tokens of each path, on the host.
        ends: (T,) int32: the slots from i to ends[i] − 1 see slot i, and no others do.
        target_slots: (n,) int64 slot of each target of `PackedBatch.targets`.
        target_bounds: (D + 1,) int64 starts of the documents' targets, and n.
        last_slots: (D,) int64 slot of each document's last token.
    """

    key_slots: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int
    lengths_k: tuple[int, ...]
    ends: Tensor
    target_slots: Tensor
    target_bounds: Tensor
    last_slots: Tensor

    @classmethod
    def of(
        cls, tree: PrefixTree, sizes: Sequence[int], shifted: Sequence[Integers]
    ) -> tuple[PackedTree, Integers]:
        """The fields of a pack, and its (n,) targets.

        Args:
            tree: of the pack's documents.
            sizes: slots of the nodes; a last one without a node is padding.
            shifted: targets of each document, see `Document.shifted_targets`.
        """
        parents = [*tree.parent.tolist(), *[-1] * (len(sizes) - len(tree.parent))]
        stops = np.cumsum(sizes)
        ends, paths = stops.copy(), list[Integers]()
        for size, stop, parent in zip(sizes, stops.tolist(), parents, strict=True):
            own = np.arange(stop - size, stop)
            paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
        for node in reversed(range(len(parents))):  # children before parents
            if parents[node] >= 0:
                ends[parents[node]] = max(ends[parents[node]], ends[node])
        of_documents = [paths[node] for node in tree.last.tolist()]
        places = [np.flatnonzero(targets != IGNORE) for targets in shifted]
        slots = np.concatenate([path[place] for path, place in zip(of_documents, places, strict=True)])
        targets = np.concatenate([each[place] for each, place in zip(shifted, places, strict=True)])
        lengths = [len(path) for path in paths]
        made = cls(
            key_slots=torch.from_numpy(np.concatenate(paths)),
            cu_seqlens_k=torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)),
            max_seqlen_k=rounded(max(lengths)),
            lengths_k=tuple(lengths),
            ends=torch.from_numpy(np.repeat(ends, sizes).astype(np.int32)),
            target_slots=torch.from_numpy(slots),
            target_bounds=torch.from_numpy(np.cumsum([0, *map(len, places)])),
            last_slots=torch.from_numpy(np.array([path[-1] for path in of_documents])),
        )
        return made, targets


@dataclass(frozen=True)
class PackedBatch(Movable):
    """A pack as the model takes it. T is the number of slots, padding included.

    Attributes:
        input_ids: (T,) int64 tokens.
        targets: (T,) int64, shifted: the next token, or −100 at each document's last position, on prompts and on
            padding.
        position_ids: (T,) int64, counted from 0 in every document.
        cu_seqlens: (D + 1,) int32 starts of this pack's D documents, padding counted as one, and T.
        max_seqlen: slots of this pack's longest document, padding included, rounded up to a multiple of 128. Kernels
            start max_seqlen / 128 thread blocks for each of the D documents and each head. On lognormal lengths that is
            4 to 6 times the blocks with work; with the bounds of a whole plan it would be 240 to 690 times.
        num_documents: documents in this pack, without padding.
        num_tokens: tokens in this pack, without padding.
        num_target_tokens: targets that are not −100.
        lengths: the same boundaries on the host: slots of each document, padding's last; their sum is T.
        longest: tokens of this pack's longest document, without padding.
        denominator: this pack's share of the loss's denominator: its targets or, with document weighting, its documents
            with a target; a piece of a split document counts as one, and a document of weight w as w documents.
        weights: (T,) float32 weight of each target in the summed loss, 0 without a target. None = every target has
            weight 1.
        tree: set if documents share tokens. Bounds and `lengths` are then of nodes, `position_ids` depths, and
            `targets` and `weights` (n,) lists without −100, document after document; `num_tokens` still counts the
            tokens of each document.
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
    tree: PackedTree | None = None

    @property
    def num_slots(self) -> int:
        """T: tokens and padding."""
        return int(self.input_ids.numel())


def without_tokens(bounds: Sequence[int], device: torch.device | str = "cpu") -> PackedBatch:
    """A pack for attention and masks alone: `input_ids`, `targets` and `position_ids` are on the meta device.

    Args:
        bounds: (documents + 1,) rising slots at which documents start, and the number of slots.
        device: of `cu_seqlens`.
    """
    lengths = tuple(stop - start for start, stop in pairwise(bounds))
    nothing = torch.empty(bounds[-1], dtype=torch.long, device="meta")
    return PackedBatch(
        input_ids=nothing,
        targets=nothing,
        position_ids=nothing,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
        max_seqlen=rounded(max(lengths)),
        num_documents=len(lengths),
        num_tokens=bounds[-1],
        num_target_tokens=0,
        lengths=lengths,
        longest=max(lengths),
        denominator=0,
    )


def rounded(tokens: int) -> int:
    """Tokens rounded up to a multiple of `TILE_TOKENS`."""
    return -(-tokens // TILE_TOKENS) * TILE_TOKENS


def check_tokens(input_ids: Tensor, vocabulary_size: int) -> None:
    """`ValueError` if a token is outside the vocabulary; on a GPU the error would come later, without the token."""
    if not input_ids.numel():
        return
    low, high = (int(x) for x in torch.aminmax(input_ids))
    if low < 0 or high >= vocabulary_size:
        raise ValueError(
            f"token {low if low < 0 else high} is outside the vocabulary of {vocabulary_size:,}:"
            " the documents and the model must come from one tokenizer"
        )
