"""A document, and views of a token store in which documents are selected, cut or split without copying.

    store     |AAAAAAAAAAAA|BBBB|CCCCCCCC|                 flat tokens, documents end to end
    split     [A        ] [C        ]  |  [B   ]           train | validation
    cut(8)    [AAAAAAAA][AAAA] …                           pieces of at most 8 tokens

Every view is a few flat arrays (document number, start, length, …: `Pieces`), so that views of views cost little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.data.batch import IGNORE
from multipack.data.fit import Fit, FitPolicy, FitReport, Pieces, cut_pieces, fit_pieces
from multipack.data.joint import JointStore, Store, spans_of_each
from multipack.data.memory import MemoryStore
from multipack.planning.order import keys

_VALIDATION = 1 << 20  # a stream of keys of its own: which documents validate says nothing about their order


@dataclass(frozen=True)
class Document:
    """One document (or piece of one) as the collator takes it.

    Attributes:
        tokens: (l,) unsigned integers, a slice of the store's memory map.
        spans: (k, 2) int64 [start, stop) ranges of tokens that are targets, within the document. The first
            token of a document is never a target: nothing comes before it.
        border: where the second half of a preference pair (the rejected one) begins; 0 = the document is no pair.
    """

    tokens: NDArray[np.unsignedinteger]
    spans: NDArray[np.int64]
    border: int = 0

    def shifted_targets(self) -> NDArray[np.int64]:
        """(l,) int64: at each position the token that follows it if that is a target, else −100."""
        targets = np.full(len(self.tokens), IGNORE, dtype=np.int64)
        for start, stop in self.spans:
            first = max(int(start), 1)
            targets[first - 1 : stop - 1] = self.tokens[first:stop]
        return targets


class Documents:
    """A view of a token store: n documents, or pieces of documents, in an order.

    It is a data set as `torch.utils.data` knows it. A document is a zero-copy slice of the store; a piece before which
    a prompt is repeated is a copy. A document may stand in a view several times.

    Args:
        store: the token store, or several as one.
        document: (n,) numbers of documents in the store.
        start: (n,) first token of each piece within its document.
        length: (n,) tokens of each piece.
        train_on_prompt: whether every token but the first is a target.
        prefix, context: (n,) tokens of the document that are repeated in front of each piece, and first tokens that
            are not targets (see `Pieces`); None = 0.

    Raises:
        ValueError: a piece that lies outside its document, or is part of a preference pair.
    """

    def __init__(
        self,
        store: Store | MemoryStore,
        document: ArrayLike,
        start: ArrayLike,
        length: ArrayLike,
        train_on_prompt: bool = False,
        prefix: ArrayLike | None = None,
        context: ArrayLike | None = None,
    ) -> None:
        self.store = store
        self.train_on_prompt = train_on_prompt
        given = (np.ascontiguousarray(values, dtype=np.int64).view() for values in (document, start, length))
        pieces = Pieces.of(*given)
        if context is not None:
            front = (
                np.zeros_like(pieces.length)
                if prefix is None
                else np.ascontiguousarray(prefix, dtype=np.int64)
            )
            pieces = pieces._replace(
                prefix=front.view(), context=np.ascontiguousarray(context, dtype=np.int64).view()
            )
        if any(values.shape != (len(pieces.document),) for values in pieces):
            raise ValueError("document, start, length, prefix and context are flat arrays of one size")
        for values in pieces:
            values.flags.writeable = False
        self.pieces = pieces
        if len(self):
            self._check()

    def _check(self) -> None:
        document, start, length, prefix, context = self.pieces
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
    def whole(cls, store: Store | MemoryStore, train_on_prompt: bool = False) -> Documents:
        """All documents of `store`, uncut, in its order."""
        numbers = np.arange(store.num_documents, dtype=np.int64)
        return cls(store, numbers, np.zeros_like(numbers), store.lengths, train_on_prompt)

    @classmethod
    def joined(cls, views: Sequence[Documents]) -> Documents:
        """All documents of these views of one store, in turn.

        Raises:
            ValueError: they are views of different stores.
        """
        first = views[0]
        if any(view.store is not first.store for view in views):
            raise ValueError("views of different stores: join the stores first (JointStore)")
        return first._view(Pieces.joined([view.pieces for view in views]))

    def within(self, store: JointStore, number: int) -> Documents:
        """The same view, of the joint store of which this view's store is number `number`."""
        moved = self.pieces._replace(document=self.pieces.document + store.first[number])
        return Documents.whole(store, self.train_on_prompt)._view(moved)

    def __len__(self) -> int:
        return len(self.pieces.document)

    def __getitem__(self, index: int) -> Document:
        """Document `index` (negative: from the end).

        Raises:
            IndexError: there is none.
            ValueError: the store's tokens do not belong to its vocabulary: it is damaged.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self):,}")
        document, start, length, prefix, context = (int(values[index]) for values in self.pieces)
        tokens = self._tokens(document, start, length - prefix)
        if prefix:
            tokens = np.concatenate([self._tokens(document, 0, prefix), tokens])
        border = self.store.border(document)
        if self.train_on_prompt:
            return Document(tokens, np.array([[context, length]], dtype=np.int64), border)
        spans = np.clip(self.store.spans_of(document) - start + prefix, context, length)
        return Document(tokens, spans[spans[:, 0] < spans[:, 1]], border)

    def _tokens(self, document: int, start: int, length: int) -> NDArray[np.unsignedinteger]:
        tokens = self.store.tokens_of(document, start, length)
        if length and int(tokens.max()) >= self.store.vocabulary_size:
            raise ValueError(
                f"document {document} of {self.store.path} holds token {int(tokens.max()):,}, but the "
                f"vocabulary has {self.store.vocabulary_size:,}: the store is damaged; prepare it again"
            )
        return tokens

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of each document."""
        return self.pieces.length

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @cached_property
    def target_counts(self) -> NDArray[np.int64]:
        """(n,) tokens of each document that are targets; its first token never is."""
        if self.train_on_prompt:  # of a pair, the first token of each half is none
            return self.lengths - np.maximum(self.pieces.context, 2 if self.store.has_pairs else 1)
        if self.store.has_pairs:
            return self.store.target_counts[self.pieces.document]
        block = 1 << 18  # pieces at once: bounds the memory of what follows
        parts = [self._count_targets(slice(at, at + block)) for at in range(0, len(self), block)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _count_targets(self, part: slice) -> NDArray[np.int64]:
        document, start, length, prefix, context = self.pieces.take(part)
        counts, spans = spans_of_each(self.store, document)
        piece = np.repeat(np.arange(len(document)), counts)
        shift = (start - prefix)[piece]  # from a place in the piece to one in its document
        least, most = np.maximum(context, 1)[piece], length[piece]
        targets = np.minimum(spans[:, 1] - shift, most) - np.maximum(spans[:, 0] - shift, least)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        sums = np.concatenate(([0], np.cumsum(np.maximum(targets, 0))))
        return sums[bounds[1:]] - sums[bounds[:-1]]

    def names(self, index: int) -> str:
        """For people: `functools.py:reduce`, with the range of tokens when it is a piece."""
        document, start, length, prefix, _ = (int(values[index]) for values in self.pieces)
        whole, name = int(self.store.lengths[document]), self.store.name(document)
        if length == whole and not prefix:
            return name
        after = "prompt and " if prefix else ""
        return f"{name} [{after}tokens {start:,} to {start + length - prefix:,} of {whole:,}]"

    def prompt_length(self, index: int) -> int:
        """Tokens before the first target of document `index`; 0 when it has no prompt, or is a later piece without."""
        return int(self._prompts(np.array([index]))[0])

    def _prompts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """(len(numbers),) tokens of the prompt with which each of these begins."""
        document, start, length, prefix, _ = self.pieces.take(numbers)
        counts, spans = spans_of_each(self.store, document)
        first = np.cumsum(counts) - counts
        prompt = np.zeros_like(length)
        prompt[counts > 0] = spans[first[counts > 0], 0]
        return np.where(prefix > 0, prefix, np.where(start == 0, np.minimum(prompt, length), 0))

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of which tokens these documents are, and which of them are targets."""
        digest = hashlib.sha256(f"{self.store.checksum} {self.train_on_prompt}".encode())
        for values in self.pieces[: 5 if self.pieces.repeats else 3]:
            digest.update(values.astype("<i8", copy=False).data)
        return digest.hexdigest()

    def take(self, indices: ArrayLike) -> Documents:
        """These documents of the view, in this order."""
        return self._view(self.pieces.take(np.asarray(indices, dtype=np.int64)))

    def split(self, fraction: float, seed: int = 0) -> tuple[Documents, Documents]:
        """Two views, by document: the pieces of one document stay together. Order is kept.

        Args:
            fraction: share of the documents in the second view; rounded, but at least one document (if there
                are two) and not all.
            seed: of the choice.

        Raises:
            ValueError: a fraction outside [0, 1), or more than 0 of fewer than two documents.
        """
        _check_fraction(fraction)
        numbers = np.unique(self.pieces.document)
        if fraction and len(numbers) < 2:
            raise ValueError(f"{len(numbers)} document cannot be split in two")
        count = min(max(round(len(numbers) * fraction), 1 if fraction else 0), max(len(numbers) - 1, 0))
        chosen = numbers[np.argsort(keys(seed, 0, numbers, _VALIDATION), kind="stable")[:count]]
        is_chosen = np.zeros(self.store.num_documents, dtype=bool)
        is_chosen[chosen] = True
        second = is_chosen[self.pieces.document]
        return self.take(np.flatnonzero(~second)), self.take(np.flatnonzero(second))

    def split_by_position(self, fraction: float) -> tuple[Documents, Documents]:
        """Two views, by position: the first int(tokens · (1 − fraction)) tokens, and the rest.

        A document in which the border falls is cut in two.

        Raises:
            ValueError: a fraction outside [0, 1), or one that leaves the first view empty.
        """
        _check_fraction(fraction)
        border = int(self.num_tokens * (1.0 - fraction))
        if border == 0:
            raise ValueError(f"{self.num_tokens} tokens cannot be split in two")
        end = np.cumsum(self.lengths)
        begin = end - self.lengths
        inside = np.clip(border - begin, 0, self.lengths)  # tokens of each document before the border
        first, rest = np.flatnonzero(inside > 0), np.flatnonzero(inside < self.lengths)
        return (
            self._view(self.pieces.take(first).between(np.zeros_like(first), inside[first])),
            self._view(self.pieces.take(rest).between(inside[rest], self.lengths[rest])),
        )

    def cut(self, block_size: int) -> Documents:
        """Every document as pieces of `block_size` tokens; only the last piece of each may be shorter.

        Raises:
            ValueError: a block size below 1.
        """
        if block_size < 1:
            raise ValueError(f"blocks of {block_size} tokens")
        return self._view(cut_pieces(self.pieces, block_size))

    def fit(self, limit: int, fit: Fit | FitPolicy = "error") -> tuple[Documents, FitReport]:
        """A view in which no document is longer than `limit` tokens, and what was done for that.

        Raises:
            ValueError: see `Fit` and `fit_pieces`.
        """
        if not isinstance(fit, Fit):
            fit = Fit(fit)
        pieces, report = fit_pieces(self.pieces, limit, fit, self.names, self._prompts, self.store.has_pairs)
        fitted = self._view(pieces)
        return fitted, replace(report, without_targets=int((fitted.target_counts == 0).sum()))

    def _view(self, pieces: Pieces) -> Documents:
        document, start, length, prefix, context = pieces
        repeated = (prefix, context) if pieces.repeats else (None, None)
        return Documents(self.store, document, start, length, self.train_on_prompt, *repeated)

    def __repr__(self) -> str:
        return f"Documents({len(self):,} documents, {self.num_tokens:,} tokens, {str(self.store.path)!r})"


def _check_fraction(fraction: float) -> None:
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"a share of {fraction}: at least 0 and less than 1")
