"""Where documents come from: the standard library, text or JSONL files; each a `Source` of `SourceDocument`s.

    data.source=stdlib                          (signature + docstring → source) pairs of the running Python
    data.source=text   data.path=FILE|FOLDER    documents by file, blank line or separator, or one stream
    data.source=jsonl  data.path=FILE|FOLDER    a text, or a prompt and its completion, per line
    data.source=store  data.path=FOLDER         what `multipack prepare` made (see `data/store.py`)

A source reads its files from the start whenever it is iterated, one document in memory at a time, and
refuses to go on when a file has changed since it was found. Files may be gzipped (`.gz`).
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import platform
from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, BinaryIO, TextIO

from multipack.data import stdlib
from multipack.data.config import DataConfig
from multipack.data.files import FileSet, paragraphs, separated, stretches
from multipack.data.source import Part, Source, SourceDocument

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson")


def open_source(config: DataConfig) -> Source:
    """The source that `config` names; files are listed, not yet read.

    Raises:
        ValueError: the configuration is impossible, or there is nothing at its path.
    """
    config.check()
    if config.source == "stdlib":
        return StdlibSource()
    if config.source == "text":
        return TextSource(config)
    if config.source == "jsonl":
        return JsonlSource(config)
    raise ValueError(f"data.source=store: {config.path} is tokenized already; there is no text to read")


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


class FileSource(Source):
    """What text and jsonl share: a file, or the sorted files of a folder."""

    def __init__(self, config: DataConfig, suffixes: tuple[str, ...]) -> None:
        super().__init__()
        self.config = config
        self._files = FileSet(config.path, suffixes)
        self.total = self._files.total_bytes

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What decides, beside the content, what the documents are."""

    @abstractmethod
    def _read(self, index: int, file: BinaryIO) -> Iterator[SourceDocument]:
        """The documents of file `index`."""

    @cached_property
    def hash(self) -> str:
        """See `Source`."""
        digest = hashlib.sha256(json.dumps(self._settings(), sort_keys=True).encode())
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


class TextSource(FileSource):
    """Plain text in UTF-8, divided as `DataConfig.documents` says; empty documents are left out."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config, TEXT_SUFFIXES)
        self._division = config.division
        self.is_stream = self._division == "stream"

    def _settings(self) -> dict[str, Any]:
        return {"source": "text 1", "documents": self._division, "separator": self.config.separator}

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
            for number, content in enumerate(separated(text, self.config.separator), 1):
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


class JsonlSource(FileSource):
    """One JSON object a line: a text, or a prompt and its completion."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config, JSONL_SUFFIXES)
        self._fields = tuple(config.fields)

    def _settings(self) -> dict[str, Any]:
        return {"source": "jsonl 1", "fields": self.config.fields, "between": self.config.between}

    def _read(self, index: int, file: BinaryIO) -> Iterator[SourceDocument]:
        for number, line in enumerate(file, 1):
            where = f"{self._files.paths[index]}, line {number}"
            if not line.strip():
                self._skip("blank lines")
                continue
            document = self._document(_record(line, where), f"{self._files.names[index]}:{number}", where)
            if document is not None:
                yield document

    def _document(self, record: dict[str, Any], name: str, where: str) -> SourceDocument | None:
        if not self._fields:  # the first record decides for all
            self._fields = _detect(record, where)
        texts = [_text(record, field, where) for field in self._fields]
        if not texts[-1].strip():
            self._skip("empty documents" if len(texts) == 1 else "empty completions")
            return None
        if len(texts) == 1:
            return SourceDocument(name, (Part(texts[0], True),))
        return SourceDocument(name, (Part(texts[0] + self.config.between, False), Part(texts[1], True)))

    def describe(self, documents: int) -> str:
        """See `Source`."""
        what = " → ".join(self._fields) or "nothing"
        return f"{self._files.root.name or self._files.root}, {documents:,} documents ({what})"


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.removeprefix(codecs.BOM_UTF8))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{where}: a JSON {type(record).__name__}, not an object; jsonl has one object a line"
        )
    return record


def _detect(record: dict[str, Any], where: str) -> tuple[str, ...]:
    for fields in (("text",), ("prompt", "completion")):
        if all(field in record for field in fields):
            return fields
    raise ValueError(
        f"{where}: neither `text` nor `prompt` and `completion` among the fields "
        f"({', '.join(record) or 'none'}); name one or two of them in data.fields"
    )


def _text(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise ValueError(f"{where}: no field {field!r} (it has {', '.join(record) or 'none'})")
    value = record[field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is a {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: field {field!r} holds half a surrogate pair: {error}") from error
    return value
