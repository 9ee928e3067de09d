"""`prepare`: tokenize a source into a token store, or reuse the store that an earlier call made.

    DataConfig ─▶ Source ─▶ items ─▶ batches ─▶ StoreWriter ─▶ shards

A source is read once, and once before to train its tokenizer if necessary. After an interruption the same call
continues after the finished shards, with the same result. A source of several files can be prepared in parts, by any
scheduler: each part writes its own shards, and the part that finishes last completes the store.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

import tokenizers

from multipack.atomic import cache_folder, is_free, locked
from multipack.data.stores.shards import HEADER, StoreHeader
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import StoreWriter, remove_store
from multipack.data.text.data_config import RECORDS, DataConfig
from multipack.data.text.skipped import counted
from multipack.data.text.sources import Source
from multipack.data.text.texts import Item
from multipack.data.text.tokenizer import Progress, Tokenizer, TokenizerConfig, build_tokenizer, silent
from multipack.planning.options import check_choice

VERSION = 4
"""Version of how documents become tokens: stores of other versions are not reused."""
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 4096
"""Size of the batches that are tokenized at once."""
EngineName = Literal["local", "ray"]
_DATE = re.compile(r" of (\d{4}-\d{2}-\d{2})\)$")
"""The date of a template at the end of a store's description."""


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    out: Path | None = None,
    progress: Progress = silent,
    *,
    engine: EngineName = "local",
    shards: int = 0,
    part: str = "1/1",
    report: Callable[[str], None] = silent,
) -> Path:
    """Tokenize a source into a token store, or find the store that an earlier call made of the same source.

    While one process prepares a store, other processes that need the same store wait for it.

    Args:
        data: the source.
        tokenizer: the tokenizer; trained on the source, if its kind requires it.
        out: folder of the store; None = in the cache.
        progress: called with (done, total, unit) during the work.
        engine: `local`, or `ray`: parts of the source as tasks of a Ray cluster.
        shards: approximate number of shards, each of at most `SHARD_TOKENS` tokens; 0 = as few as that allows.
        part: `i/n`: tokenize part i of n; all n parts are written to the same folder.
        report: called with a line of text if finished shards or parts are reused.

    Returns:
        The folder of the store.

    Raises:
        ImportError: a package that the source, the tokenizer or the engine needs is not installed.
        ValueError: the settings contradict each other, the source is malformed or empty or a stream, or `out` holds
            other files.
    """
    tokenizer.check()
    if data.stream:
        raise ValueError(
            "data.stream=true is for training while records arrive; leave it out to prepare a store"
        )
    check_choice("--engine", engine, EngineName)
    number, parts = _check_options(data, engine, shards, part, out)
    data = _dated(data, out)
    source = Source(data, tokenizer)
    cache = cache_folder(data.cache)
    if out is not None and not (is_free(out, leftovers=True) or (out / HEADER).is_file()):  # before the work
        raise ValueError(f"{out} exists and is not a token store; choose another folder for the store")
    built = build_tokenizer(tokenizer, source, cache, progress)
    key = _job_key(data, source, built)
    path = out if out is not None else cache / "stores" / key
    job = hashlib.sha256(f"{path.absolute()} {part}".encode()).hexdigest()[:32]
    with locked(cache / "stores" / f"{job}.lock"), _alone(out, part, report):
        if _is_complete(path, key):  # another process may have been faster
            return path
        if engine == "ray":
            from multipack.data.stores.ray_engine import count_parts, run_parts

            parts = count_parts(source.total, len(source.files))
        begun = StoreHeader.find(path)
        if out is None and (begun is None or begun.parts != parts):
            remove_store(path)  # damaged, of another version, or divided otherwise
        if engine == "local":
            _write_part(path, source, built, key, number - 1, parts, shards, progress, report)
            return path
        run_parts(_part_writer(path, data, tokenizer, built, key, parts), parts, progress)
        if not _is_complete(path, key):
            raise ValueError(f"{path}: parts are missing; every machine of the cluster must see this folder")
    return path


