"""Writes a token store (see `data/store.py`): files that only grow, hashed on the way, a header last."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from multipack.atomic import atomic_folder
from multipack.data.blocks import BlockBuilder, EncodedPart, TokenBlock, check_tokens
from multipack.data.fit import FitPolicy
from multipack.data.header import BORDERS, CHAT_TEMPLATE, HEADER, StoreHeader, dtype_of
from multipack.data.tokenizer import Tokenizer

Integers = NDArray[np.int64]
_OFFSETS = ("offsets.bin", "span_offsets.bin", "name_offsets.bin")


class _HashedFile:
    """A file that is written once, from start to end, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._file, self._path = path.open("xb"), path
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, content: bytes) -> None:
        with self._named_in_errors():
            self._file.write(content)
        self._digest.update(content)
        self._size += len(content)

    def sync(self) -> dict[str, Any]:
        with self._named_in_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        with suppress(OSError):  # all was synced, or else what failed is known already
            self._file.close()

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk does not say which one
            error.filename = str(self._path)
            raise


class StoreWriter:
    """Writes a token store, document after document or block after block; it keeps none of them in memory.

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
        chat_template: how conversations became text, as JSON; empty where documents are no conversations.

    Attributes:
        description: see above.
        skipped: what the source left out; may be set until the block ends.
        documents: documents written so far.
        tokens: tokens written so far.

    Raises:
        FileExistsError: `path` exists, is not an empty folder, and `replace` is not set.
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
        chat_template: str = "",
    ) -> None:
        self.description = description
        self.skipped: dict[str, int] = {}
        self.documents = 0
        self.tokens = 0
        self._tokenizer = tokenizer
        self._source_hash = source_hash
        self._split_by = split_by
        self._overlong = overlong
        self._chat_template = chat_template
        self._place: AbstractContextManager[Path] = atomic_folder(path, replace)
        self._dtype = dtype_of(tokenizer.vocabulary_size)
        self._totals = dict.fromkeys(_OFFSETS, 0)
        self._open_length = 0  # of a document that continues, and its ranges of targets
        self._open_spans: Integers = np.zeros((0, 2), dtype=np.int64)

    def __enter__(self) -> StoreWriter:
        self._folder = self._place.__enter__()
        self._files: dict[str, _HashedFile] = {}
        for name in (*_OFFSETS, "tokens.bin", "spans.bin", "names.bin"):
            self._open(name)
        for name in _OFFSETS:
            self._write(name, np.zeros(1, dtype=np.int64))
        return self

    def _open(self, name: str) -> None:
        self._files[name] = _HashedFile(self._folder / name)

    def _write(self, name: str, values: NDArray[Any]) -> None:
        self._files[name].write(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())

    def add(self, name: str, parts: Sequence[EncodedPart], continues: bool = False, border: int = 0) -> None:
        """Add a document.

        Args:
            name: for people.
            parts: its tokens in pieces, each with whether they are targets.
            continues: the document goes on with the next `add`; the last one, or `end_document`, names it.
            border: first token of the second half of a pair; 0 = no pair.

        Raises:
            ValueError: the document has no tokens; a token outside the vocabulary.
        """
        builder = BlockBuilder(self._tokenizer.vocabulary_size)
        builder.add(name, parts, border)
        if not continues and not self._open_length:
            self.extend(builder.finish())
            return
        self.extend(builder.finish(), continues=True)
        if not continues:
            self.end_document(name)

    def extend(self, block: TokenBlock, continues: bool = False) -> None:
        """Add the documents of a block.

        Args:
            block: the documents.
            continues: they are all stretches of one document, which goes on until `end_document`.

        Raises:
            ValueError: a document has no tokens; a token outside the vocabulary.
        """
        check_tokens(block.tokens, self._tokenizer.vocabulary_size)
        if not continues:
            self._finish_documents(
                block.lengths, block.spans, block.span_counts, block.names, block.name_lengths, block.borders
            )
        self.tokens += len(block.tokens)
        self._write("tokens.bin", block.tokens.astype(self._dtype, copy=False))
        if continues:
            starts = np.cumsum(block.lengths) - block.lengths + self._open_length
            spans = block.spans + np.repeat(starts, block.span_counts)[:, None]
            self._open_spans = _merged(np.concatenate([self._open_spans, spans]))
            self._open_length += len(block.tokens)

    def end_document(self, name: str) -> None:
        """End a document that was to continue.

        Raises:
            ValueError: it has no tokens.
        """
        raw = np.frombuffer(name.encode("utf-8", "replace"), dtype=np.uint8)
        spans, length = self._open_spans, self._open_length
        self._open_length, self._open_spans = 0, np.zeros((0, 2), dtype=np.int64)
        self._finish_documents(
            np.array([length], dtype=np.int64),
            spans,
            np.array([len(spans)], dtype=np.int64),
            raw,
            np.array([len(raw)], dtype=np.int64),
            np.zeros(1, dtype=np.int64),
        )

    def _finish_documents(
        self,
        lengths: Integers,
        spans: Integers,
        span_counts: Integers,
        names: NDArray[np.uint8],
        name_lengths: Integers,
        borders: Integers,
    ) -> None:
        if self._open_length:
            raise ValueError("the last document was announced to continue: call end_document")
        if len(lengths) and lengths.min() < 1:
            first = int(np.argmin(lengths))
            at = int(name_lengths[:first].sum())
            name = names[at : at + int(name_lengths[first])].tobytes().decode("utf-8", "replace")
            raise ValueError(f"document {self.documents + first} ({name}) has no tokens")
        self._write("spans.bin", spans)
        self._files["names.bin"].write(names.tobytes())
        for file, sizes in zip(_OFFSETS, (lengths, span_counts, name_lengths), strict=True):
            ends = np.cumsum(sizes) + self._totals[file]
            self._write(file, ends)
            self._totals[file] = int(ends[-1]) if len(ends) else self._totals[file]
        self._write_borders(borders)
        self.documents += len(lengths)

    def _write_borders(self, borders: Integers) -> None:
        """The file is begun with the first pair, and then has a row for every document before it, too."""
        if BORDERS not in self._files:
            if not borders.any():
                return
            self._open(BORDERS)
            self._write(BORDERS, np.zeros(self.documents, dtype=np.int64))
        self._write(BORDERS, borders)

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
        if self._open_length:
            raise ValueError("the last document was announced to continue: call end_document")
        texts = {"tokenizer.json": self._tokenizer.to_json()}
        if self._chat_template:
            texts[CHAT_TEMPLATE] = self._chat_template
        for name, text in texts.items():
            self._open(name)
            self._files[name].write(text.encode())
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
        self._open(HEADER)
        self._files[HEADER].write(header.to_json().encode())
        self._files[HEADER].sync()


def _merged(spans: Integers) -> Integers:
    """Ranges, in order, with those that touch made one."""
    if not len(spans):
        return spans
    begins = np.concatenate(([True], spans[1:, 0] != spans[:-1, 1]))
    ends = np.concatenate((begins[1:], [True]))
    return np.stack([spans[begins, 0], spans[ends, 1]], axis=1)
