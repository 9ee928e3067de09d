"""Sources of documents: each kind of file is one reader function and its row in `READERS`.

    data.source=stdlib                              (signature + docstring → source) pairs of the running Python
    data.source=text         data.path=PATH         documents by file, blank line or separator, or one stream
    data.source=jsonl        data.path=PATH         one object per line, or a `.json` file with a list of objects
    data.source=parquet      data.path=PATH         rows of Parquet files                (extra `parquet`)
    data.source=huggingface  data.path=NAME|FOLDER  rows of a Hugging Face data set      (extra `huggingface`)

PATH is a file, a folder, or a pattern such as `data/**/*.jsonl.gz`. Files may be gzipped (`.gz`). A reader yields the
documents of one open file and, in place of an entry that is left out, a `Skip`.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from multipack.data.text.data_config import RECORDS, SUFFIXES, DataConfig, TokenizerConfig
from multipack.data.text.records import Entry, RecordForm, RecordReader, without_nulls
from multipack.data.text.skipped import MOST_PLACES, Noted, grouped
from multipack.data.text.texts import (
    Found,
    Item,
    Skip,
    SourceDocument,
    TextPart,
    divided,
    find_files,
    json_records,
)
from multipack.machine import import_extra
from multipack.untrusted import reason_of


class SourceFile(NamedTuple):
    """A file of a source: its path relative to the source's folder, size on disk, and modification time in ns."""

    name: str
    path: Path
    size: int
    modified: int


