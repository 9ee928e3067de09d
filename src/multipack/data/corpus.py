"""From token stores to the documents that a run trains and validates on.

TokenStore ─▶ split ─▶ fit ─▶ Corpus(train, validation, …)      views: nothing is copied
  several  ─▶ split ─▶ fit ─▶ mix                               each store separately, then joined
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np

from multipack.atomic import cache_folder
from multipack.data.arriving import Arriving, GrowingFolder, StreamedRecords
from multipack.data.data_config import DataConfig
from multipack.data.documents import Documents
from multipack.data.mixture import Share, mix
from multipack.data.overlong import FitReport
from multipack.data.prepare import prepare
from multipack.data.sources import Source, open_dataset
from multipack.data.staging import stage, verify_once
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Progress, Tokenizer, TokenizerConfig, build_tokenizer, silent


@dataclass(frozen=True)
class Corpus:
    """The documents of a run.

    Attributes:
        train: documents to train on, none longer than the limit.
        validation: documents to validate on; empty if `data.validation` is 0.
        tokenizer: tokenizer of both.
        corpus_hash: identifies the content of the documents before they are split and fitted.
        description: one line for people.
        train_fit, validation_fit: what was done to documents that were too long.
        skipped: reason → number of entries that the source left out.
        prompts: a few short beginnings, from validation if there is any, for samples.
        store_path: folder of the token store; of a mixture, of the first one.
        mixture: share of each source of a mixture.
        sources: name and number of validation documents of each source of a mixture, in the order of `validation`.
        arriving: the documents to train on if they arrive during the run; `train` is empty then.
        staged: one line about copies made before training; empty = none.
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
    mixture: tuple[Share, ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    arriving: Arriving | None = None
    staged: str = ""

    @property
    def chat_template(self) -> str:
        """The template of its chats, as JSON; empty without chats."""
        return self.train.store.header.chat_template


def load_corpus(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    limit: int,
    progress: Progress = silent,
    reads: bool = True,
) -> Corpus:
    """The documents that a run trains and validates on; they are prepared first, if necessary.

    Every rank calls this. A prepared store is reused while its source's files have the same sizes and modification
    times; with `data.verify=full` one process of each host compares its content with its hashes.

    Args:
        data: the source, or token stores, and how documents are divided.
        tokenizer: the tokenizer; `auto` takes that of a store.
        limit: most tokens of a document: the capacity of a pack, or the model's context if that is less.
        progress: see `prepare`.
        reads: whether this process reads tokens; one that receives packs from others neither copies nor verifies.

    Raises:
        ValueError: see `prepare` and `TokenStore`; a store of another tokenizer; too few or too long documents.
    """
    data.check()
    tokenizer.check()
    if data.stream:
        return _load_stream(data, tokenizer, limit)
    if data.source in ("store", "mixture"):
        stores = [_open(path, tokenizer) for path in data.paths or [data.path]]
    else:
        stores = [TokenStore(prepare(data, tokenizer, progress=progress))]
    stores, staged = stage(stores, data.stage if reads else "", progress)
    if data.verify == "full" and reads:
        verify_once(stores, cache_folder(data.cache), progress)
    trains, validations, train_fits, validation_fits = zip(
        *(_divided(store, data, limit) for store in stores), strict=True
    )
    train, validation, shares = trains[0], validations[0], tuple[Share, ...]()
    description = stores[0].description
    if data.source == "mixture":
        train, validation, shares = _mixed(stores, trains, validations, data)
        shown = ", ".join(f"{share.name} {share.actual:.1%}" for share in shares)
        description = f"mixture by {data.weigh_by}: {shown}"
    store, train_fit = train.store, reduce(add, train_fits)
    if not len(train):
        raise ValueError(f"{store.path} has no documents to train on: {train_fit.describe()}")
    if not train.target_counts.any():
        raise ValueError(
            f"none of the {len(train):,} training documents of {store.path} has a target token, and nothing would be"
            f" learned: look at the answers, and at data.overlong={data.overlong}, which may cut them off"
            " (data.train_on_prompt=true makes all tokens targets)"
        )
    return Corpus(
        train=train,
        validation=validation,
        tokenizer=store.tokenizer,
        corpus_hash=store.checksum,
        description=description,
        train_fit=train_fit,
        validation_fit=reduce(add, validation_fits),
        skipped=store.skipped,
        prompts=_prompts(validation if len(validation) else train, store.tokenizer, limit),
        store_path=stores[0].path,
        mixture=shares,
        sources=tuple((share.name, len(held)) for share, held in zip(shares, validations, strict=False)),
        staged=staged,
    )


def find_tokenizer(
    data: DataConfig, tokenizer: TokenizerConfig, *, limit: int, progress: Progress = silent
) -> Tokenizer:
    """The tokenizer that `load_corpus` will have, before it tokenizes; one that must be trained is trained, and kept.

    Arguments and errors are those of `load_corpus`.
    """
    if data.stream:
        return _load_stream(data, tokenizer, limit).tokenizer
    if data.source in ("store", "mixture"):
        return _open((data.paths or [data.path])[0], tokenizer).tokenizer
    return build_tokenizer(tokenizer, Source(data, tokenizer), cache_folder(data.cache), progress)


def _divided(
    store: TokenStore, data: DataConfig, limit: int
) -> tuple[Documents, Documents, FitReport, FitReport]:
    """Training and validation documents of one store, none of them too long, and what was done to those that were."""
    whole, block = Documents.whole(store, data.train_on_prompt), data.block_size or limit
    if store.header.split_by == "document":
        if data.block_size:
            raise ValueError(
                f"data.block_size={data.block_size} cuts a stream, and {store.path} holds {len(whole):,} documents;"
                " data.overlong=split cuts those that are too long"
            )
        views = whole.split(data.validation, data.split_seed)
    else:
        if block > limit:
            raise ValueError(
                f"data.block_size={block:,} exceeds the limit of {limit:,} tokens for a document: lower it, or raise"
                " plan.capacity (and the model's context)"
            )
        train, validation = whole.split_by_position(data.validation)
        views = train.cut(block), validation.cut(block)
    (train, train_fit), (validation, validation_fit) = (
        view.fit(limit, data.overlong, data.overlap, data.repeat_prompt) for view in views
    )
    return train, validation, train_fit, validation_fit


def _mixed(
    stores: Sequence[TokenStore],
    trains: Sequence[Documents],
    validations: Sequence[Documents],
    data: DataConfig,
) -> tuple[Documents, Documents, tuple[Share, ...]]:
    """The mixture to train on, and all validation documents, as views of the joined stores."""
    paths = [store.path.absolute() for store in stores]
    names = [str(path.relative_to(os.path.commonpath(paths))) for path in paths]
    joined = TokenStore.joined(stores[0].path.parent, stores, names)
    first = np.cumsum([0, *(store.num_documents for store in stores[:-1])]).tolist()
    own = [view.within(joined, start) for view, start in zip(trains, first, strict=True)]
    train, shares = mix(own, names, data.weights, data.weigh_by, data.mixture_ends, data.split_seed)
    held = [view.within(joined, start) for view, start in zip(validations, first, strict=True)]
    return train, Documents.joined(held), shares


def _load_stream(data: DataConfig, tokenizer: TokenizerConfig, limit: int) -> Corpus:
    """The documents of a stream: those held back for validation, and an iterator over the others."""
    arriving: Arriving
    if data.source == "store":
        arriving = GrowingFolder(data, limit)
        _check_tokenizer(arriving.validation.store, tokenizer)
    else:
        arriving = StreamedRecords(data, limit, tokenizer, lambda: open_dataset(data))
    validation = arriving.validation
    return Corpus(
        train=validation.take([]),
        validation=validation,
        tokenizer=arriving.tokenizer,
        corpus_hash=arriving.fingerprint,
        description=f"{arriving.name}, documents as they arrive",
        train_fit=arriving.report,
        validation_fit=arriving.validation_fit,
        skipped=arriving.skipped,
        prompts=_prompts(validation, arriving.tokenizer, limit),
        store_path=arriving.validation.store.path,
        arriving=arriving,
    )


def _open(path: str, tokenizer: TokenizerConfig) -> TokenStore:
    store = TokenStore(Path(path).expanduser())
    _check_tokenizer(store, tokenizer)
    return store


def _check_tokenizer(store: TokenStore, config: TokenizerConfig) -> None:
    """Refuse a store of another tokenizer than the one that was asked for."""
    if config.kind == "auto":
        return
    same, wanted = config.name == store.header.tokenizer, config.name
    if config.kind == "file":
        given = Tokenizer.load(Path(config.path).expanduser(), config.name)
        same, wanted = given.hash == store.header.tokenizer_hash, f"{given.name} (hash {given.hash[:12]})"
    if not same:
        raise ValueError(
            f"{store.path} was tokenized with {store.header.tokenizer} (hash {store.header.tokenizer_hash[:12]}), but"
            f" the configuration asks for {wanted}: set tokenizer.kind=auto, or prepare the documents again"
        )


def _prompts(documents: Documents, tokenizer: Tokenizer, limit: int, count: int = 3) -> tuple[str, ...]:
    """Beginnings of the first documents that begin with text: short prompts whole, of others a few tokens."""
    few, prompts = 16 if tokenizer.vocabulary_size >= 1024 else 48, list[str]()
    for index in range(min(len(documents), 256)):
        document = documents.pair(index)[0] if documents.store.has_pairs else documents[index]
        size = documents.prompt_length(index)
        shown = size if 0 < size <= max(limit // 4, few) else few
        text = tokenizer.decode(document.tokens[:shown].tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
        if text:
            prompts.append(text)
        if len(prompts) == count:
            break
    return tuple(prompts)
