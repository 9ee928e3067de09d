"""A document, and views of a token store in which documents are selected, cut or split without copying.

    store     |AAAAAAAAAAAA|BBBB|CCCCCCCC|                 flat tokens, documents end to end
    split     [A        ] [C        ]  |  [B   ]           train | validation
    cut(8)    [AAAAAAAA][AAAA] …                           pieces of at most 8 tokens

Every view is three flat arrays (document number, start, length), so that views of views cost nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.data.batch import IGNORE
from multipack.data.fit import FitPolicy, FitReport, Pieces, cut_pieces, fit_pieces
from multipack.data.store import TokenStore
from multipack.planning.permutation import keys

_VALIDATION = 1 << 20  # a stream of keys of its own: which documents validate says nothing about their order


@dataclass(frozen=True)
class Document:
    """One document (or piece of one) as the collator takes it.

    Attributes:
        tokens: (l,) unsigned integers, a slice of the store's memory map.
        spans: (k, 2) int64 [start, stop) ranges of tokens that are targets, within the document. The first
            token of a document is never a target: nothing comes before it.
    """

    tokens: NDArray[np.unsignedinteger]
    spans: NDArray[np.int64]

    def shifted_targets(self) -> NDArray[np.int64]:
        """(l,) int64: at each position the token that follows it if that is a target, else −100."""
        targets = np.full(len(self.tokens), IGNORE, dtype=np.int64)
        for start, stop in self.spans:
            first = max(int(start), 1)
            targets[first - 1 : stop - 1] = self.tokens[first:stop]
        return targets


class Documents:
    """A view of a token store: n documents, or pieces of documents, in an order.

    It is a data set as `torch.utils.data` knows it. A document is a zero-copy slice of the store.

    Args:
        store: the token store.
        document: (n,) numbers of documents in the store.
        start: (n,) first token of each piece within its document.
        length: (n,) tokens of each piece.
        train_on_prompt: whether every token but the first is a target.

    Raises:
        ValueError: a piece that lies outside its document.
    """

    def __init__(
        self,
        store: TokenStore,
        document: ArrayLike,
        start: ArrayLike,
        length: ArrayLike,
        train_on_prompt: bool = False,
    ) -> None:
        self.store = store
        self.train_on_prompt = train_on_prompt
        self._document, self._start, self._length = (
            np.ascontiguousarray(values, dtype=np.int64).view() for values in (document, start, length)
        )
        if not self._document.shape == self._start.shape == self._length.shape == (len(self._document),):
            raise ValueError("document, start and length are flat arrays of one size")
        self._check()
        for values in (self._document, self._start, self._length):
            values.flags.writeable = False

    def _check(self) -> None:
        if not len(self._document):
            return
        if self._document.min() < 0 or self._document.max() >= self.store.num_documents:
            raise ValueError(f"a document outside the {self.store.num_documents:,} of {self.store.path}")
        whole = self.store.lengths[self._document]
        wrong = (self._start < 0) | (self._length < 1) | (self._start + self._length > whole)
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(
                f"piece {first}: tokens {self._start[first]} to {self._start[first] + self._length[first]} "
                f"of document {self._document[first]}, which has {whole[first]}"
            )

    @classmethod
    def whole(cls, store: TokenStore, train_on_prompt: bool = False) -> Documents:
        """All documents of `store`, uncut, in its order."""
        numbers = np.arange(store.num_documents, dtype=np.int64)
        return cls(store, numbers, np.zeros_like(numbers), store.lengths, train_on_prompt)

    def __len__(self) -> int:
        return len(self._document)

    def __getitem__(self, index: int) -> Document:
        """Document `index` (negative: from the end).

        Raises:
            IndexError: there is none.
            ValueError: the store's tokens do not belong to its vocabulary: it is damaged.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self):,}")
        document, start = int(self._document[index]), int(self._start[index])
        length = int(self._length[index])
        first = int(self.store.offsets[document]) + start
        tokens = self.store.tokens[first : first + length]
        if int(tokens.max()) >= self.store.vocabulary_size:
            raise ValueError(
                f"document {document} of {self.store.path} holds token {int(tokens.max()):,}, but the "
                f"vocabulary has {self.store.vocabulary_size:,}: the store is damaged; prepare it again"
            )
        if self.train_on_prompt:
            return Document(tokens, np.array([[0, length]], dtype=np.int64))
        spans = np.clip(self.store.spans_of(document) - start, 0, length)
        return Document(tokens, spans[spans[:, 0] < spans[:, 1]])

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of each document."""
        return self._length

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self._length.sum())

    @cached_property
    def target_counts(self) -> NDArray[np.int64]:
        """(n,) tokens of each document that are targets; its first token never is."""
        if self.train_on_prompt:
            return self._length - 1
        block = 1 << 18  # pieces at once: bounds the memory of what follows
        parts = [self._count_targets(slice(at, at + block)) for at in range(0, len(self), block)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _count_targets(self, part: slice) -> NDArray[np.int64]:
        document, start, length = self._document[part], self._start[part], self._length[part]
        first, stop = self.store.span_offsets[document], self.store.span_offsets[document + 1]
        counts = stop - first
        piece = np.repeat(np.arange(len(document)), counts)
        number = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts) + first[piece]
        begin, end = self.store.spans[number, 0] - start[piece], self.store.spans[number, 1] - start[piece]
        targets = np.clip(np.minimum(end, length[piece]) - np.maximum(begin, 1), 0, None)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        sums = np.concatenate(([0], np.cumsum(targets)))
        return sums[bounds[1:]] - sums[bounds[:-1]]

    def names(self, index: int) -> str:
        """For people: `functools.py:reduce`, with the range of tokens when it is a piece."""
        document, start = int(self._document[index]), int(self._start[index])
        length, whole = int(self._length[index]), int(self.store.lengths[document])
        name = self.store.name(document)
        return name if length == whole else f"{name} [tokens {start:,} to {start + length:,} of {whole:,}]"

    def prompt_length(self, index: int) -> int:
        """Tokens before the first target of document `index`; 0 when it has no prompt or is a later piece."""
        spans, start = self.store.spans_of(int(self._document[index])), int(self._start[index])
        if start or not len(spans):
            return 0
        return min(int(spans[0, 0]), int(self._length[index]))

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of which tokens these documents are, and which of them are targets."""
        digest = hashlib.sha256(f"{self.store.checksum} {self.train_on_prompt}".encode())
        for values in (self._document, self._start, self._length):
            digest.update(values.astype("<i8", copy=False).data)
        return digest.hexdigest()

    def take(self, indices: ArrayLike) -> Documents:
        """These documents of the view, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return self._view((self._document[chosen], self._start[chosen], self._length[chosen]))

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
        numbers = np.unique(self._document)
        if fraction and len(numbers) < 2:
            raise ValueError(f"{len(numbers)} document cannot be split in two")
        count = min(max(round(len(numbers) * fraction), 1 if fraction else 0), max(len(numbers) - 1, 0))
        chosen = numbers[np.argsort(keys(seed, 0, numbers, _VALIDATION), kind="stable")[:count]]
        is_chosen = np.zeros(self.store.num_documents, dtype=bool)
        is_chosen[chosen] = True
        second = is_chosen[self._document]
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
        end = np.cumsum(self._length)
        begin = end - self._length
        whole, rest = begin < border, end > border
        first = np.minimum(end[whole], border) - begin[whole]
        skipped = np.maximum(border - begin[rest], 0)
        return (
            self._view((self._document[whole], self._start[whole], first)),
            self._view((self._document[rest], self._start[rest] + skipped, self._length[rest] - skipped)),
        )

    def cut(self, block_size: int) -> Documents:
        """Every document as pieces of `block_size` tokens; only the last piece of each may be shorter.

        Raises:
            ValueError: a block size below 1.
        """
        if block_size < 1:
            raise ValueError(f"blocks of {block_size} tokens")
        return self._view(cut_pieces(self._pieces, block_size))

    def fit(self, limit: int, policy: FitPolicy = "error") -> tuple[Documents, FitReport]:
        """A view in which no document is longer than `limit` tokens, and what was done for that.

        Raises:
            ValueError: see `fit_pieces`.
        """
        pieces, report = fit_pieces(self._pieces, limit, policy, self.names)
        fitted = self._view(pieces)
        return fitted, replace(report, without_targets=int((fitted.target_counts == 0).sum()))

    @property
    def _pieces(self) -> Pieces:
        return self._document, self._start, self._length

    def _view(self, pieces: Pieces) -> Documents:
        return Documents(self.store, *pieces, self.train_on_prompt)

    def __repr__(self) -> str:
        return f"Documents({len(self):,} documents, {self.num_tokens:,} tokens, {str(self.store.path)!r})"


def _check_fraction(fraction: float) -> None:
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"a share of {fraction}: at least 0 and less than 1")
