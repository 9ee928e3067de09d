"""From a source to a token store, once; then it is reused.

DataConfig ─▶ Source ─▶ Tokenizer ─▶ TokenStore
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from multipack.atomic import is_free
from multipack.data.cache import cache_folder, locked
from multipack.data.config import DataConfig
from multipack.data.header import HEADER, VERSION
from multipack.data.source import Source, SourceDocument
from multipack.data.sources import open_source
from multipack.data.store import StoreWriter, TokenStore
from multipack.data.tokenizer import Progress, Tokenizer, TokenizerConfig, build_tokenizer

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 4096
"""What is tokenized at once."""


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    out: Path | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Path:
    """Tokenize a source into a token store, or find the store that an earlier call made of the same.

    One process works while others that want the same store wait for it. A process that is killed leaves
    nothing that loads.

    Args:
        data: the source.
        tokenizer: the tokenizer; trained on the source, if need be.
        out: the store's folder; None = in the cache.
        progress: told how far it is, with a unit for each stretch of the work.
        overwrite: put the new store in the place of another store at `out` (never of another folder).

    Returns:
        The store's folder.

    Raises:
        ValueError: a source that is impossible, malformed or empty; `out` holds something else.
    """
    tokenizer.check()
    source = open_source(data)
    cache = cache_folder(data.cache)
    if out is not None:
        _refuse_foreign(out)  # now, before the work
    made = build_tokenizer(tokenizer, source, cache, progress)
    key = hashlib.sha256(f"{VERSION} {source.hash} {made.hash}".encode()).hexdigest()[:32]
    path = out if out is not None else cache / "stores" / key
    if _holds(path, source, made, data.verify):
        return path
    place = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    with locked(cache / "stores" / f"{place}.lock"):
        if _holds(path, source, made, data.verify):  # another process was faster
            return path
        _refuse_foreign(path)
        exists = not is_free(path)
        if exists and out is not None and not overwrite:
            raise ValueError(
                f"{path} holds a token store of other documents or of another tokenizer; "
                "remove it or choose another folder"
            )
        _tokenize(source, made, path, exists, progress)
    return path


def _refuse_foreign(path: Path) -> None:
    if not is_free(path) and not (path / HEADER).is_file():
        raise ValueError(f"{path} exists and is not a token store; choose another folder for the store")


def _holds(path: Path, source: Source, tokenizer: Tokenizer, verify: bool) -> bool:
    """Whether an undamaged store of this source and tokenizer is at `path`."""
    try:
        store = TokenStore(path)
        if verify:
            store.verify()
    except ValueError:
        return False
    return (store.header.source_hash, store.header.tokenizer_hash) == (source.hash, tokenizer.hash)


def _tokenize(
    source: Source, tokenizer: Tokenizer, path: Path, replace: bool, progress: Progress | None
) -> None:
    with StoreWriter(
        path,
        tokenizer,
        source_hash=source.hash,
        split_by="position" if source.is_stream else "document",
        overlong=source.overlong,
        replace=replace,
    ) as writer:
        without_tokens, tokens = 0, 0
        for batch in _batches(source):
            for document, parts in zip(batch, _encode(batch, tokenizer), strict=True):
                count = sum(len(ids) for ids, _ in parts)
                if count == 0:
                    without_tokens += 1
                    continue
                if document.ended and tokenizer.end_id is not None:
                    parts.append(([tokenizer.end_id], True))
                writer.add(document.name, parts, continues=source.is_stream)
                tokens += count
            if progress is not None:
                progress(source.done, source.total, f"{source.unit} tokenized")
        skipped = dict(source.skipped)
        if without_tokens:
            skipped["documents without tokens"] = without_tokens
        if tokens == 0:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
            raise ValueError(f"the source has no documents{f' ({reasons})' if reasons else ''}")
        if source.is_stream:
            writer.end_document(document.name)
        writer.description = source.describe(writer.documents)
        writer.skipped = skipped


def _batches(source: Source) -> Iterator[list[SourceDocument]]:
    batch, characters = list[SourceDocument](), 0
    for document in source:
        batch.append(document)
        characters += sum(len(text) for text, *_ in document.parts)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batch: list[SourceDocument], tokenizer: Tokenizer) -> list[list[tuple[list[int], bool]]]:
    texts = [text for document in batch for text, *_ in document.parts]
    try:
        encoded = iter(tokenizer.encode_batch(texts))
    except ValueError:
        for document in batch:  # which one was it?
            for text, *_ in document.parts:
                try:
                    tokenizer.encode(text)
                except ValueError as error:
                    raise ValueError(f"{document.name}: {error}") from error
        raise
    return [[(next(encoded), is_target) for _, is_target, *_ in document.parts] for document in batch]
