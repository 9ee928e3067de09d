"""From a source to a token store, or to a folder of them, once; then it is reused.

    DataConfig ─▶ Source ─▶ batches ─▶ engine ─▶ blocks ─▶ TokenStore
                                                   └─▶ parts, for whoever is interrupted

Whatever tokenizes, and however often it was interrupted: the bytes of the store are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import tokenizers

from multipack.atomic import is_free
from multipack.data.batches import Engine, KeptDocuments, batches
from multipack.data.cache import cache_folder, locked
from multipack.data.data_config import DataConfig, check_choice
from multipack.data.header import HEADER, StoreHeader
from multipack.data.parts import Parts, folder_of_parts
from multipack.data.shards import MOST_SHARDS, ShardsHeader, is_shards, only_shards, shard_name
from multipack.data.source_document import SourceDocument
from multipack.data.sources import Source, open_source
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Progress, Tokenizer, TokenizerConfig, build_tokenizer
from multipack.data.workers import LocalEngine
from multipack.data.writer import StoreWriter

RECIPE = 1
"""Version of what makes tokens of documents: stores and parts of other versions are not reused."""
EngineName = Literal["local", "ray"]
Tell = Callable[[str], None]


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    out: Path | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    *,
    engine: EngineName = "local",
    shards: int = 0,
    tell: Tell | None = None,
) -> Path:
    """Tokenize a source into a token store, or find the store that an earlier call made of the same.

    One process works while others that want the same store wait for it. A process that is killed leaves
    nothing that loads, but for finished shards; the next one takes over the parts that it had finished.

    Args:
        data: the source.
        tokenizer: the tokenizer; trained on the source, if need be.
        out: the store's folder; None = in the cache.
        progress: told how far it is, with a unit for each stretch of the work.
        overwrite: put the new store in the place of another store at `out` (never of another folder).
        engine: what tokenizes: this machine, or a Ray cluster.
        shards: write a folder of so many stores, each with a contiguous range of the documents; 0 = one store.
        tell: told in a sentence what is taken over from an earlier call.

    Returns:
        The folder of the store or of the shards.

    Raises:
        ValueError: a source that is impossible, malformed or empty; `out` holds something else; the engine is not
            installed.
        ChildProcessError: a process that tokenizes was killed.
    """
    tokenizer.check()
    check_choice("--engine", engine, get_args(EngineName))
    if shards and out is None:
        raise ValueError(f"--shards {shards} needs a folder: name it with --store")
    if not 0 <= shards <= MOST_SHARDS:
        raise ValueError(f"--shards {shards}: at least 1 (or 0: one store), and at most {MOST_SHARDS:,}")
    source = open_source(data, tokenizer)
    if shards and source.is_stream:
        raise ValueError(
            f"--shards {shards} divides documents, and a stream is one: divide the text with data.documents"
        )
    cache = cache_folder(data.cache)
    if out is not None:
        _refuse_foreign(out, shards)  # now, before the work
    made = build_tokenizer(tokenizer, source, cache, progress)
    work = _Work(source, made, data, engine, progress or _silent, tell or _silent)
    path = out if out is not None else cache / "stores" / work.key
    if work.holds(path, shards) and not folder_of_parts(path).exists():
        return path
    place = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    with locked(cache / "stores" / f"{place}.lock"):
        if work.holds(path, shards):  # another process was faster
            work.open_parts(path, work.corpus_hash).remove()
            return path
        _refuse_foreign(path, shards)
        if shards:
            work.write_shards(path, shards)
        else:
            exists = not is_free(path)
            if exists and out is not None and not overwrite:
                raise ValueError(
                    f"{path} holds a token store of other documents or of another tokenizer; "
                    "remove it or choose another folder"
                )
            work.write_store(path, exists)
    return path


def _silent(*_: object) -> None:
    pass


def _refuse_foreign(path: Path, shards: int) -> None:
    if is_free(path) or (path / HEADER).is_file() or (shards and only_shards(path)):
        return
    if is_shards(path):
        raise ValueError(
            f"{path} is a folder of shards that is not complete: go on with --shards, or remove it"
        )
    raise ValueError(f"{path} exists and is not a token store; choose another folder for the store")


@dataclass
class _Work:
    """One call of `prepare`, once it is known what it has to do."""

    source: Source
    tokenizer: Tokenizer
    data: DataConfig
    engine: EngineName
    progress: Progress
    tell: Tell

    @property
    def corpus_hash(self) -> str:
        """Hash of the documents: of the source, and of whether duplicates are left out."""
        hashed = self.source.identity
        return hashlib.sha256(f"{hashed} dedup 1".encode()).hexdigest() if self.data.dedup else hashed

    @property
    def key(self) -> str:
        """Names the store of these documents and this tokenizer."""
        recipe = f"{RECIPE} {self.corpus_hash} {self.tokenizer.hash}"
        return hashlib.sha256(recipe.encode()).hexdigest()[:32]

    def shard_hash(self, number: int, shards: int) -> str:
        """Hash of the documents of a shard."""
        return hashlib.sha256(f"{self.corpus_hash} shard {number} of {shards}".encode()).hexdigest()

    def holds(self, path: Path, shards: int) -> bool:
        """Whether what shall be made is at `path`, undamaged."""
        return self.holds_shards(path, shards) if shards else self.holds_store(path)

    def holds_store(self, path: Path, corpus_hash: str = "") -> bool:
        """Whether an undamaged store of these documents and this tokenizer is at `path`."""
        try:
            store = TokenStore(path)
            if self.data.verify:
                store.verify()
        except ValueError:
            return False
        wanted = (corpus_hash or self.corpus_hash, self.tokenizer.hash)
        return (store.header.source_hash, store.header.tokenizer_hash) == wanted

    def holds_shards(self, path: Path, shards: int) -> bool:
        """Whether a complete folder of so many undamaged shards of these documents and this tokenizer is at `path`."""
        try:
            header = ShardsHeader.read(path)
        except ValueError:
            return False
        found = header.source_hash, header.tokenizer_hash, len(header.shards)
        if found != (self.corpus_hash, self.tokenizer.hash, shards):
            return False
        return all(
            self.holds_store(path / entry["name"], self.shard_hash(number, shards))
            for number, entry in enumerate(header.shards)
        )

    def open_engine(self) -> Engine:
        """What tokenizes; its processes are started when there is enough to do."""
        if self.engine == "ray":
            from multipack.data.ray_engine import RayEngine

            return RayEngine(self.tokenizer)
        return LocalEngine(self.tokenizer, self.data.workers)

    def open_writer(self, path: Path, corpus_hash: str, replace: bool = False) -> StoreWriter:
        """A store's writer."""
        return StoreWriter(
            path,
            self.tokenizer,
            source_hash=corpus_hash,
            split_by="position" if self.source.is_stream else "document",
            overlong=self.source.overlong,
            replace=replace,
            chat_template=self.source.chat_template,
        )

    def open_parts(self, path: Path, corpus_hash: str) -> Parts:
        """Finished parts of the store at `path`."""
        recipe = f"{RECIPE} {corpus_hash} {self.tokenizer.hash} tokenizers {tokenizers.__version__}"
        return Parts(path, hashlib.sha256(recipe.encode()).hexdigest())

    def write_store(self, path: Path, replace: bool) -> None:
        """Write one store.

        Raises:
            ValueError: the source is malformed or empty.
        """
        parts = self.open_parts(path, self.corpus_hash)
        with closing(self.open_engine()) as engine, _no_parts_of_bad_input(parts):
            documents = KeptDocuments(engine.reads(self.source), self.data.dedup)
            with self.open_writer(path, self.corpus_hash, replace) as writer:
                left_out = self._fill(writer, documents, parts, engine)
                writer.skipped = _counted(documents.skipped, left_out)
                if not writer.tokens:
                    raise ValueError(self._no_documents(writer.skipped))
                if self.source.is_stream:
                    writer.end_document(documents.last_name)
                writer.description = self.source.describe(writer.documents)
        parts.remove()

    def _fill(
        self, writer: StoreWriter, documents: Iterator[SourceDocument], parts: Parts, engine: Engine
    ) -> int:
        """Write documents to a store, those of finished parts first; returns how many have no tokens."""
        read, left_out = 0, 0
        for block in parts.finished():
            writer.extend(block, self.source.is_stream)
            read, left_out = read + block.documents_read, left_out + block.num_left_out
        if read:
            self.tell(
                f"{read:,} documents ({writer.tokens:,} tokens) are taken over from an interrupted prepare"
            )
            for _ in islice(documents, read):
                pass
        for batch, block in engine.encode(batches(documents, lambda: self.source.done)):
            writer.extend(block, self.source.is_stream)
            parts.add(block)
            left_out += block.num_left_out
            self.progress(batch.done, self.source.total, f"{self.source.unit} tokenized")
        return left_out

    def write_shards(self, path: Path, shards: int) -> None:
        """Write a folder of shards; those that are there already stay.

        The documents are counted first, so that each shard has as many; what is wrong with the source is found then.

        Raises:
            ValueError: the source is malformed, or has fewer documents than there shall be shards; something else is
                at `path`.
        """
        if (path / HEADER).exists():
            raise ValueError(
                f"{path} holds other documents, another tokenizer or another number of shards;"
                " remove it or choose another folder"
            )
        with closing(self.open_engine()) as engine:
            total = self._count(engine)
            if not shards <= total:
                raise ValueError(f"--shards {shards} of {total:,} documents: at most one shard a document")
            path.mkdir(parents=True, exist_ok=True)
            documents, left_out = KeptDocuments(engine.reads(self.source), self.data.dedup), 0
            for number in range(shards):
                count = total * (number + 1) // shards - total * number // shards
                left_out += self._shard(path, number, shards, documents, count, engine)
        headers = [StoreHeader.read(path / shard_name(number)) for number in range(shards)]
        if not sum(header.tokens for header in headers):
            raise ValueError(self._no_documents(_counted(documents.skipped, left_out)))
        ShardsHeader(
            shards=[_entry(number, header) for number, header in enumerate(headers)],
            documents=sum(header.documents for header in headers),
            tokens=sum(header.tokens for header in headers),
            source_hash=self.corpus_hash,
            tokenizer_hash=self.tokenizer.hash,
            description=self.source.describe(sum(header.documents for header in headers)),
            skipped=_counted(documents.skipped, left_out),
        ).write(path)

    def _count(self, engine: Engine) -> int:
        """Documents that are kept."""
        count, source = 0, engine.reads(self.source, tokenizes=False)
        for batch in batches(KeptDocuments(source, self.data.dedup), lambda: source.done):
            count += len(batch.documents)
            self.progress(batch.done, self.source.total, f"{self.source.unit} read to count documents")
        return count

    def _shard(
        self, path: Path, number: int, shards: int, documents: KeptDocuments, count: int, engine: Engine
    ) -> int:
        """Write one shard, or find it; returns how many of its documents have no tokens."""
        place, corpus_hash = path / shard_name(number), self.shard_hash(number, shards)
        before, mine, is_last = documents.skipped, islice(documents, count), number == shards - 1
        if self.holds_store(place, corpus_hash):
            self.tell(f"{place.name} is there already")
            self.open_parts(place, corpus_hash).remove()  # a kill may have come between the two
            left_out = StoreHeader.read(place).skipped.get(_WITHOUT_TOKENS, 0)
            for _ in mine:
                pass
            if is_last:
                _expect_end(documents)  # and count what was left out after the last document
        else:
            if not is_free(place):
                raise ValueError(f"{place} holds other documents; remove {path} or choose another folder")
            parts = self.open_parts(place, corpus_hash)
            with _no_parts_of_bad_input(parts), self.open_writer(place, corpus_hash) as writer:
                left_out = self._fill(writer, mine, parts, engine)
                if is_last:
                    _expect_end(documents)
                skipped = {
                    reason: found - before.get(reason, 0) for reason, found in documents.skipped.items()
                }
                writer.skipped = _counted({reason: n for reason, n in skipped.items() if n}, left_out)
                writer.description = (
                    f"{self.source.describe(writer.documents)}, shard {number + 1} of {shards}"
                )
            parts.remove()
        return left_out

    def _no_documents(self, skipped: dict[str, int]) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
        where = f"data.path={self.data.path}" if self.data.path else f"data.source={self.data.source}"
        return f"{where}: there are no documents{f' ({reasons})' if reasons else ''}"


_WITHOUT_TOKENS = "documents without tokens"


def _expect_end(documents: KeptDocuments) -> None:
    if next(documents, None) is not None:
        raise ValueError("the source has more documents than were counted: it has changed meanwhile")


def _counted(skipped: dict[str, int], left_out: int) -> dict[str, int]:
    return {**skipped, **({_WITHOUT_TOKENS: left_out} if left_out else {})}


def _entry(number: int, header: StoreHeader) -> dict[str, Any]:
    return {
        "name": shard_name(number),
        "checksum": header.checksum,
        "documents": header.documents,
        "tokens": header.tokens,
    }


@contextmanager
def _no_parts_of_bad_input(parts: Parts) -> Iterator[None]:
    """Parts are for whoever starts again; the same bad input would fail again, and mended input is other input."""
    try:
        yield
    except ValueError:
        parts.remove()
        raise
