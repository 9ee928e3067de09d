"""A token store in memory: documents that were tokenized just now, behind the interface of a `TokenStore`."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multipack.data.blocks import TokenBlock

Integers = NDArray[np.int64]


class MemoryStore:
    """The documents of a block of tokens.

    Args:
        path: where they come from, for people.
        block: the documents.
        vocabulary_size: every token is less than this.
        has_pairs: whether they are preference pairs.

    Attributes:
        path, vocabulary_size, has_pairs: as given.
        spans: (spans, 2) int64 ranges of targets; those of document d are `spans[span_offsets[d]:span_offsets[d + 1]]`.
        span_offsets: (documents + 1,) int64.
    """

    def __init__(self, path: Path, block: TokenBlock, vocabulary_size: int, has_pairs: bool = False) -> None:
        self.path, self.vocabulary_size, self.has_pairs = path, vocabulary_size, has_pairs
        self._block = block
        self._offsets, self._name_offsets = _offsets(block.lengths), _offsets(block.name_lengths)
        self.spans, self.span_offsets = block.spans, _offsets(block.span_counts)

    @property
    def num_documents(self) -> int:
        """Documents in the store."""
        return len(self._block.lengths)

    @property
    def lengths(self) -> Integers:
        """(documents,) tokens of each document."""
        return self._block.lengths

    @cached_property
    def checksum(self) -> str:
        """Identifies the content."""
        digest = hashlib.sha256()
        for field in fields(self._block):
            values = np.ascontiguousarray(getattr(self._block, field.name))
            digest.update(f"{field.name} {values.shape}".encode())
            digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
        return digest.hexdigest()

    @cached_property
    def target_counts(self) -> Integers:
        """(documents,) tokens of each document that are targets; the first of a document or of a half never is."""
        owner = np.repeat(np.arange(self.num_documents), self._block.span_counts)
        begin, stop = self.spans[:, 0], self.spans[:, 1]
        border = self._block.borders[owner]
        counts = stop - begin - (begin == 0) - ((begin == border) & (border > 0))
        return np.bincount(owner, counts, self.num_documents).astype(np.int64)

    def tokens_of(self, document: int, start: int, length: int) -> NDArray[np.unsignedinteger]:
        """(length,) tokens of a document from `start` on."""
        first = int(self._offsets[document]) + start
        return self._block.tokens[first : first + length]

    def spans_of(self, document: int) -> Integers:
        """(k, 2) ranges of targets of a document."""
        return self.spans[self.span_offsets[document] : self.span_offsets[document + 1]]

    def border(self, document: int) -> int:
        """First token of the second half of a pair; 0 where the document is no pair."""
        return int(self._block.borders[document])

    def name(self, document: int) -> str:
        """The name of a document."""
        raw = self._block.names[self._name_offsets[document] : self._name_offsets[document + 1]]
        return raw.tobytes().decode("utf-8", "replace")


def _offsets(counts: Integers) -> Integers:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
