"""Sources of records: what they share, and records in files of JSON.

data.source=jsonl  data.path=train.jsonl        an object a line
                   data.path=train.json         … or a list of objects, read one by one
                   data.path=data/**/*.jsonl.gz any files, by a pattern
                   data.path=data               all .jsonl and .ndjson files of a folder
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple, TextIO

from multipack.data.data_config import DataConfig
from multipack.data.files import CHUNK, FileSet, FileSource
from multipack.data.records import RecordReader, Shape
from multipack.data.source import Source, SourceDocument
from multipack.data.tokenizer import TokenizerConfig

JSONL_SUFFIXES = (".jsonl", ".ndjson")
_SPACES = " \t\r\n"


class Row(NamedTuple):
    """A record, and where it stands.

    Attributes:
        name: for people: `train.jsonl:17`.
        where: for errors: `data/train.jsonl, line 17`.
        record: field → value.
    """

    name: str
    where: str
    record: dict[str, Any]


class RecordSource(Source):
    """Documents made of records; the first record decides what all are.

    Args:
        config: which records, and what they are.
        tokenizer: whose chat template and end token chats take, where `config` names none.
    """

    def __init__(self, config: DataConfig, tokenizer: TokenizerConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self._tokenizer = tokenizer or TokenizerConfig()
        self._reader = RecordReader(config, self._open_template)

    def _open_template(self) -> Any:
        from multipack.data.templates import resolve_template  # Jinja is loaded for chats alone

        return resolve_template(self.config, self._tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs, here or in another process: there the template is compiled anew, from its text."""
        shape, template = self.shape, self._reader.template
        written = (template.to_json(), template.identity) if template is not None else None
        return {**self.__dict__, "_reader": (shape, written)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`.

        Raises:
            ValueError: the template asks for the day, and here it is another one.
        """
        self.__dict__.update(state)
        shape, written = state["_reader"]
        self._reader = RecordReader(self.config, self._open_template)
        self._reader.shape = shape
        if written is not None:
            from multipack.data.chat import ChatTemplate

            self._reader.template = ChatTemplate.from_json(written[0])
            if self._reader.template.identity != written[1]:
                raise ValueError(
                    f"{self._reader.template.name} writes the day, which has changed meanwhile: start again"
                )

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """All records, from the start."""

    @abstractmethod
    def _content_hash(self) -> str:
        """Of all records, whatever is read from them."""

    @property
    @abstractmethod
    def _place(self) -> str:
        """Where the records are, for people."""

    def _before(self) -> None:
        """Called when the records are about to be read from the start."""
        self.skipped = {}

    def __iter__(self) -> Iterator[SourceDocument]:
        self._before()
        for name, where, record in self._rows():
            document = self._reader.document(record, name, where)
            if isinstance(document, SourceDocument):
                yield document
            else:
                self._skip(document)

    @property
    def shape(self) -> Shape | None:
        """What the records are; None = there are none."""
        if self._reader.shape is None:
            first = next(self._rows(), None)
            if first is not None:
                self._reader.begin(first.record, first.where)
        return self._reader.shape

    @property
    def pairs(self) -> bool:
        """See `Source`."""
        return self.shape is not None and self.shape.form == "preference"

    @property
    def chat_template(self) -> str:
        """See `Source`."""
        return self._reader.template.to_json() if self.shape is not None and self._reader.template else ""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """See `Source`."""
        return (
            self._reader.template.special_tokens if self.shape is not None and self._reader.template else ()
        )

    @cached_property
    def hash(self) -> str:
        """See `Source`."""
        shape = self.shape
        settings = {
            "records": 2,
            "form": shape.form if shape else "",
            "fields": (*shape.fields, shape.tools) if shape else (),
            "between": self.config.between,
            "template": self._reader.template.identity if self._reader.template else "",
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self._content_hash().encode())
        return digest.hexdigest()

    def describe(self, documents: int) -> str:
        """See `Source`."""
        what = str(self.shape or "nothing")
        if self._reader.template is not None:
            what += f", {self._reader.template.name}"
        return f"{self._place}, {documents:,} documents ({what})"


class FileRecords(RecordSource, FileSource):
    """Records in files."""

    def __init__(
        self, config: DataConfig, tokenizer: TokenizerConfig | None, suffixes: tuple[str, ...]
    ) -> None:
        super().__init__(config, tokenizer)
        self._files = FileSet(config.path, suffixes)

    @abstractmethod
    def _read(self, index: int, file: BinaryIO) -> Iterator[Row]:
        """The records of file `index`."""

    def _rows(self) -> Iterator[Row]:
        self._files.restart()
        for index in range(len(self._files.paths)):
            with self._files.open(index) as file:
                yield from self._read(index, file)

    def _content_hash(self) -> str:
        return self._files.digest().hex()

    @property
    def _place(self) -> str:
        return self._files.root.name or str(self._files.root)

    def _before(self) -> None:
        self.skipped = {"files of other kinds": self._files.ignored} if self._files.ignored else {}


class JsonlSource(FileRecords):
    """One JSON object a line; a `.json` file may hold a list of objects."""

    def __init__(self, config: DataConfig, tokenizer: TokenizerConfig | None = None) -> None:
        super().__init__(config, tokenizer, JSONL_SUFFIXES)
        self.total = self._files.total_bytes

    @property
    def done(self) -> int:
        """See `Source`."""
        return self._files.bytes_read

    def _read(self, index: int, file: BinaryIO) -> Iterator[Row]:
        path, name = self._files.paths[index], self._files.names[index]
        if path.name.lower().removesuffix(".gz").endswith(".json") and _begins_a_list(file):
            for number, record in enumerate(list_items(file, str(path)), 1):
                yield Row(f"{name}:{number}", f"{path}, record {number}", record)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield Row(f"{name}:{number}", where, _record(line, where))
            else:
                self._skip("blank lines")


def _begins_a_list(file: Any) -> bool:
    begin: bytes = file.peek(16)
    return begin.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def list_items(file: BinaryIO, where: str) -> Iterator[dict[str, Any]]:
    """The objects of one JSON list; no more than about `CHUNK` characters, or one object, are in memory at once.

    Args:
        file: the list in UTF-8.
        where: the file's name, for errors.

    Raises:
        ValueError: it is not a list of objects; the message says which of them is none.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    number, size = 1, CHUNK
    try:
        buffer, position = text.read(CHUNK).lstrip(), 1
        while True:
            try:
                item = _next_item(buffer, position, number == 1)
            except ValueError as error:  # malformed, or not whole yet
                if not (more := text.read(size)):
                    raise ValueError(f"{where}, record {number}: not JSON: {error}") from error
                buffer, position, size = buffer[position:] + more, 0, size * 2  # so that reading stays linear
                continue
            if item is None:
                _expect_end(
                    buffer[position:].lstrip(_SPACES)[1:], text, f"{where}, after record {number - 1}"
                )
                return
            record, position = item
            if not isinstance(record, dict):
                raise ValueError(f"{where}, record {number}: a JSON {type(record).__name__}, not an object")
            yield record
            number, size = number + 1, CHUNK
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 after record {number - 1}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{where}, record {number}: not JSON: nested too deeply") from error
    finally:
        text.detach()


def _next_item(buffer: str, position: int, is_first: bool) -> tuple[Any, int] | None:
    """The value that begins at `position`, after a comma unless it is the first, and its end; None = the list ends."""
    position = _spaces_end(buffer, position)
    if buffer.startswith("]", position):
        return None
    if not is_first:
        if not buffer.startswith(",", position):
            raise ValueError("neither a comma nor the end of the list before it")
        position = _spaces_end(buffer, position + 1)
    return json.JSONDecoder().raw_decode(buffer, position)


def _expect_end(rest: str, text: TextIO, where: str) -> None:
    """Refuse what follows a list, and would not be read; of a gzipped file, the checksum is verified on the way."""
    while not rest.strip(_SPACES):
        if not (rest := text.read(CHUNK)):
            return
    raise ValueError(
        f"{where}: {rest.strip(_SPACES)[:20]!r} follows the end of the list; a file holds one list"
    )


def _spaces_end(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACES:
        position += 1
    return position


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
