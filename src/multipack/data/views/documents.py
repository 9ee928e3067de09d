"""A document, and views of a token store in which documents are selected, cut or split without copying.

    store     |AAAAAAAAAAAA|BBBB|CCCCCCCC|                 flat tokens, documents end to end
    hold out  [A        ] [C        ]  |  [B   ]           train | validation
    cut(8)    [AAAAAAAA][AAAA] …                           pieces of at most 8 tokens

A view is one array of rows (document, start, length, prefix, context: `PIECE`), so that a view of a view costs little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.data.views.overlong import CUTS, EFFECTS, FitReport, Pieces, pieces_of, split
from multipack.data.views.prefix_tree import PrefixTree
from multipack.planning.lengths import Integers
from multipack.planning.steps import permutation

IGNORE = -100
"""Target that no loss counts."""

if TYPE_CHECKING:
    from multipack.data.stores.store import TokenStore

_VALIDATION = 1 << 20  # in place of an epoch, for an order that no epoch has
_ROOM = "plan.capacity (and model.context, where positions are learned)"


@dataclass(frozen=True)
class Document:
    """One document, or piece of one, as collators take it.

    Attributes:
        tokens: (l,) unsigned integers, a slice of the store's memory map.
        spans: (k, 2) int64 [start, stop) ranges of tokens that are targets, within the document. The first token of a
            document is never a target: nothing comes before it.
        weight: weight of its loss, at least 0.
    """

    tokens: NDArray[np.unsignedinteger]
    spans: Integers
    weight: float = 1.0

    def shifted_targets(self) -> Integers:
        """(l,) int64: at each position the next token if it is a target, else −100."""
        targets = np.full(len(self.tokens), IGNORE, dtype=np.int64)
        for start, stop in self.spans:
            first = max(int(start), 1)
            targets[first - 1 : stop - 1] = self.tokens[first:stop]
        return targets


class Documents:
    """A view of a token store: n items in an order, each of which is a document or a piece of one.

    It is a map-style data set of `torch.utils.data`. A document is a zero-copy slice of the store; a piece with a
    repeated prompt is a copy. A document may occur several times. Where items of the store are two documents (see
    `ItemKind`), an item is two neighboring rows, which are never cut, and `members` gives both.

    Args:
        store: the token store.
        pieces: (n · `size`,) rows of type `PIECE`, item after item.
        train_on_prompt: whether every token but the first is a target.

    Attributes:
        size: rows of an item.
    """

    def __init__(self, store: TokenStore, pieces: Pieces, train_on_prompt: bool = False) -> None:
        self.store, self.pieces, self.train_on_prompt = store, pieces, train_on_prompt
        self.size = store.item_size

    @classmethod
    def whole(cls, store: TokenStore, train_on_prompt: bool = False) -> Documents:
        """All documents of `store`, uncut, in its order."""
        return cls(store, pieces_of(np.arange(store.num_documents), 0, store.lengths), train_on_prompt)

    @classmethod
    def joined(cls, views: Sequence[Documents]) -> Documents:
        """All documents of these views of one store, in order."""
        return views[0]._view(np.concatenate([view.pieces for view in views]))

    def within(self, joined: TokenStore, first: int) -> Documents:
        """The same view of a joined store, in which the first document of this view's store is number `first`."""
        moved = self.pieces.copy()
        moved["document"] += first
        return Documents(joined, moved, self.train_on_prompt)

    def _view(self, pieces: Pieces) -> Documents:
        return Documents(self.store, pieces, self.train_on_prompt)

    def _of_items(self, rows: Integers) -> Integers:
        """(n,) sums over the rows of each item."""
        return rows.reshape(-1, self.size).sum(axis=1)

    @property
    def _numbers(self) -> Integers:
        """(n,) number in the store of the first document of each item."""
        return self.pieces["document"][:: self.size]

    def __len__(self) -> int:
        return len(self.pieces) // self.size

    def _row(self, index: int, member: int = 0) -> tuple[int, int, int, int, int]:
        """The row of a member of item `index`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self):,}")
        row: tuple[int, int, int, int, int] = self.pieces[int(index) * self.size + member].item()
        return row

    def __getitem__(self, index: int) -> Document:
        """Document `index` (negative: from the end).

        Raises:
            IndexError: there is none.
            ValueError: it is an item of two documents; the store is damaged.
        """
        if self.size > 1:
            raise ValueError(f"{self.name(index)} is a preference pair: `members` gives its documents")
        return self._document(index, 0, 1.0 if self.weights is None else float(self.weights[index]))

    def _document(self, index: int, member: int, weight: float = 1.0) -> Document:
        document, start, length, prefix, context = self._row(index, member)
        tokens = self.store.tokens_of(document, start, length - prefix)
        if prefix:
            tokens = np.concatenate([self.store.tokens_of(document, 0, prefix), tokens])
        if self.train_on_prompt:
            return Document(tokens, np.array([[context, length]], dtype=np.int64), weight)
        spans = np.clip(self.store.spans_of(document) - start + prefix, context, length)
        return Document(tokens, spans[spans[:, 0] < spans[:, 1]], weight)

    def members(self, index: int) -> tuple[Document, ...]:
        """The documents of item `index`: one, or both answers, each after the prompt.

        Raises:
            IndexError: there is none.
            ValueError: one of two answers has no target; the store is damaged.
        """
        if self.size == 1:
            return (self[index],)
        answers = self._document(index, 0), self._document(index, 1)
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            if not (answer.spans[:, 1] > np.maximum(answer.spans[:, 0], 1)).any():
                raise ValueError(f"{self.name(index)}: the {name} answer has no target token: it is empty")
        return answers

    @cached_property
    def lengths(self) -> Integers:
        """(n,) tokens of each item, read-only."""
        lengths = self._of_items(self.pieces["length"])
        lengths.flags.writeable = False
        return lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @cached_property
    def target_counts(self) -> Integers:
        """(n,) targets of each item; the first token of a document never is one."""
        rows, first = self.pieces, np.maximum(self.pieces["context"], 1)
        if self.train_on_prompt:
            return self._of_items(rows["length"] - first)
        shift = rows["start"] - rows["prefix"]  # from a place in the piece to one in its document
        counts = self.store.count_targets(rows["document"], shift + first, shift + rows["length"])
        return self._of_items(counts)

    @cached_property
    def weights(self) -> NDArray[np.float64] | None:
        """(n,) weight of each item in the loss; None = all are 1."""
        return None if self.store.weights is None else self.store.weights[self._numbers]

    @cached_property
    def labels(self) -> NDArray[np.bool_]:
        """(n,) whether each answer is desirable, of a store of labeled answers; all true of other stores."""
        return self.store.labels[self._numbers]

    def name(self, index: int) -> str:
        """Name of a document: `functools.py:reduce`, with the range of tokens if it is a piece."""
        document, start, length, prefix, _ = self._row(index)
        name, whole = self.store.name(document), int(self.store.lengths[document])
        if length == whole and not prefix:
            return name
        stop = start + length - prefix
        return f"{name} [{'prompt and ' if prefix else ''}tokens {start:,} to {stop:,} of {whole:,}]"

    def prompt_length(self, index: int) -> int:
        """Tokens of a document before its first target; of a later piece, the tokens of the prompt that it repeats."""
        document, start, length, prefix, _ = self._row(index)
        spans = self.store.spans_of(document)
        return prefix if start or prefix or not len(spans) else min(int(spans[0, 0]), length)

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 that identifies the tokens of these documents, and which of them are targets."""
        digest = hashlib.sha256(f"{self.store.checksum} {self.train_on_prompt}".encode())
        items = self.pieces[:: self.size].copy()
        items["length"] = self.lengths
        digest.update(items.data)
        return digest.hexdigest()

    def take(self, indices: ArrayLike) -> Documents:
        """These items of the view, in this order."""
        rows = np.asarray(indices, dtype=np.int64)[:, None] * self.size + np.arange(self.size)
        return self._view(self.pieces[rows.ravel()])

    def hold_out(self, fraction: float, seed: int = 0) -> tuple[Documents, Documents]:
        """Two views, by document: the pieces of one document stay together. Order is kept.

        Args:
            fraction: share of the documents in the second view, less than 1; rounded, at least one document, not all.
            seed: seed of the choice.

        Raises:
            ValueError: a fraction above 0 of fewer than two documents.
        """
        numbers = np.unique(self._numbers)
        if fraction and len(numbers) < 2:
            raise ValueError(
                f"data.validation={fraction}: {len(numbers)} document of {self.store.path} cannot be split in two; set"
                " data.validation=0 (and train.eval_every=0), add documents, or divide a text with data.documents"
            )
        count = min(max(round(len(numbers) * fraction), 1 if fraction else 0), max(len(numbers) - 1, 0))
        chosen = numbers[permutation(seed, _VALIDATION, len(numbers))[:count]]
        is_held = np.isin(self._numbers, chosen)
        return self.take(np.flatnonzero(~is_held)), self.take(np.flatnonzero(is_held))

    def hold_out_end(self, fraction: float) -> tuple[Documents, Documents]:
        """Two views, by position: the first int(tokens · (1 − fraction)) tokens, and the rest.

        Raises:
            ValueError: a fraction above 0 that leaves a view less than 2 tokens.
        """
        border = int(self.num_tokens * (1.0 - fraction))
        if fraction and min(border, self.num_tokens - border) < 2:
            raise ValueError(
                f"data.validation={fraction} of a stream of {self.num_tokens:,} tokens leaves {border:,} to train and"
                f" {self.num_tokens - border:,} to validate on: each needs 2"
            )
        begin = np.cumsum(self.lengths) - self.lengths
        inside = np.clip(border - begin, 0, self.lengths)  # tokens of each document before the border
        first, rest = np.flatnonzero(inside > 0), np.flatnonzero(inside < self.lengths)
        return (
            self._cut(pieces_of(first, np.zeros_like(first), inside[first])),
            self._cut(pieces_of(rest, inside[rest], (self.lengths - inside)[rest])),
        )

    def cut(self, block_size: int) -> Documents:
        """Every document as pieces of `block_size` (at least 1) tokens; the last piece of each may be shorter."""
        return self._cut(split(self.lengths, block_size))

    def _cut(self, cuts: Pieces) -> Documents:
        """Pieces of these documents: `cuts` numbers them, and its starts count from their first tokens.

        Raises:
            ValueError: a document repeats tokens, or is a part of a preference pair.
        """
        if self.size > 1:
            raise ValueError(f"{self.name(0)} is a preference pair, and a pair cannot be cut")
        mine, pieces = self.pieces[cuts["document"]], cuts.copy()
        if mine["context"].any():
            raise ValueError("pieces with repeated tokens cannot be cut again")
        pieces["document"] = mine["document"]
        pieces["start"] += mine["start"]
        return self._view(pieces)

    def fit(
        self,
        limit: int,
        policy: str = "error",
        overlap: int = 0,
        repeat_prompt: bool = False,
        min_prefix: int | None = None,
    ) -> tuple[Documents, FitReport]:
        """A view in which no document is longer than `limit` tokens, and a report on the longer ones.

        Args:
            limit: most tokens of a document.
            policy: for longer documents: `error`, a name in `EFFECTS`, or `auto`: the store's own.
            overlap: tokens that a piece of a split document repeats from the piece before.
            repeat_prompt: whether each piece of a split document begins with the document's prompt.
            min_prefix: a pair's common beginning of at least this number of tokens counts once; None = twice.

        Raises:
            ValueError: an unknown policy; a limit below 1; a document too long with policy `error`; a pair that would
                be shortened; `split` leaves no room for new tokens.
        """
        policy = self.store.header.overlong if policy == "auto" else policy
        if policy not in ("error", *EFFECTS):
            raise ValueError(f"data.overlong={policy!r}: one of {', '.join(('error', *EFFECTS))}")
        if limit < 1 or overlap < 0 or (policy == "split" and overlap >= limit):
            raise ValueError(f"data.overlap={overlap}: pieces of {limit:,} tokens repeat 0 to {limit - 1:,}")
        are_pairs, long = self.size > 1, self._longer_than(limit, min_prefix)
        if not len(long):
            return self, FitReport(limit, policy, without_targets=int((self.target_counts == 0).sum()))
        if policy == "error" or (are_pairs and policy != "drop"):
            policies = "drop (a preference pair is not shortened)" if are_pairs else "truncate, split or drop"
            first = int(long[0])
            raise ValueError(
                f"document {first:,} ({self.name(first)}) has {int(self.lengths[first]):,} tokens, more than the limit"
                f" of {limit:,} tokens for a document ({len(long):,} of {len(self):,} documents are too long, the"
                f" longest has {int(self.lengths.max()):,}): set data.overlong={policies}, or raise {_ROOM}"
            )
        if policy == "drop":
            fitted = self.take(np.delete(np.arange(len(self)), long))
        else:
            prompt = np.zeros_like(self.lengths)
            if policy == "split" and repeat_prompt:
                prompt[long] = self._repeated_prompts(long, limit, overlap)
            fitted = self._cut(CUTS[policy](self.lengths, limit, overlap, prompt))
        is_truncated = policy in ("truncate", "truncate_left")
        return fitted, FitReport(
            limit,
            policy,
            documents=len(long),
            pieces=len(fitted) - (len(self) - len(long)),
            tokens=abs(fitted.num_tokens - self.num_tokens),
            without_targets=int((fitted.target_counts == 0).sum()),
            cut_answers=int((fitted.target_counts < self.target_counts).sum()) if is_truncated else 0,
        )

    def _longer_than(self, limit: int, min_prefix: int | None) -> Integers:
        """Numbers of the documents of more than `limit` tokens; see `fit`."""
        long = np.flatnonzero(self.lengths > limit)
        if self.size == 1 or min_prefix is None:
            return long
        pairs = self.pieces["document"].reshape(-1, self.size)[long]
        trees = (PrefixTree.of(list(map(self.store.tokens_of, pair)), min_prefix) for pair in pairs.tolist())
        return long[np.array([tree.num_slots > limit for tree in trees], dtype=np.bool_)]

    def _repeated_prompts(self, long: Integers, limit: int, overlap: int) -> Integers:
        """(long,) tokens of the prompt of each document that is split; `ValueError` if one fills its pieces."""
        prompts = np.array([self.prompt_length(number) for number in long.tolist()])
        if len(full := np.flatnonzero(prompts + overlap >= limit)):
            first = int(full[0])
            raise ValueError(
                f"{self.name(int(long[first]))} has a prompt of {int(prompts[first]):,} tokens, which leaves no room"
                f" for new tokens in pieces of {limit:,} with data.overlap={overlap:,} ({len(full):,} such documents):"
                f" set data.repeat_prompt=false, or raise {_ROOM}"
            )
        return prompts

    def __repr__(self) -> str:
        return f"Documents({len(self):,} documents, {self.num_tokens:,} tokens, {str(self.store.path)!r})"