def _dated(data: DataConfig, out: Path | None) -> DataConfig:
    """The settings with the date of templates: the date of the store at `out` if one was begun, else today.

    Raises:
        ValueError: the settings have another date than the store.
    """
    header = None if out is None else StoreHeader.find(out)
    saved = None if header is None else _DATE.search(header.description)
    if saved is None or data.source not in RECORDS:
        return data.dated()
    if data.template_date not in ("", saved[1]):
        raise ValueError(
            f"{out} was prepared with data.template_date={saved[1]}, not {data.template_date}: leave it out, or choose"
            " another folder"
        )
    return replace(data, template_date=saved[1])


@contextmanager
def _alone(out: Path | None, part: str, report: Callable[[str], None]) -> Iterator[None]:
    """Context in which no other process writes this part of the store `out`, whatever its cache."""
    if out is None:
        yield
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        name = f".{out.name}.{part.replace('/', '-of-')}.lock"
        try:
            stack.enter_context(locked(out.absolute().with_name(name), temporary=True))
        except (ValueError, PermissionError) as error:  # no locks, or another user's that cannot be read
            report(f"note: no lock keeps other processes from {out} meanwhile: {error}")
        yield


def _check_options(
    data: DataConfig, engine: str, shards: int, part: str, out: Path | None
) -> tuple[int, int]:
    """Check options against each other; returns the number of the part, from 1, and the number of parts."""
    is_part = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", part)
    number, parts = (int(digits) for digits in is_part.groups()) if is_part else (0, 0)
    is_divided, is_stream = parts > 1 or engine == "ray", data.source == "text" and data.division == "stream"
    given = "--engine ray" if engine == "ray" else "--part"
    for is_wrong, message in (
        (not 1 <= number <= parts, f"--part {part}: i/n, part i of n, such as 1/16 to 16/16"),
        (shards < 0, f"--shards {shards}: at least 1 (or 0: by the number of tokens)"),
        (is_divided and shards > 0, f"{given}: each part has its own shards; leave --shards {shards} out"),
        (is_divided and data.dedup, f"{given}: data.dedup=true finds duplicates within one process only"),
        (is_stream and is_divided, f"{given} divides documents, and a stream is one: set data.documents"),
        (is_stream and data.dedup, "data.dedup=true: a stream is one document; divide it by data.documents"),
        (engine == "ray" and parts > 1, "--engine ray runs all parts: leave --part out"),
        (parts > 1 and out is None, "--part needs the folder of the store: name it with --store"),
    ):
        if is_wrong:
            raise ValueError(message)
    return number, parts


def _job_key(data: DataConfig, source: Source, tokenizer: Tokenizer) -> str:
    """Hash of versions, source (names, sizes and modification times of its files), settings and tokenizer."""
    versions = f"{VERSION} tokenizers {tokenizers.__version__}"
    recipe = f"{versions} {source.identity} dedup {data.dedup} {tokenizer.hash}"
    return hashlib.sha256(recipe.encode()).hexdigest()[:32]


def _is_complete(path: Path, key: str) -> bool:
    """Whether the complete store of this job is at `path`."""
    try:
        return TokenStore(path).header.key == key
    except ValueError:
        return False


