"""Where documents come from: the standard library, text, or records; each a `Source` of `SourceDocument`s.

    data.source=stdlib                              (signature + docstring → source) pairs of the running Python
    data.source=text         data.path=PATH         documents by file, blank line or separator, or one stream
    data.source=jsonl        data.path=PATH         records in JSON (see `data/records.py`)
    data.source=parquet      data.path=PATH         records in Parquet
    data.source=huggingface  data.path=NAME|FOLDER  records in a data set of Hugging Face's library
    data.source=store        data.path=FOLDER       what `multipack prepare` made (see `data/store.py`)

PATH is a file, a folder, or a pattern such as `data/**/*.jsonl.gz`. A source reads its files from the start whenever it
is iterated, one document in memory at a time, and refuses to go on when a file has changed since it was found. Files
may be gzipped (`.gz`).
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Iterator
from functools import cached_property
from typing import BinaryIO, TextIO

from multipack.data import stdlib
from multipack.data.data_config import DataConfig
from multipack.data.files import FileSet, FileSource, paragraphs, separated, stretches
from multipack.data.huggingface import HuggingFaceSource
from multipack.data.parquet import ParquetSource
from multipack.data.record_source import JsonlSource
from multipack.data.source import Part, Source, SourceDocument
from multipack.data.tokenizer import TokenizerConfig

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".py")


def open_source(config: DataConfig, tokenizer: TokenizerConfig | None = None) -> Source:
    """The source that `config` names; files are listed, not yet read.

    Args:
        config: the source.
        tokenizer: whose chat template and end token chats take, where `config` names none; None = one that is trained.

    Raises:
        ImportError: a package that reads the source is not installed.
        ValueError: the configuration is impossible, or there is nothing at its path.
    """
    config.check()
    if config.source == "stdlib":
        return StdlibSource()
    if config.source == "text":
        return TextSource(config)
    if config.source == "jsonl":
        return JsonlSource(config, tokenizer)
    if config.source == "parquet":
        return ParquetSource(config, tokenizer)
    if config.source == "huggingface":
        return HuggingFaceSource(config, tokenizer)
    where = config.path or ", ".join(config.paths)
    raise ValueError(f"data.source={config.source}: {where} is tokenized already; there is no text to read")


class StdlibSource(Source):
    """The running Python's standard library (see `data/stdlib.py`); parsed once, then kept."""

    unit = "files"
    overlong = "split"

    def __init__(self) -> None:
        super().__init__()
        self._folder, self._files = stdlib.library_files()
        self._documents: dict[str, list[SourceDocument] | None] = {}
        self._done = 0
        self.total = len(self._files)

    @cached_property
    def hash(self) -> str:
        """See `Source`."""
        digest = hashlib.sha256(f"multipack stdlib 1, Python {platform.python_version()}".encode())
        for name in self._files:
            digest.update(f"\0{name}\0".encode())
            digest.update(hashlib.sha256((self._folder / name).read_bytes()).digest())
        return digest.hexdigest()

    @property
    def done(self) -> int:
        """See `Source`."""
        return self._done

    def __iter__(self) -> Iterator[SourceDocument]:
        self.skipped = {}
        for number, name in enumerate(self._files):
            self._done = number
            if name not in self._documents:
                self._documents[name] = self._parse(name)
            documents = self._documents[name]
            if documents is None:
                self._skip("files that do not parse")
            else:
                yield from documents
        self._done = self.total

    def _parse(self, name: str) -> list[SourceDocument] | None:
        try:
            pairs = stdlib.parse_pairs((self._folder / name).read_bytes())
        except (SyntaxError, UnicodeDecodeError):
            return None
        return [
            SourceDocument(f"{name}:{pair.name}", (Part(pair.prompt, False), Part(pair.completion, True)))
            for pair in pairs
        ]

    def describe(self, documents: int) -> str:
        """See `Source`."""
        return f"Python {platform.python_version()} standard library, {documents:,} functions with docstring"


class TextSource(FileSource):
    """Plain text in UTF-8, divided as `DataConfig.documents` says; empty documents are left out."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self._files = FileSet(config.path, TEXT_SUFFIXES)
        self.total = self._files.total_bytes
        self._division, self._separator = config.division, config.separator
        self.is_stream = self._division == "stream"

    @cached_property
    def hash(self) -> str:
        """See `Source`."""
        settings = {"source": "text 1", "documents": self._division, "separator": self._separator}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self._files.digest())
        return digest.hexdigest()

    @property
    def done(self) -> int:
        """See `Source`."""
        return self._files.bytes_read

    def __iter__(self) -> Iterator[SourceDocument]:
        self.skipped = {"files of other kinds": self._files.ignored} if self._files.ignored else {}
        self._files.restart()
        for index in range(len(self._files.paths)):
            with self._files.open(index) as file:
                yield from self._read(index, file)

    def _read(self, index: int, file: BinaryIO) -> Iterator[SourceDocument]:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")  # line ends stay as they are
        try:
            ended = False
            for name, content, ended in self._divide(text, self._files.names[index]):
                if content.strip() or self.is_stream:
                    yield SourceDocument(name, (Part(content, True),), ended)
                else:
                    self._skip("empty documents")
            if not ended:
                self._skip("empty files")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._files.paths[index]} is not UTF-8 text: {error}") from error
        finally:
            text.detach()

    def _divide(self, text: TextIO, name: str) -> Iterator[tuple[str, str, bool]]:
        if self._division == "blank_line":
            for line, content in paragraphs(text):
                yield f"{name}:{line}", content, True
        elif self._division == "separator":
            for number, content in enumerate(separated(text, self._separator), 1):
                yield f"{name}#{number}", content, True
        elif self._division == "stream":
            for content, ended in stretches(text):
                yield name, content, ended
        else:
            yield name, text.read(), True

    def describe(self, documents: int) -> str:
        """See `Source`."""
        count = len(self._files.paths)
        where = f"{self._files.root.name or self._files.root}"
        if self.is_stream:
            return f"{where}, one stream of {count:,} {'file' if count == 1 else 'files'}"
        return f"{where}, {documents:,} documents by {self._division.replace('_', ' ')}"
