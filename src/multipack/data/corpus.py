"""From a token store to the documents that a run trains and validates on.

TokenStore ─▶ split ─▶ fit ─▶ Corpus(train, validation, …)      views: nothing is copied
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from multipack.data.config import DataConfig
from multipack.data.documents import Documents
from multipack.data.fit import FitPolicy, FitReport
from multipack.data.prepare import prepare
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Progress, Tokenizer, TokenizerConfig


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
