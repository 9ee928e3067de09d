"""The token store: a folder of flat, memory-mapped files; a document is a slice of them.

    header.json        format, version, dtype, counts, hashes, size and sha256 of every file; its own checksum
    tokens.bin         |AAAAAAAA|BBBB|CCCCCC|     uint16 (vocabulary ≤ 65,536) or uint32
    offsets.bin        0        8    12     18    int64, documents + 1
    spans.bin          [3,8) [0,4) [1,3) [4,6)    int64 pairs: ranges of targets within their document
    span_offsets.bin   0     1     2          4   int64, documents + 1
    names.bin, name_offsets.bin                   UTF-8, and int64, documents + 1
    tokenizer.json

All numbers are little endian. The folder appears whole or not at all: it is written beside its place, the
header last, and then moved there. Nothing in it is ever executed or unpickled; sizes are checked before they
are believed.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from multipack.atomic import atomic_folder
from multipack.data.fit import FitPolicy
from multipack.data.header import DTYPES, HEADER, StoreHeader
from multipack.data.tokenizer import Tokenizer

FLUSH = 1 << 20
"""Tokens that a writer keeps in memory before they go to the disk."""


class TokenStore:
    """A token store, opened read-only in milliseconds: nothing is read but the header.

    Args:
        path: its folder.

    Attributes:
        path: its folder.
        header: what it says about itself.
        tokens: (tokens,) uint16 or uint32, memory-mapped.
        offsets: (documents + 1,) int64: document d is `tokens[offsets[d]:offsets[d + 1]]`.
        spans: (spans, 2) int64 ranges of targets; those of document d are
            `spans[span_offsets[d]:span_offsets[d + 1]]`, counted from its first token.
        span_offsets: (documents + 1,) int64.

    Raises:
        ValueError: there is no store at `path`, or it is truncated, edited, or of a newer format.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.header = header = StoreHeader.read(self.path)
        for name, entry in header.files.items():
            file = self.path / name
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
        for name, offsets, end in (
            ("offsets.bin", self.offsets, header.tokens),
            ("span_offsets.bin", self.span_offsets, header.spans),
            ("name_offsets.bin", self._name_offsets, len(self._names)),
        ):
            if offsets[0] != 0 or offsets[-1] != end:
                raise self._damaged(f"{name} runs from {offsets[0]} to {offsets[-1]}, not from 0 to {end}")

    def _map(self, name: str, dtype: str) -> NDArray[Any]:
        if self.header.files[name]["bytes"] == 0:  # which cannot be mapped
            return np.zeros(0, dtype=dtype)
        return np.memmap(self.path / name, dtype=dtype, mode="r").view(np.ndarray)

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: {what}: the store is damaged; prepare it again")

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.path.absolute(),)  # other processes open the files for themselves

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
        tokenizer = Tokenizer.load(self.path / "tokenizer.json", self.header.tokenizer)
        if tokenizer.hash != self.header.tokenizer_hash:
            raise self._damaged("tokenizer.json was exchanged")
        return tokenizer

    def spans_of(self, document: int) -> NDArray[np.int64]:
        """(k, 2) ranges of targets of a document."""
        return self.spans[self.span_offsets[document] : self.span_offsets[document + 1]]

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
            with open(self.path / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != entry["sha256"]:
                raise self._damaged(f"{name} was edited (its sha256 differs)")
            done += entry["bytes"]
            if progress is not None:
                progress(done, total, "bytes verified")

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {self.num_documents:,} documents, {self.num_tokens:,} tokens)"


