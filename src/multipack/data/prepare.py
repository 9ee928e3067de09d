"""From a source to a token store, and from a store to the documents that a run trains and validates on.

DataConfig ─▶ Source ─▶ Tokenizer ─▶ TokenStore ─▶ split ─▶ fit ─▶ Corpus(train, validation, …)
              └───── prepare: once, then reused ──┘└── load_corpus: views, nothing is copied ──┘
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from multipack.atomic import is_free
from multipack.data.cache import cache_folder, locked
from multipack.data.documents import Documents
from multipack.data.fit import FitPolicy, FitReport
from multipack.data.header import HEADER, VERSION
from multipack.data.sources import DataConfig, Source, SourceDocument, open_source
from multipack.data.store import StoreWriter, TokenStore
from multipack.data.tokenizer import Progress, Tokenizer, TokenizerConfig, build_tokenizer

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 4096
"""What is tokenized at once."""


@dataclass(frozen=True)
class Corpus:
    """What a run trains on.

    Attributes:
        train: documents to train on, none longer than the limit.
        validation: documents to validate on; empty when `data.validation` is 0.
        tokenizer: of both.
        corpus_hash: sha256 of the source's content and of how it was divided.
        description: one line for people.
        train_fit: what was done to training documents that were too long, and
        validation_fit: to those of validation.
        skipped: what the source left out: reason → how many.
        prompts: a few short beginnings, from validation where there is one, for samples.
        store_path: the token store behind all this.
    """

    train: Documents
    validation: Documents
    tokenizer: Tokenizer
    corpus_hash: str
    description: str
    train_fit: FitReport
    validation_fit: FitReport
    skipped: dict[str, int]
    prompts: tuple[str, ...]
    store_path: Path


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
        characters += sum(len(text) for text, _ in document.parts)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batch: list[SourceDocument], tokenizer: Tokenizer) -> list[list[tuple[list[int], bool]]]:
    texts = [text for document in batch for text, _ in document.parts]
    try:
        encoded = iter(tokenizer.encode_batch(texts))
    except ValueError:
        for document in batch:  # which one was it?
            for text, _ in document.parts:
                try:
                    tokenizer.encode(text)
                except ValueError as error:
                    raise ValueError(f"{document.name}: {error}") from error
        raise
    return [[(next(encoded), is_target) for _, is_target in document.parts] for document in batch]


def load_corpus(
    data: DataConfig, tokenizer: TokenizerConfig, *, limit: int, progress: Progress | None = None
) -> Corpus:
    """The documents that a run trains and validates on; prepared first, where they are not yet.

    Args:
        data: the source, or a token store, and what becomes of it.
        tokenizer: the tokenizer; `auto` takes a store's own.
        limit: most tokens of a document: a pack's capacity or the model's context, whichever is less.
        progress: see `prepare`.

    Raises:
        ValueError: see `prepare` and `TokenStore`; a store of another tokenizer; too few documents or tokens
            to validate on; documents that are too long, unless `data.overlong` says what becomes of them.
    """
    data.check()
    tokenizer.check()
    if data.source == "store":
        store = TokenStore(Path(data.path).expanduser())
        if data.verify:
            store.verify(progress)
        _check_tokenizer(store, tokenizer)
    else:
        store = TokenStore(prepare(data, tokenizer, progress=progress))
    train, validation = _split(Documents.whole(store, data.train_on_prompt), data, limit)
    policy: FitPolicy = store.overlong if data.overlong == "auto" else data.overlong
    train, train_fit = train.fit(limit, policy)
    validation, validation_fit = validation.fit(limit, policy)
    return Corpus(
        train=train,
        validation=validation,
        tokenizer=store.tokenizer,
        corpus_hash=store.header.source_hash,
        description=store.header.description,
        train_fit=train_fit,
        validation_fit=validation_fit,
        skipped=store.header.skipped,
        prompts=_prompts(validation if len(validation) else train, store.tokenizer, limit),
        store_path=store.path,
    )


def _check_tokenizer(store: TokenStore, config: TokenizerConfig) -> None:
    if config.kind == "auto":
        return
    if config.kind == "file":
        asked = Tokenizer.load(Path(config.path).expanduser(), config.name)
        same, wanted = asked.hash == store.header.tokenizer_hash, f"{asked.name} (hash {asked.hash[:12]})"
    else:
        same, wanted = config.name == store.header.tokenizer, config.name
    if not same:
        raise ValueError(
            f"{store.path} was tokenized with {store.header.tokenizer} "
            f"(hash {store.header.tokenizer_hash[:12]}), but the configuration asks for {wanted}: "
            "set tokenizer.kind=auto to take the store's own, or prepare the documents again"
        )


def _split(whole: Documents, data: DataConfig, limit: int) -> tuple[Documents, Documents]:
    if whole.store.header.split_by == "position":
        return _split_stream(whole, data, limit)
    if data.block_size:
        raise ValueError(
            f"data.block_size={data.block_size} cuts a stream, and {data.path} holds "
            f"{len(whole):,} documents; data.overlong=split cuts those that are too long"
        )
    if data.validation and len(whole) < 2:
        raise ValueError(
            f"data.validation={data.validation}: {len(whole)} document ({whole.names(0)}) cannot be split in "
            "two; set data.validation=0 (and train.eval_every=0), add documents, or divide a text with data.documents"
        )
    return whole.split(data.validation, data.split_seed)


def _split_stream(whole: Documents, data: DataConfig, limit: int) -> tuple[Documents, Documents]:
    block = data.block_size or limit
    if block > limit:
        raise ValueError(
            f"data.block_size={block:,} exceeds the limit of {limit:,} tokens for a document: raise "
            f"plan.capacity (and the model's context), or set data.block_size={limit}"
        )
    train, validation = whole, whole.take([])
    if data.validation:
        train, validation = whole.split_by_position(data.validation)
        if min(train.num_tokens, validation.num_tokens) < 2:
            raise ValueError(
                f"data.validation={data.validation} of a stream of {whole.num_tokens:,} tokens leaves "
                f"{train.num_tokens:,} to train and {validation.num_tokens:,} to validate on: each needs 2"
            )
    return train.cut(block), validation.cut(block)


def _prompts(documents: Documents, tokenizer: Tokenizer, limit: int, count: int = 3) -> tuple[str, ...]:
    """Beginnings of the first documents: their prompts, where these are short, or else a few tokens.

    There is at least one, unless no document begins with text.
    """
    few = 16 if tokenizer.vocabulary_size >= 1024 else 48
    most = max(limit // 4, few)
    short: list[str] = []
    cut: list[str] = []  # of long prompts: for want of better
    for index in range(min(len(documents), 256)):
        tokens = documents[index].tokens
        size = documents.prompt_length(index) or min(few, len(tokens))
        text = tokenizer.decode(tokens[: size if size <= most else few].tolist())
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if text:
            (short if size <= most else cut).append(text)
        if len(short) == count:
            break
    return tuple((short or cut)[:count])
