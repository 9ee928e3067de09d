"""`prepare`: tokenize a source into a token store, or reuse the store that an earlier call made.

    DataConfig ─▶ Source ─▶ items ─▶ batches ─▶ encode ─▶ StoreWriter ─▶ shards … header

A source is read once, and once before to train its tokenizer if necessary. After an interruption the same call
continues after the finished shards, with the same result. A source of several files can be prepared in parts, by any
scheduler: each part writes its own shards, and the part that finishes last completes the store.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from multipack.atomic import cache_folder, is_free, locked
from multipack.data.data_config import DataConfig, check_choice
from multipack.data.ray_engine import count_parts, run_parts
from multipack.data.shards import HEADER, RECIPE, StoreHeader, part_name
from multipack.data.sources import Source, open_source
from multipack.data.store import TokenStore
from multipack.data.texts import SourceDocument
from multipack.data.tokenizer import Progress, Tokenizer, TokenizerConfig, build_tokenizer
from multipack.data.writer import StoreWriter, encode, finish_store, remove_store

VERSION = 2
"""Version of how documents become tokens: stores of other versions are not reused."""
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 4096
"""Size of the batches that are tokenized at once."""
EngineName = Literal["local", "ray"]
Item = tuple[SourceDocument, ...]
"""One document, or the two answers of a preference pair."""


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    out: Path | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    *,
    engine: EngineName = "local",
    shards: int = 0,
    part: str = "1/1",
    tell: Callable[[str], None] | None = None,
) -> Path:
    """Tokenize a source into a token store, or find the store that an earlier call made of the same source.

    While one process prepares a store, other processes that need the same store wait for it.

    Args:
        data: the source.
        tokenizer: the tokenizer; trained on the source, if its kind requires it.
        out: folder of the store; None = in the cache.
        progress: called with (done, total, unit) during the work.
        overwrite: replace another token store at `out` (but no other folder).
        engine: `local`, or `ray`: parts of the source as tasks of a Ray cluster.
        shards: approximate number of shards, each of at most `SHARD_TOKENS` tokens; 0 = as few as that allows.
        part: `i/n`: tokenize part i of n; all n parts are written to the same folder.
        tell: called with a line of text if finished shards or parts are reused.

    Returns:
        The folder of the store.

    Raises:
        ValueError: the settings contradict each other, the source is malformed or empty, `out` holds other files, or a
            package is missing.
    """
    tokenizer.check()
    check_choice("--engine", engine, get_args(EngineName))
    number, parts = parse_part(part)
    _check_options(data, engine, shards, parts, out)
    source = open_source(data, tokenizer)
    cache = cache_folder(data.cache)
    if out is not None:
        _refuse_foreign(out)  # before the work
    made = build_tokenizer(tokenizer, source, cache, progress)
    job = Job(data, tokenizer, made, source, parts, shards, progress or _silent, tell or _silent)
    path = out if out is not None else cache / "stores" / job.key
    place = hashlib.sha256(f"{path.absolute()} {part}".encode()).hexdigest()[:32]
    with locked(cache / "stores" / f"{place}.lock"):
        if job.is_complete(path):  # another process may have been faster
            return path
        if engine == "ray":
            job.write_on_ray(path, overwrite or out is None)
        else:
            job.write_part(path, number - 1, overwrite or out is None)
    return path


def parse_part(part: str) -> tuple[int, int]:
    """`i/n` → (i, n).

    Raises:
        ValueError: `part` does not have this form with 1 ≤ i ≤ n ≤ 9999.
    """
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts) <= 9999):
        raise ValueError(f"--part {part}: i/n, part i of n, such as 1/16 to 16/16")
    return int(number), int(parts)


def _check_options(data: DataConfig, engine: str, shards: int, parts: int, out: Path | None) -> None:
    if shards < 0:
        raise ValueError(f"--shards {shards}: at least 1 (or 0: by the number of tokens)")
    if parts == 1 and engine == "local":
        return
    given = "--engine ray" if engine == "ray" else "--part"
    if shards:
        raise ValueError(
            f"{given} and --shards {shards}: each part has shards of its own; leave --shards out"
        )
    if data.dedup:
        raise ValueError(f"data.dedup=true finds duplicates in one process only: leave {given} out")
    if data.source == "text" and data.division == "stream":
        raise ValueError(
            f"{given} divides documents, and a stream is one: divide the text with data.documents"
        )
    if engine == "ray" and parts > 1:
        raise ValueError("--engine ray runs all parts: leave --part out")
    if parts > 1 and out is None:
        raise ValueError("--part needs the folder of the store: name it with --store")


def _silent(*_: object) -> None:
    pass


def _refuse_foreign(path: Path) -> None:
    if is_free(path, leftovers=True) or (path / HEADER).is_file() or (path / RECIPE).is_file():
        return
    raise ValueError(f"{path} exists and is not a token store; choose another folder for the store")


@dataclass
class Job:
    """One call of `prepare`."""

    data: DataConfig
    tokenizer_config: TokenizerConfig
    tokenizer: Tokenizer
    source: Source
    parts: int
    shards: int
    progress: Progress
    tell: Callable[[str], None]

    @property
    def key(self) -> str:
        """Hash of source (names, sizes and modification times of its files), settings and tokenizer."""
        recipe = f"{VERSION} {self.source.identity} dedup {self.data.dedup} {self.tokenizer.hash}"
        return hashlib.sha256(recipe.encode()).hexdigest()[:32]

    def is_complete(self, path: Path) -> bool:
        """Whether the complete store of this job is at `path`, with files of the right sizes."""
        try:
            return TokenStore(path).header.key == self.key
        except ValueError:
            return False

    def write_part(self, path: Path, part: int = 0, replace: bool = False) -> None:
        """Write one part of the store, continuing after its finished shards.

        Raises:
            ValueError: the source is malformed or empty, or `path` holds a store of other documents.
        """
        source = self.source.part(part, self.parts)
        writer = StoreWriter(
            path,
            self.tokenizer,
            key=self.key,
            description=self.source.describe,
            split_by="position" if source.is_stream else "document",
            overlong=source.overlong,
            pairs=source.pairs,
            replace=replace and self.parts == 1,  # other parts may be written now
            chat_template=source.chat_template,
            part=part,
            parts=self.parts,
        )
        if self._is_finished(path, part, writer.recipe):
            finish_store(path, self.source.describe)  # a kill may have prevented it
            self.tell(f"part {part + 1} of {self.parts} is there already")
            return
        try:
            with writer:
                self._fill(writer, source)
        except FileExistsError as error:
            raise ValueError(
                f"{path} holds a token store of other documents, another tokenizer or other parts, or a damaged one;"
                " remove it or choose another folder"
            ) from error

    def write_on_ray(self, path: Path, replace_store: bool) -> None:
        """Write all parts as tasks of a Ray cluster.

        Raises:
            ValueError: see `run_parts`; the machines of the cluster do not share the folder.
        """
        by_files = self.source.unit == "bytes"
        self.parts = count_parts(self.source.total, len(self.source.files)) if by_files else 1
        if replace_store and not self._is_begun(path):
            remove_store(path)
        definition = (self.tokenizer.to_json(), self.tokenizer.name)
        write = partial(_write_there, self.data, self.tokenizer_config, definition, self.key, self.parts)
        run_parts(partial(write, os.getcwd(), str(path)), self.parts, self.progress)
        if not finish_store(path, self.source.describe):
            raise ValueError(
                f"{path}: not all parts are there; every machine of the cluster must see this folder"
            )

    def _is_begun(self, path: Path) -> bool:
        try:
            recipe = StoreHeader.read(path / RECIPE)
        except ValueError:
            return False
        return (recipe.key, recipe.parts) == (self.key, self.parts) and not (path / HEADER).exists()

    def _is_finished(self, path: Path, part: int, recipe: StoreHeader) -> bool:
        try:
            return StoreHeader.read(path / part_name(part)).is_for(recipe)
        except ValueError:
            return False

    def _fill(self, writer: StoreWriter, source: Source) -> None:
        items, step = KeptItems(source, self.data.dedup), 2 if source.pairs else 1
        without_tokens = 0
        if writer.read:
            self.tell(
                f"{writer.read:,} documents ({writer.tokens:,} tokens) are there from an interrupted prepare"
            )
            without_tokens = writer.read - sum(shard.documents for shard in writer.shards) // step
            for _ in islice(items, writer.read):
                pass
        for batch in batches(items, lambda: source.done, self._batch_characters(source)):
            found = encode(batch.items, self.tokenizer)
            writer.extend(found, len(batch.items))
            without_tokens += len(batch.items) - len(found) // step
            if self.shards and batch.done * self.shards >= source.total * (len(writer.shards) + 1):
                writer.end_shard()
            self.progress(batch.done, source.total, f"{source.unit} tokenized")
        writer.end_shard()
        writer.skipped = items.skipped
        if without_tokens > 0 and not source.is_stream:
            writer.skipped["documents without tokens"] = without_tokens
        if not writer.tokens and self.parts == 1:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in writer.skipped.items())
            where = f"data.path={self.data.path}" if self.data.path else f"data.source={self.data.source}"
            raise ValueError(f"{where}: there are no documents{f' ({reasons})' if reasons else ''}")

    def _batch_characters(self, source: Source) -> int:
        """Characters of a batch: less for small sources that are to be divided into many shards."""
        if self.shards and source.unit == "bytes":
            return max(1, min(BATCH_CHARACTERS, source.total // self.shards // 8))
        return BATCH_CHARACTERS


def _write_there(
    data: DataConfig,
    config: TokenizerConfig,
    definition: tuple[str, str],
    key: str,
    parts: int,
    folder: str,
    path: str,
    part: int,
) -> str:
    """Write one part in another process; returns the error of its source, or nothing.

    Args:
        data: the source.
        config: the tokenizer's configuration, for chat templates.
        definition: the tokenizer's JSON, and its name.
        key: the job's key, as the caller computed it.
        parts: number of parts.
        folder: working directory of the caller.
        path: folder of the store.
        part: number of the part.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
    try:
        os.chdir(folder)  # relative paths are those of the caller
        job = Job(data, config, Tokenizer(*definition), open_source(data, config), parts, 0, _silent, _silent)
        if job.key != key:
            return f"{data.path}: this machine sees other files, or other times of change, than the caller"
        job.write_part(Path(path), part)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