class _HashedFile:
    """A file that is written once, from start to end, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._size += len(content)

    def sync(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        self._file.close()


class StoreWriter:
    """Writes a token store, document after document, in bounded memory.

        with StoreWriter(path, tokenizer, source_hash="…") as writer:
            writer.add("a.txt", [(tokenizer.encode(text), True)])

    The store is at `path` when the block has ended without an exception, and not a moment earlier.

    Args:
        path: its folder.
        tokenizer: whose tokens they are.
        source_hash: hash of the corpus.
        description: one line for people; may be set until the block ends.
        split_by: "position" when the one document is a stream.
        overlong: what becomes of documents longer than a pack, where nobody says otherwise.
        replace: put it in the place of a folder that exists.

    Attributes:
        description: see above.
        skipped: what the source left out; may be set until the block ends.
        documents: documents written so far.

    Raises:
        FileExistsError: `path` exists and `replace` is not set.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        *,
        source_hash: str,
        description: str = "",
        split_by: Literal["document", "position"] = "document",
        overlong: FitPolicy = "error",
        replace: bool = False,
    ) -> None:
        self.description = description
        self.skipped: dict[str, int] = {}
        self.documents = 0
        self._tokenizer = tokenizer
        self._source_hash = source_hash
        self._split_by = split_by
        self._overlong = overlong
        self._place: AbstractContextManager[Path] = atomic_folder(path, replace)
        self._dtype = "uint16" if tokenizer.vocabulary_size <= 1 << 16 else "uint32"
        self._totals = dict.fromkeys(("offsets.bin", "span_offsets.bin", "name_offsets.bin"), 0)
        self._buffered: dict[str, list[int]] = {name: [0] for name in self._totals}
        self._buffered |= {"tokens.bin": [], "spans.bin": []}
        self._length = 0
        self._spans: list[list[int]] = []

    def __enter__(self) -> StoreWriter:
        self._folder = self._place.__enter__()
        self._files = {name: _HashedFile(self._folder / name) for name in (*self._buffered, "names.bin")}
        return self

    def add(self, name: str, parts: Sequence[tuple[Sequence[int], bool]], continues: bool = False) -> None:
        """Add a document.

        Args:
            name: for people.
            parts: its tokens in pieces, each with whether they are targets.
            continues: the document goes on with the next `add`; the last one, or `end_document`, names it.

        Raises:
            ValueError: the document has no tokens; a token outside the vocabulary.
        """
        for ids, is_target in parts:
            if is_target and len(ids):
                if self._spans and self._spans[-1][1] == self._length:
                    self._spans[-1][1] += len(ids)
                else:
                    self._spans.append([self._length, self._length + len(ids)])
            self._length += len(ids)
            self._buffered["tokens.bin"].extend(ids)
        if not continues:
            self.end_document(name)
        if len(self._buffered["tokens.bin"]) >= FLUSH:
            self._flush()

    def end_document(self, name: str) -> None:
        """End a document that was to continue.

        Raises:
            ValueError: it has no tokens.
        """
        if not self._length:
            raise ValueError(f"document {self.documents} ({name}) has no tokens")
        raw = name.encode("utf-8", "replace")
        self._files["names.bin"].write(raw)
        for file, size in (
            ("offsets.bin", self._length),
            ("span_offsets.bin", len(self._spans)),
            ("name_offsets.bin", len(raw)),
        ):
            self._totals[file] += size
            self._buffered[file].append(self._totals[file])
        self._buffered["spans.bin"].extend(bound for span in self._spans for bound in span)
        self.documents += 1
        self._length, self._spans = 0, []

    def _flush(self) -> None:
        for name, values in self._buffered.items():
            array = np.array(values, dtype=np.int64)
            if name == "tokens.bin":
                self._check(array)
                array = array.astype("<u2" if self._dtype == "uint16" else "<u4")
            self._files[name].write(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            values.clear()

    def _check(self, tokens: NDArray[np.int64]) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._tokenizer.vocabulary_size:
            raise ValueError(
                f"tokens from {tokens.min()} to {tokens.max()} for a vocabulary of "
                f"{self._tokenizer.vocabulary_size:,} tokens"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException as failure:
            self._close_files()
            self._place.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._close_files()
        self._place.__exit__(kind, error, trace)

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()

    def _finish(self) -> None:
        if self._length:
            raise ValueError("the last document was announced to continue: call end_document")
        self._flush()
        self._files["tokenizer.json"] = _HashedFile(self._folder / "tokenizer.json")
        self._files["tokenizer.json"].write(self._tokenizer.to_json().encode())
        header = StoreHeader(
            dtype=self._dtype,
            documents=self.documents,
            tokens=self._totals["offsets.bin"],
            spans=self._totals["span_offsets.bin"],
            vocabulary_size=self._tokenizer.vocabulary_size,
            end_id=self._tokenizer.end_id,
            tokenizer=self._tokenizer.name,
            tokenizer_hash=self._tokenizer.hash,
            source_hash=self._source_hash,
            description=self.description,
            python=platform.python_version(),
            split_by=self._split_by,
            overlong=self._overlong,
            skipped=self.skipped,
            files={name: file.sync() for name, file in self._files.items()},
        )
        last = _HashedFile(self._folder / HEADER)
        self._files[HEADER] = last
        last.write(header.to_json().encode())
        last.sync()
