"""A document, and views of a token store in which documents are selected, cut or split without copying.

    store     |AAAAAAAAAAAA|BBBB|CCCCCCCC|                 flat tokens, documents end to end
    split     [A        ] [C        ]  |  [B   ]           train | validation
    cut(8)    [AAAAAAAA][AAAA] …                           pieces of at most 8 tokens

A view is a few flat arrays (document number, start, length: `Pieces`), so that a view of a view costs little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.data.batch import IGNORE
from multipack.data.overlong import Fit, FitReport, Integers, Pieces, fit_pieces, split
from multipack.data.store import TokenStore

_VALIDATION = 1 << 20  # random stream of the choice of validation documents


def seeded_order(count: int, seed: int, stream: int) -> Integers:
    """The numbers 0 … count − 1 in an order that follows from seed and stream, on every platform.

    Sorts the raw output of numpy's Philox generator, which NEP 19 keeps unchanged.
    """
    key = np.array([seed % (1 << 64), stream], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


@dataclass(frozen=True)
class Document:
    """One document, or piece of one, as collators take it.

    Attributes:
        tokens: (l,) unsigned integers, a slice of the store's memory map.
        spans: (k, 2) int64 [start, stop) ranges of tokens that are targets, within the document. The first token of a
            document is never a target: nothing comes before it.
    """

    tokens: NDArray[np.unsignedinteger]
    spans: Integers

    def shifted_targets(self) -> Integers:
        """(l,) int64: at each position the next token if it is a target, else −100."""
        targets = np.full(len(self.tokens), IGNORE, dtype=np.int64)
        for start, stop in self.spans:
            first = max(int(start), 1)
            targets[first - 1 : stop - 1] = self.tokens[first:stop]
        return targets


class Documents:
    """A view of a token store: n documents, or pieces of documents, in an order.

    It is a map-style data set of `torch.utils.data`. A document is a zero-copy slice of the store; a piece with a
    repeated prompt is a copy. A document may occur several times. Of a store of preference pairs each document here is
    a pair, which is never cut; `pair` gives its two answers.

    Args:
        store: the token store.
        pieces: documents, or pieces of them.
        train_on_prompt: whether every token but the first is a target.

    Raises:
        ValueError: a piece outside its document, or of a part of a preference pair.
    """

    def __init__(self, store: TokenStore, pieces: Pieces, train_on_prompt: bool = False) -> None:
        self.store, self.train_on_prompt = store, train_on_prompt
        arrays = [None if values is None else np.asarray(values, dtype=np.int64).view() for values in pieces]
        for values in arrays:
            if values is not None:
                values.flags.writeable = False
        self.pieces = Pieces(*arrays)  # type: ignore[arg-type]
        if len(self):
            self._check()

    def _check(self) -> None:
        document, start, length, _ = self.pieces
        prefix, context = self.pieces.fronts()
        if document.min() < 0 or document.max() >= self.store.num_documents:
            raise ValueError(f"a document outside the {self.store.num_documents:,} of {self.store.path}")
        whole = self.store.lengths[document]
        wrong = (start < 0) | (length < 1) | (start + length - prefix > whole)
        wrong |= (prefix < 0) | (context < prefix) | (prefix > start) | (context > length)
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(
                f"piece {first}: tokens {start[first]} to {start[first] + length[first] - prefix[first]} of document"
                f" {document[first]}, which has {whole[first]}, after {prefix[first]} of its first ones"
            )
        if self.store.has_pairs and not np.array_equal(length, whole):
            first = int(np.argmax(length != whole))
            raise ValueError(
                f"document {document[first]} ({self.names(first)}) is a preference pair, and a pair cannot be cut"
            )

    @classmethod
    def whole(cls, store: TokenStore, train_on_prompt: bool = False) -> Documents:
        """All documents of `store`, uncut, in its order."""
        numbers = np.arange(store.num_documents, dtype=np.int64)
        return cls(store, Pieces(numbers, np.zeros_like(numbers), store.lengths), train_on_prompt)

    @classmethod
    def joined(cls, views: Sequence[Documents]) -> Documents:
        """All documents of these views of one store, in order.

        Raises:
            ValueError: they are views of different stores.
        """
        if any(view.store is not views[0].store for view in views):
            raise ValueError("views of different stores: join the stores first (TokenStore.joined)")
        return views[0]._view(Pieces.joined([view.pieces for view in views]))

    def within(self, joined: TokenStore, first: int) -> Documents:
        """The same view of a joined store, in which the first document of this view's store is number `first`."""
        moved = self.pieces._replace(document=self.pieces.document + first)
        return Documents(joined, moved, self.train_on_prompt)

    def _view(self, pieces: Pieces) -> Documents:
        return Documents(self.store, pieces, self.train_on_prompt)

    def __len__(self) -> int:
        return len(self.pieces.document)

    def _index(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self):,}")
        return int(index) % len(self)

    def __getitem__(self, index: int) -> Document:
        """Document `index` (negative: from the end).

        Raises:
            IndexError: there is none.
            ValueError: it is a preference pair; the store is damaged.
        """
        if self.store.has_pairs:
            raise ValueError(
                f"{self.names(index)} is a preference pair: take documents from `pair`, or `PreferencePairs(documents)`"
            )
        one = self.pieces.take(slice(position := self._index(index), position + 1))
        document, start, length = int(one.document[0]), int(one.start[0]), int(one.length[0])
        prefix, context = (int(values[0]) for values in one.fronts())
        tokens = self.store.tokens_of(document, start, length - prefix)
        if prefix:
            tokens = np.concatenate([self.store.tokens_of(document, 0, prefix), tokens])
        if self.train_on_prompt:
            return Document(tokens, np.array([[context, length]], dtype=np.int64))
        spans = np.clip(self.store.spans_of(document) - start + prefix, context, length)
        return Document(tokens, spans[spans[:, 0] < spans[:, 1]])

    def pair(self, index: int) -> tuple[Document, Document]:
        """The chosen and the rejected answer of preference pair `index`, each after the prompt.

        Raises:
            ValueError: the store holds no pairs, or an answer has no target.
        """
        if not self.store.has_pairs:
            raise ValueError(
                f"{self.names(index)} is no preference pair; prepare the data with data.format=preference (prompt,"
                " chosen, rejected)"
            )
        document = int(self.pieces.document[self._index(index)])
        tokens, border = self.store.tokens_of(document), self.store.border(document)
        answers = []
        for name, part, spans in zip(
            ("chosen", "rejected"),
            (tokens[:border], tokens[border:]),
            self.store.spans_of_pair(document),
            strict=True,
        ):
            spans = np.array([[0, len(part)]], dtype=np.int64) if self.train_on_prompt else spans
            if not (spans[:, 1] > np.maximum(spans[:, 0], 1)).any():
                raise ValueError(f"{self.names(index)}: the {name} answer has no target token: it is empty")
            answers.append(Document(part, spans))
        return answers[0], answers[1]

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> Integers:
        """(n,) tokens of each document."""
        return self.pieces.length

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @cached_property
    def target_counts(self) -> Integers:
        """(n,) targets of each document; its first token never is one."""
        if self.train_on_prompt:
            return self.lengths - np.maximum(self.pieces.fronts()[1], 2 if self.store.has_pairs else 1)
        if self.store.has_pairs:
            return self.store.target_counts[self.pieces.document]
        block = 1 << 18  # pieces at once: bounds the memory
        parts = [self._count_targets(slice(at, at + block)) for at in range(0, len(self), block)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _count_targets(self, part: slice) -> Integers:
        pieces = self.pieces.take(part)
        prefix, context = pieces.fronts()
        counts, spans = self.store.spans_of_each(pieces.document)
        owner = np.repeat(np.arange(len(counts)), counts)
        shift = (pieces.start - prefix)[owner]  # from a place in the piece to one in its document
        least, most = np.maximum(context, 1)[owner], pieces.length[owner]
        targets = np.minimum(spans[:, 1] - shift, most) - np.maximum(spans[:, 0] - shift, least)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        sums = np.concatenate(([0], np.cumsum(np.maximum(targets, 0))))
        return sums[bounds[1:]] - sums[bounds[:-1]]

    def names(self, index: int) -> str:
        """Name of a document: `functools.py:reduce`, with the range of tokens if it is a piece."""
        one = self.pieces.take(slice(position := self._index(index), position + 1))
        document, start, length = int(one.document[0]), int(one.start[0]), int(one.length[0])
        prefix, whole = int(one.fronts()[0][0]), int(self.store.lengths[document])
        if length == whole and not prefix:
            return self.store.name(document)
        after = "prompt and " if prefix else ""
        stop = start + length - prefix
        return f"{self.store.name(document)} [{after}tokens {start:,} to {stop:,} of {whole:,}]"

    def prompts(self, numbers: ArrayLike) -> Integers:
        """(len(numbers),) tokens before the first target of each of these documents; 0 for later pieces."""
        pieces = self.pieces.take(np.asarray(numbers, dtype=np.int64))
        counts, spans = self.store.spans_of_each(pieces.document)
        first = np.cumsum(counts) - counts
        prompt = np.zeros_like(pieces.length)
        prompt[counts > 0] = spans[first[counts > 0], 0]
        prefix = pieces.fronts()[0]
        own = np.where(pieces.start == 0, np.minimum(prompt, pieces.length), 0)
        return np.where(prefix > 0, prefix, own)

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of the tokens of these documents, and of which are targets."""
        digest = hashlib.sha256(f"{self.store.checksum} {self.train_on_prompt}".encode())
        for values in self.pieces:
            if values is not None:
                digest.update(np.ascontiguousarray(values, dtype="<i8").data)
        return digest.hexdigest()

    def take(self, indices: ArrayLike) -> Documents:
        """These documents of the view, in this order."""
        return self._view(self.pieces.take(np.asarray(indices, dtype=np.int64)))

    def split(self, fraction: float, seed: int = 0) -> tuple[Documents, Documents]:
        """Two views, by document: the pieces of one document stay together. Order is kept.

        Args:
            fraction: share of the documents in the second view; rounded, at least one document, and not all.
            seed: seed of the choice.

        Raises:
            ValueError: a fraction outside [0, 1), or more than 0 of fewer than two documents.
        """
        _check_fraction(fraction)
        numbers = np.unique(self.pieces.document)
        if fraction and len(numbers) < 2:
            raise ValueError(f"{len(numbers)} document cannot be split in two")
        count = min(max(round(len(numbers) * fraction), 1 if fraction else 0), max(len(numbers) - 1, 0))
        chosen = numbers[seeded_order(len(numbers), seed, _VALIDATION)[:count]]
        is_chosen = np.zeros(self.store.num_documents, dtype=bool)
        is_chosen[chosen] = True
        second = is_chosen[self.pieces.document]
        return self.take(np.flatnonzero(~second)), self.take(np.flatnonzero(second))

    def split_by_position(self, fraction: float) -> tuple[Documents, Documents]:
        """Two views, by position: the first int(tokens · (1 − fraction)) tokens, and the rest.

        Raises:
            ValueError: a fraction outside [0, 1), or one that leaves the first view empty.
        """
        _check_fraction(fraction)
        border = int(self.num_tokens * (1.0 - fraction))
        if border == 0:
            raise ValueError(f"{self.num_tokens} tokens cannot be split in two")
        begin = np.cumsum(self.lengths) - self.lengths
        inside = np.clip(border - begin, 0, self.lengths)  # tokens of each document before the border
        first, rest = np.flatnonzero(inside > 0), np.flatnonzero(inside < self.lengths)
        return (
            self._view(self.pieces.cut(Pieces(first, np.zeros_like(first), inside[first]))),
            self._view(self.pieces.cut(Pieces(rest, inside[rest], (self.lengths - inside)[rest]))),
        )

    def cut(self, block_size: int) -> Documents:
        """Every document as pieces of `block_size` tokens; only the last piece of each may be shorter.

        Raises:
            ValueError: a block size below 1.
        """
        if block_size < 1:
            raise ValueError(f"blocks of {block_size} tokens")
        return self._view(self.pieces.cut(split(self.lengths, block_size)))

    def fit(self, limit: int, fit: Fit | str = "error") -> tuple[Documents, FitReport]:
        """A view in which no document is longer than `limit` tokens, and a report of what was done.

        Raises:
            ValueError: see `Fit` and `fit_pieces`.
        """
        policy = fit if isinstance(fit, Fit) else Fit(fit)
        pieces, report = fit_pieces(self.pieces, limit, policy, self, self.store.has_pairs)
        fitted = self._view(pieces)
        return fitted, replace(report, without_targets=int((fitted.target_counts == 0).sum()))

    def __repr__(self) -> str:
        return f"Documents({len(self):,} documents, {self.num_tokens:,} tokens, {str(self.store.path)!r})"


def _check_fraction(fraction: float) -> None:
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"a share of {fraction}: at least 0 and less than 1")