class KeptItems:
    """The items of a source in order, without duplicates if these are not wanted; iterated once.

    Of duplicates the first one remains. Of each item that remains, 16 bytes of BLAKE2b over its texts and targets are
    kept: about 100 bytes of memory. (Two of 10¹² different items share a hash with a probability of about 10⁻¹⁵.)

    Args:
        source: yields the documents; those of pairs one after the other.
        dedup: leave out duplicates.

    Raises:
        ValueError: duplicates of a stream, which is one document.
    """

    def __init__(self, source: Source, dedup: bool) -> None:
        if dedup and source.is_stream:
            raise ValueError(
                "data.dedup=true leaves out documents, and a stream is one: divide the text with data.documents,"
                " or set data.dedup=false"
            )
        self._source, self._dedup, self._duplicates = source, dedup, 0
        self._items = self._kept()

    def __iter__(self) -> Iterator[Item]:
        return self._items

    def _kept(self) -> Iterator[Item]:
        seen = set[bytes]()
        documents = iter(self._source)
        for item in (
            zip(documents, documents, strict=True) if self._source.pairs else zip(documents, strict=True)
        ):
            if self._dedup:
                digest = _digest(item)
                if digest in seen:
                    self._duplicates += 1
                    continue
                seen.add(digest)
            yield item

    @property
    def skipped(self) -> dict[str, int]:
        """Reason → number of entries that were left out so far."""
        return {**self._source.skipped, **({"duplicates": self._duplicates} if self._duplicates else {})}


def _digest(item: Item) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for document in item:
        digest.update(f"{document.ended} {document.closed} {len(document.parts)}".encode())
        for text, is_target, is_special in document.parts:
            raw = text.encode("utf-8", "surrogatepass")
            digest.update(f"\0{len(raw)} {is_target} {is_special}\0".encode())
            digest.update(raw)
    return digest.digest()


class Batch(NamedTuple):
    """Items that are tokenized at once, and how far their source was read."""

    items: list[Item]
    done: int


def batches(
    items: Iterable[Item], done: Callable[[], int], characters: int = BATCH_CHARACTERS
) -> Iterator[Batch]:
    """Items in batches of about `characters` characters, and of `BATCH_DOCUMENTS` items at most."""
    batch, size = list[Item](), 0
    for item in items:
        batch.append(item)
        size += sum(document.characters for document in item)
        if size >= characters or len(batch) >= BATCH_DOCUMENTS:
            yield Batch(batch, done())
            batch, size = [], 0
    if batch:
        yield Batch(batch, done())
