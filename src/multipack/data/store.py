"""The token store: a folder of flat, memory-mapped files; a document is a slice of them.

    header.json        format, version, dtype, counts, hashes, size and sha256 of every file; its own checksum
    tokens.bin         |AAAAAAAA|BBBB|CCCCCC|     uint16 (vocabulary ≤ 65,536) or uint32
    offsets.bin        0        8    12     18    int64, documents + 1
    spans.bin          [3,8) [0,4) [1,3) [4,6)    int64 pairs: ranges of targets within their document
    span_offsets.bin   0     1     2          4   int64, documents + 1
    names.bin, name_offsets.bin                   UTF-8, and int64, documents + 1
    borders.bin        of pairs only: int64, documents: first token of the second half; 0 = no pair
    tokenizer.json
    chat_template.json of chats only: how conversations became text

All numbers are little endian. The folder appears whole or not at all: it is written beside its place, the
header last, and then moved there. Nothing in it is ever executed or unpickled; sizes are checked before they
are believed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.fit import FitPolicy
from multipack.data.header import BORDERS, CHAT_TEMPLATE, DTYPES, StoreHeader
from multipack.data.tokenizer import Tokenizer
from multipack.data.writer import StoreWriter

__all__ = ["StoreWriter", "TokenStore"]

_BLOCK = 1 << 20
"""Documents whose targets are counted at once: bounds the memory that it takes."""


class TokenStore:
    """A token store, opened read-only in milliseconds: nothing is read but the header.

    Args:
        path: its folder.
        folder: where its files are read, if that is a copy of them elsewhere (see `data/staging.py`).
        in_memory: read all arrays into memory now, each from its beginning to its end, instead of mapping them.

    Attributes:
        path: its folder, by which people know it.
        folder: where its files are read.
        in_memory: as given.
        header: what it says about itself.
        tokens: (tokens,) uint16 or uint32, memory-mapped.
        offsets: (documents + 1,) int64: document d is `tokens[offsets[d]:offsets[d + 1]]`.
        spans: (spans, 2) int64 ranges of targets; those of document d are
            `spans[span_offsets[d]:span_offsets[d + 1]]`, counted from its first token.
        span_offsets: (documents + 1,) int64.
        borders: (documents,) int64 first token of the second half of a pair, 0 = no pair; empty where there are none.

    Raises:
        ValueError: there is no store at `path`, or it is truncated, edited, or of a newer format.
    """

    def __init__(
        self, path: Path | str, folder: Path | str | None = None, *, in_memory: bool = False
    ) -> None:
        self.path, self.in_memory = Path(path), in_memory
        self.folder = self.path if folder is None else Path(folder)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._bytes_asked, self._counting = 0, threading.Lock()
        self.header = header = StoreHeader.read(self.folder)
        for name, entry in header.files.items():
            file = self.folder / name
            size = file.stat().st_size if file.is_file() else -1
            if size != entry["bytes"]:
                has = "is missing" if size < 0 else f"has {size:,} bytes instead of {entry['bytes']:,}"
                raise ValueError(f"{file} {has}: the store is truncated or damaged; prepare it again")
        self.tokens: NDArray[np.unsignedinteger] = self._map("tokens.bin", f"<u{DTYPES[header.dtype]}")
        self.offsets: NDArray[np.int64] = self._map("offsets.bin", "<i8")
        self.spans: NDArray[np.int64] = self._map("spans.bin", "<i8").reshape(-1, 2)
        self.span_offsets: NDArray[np.int64] = self._map("span_offsets.bin", "<i8")
        self._name_offsets: NDArray[np.int64] = self._map("name_offsets.bin", "<i8")
        self._names: NDArray[np.uint8] = self._map("names.bin", "u1")
        self.borders: NDArray[np.int64] = self._map(BORDERS, "<i8")
        for name, offsets, end in (
            ("offsets.bin", self.offsets, header.tokens),
            ("span_offsets.bin", self.span_offsets, header.spans),
            ("name_offsets.bin", self._name_offsets, len(self._names)),
        ):
            if offsets[0] != 0 or offsets[-1] != end:
                raise self._damaged(f"{name} runs from {offsets[0]} to {offsets[-1]}, not from 0 to {end}")

    def _map(self, name: str, dtype: str) -> NDArray[Any]:
        if name not in self.header.files or self.header.files[name]["bytes"] == 0:  # which cannot be mapped
            return np.zeros(0, dtype=dtype)
        if not self.in_memory:
            return np.memmap(self.folder / name, dtype=dtype, mode="r").view(np.ndarray)
        array = np.fromfile(self.folder / name, dtype=dtype)
        array.flags.writeable = False
        self._arrays[name] = array
        self._count(array.nbytes)
        return array

    def _count(self, size: int) -> None:
        with self._counting:  # a thread that prefetches counts too
            self._bytes_asked += size

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.folder}: {what}: the store is damaged; prepare it again")

    def __reduce__(self) -> tuple[Any, ...]:  # other processes open the files for themselves
        return _reopen, (self.path.absolute(), self.folder.absolute(), self.in_memory)

    @property
    def bytes_asked(self) -> int:
        """Bytes of documents (tokens, and their ranges of targets) that were asked of storage so far, here.

        In memory these are the bytes of all arrays, read once. Otherwise offsets and ranges that every rank looks
        at to plan are not counted, nor what `verify` reads.
        """
        return self._bytes_asked

    @property
    def num_documents(self) -> int:
        """Documents in the store."""
        return self.header.documents

    @property
    def num_tokens(self) -> int:
        """Tokens in the store."""
        return self.header.tokens

    @property
    def vocabulary_size(self) -> int:
        """Every token is less than this."""
        return self.header.vocabulary_size

    @property
    def overlong(self) -> FitPolicy:
        """What becomes of documents longer than a pack, where nobody says otherwise."""
        return self.header.overlong

    @property
    def has_pairs(self) -> bool:
        """Whether documents of the store are preference pairs: two answers, the chosen one first."""
        return BORDERS in self.header.files

    @property
    def checksum(self) -> str:
        """Identifies the content of the store."""
        return self.header.checksum

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(documents,) tokens of each document, read-only.

        Raises:
            ValueError: offsets do not increase: the store is damaged.
        """
        for name, offsets, least in (
            ("offsets.bin", self.offsets, 1),
            ("span_offsets.bin", self.span_offsets, 0),
        ):
            steps = np.diff(offsets)
            if len(steps) and steps.min() < least:
                raise self._damaged(f"{name} does not increase at document {int(np.argmin(steps))}")
        lengths = np.diff(self.offsets)
        lengths.flags.writeable = False
        return lengths

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer whose tokens these are.

        Raises:
            ValueError: its file is not the one that the header speaks of.
        """
        tokenizer = Tokenizer.load(self.folder / "tokenizer.json", self.header.tokenizer)
        if tokenizer.hash != self.header.tokenizer_hash:
            raise self._damaged("tokenizer.json was exchanged")
        return tokenizer

    @cached_property
    def chat_template(self) -> str:
        """How conversations became text, as JSON; empty where documents are no conversations.

        Raises:
            ValueError: its file is not the one that the header speaks of.
        """
        entry = self.header.files.get(CHAT_TEMPLATE)
        if entry is None:
            return ""
        content = (self.folder / CHAT_TEMPLATE).read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise self._damaged(f"{CHAT_TEMPLATE} was exchanged")
        return content.decode("utf-8", "replace")

    @cached_property
    def target_counts(self) -> NDArray[np.int64]:
        """(documents,) tokens of each document that are targets, read-only.

        Its first token never is, nor is the first of a pair's second half: nothing comes before them.
        """
        counts = np.empty(self.num_documents, dtype=np.int64)
        for at in range(0, self.num_documents, _BLOCK):
            documents = slice(at, min(at + _BLOCK, self.num_documents))
            first = np.asarray(self.span_offsets[documents.start : documents.stop + 1])
            spans = self.spans[first[0] : first[-1]]
            targets = spans[:, 1] - spans[:, 0] - (spans[:, 0] == 0)
            if self.has_pairs:
                border = np.repeat(self.borders[documents], np.diff(first))
                targets -= (spans[:, 0] == border) & (border > 0)
            sums = np.concatenate(([0], np.cumsum(targets)))
            counts[documents] = np.diff(sums[first - first[0]])
        counts.flags.writeable = False
        return counts

    def tokens_of(
        self, document: int, start: int = 0, length: int | None = None
    ) -> NDArray[np.unsignedinteger]:
        """(length,) tokens of a document from its token `start` on (None: all that follow), not copied.

        Raises:
            IndexError: they are not all in the document.
        """
        first, end = int(self.offsets[document]), int(self.offsets[document + 1])
        stop = end - first if length is None else start + length
        if not 0 <= start <= stop <= end - first:
            raise IndexError(f"tokens {start} to {stop} of document {document}, which has {end - first}")
        if not self.in_memory:
            self._count((stop - start) * self.tokens.itemsize)
        return self.tokens[first + start : first + stop]

    def border(self, document: int) -> int:
        """First token of the second half of a pair; 0 where the document is no pair.

        Raises:
            ValueError: it lies outside the document: the store is damaged.
        """
        if not self.has_pairs:
            return 0
        border, length = int(self.borders[document]), int(self.offsets[document + 1] - self.offsets[document])
        if not 0 <= border < length:
            raise self._damaged(f"{BORDERS} says {border} for document {document} of {length} tokens")
        return border

    def spans_of(self, document: int) -> NDArray[np.int64]:
        """(k, 2) ranges of targets of a document."""
        spans = self.spans[self.span_offsets[document] : self.span_offsets[document + 1]]
        if not self.in_memory:
            self._count(spans.nbytes)
        return spans

    def name(self, document: int) -> str:
        """The name of a document, as its source gave it."""
        raw = self._names[self._name_offsets[document] : self._name_offsets[document + 1]]
        return raw.tobytes().decode("utf-8", "replace")

    def verify(self, progress: Callable[[int, int | None, str], None] | None = None) -> None:
        """Read everything and compare it with the header's hashes.

        Raises:
            ValueError: a file was edited.
        """
        total, done = sum(entry["bytes"] for entry in self.header.files.values()), 0
        for name, entry in self.header.files.items():
            if name in self._arrays:  # what will be used, and no second reading
                found = hashlib.sha256(self._arrays[name].data).hexdigest()
            else:
                with open(self.folder / name, "rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != entry["sha256"]:
                raise self._damaged(f"{name} was edited (its sha256 differs)")
            done += entry["bytes"]
            if progress is not None:
                progress(done, total, "bytes verified")

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {self.num_documents:,} documents, {self.num_tokens:,} tokens)"


def _reopen(path: Path, folder: Path, in_memory: bool) -> TokenStore:
    return TokenStore(path, folder, in_memory=in_memory)