class Source:
    """The documents of a `DataConfig`, read from the start at each iteration, some in memory at a time.

    Files are listed but not read before the first iteration.

    Args:
        config: describes the source.
        tokenizer: provides the chat template and its end token if `config` names no template.

    Attributes:
        config: as given.
        files: files to read, sorted by name; empty for a Hugging Face data set.
        dataset: rows of `data.source=huggingface`, none of a stream (see `chunk`); None for other sources.
        reader: makes documents of records.
        name: name of the source, for messages.
        unit: unit of `done` and `total`: bytes of files, or rows.
        total: size of the source, in `unit`.
        overlong: policy for documents longer than a pack if `data.overlong` is auto.
        noted: about the records of the last iteration.
        fault: what is wrong with the first broken entry of the last iteration; empty = none was broken.

    Raises:
        ValueError: a setting is wrong, there is no file at `config.path`, or the documents are already tokenized.
    """

    def __init__(self, config: DataConfig, tokenizer: TokenizerConfig | None = None) -> None:
        config.check()
        self.config = config
        self.reader = RecordReader(config, partial(open_template, config, tokenizer or TokenizerConfig()))
        self.files: list[SourceFile] = []
        self.dataset: Any = None
        self.name, self.unit, self.total = config.path, "bytes", 0
        self.overlong: Literal["error", "split"] = "split" if config.source == "stdlib" else "error"
        self.noted, self.fault = Noted(), ""
        self._ignored, self._done, self._before = 0, 0, 0
        self._open_file: BinaryIO | None = None
        if config.source == "huggingface":
            self.dataset = [] if config.stream else open_dataset(config)
            self.unit, self.total = "rows", len(self.dataset)
            if config.stream or Path(config.path).expanduser().exists():
                self.name = Path(config.path).name
            return
        if config.source not in READERS:
            place = config.path or ", ".join(config.paths)
            raise ValueError(
                f"data.source={config.source}: {place} is already tokenized; there is no text to read"
            )
        if config.source == "stdlib":
            from multipack.data.text.stdlib import library_files

            root, names = library_files()
            self.name = f"Python {platform.python_version()} standard library"
        else:
            root, names, self._ignored = find_files(config.path, SUFFIXES[config.source])
            self.name = root.name or str(root)
        for name in names:
            path = root / name if name else root
            state = path.stat()
            self.files.append(SourceFile(name or root.name, path, state.st_size, state.st_mtime_ns))
        self.total = sum(file.size for file in self.files)

    def part(self, number: int, parts: int) -> Source:
        """Part `number` of `parts`: contiguous files, or rows of a data set, of about equal size."""
        if parts == 1:
            return self
        part = copy.copy(self)
        if self.dataset is not None:
            part.dataset = self.dataset.shard(parts, number, contiguous=True)
            part.total = len(part.dataset)
            return part
        begins = accumulate((file.size for file in self.files), initial=0)
        places = [min(begin * parts // max(self.total, 1), parts - 1) for begin in begins]
        part.files = [file for file, place in zip(self.files, places, strict=False) if place == number]
        part.total = sum(file.size for file in part.files)
        part._ignored = self._ignored if number == 0 else 0
        return part

    def chunk(self, rows: list[dict[str, Any]], before: int) -> Source:
        """A source of some rows of a stream, with the same reader; `before` others precede them."""
        part = copy.copy(self)
        part.dataset, part.total, part._before = rows, len(rows), before
        return part

    @property
    def is_stream(self) -> bool:
        """Whether the source is one stream of text, not divided into documents."""
        return self.config.source == "text" and self.config.division == "stream"

    @property
    def done(self) -> int:
        """Amount that the current iteration has read, in `unit`; records that wait for the template are read, too."""
        return self._done + (self._open_file.tell() if self._open_file is not None else 0)

    def __iter__(self) -> Iterator[SourceDocument]:
        self.noted, self.fault = Noted(), ""
        self._done, self._open_file = 0, None
        self.reader.restart(self.noted)
        if self._ignored:
            self.noted.skipped["files of other kinds"] = self._ignored
        for found in (
            self._read_files()
            if self.dataset is None
            else self._checked(self.reader.documents(self._read_rows(), "rows"))
        ):
            if isinstance(found, SourceDocument):
                yield found
            else:
                self.noted.skip(found.reason, found.name)
                self.fault = self.fault or found.fault

    def items(self) -> Iterator[Item]:
        """The documents, by the item that they belong to."""
        return zip(*[iter(self)] * (2 if self.find_form().pairs else 1), strict=True)

    def _checked(self, entries: Iterable[Found]) -> Iterator[Found]:
        """The entries of a file; with `data.broken=error` a ValueError names broken ones."""
        broken = list[Skip]()
        for entry in entries:
            if isinstance(entry, Skip) and entry.fault and self.config.broken == "error":
                broken.append(entry)
                if len(broken) == MOST_PLACES:
                    break
            elif not broken:
                yield entry
        if not broken:
            return
        message, many = broken[0].fault, len(broken) > 1
        if many:
            more = " (or more)" if len(broken) == MOST_PLACES else ""
            message += f"; {len(broken)}{more} {broken[0].reason}: {grouped(entry.name for entry in broken)}"
        if self.reader.form is not None:  # else no record is as the settings say
            message += f"; data.broken=skip leaves {'them' if many else 'it'} out"
        raise ValueError(message)

    def _read_files(self) -> Iterator[Found]:
        """The documents of each file; it is closed before the next one is opened."""
        read = READERS[self.config.source]
        for file in self.files:
            state = file.path.stat()
            if (state.st_size, state.st_mtime_ns) != (file.size, file.modified):
                raise ValueError(
                    f"{file.path} has changed since it was found; start again when it is complete"
                )
            with open(file.path, "rb") as raw:
                self._open_file = raw
                is_gzip = file.path.name.lower().endswith(".gz")
                if is_gzip and not file.size:  # read as no text by the standard library
                    raise ValueError(f"{file.path}: broken gzip file: it is empty")
                content = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
                try:
                    yield from self._checked(read(self, file, content))
                except UnicodeDecodeError as error:
                    raise ValueError(f"{file.path} is not UTF-8 text: {error}") from error
                except (EOFError, OSError, zlib.error) as error:
                    raise ValueError(f"{file.path}: broken gzip file or unreadable: {error}") from error
                finally:
                    self._open_file = None
            self._done += file.size

    def _read_rows(self) -> Iterator[Entry]:
        """Rows of a Hugging Face data set, whose required columns alone are read, or of a stream."""
        rows = self.dataset
        if not self.config.stream:
            rows = rows.select_columns(self.reader.columns(rows.column_names))
        for number, record in enumerate(rows, self._before + 1):
            self._done += 1
            name, where = f"{self.name}:{number}", f"{self.config.path}, row {number}"
            yield without_nulls(dict(record)), name, where

    def find_form(self) -> RecordForm:
        """The form of the records; the first one is read if none was yet. Other sources have an empty one."""
        if self.reader.form is None and self.config.source in RECORDS:
            next(iter(self), None)
        return self.reader.form or RecordForm()

    @cached_property
    def identity(self) -> str:
        """Sha256 of the settings that determine the documents, and of each file's name, size and modification time."""
        config, form = self.config, self.find_form()
        parts: list[object] = [config.source, config.division, config.separator]
        if form.name is not None:
            fields = (*form.context, *form.answers)
            identity = "" if form.template is None else form.template.identity
            parts += [form.name, fields, form.tools, config.between, identity]
            parts += [each for each in (form.label, config.weight_field) if each]
            parts += ["drop_system"] if config.drop_system else []
            # With `skip` a store may lack records that `error` refuses: it is another store.
            parts += ["broken skip"] if config.broken == "skip" else []
        if config.source == "stdlib":
            parts.append(self.name)
        if self.dataset is not None:
            # The library's fingerprint changes with the rows and all operations on them.
            parts += [self.dataset._fingerprint, self.total, config.part]
        parts += [(file.name, file.size, file.modified) for file in self.files]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def describe(self) -> str:
        """One line about this source, with `{documents}` in place of the number of its documents."""
        if self.is_stream:
            count = len(self.files)
            return f"{self.name}, one stream of {count:,} {'file' if count == 1 else 'files'}"
        if self.config.source == "stdlib":
            return f"{self.name}, {{documents}} functions with docstring"
        if self.config.source == "text":
            return f"{self.name}, {{documents}} documents by {self.config.division.replace('_', ' ')}"
        return f"{self.name}, {{documents}} documents ({self.find_form().describe()})"


def open_template(config: DataConfig, tokenizer: TokenizerConfig) -> Any:
    """The `ChatTemplate` of a configuration."""
    from multipack.data.text.chat import resolve_template  # Jinja is loaded for chats only

    return resolve_template(config, tokenizer)


# --- readers ------------------------------------------------------------------------------------------


def read_stdlib(source: Source, file: SourceFile, content: BinaryIO) -> Iterator[Found]:
    """Documented functions of the standard library; files that this Python cannot parse are skipped."""
    from multipack.data.text.stdlib import parse_file

    pairs = parse_file(file.path)
    if pairs is None:
        yield Skip("files that do not parse", file.name)
    for name, prompt, completion in pairs or ():
        yield SourceDocument(f"{file.name}:{name}", (TextPart(prompt, False), TextPart(completion, True)))


def read_text(source: Source, file: SourceFile, content: BinaryIO) -> Iterator[Found]:
    """Plain text in UTF-8, divided by `data.documents`; line ends stay as they are, empty documents are skipped."""
    text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    ended = False
    for name, piece, ended in divided(text, file.name, source.config.division, source.config.separator):
        if piece.strip() or source.is_stream:
            yield SourceDocument(name, (TextPart(piece, True),), ended)
        else:
            yield Skip("empty documents", name)
    if not ended:
        yield Skip("empty files", file.name)


def read_jsonl(source: Source, file: SourceFile, content: BinaryIO) -> Iterator[Found]:
    """One JSON object per line; a `.json` file may hold a list of objects instead."""
    records = json_records(content, file.path)
    return source.reader.documents(
        ((record, f"{file.name}:{number}", where) for number, where, record in records), "lines"
    )


def read_parquet(source: Source, file: SourceFile, content: BinaryIO) -> Iterator[Found]:
    """Rows of a Parquet file; only the required columns are read, and at most one row group is in memory."""
    return source.reader.documents(_parquet_rows(source, file, content), "rows")


def _parquet_rows(source: Source, file: SourceFile, content: BinaryIO) -> Iterator[Entry]:
    pyarrow = import_extra("pyarrow", "data.source=parquet", "parquet")
    from pyarrow import parquet

    number = 0
    try:
        table = parquet.ParquetFile(content)
        columns = source.reader.columns(table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=1024, columns=columns, use_threads=False):
            for record in batch.to_pylist():
                number += 1
                name, where = f"{file.name}:{number}", f"{file.path}, row {number}"
                yield without_nulls(record), name, where
    except (pyarrow.ArrowException, OSError, RecursionError) as error:
        raise ValueError(
            f"{file.path}, after row {number}: not a complete Parquet file: {reason_of(error)}"
        ) from error


def open_dataset(config: DataConfig) -> Any:
    """Open the Hugging Face data set of `config`: a `datasets.Dataset`, or with `data.stream` an `IterableDataset`.

    `data.path` is a folder written by `save_to_disk`, or an argument of `load_dataset(path, subset, split=part)`.
    """
    datasets = import_extra("datasets", "data.source=huggingface", "huggingface")
    folder = Path(config.path).expanduser()
    is_saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if not is_saved:
            path = str(folder) if folder.exists() else config.path
            return datasets.load_dataset(
                path, config.subset or None, split=config.part, streaming=config.stream
            )
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library and its dependencies raise errors of many kinds
        wanted = f"data.path={config.path}, data.subset={config.subset!r}, data.part={config.part!r}"
        raise ValueError(f"{wanted}: {type(error).__name__}: {reason_of(error)}") from error
    parts = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    if config.part not in parts or config.subset:
        raise ValueError(
            f"data.part={config.part!r}, data.subset={config.subset!r}: {config.path} was saved with the parts"
            f" {', '.join(map(str, parts))} and without subsets"
        )
    dataset = parts[config.part]
    return dataset.to_iterable_dataset() if config.stream else dataset


READERS: dict[str, Callable[[Source, SourceFile, BinaryIO], Iterator[Found]]] = {
    "stdlib": read_stdlib,
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}
"""`data.source` → function that yields the documents of a file.

A new source also has its name in `SourceName` of data_config.py, suffixes of its files in `SUFFIXES`, and, if it reads
records with fields, its name in `RECORDS`.
"""