def _write_part(
    path: Path,
    source: Source,
    tokenizer: Tokenizer,
    key: str,
    part: int,
    parts: int,
    shards: int = 0,
    progress: Progress = silent,
    report: Callable[[str], None] = silent,
) -> None:
    """Write part `part` (from 0) of a store, continuing after its finished shards; the last one completes the store."""
    source = source.part(part, parts)
    with StoreWriter(
        path,
        tokenizer,
        part=part,
        key=key,
        split_by="position" if source.is_stream else "document",
        overlong=source.overlong,
        **source.find_form().header,
        parts=parts,
        description=source.describe(),
    ) as writer:
        if writer.is_finished:
            report(f"part {part + 1} of {parts} is already finished")
            return
        if writer.read:
            tokens = sum(shard.tokens for shard in writer.shards)
            report(
                f"{counted(writer.read, 'documents')} ({tokens:,} tokens) kept from an interrupted prepare"
            )
        items, characters = items_of(source), BATCH_CHARACTERS
        if shards and source.unit == "bytes":  # a small source has small batches, for as many shards
            characters = max(1, min(characters, source.total // shards // 8))
        read = sum(1 for _ in islice(items, writer.read))
        for batch in batches(items, characters):
            writer.add_batch(batch)
            read += len(batch)
            # Shard i of `shards` ends when i / shards of the source is read; the last one ends with the writer.
            if source.total * (len(writer.shards) + 1) <= source.done * shards < source.total * shards:
                writer.end_shard()
            progress(source.done, source.total, f"{source.unit} tokenized")
        kept = writer.num_documents // writer.header.item_size
        writer.noted = source.noted
        if read > kept and not source.is_stream:
            writer.noted.skipped["documents without tokens"] = read - kept
        if not kept and parts == 1:
            data = source.config
            reasons = ", ".join(writer.noted.lines())
            reasons += f"; the first: {source.fault}" if source.fault else ""
            where = f"data.path={data.path}" if data.path else f"data.source={data.source}"
            raise ValueError(f"{where}: there are no documents{f' ({reasons})' if reasons else ''}")


def _part_writer(
    path: Path, data: DataConfig, config: TokenizerConfig, tokenizer: Tokenizer, key: str, parts: int
) -> Callable[[int], str]:
    """A function that writes a part of a store in another process, and returns the error of its source, or nothing."""
    definition, folder = (tokenizer.to_json(), tokenizer.name), os.getcwd()

    def write(part: int) -> str:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
        try:
            os.chdir(folder)  # relative paths are relative to the caller's folder
            source, loaded = Source(data, config), Tokenizer(*definition)
            if _job_key(data, source, loaded) != key:
                return f"{data.path}: this machine has other files or another version of tokenizers than the caller"
            _write_part(path, source, loaded, key, part, parts)
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    return write


def items_of(source: Source) -> Iterator[Item]:
    """The documents, or preference pairs, of a source in order; with `data.dedup` without duplicates.

    The first of several duplicates remains, and `source.noted` counts the others. Items are compared by 16 bytes of
    BLAKE2b over their texts and targets. (Two of 10¹² different items share a hash with a probability of about 10⁻¹⁵.)
    """
    if not source.config.dedup:
        yield from source.items()
        return
    import sqlite3

    form = source.find_form()
    with closing(sqlite3.connect("")) as seen:  # a temporary file: items that remain take no memory
        seen.execute("PRAGMA cache_size = -65536")  # KiB: 4 million items before the file is read and written
        seen.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        for item in source.items():
            own = item[:1] if form.label else item  # the second answer is another record's
            content = [(document.parts, document.takes_end) for document in own]
            digest = hashlib.blake2b(repr(content).encode(), digest_size=16).digest()
            try:
                is_new = seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", [digest]).rowcount
            except sqlite3.Error as error:
                raise OSError(
                    f"data.dedup=true: {error}: make room in the folder of temporary files, or set TMPDIR"
                ) from error
            if is_new:
                yield item
            else:
                source.noted.skip("duplicates", item[0].name)


def batches(items: Iterable[Item], characters: int = BATCH_CHARACTERS) -> Iterator[list[Item]]:
    """Items in batches of about `characters` characters, and of `BATCH_DOCUMENTS` items at most."""
    batch, size = list[Item](), 0
    for item in items:
        batch.append(item)
        for document in item:
            for part in document.parts:
                size += len(part.text)
        if size >= characters or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
