"""From token stores to the documents that a run trains and validates on.

TokenStore ─▶ split ─▶ fit ─▶ Corpus(train, validation, …)      views: nothing is copied
  several  ─▶ split ─▶ fit ─▶ mix                               each store separately, then joined
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from multipack.atomic import cache_folder
from multipack.data.stores.prepare import prepare
from multipack.data.stores.shards import HEADER
from multipack.data.stores.store import TokenStore
from multipack.data.text.data_config import ITEM_NAMES, RECORDS, DataConfig
from multipack.data.text.sources import open_dataset
from multipack.data.text.tokenizer import Progress, Tokenizer, TokenizerConfig, silent
from multipack.data.views.documents import Documents
from multipack.data.views.overlong import FitReport
from multipack.planning.lengths import nothing_learned

if TYPE_CHECKING:
    from multipack.data.views.arriving import Arriving
    from multipack.data.views.mixture import Share


@dataclass(frozen=True)
class Corpus:
    """The documents of a run."""

    train: Documents  # documents to train on, none longer than the limit
    validation: Documents  # documents to validate on; empty if `data.validation` is 0
    description: str  # one line for people
    # reports on documents that were too long
    train_fit: FitReport
    validation_fit: FitReport
    # a line for each reason for which the source left out entries, with their number and the first names
    skipped: list[str]
    store_path: Path  # folder of the token store; of a mixture, of the first one
    mixture: tuple[Share, ...] = ()  # share of each source of a mixture
    # name and number of documents of each set of validation documents, or of each source of a mixture, in the order of
    # `validation`; empty if there is one
    sources: tuple[tuple[str, int], ...] = ()
    # one line about validation documents from elsewhere; empty = they are a share of the documents
    validation_files: str = ""
    # the documents to train on if they arrive during the run; `train` is empty then
    arriving: Arriving | None = None
    staged: str = ""  # one line about copies made before training; empty = none

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all documents."""
        return self.train.store.tokenizer

    @property
    def corpus_hash(self) -> str:
        """Identifies the content of the documents before they are split and fitted."""
        return self.train.store.checksum if self.arriving is None else self.arriving.fingerprint

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        """At most three beginnings of documents, if possible for validation: prompts, or a few tokens."""
        documents, tokenizer = self.validation if len(self.validation) else self.train, self.tokenizer
        few, prompts = 16 if tokenizer.vocabulary_size >= 1024 else 48, list[str]()
        for index in range(min(len(documents), 256)):
            document = documents.members(index)[0]
            size = documents.prompt_length(index)
            shown = size if 0 < size <= max(self.train_fit.limit // 4, few) else few
            text = tokenizer.decode(document.tokens[:shown].tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
            prompts += [text] if text else []
            if len(prompts) == 3:
                break
        return tuple(prompts)

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
        tokenizer: the tokenizer; `auto` takes a store's own.
        limit: most tokens of a document: the capacity of a pack, or the model's context if that is less.
        progress: see `prepare`.
        reads: whether this process reads tokens; one that receives packs from others neither copies nor verifies.

    Raises:
        ValueError: see `prepare` and `TokenStore`; a store of another tokenizer; too few or too long documents.
    """
    data.check()
    tokenizer.check()
    if data.stream:
        corpus = _load_stream(data, tokenizer, limit)
    else:
        corpus = _load_stored(data, tokenizer, limit, progress, reads)
    if not data.validation_sets:
        return corpus
    trained, path = corpus.validation.store, corpus.store_path
    # Streamed records have no store with a tokenizer; theirs is not trained, so that it can be loaded again.
    own = tokenizer if data.stream and data.source != "store" else TokenizerConfig("file", str(path))
    try:
        held = load_sets(validation_sets(data), own, limit=limit, progress=progress, reads=reads)
    except ValueError as error:
        raise ValueError(str(error).replace("data.path=", "data.validation_path=")) from error
    if held.tokenizer.hash != corpus.tokenizer.hash:
        raise ValueError(
            f"data.validation_path={data.validation_path}: its chats need special tokens that the tokenizer of the"
            " training documents lacks; give documents of the same form"
        )
    if (kind := held.validation.store.kind) != trained.kind:
        raise ValueError(
            f"data.validation_path={data.validation_path} holds {ITEM_NAMES[kind]}, and the training documents are"
            f" {ITEM_NAMES[trained.kind]}: give documents of the same form"
        )
    return replace(
        corpus,
        validation=held.validation,
        validation_fit=held.validation_fit,
        sources=held.sources,
        validation_files=held.description,
        skipped=[*corpus.skipped, *(f"for validation {line}" for line in held.skipped)],
    )


def load_sets(
    sets: Sequence[DataConfig],
    tokenizer: TokenizerConfig,
    *,
    limit: int,
    progress: Progress = silent,
    reads: bool = True,
) -> Corpus:
    """A corpus without training documents: all documents of each set are for validation; see `load_corpus`."""
    stores, staged = _open_all(sets, tokenizer, progress, reads)
    data = replace(sets[0], validation=0.0)
    parts = [_divided(store, data, limit) for store in stores]
    names = _names([each.path or store.path for each, store in zip(sets, stores, strict=True)])
    (views,) = _in_one_store(stores, names, [part.train for part in parts])
    documents = Documents.joined(views)
    return Corpus(
        train=documents.take([]),
        validation=documents,
        description="; ".join(store.description for store in stores),
        train_fit=FitReport(limit, "error"),
        validation_fit=reduce(add, (part.train_fit for part in parts)),
        skipped=documents.store.noted.lines(),
        store_path=stores[0].path,
        sources=tuple(zip(names, map(len, views), strict=True)) if len(stores) > 1 else (),
        staged=staged,
    )


def sets_of(data: DataConfig) -> list[DataConfig]:
    """A source, or each store of a mixture, for `load_sets`."""
    return [_store_config(data, path) for path in data.paths] or [data]


def validation_sets(data: DataConfig) -> list[DataConfig]:
    """The sources of `data.validation_path` (and `validation_part`): token stores, or files like the training files."""
    found = []
    for path in data.validation_sets:
        if (Path(path).expanduser() / HEADER).is_file():
            found.append(_store_config(data, path))
        elif data.source in ("text", *RECORDS):
            own = replace(data, validation_path=[], validation_part="", validation=0.0, stream=False)
            found.append(replace(own, path=path, part=data.validation_part or data.part))
        else:
            raise ValueError(
                f"data.validation_path={path} is not a token store, which data.source={data.source} needs: prepare it"
                " with the tokenizer of the training documents (`multipack prepare tokenizer=FILE --store …`)"
            )
    return found


_OF_STORES = (
    *("block_size", "train_on_prompt", "overlong", "overlap", "repeat_prompt"),
    *("share_prefixes", "min_prefix", "verify", "stage", "cache"),
)
"""Settings of documents that apply to each of their stores, too."""


def _store_config(data: DataConfig, path: str) -> DataConfig:
    """The settings of the token store at `path`: `data`'s where they apply to stores, else defaults."""
    kept: dict[str, Any] = {name: getattr(data, name) for name in _OF_STORES}
    return DataConfig(source="store", path=path, validation=0.0, **kept)


def _open_all(
    sets: Sequence[DataConfig], tokenizer: TokenizerConfig, progress: Progress, reads: bool
) -> tuple[list[TokenStore], str]:
    """The stores of sources, prepared, copied and verified as their settings ask for; and one line about copies."""
    stores, data, staged = list[TokenStore](), sets[0], ""
    for each in sets:
        if each.source == "store":
            stores.append(TokenStore(Path(each.path).expanduser()))
            _check_tokenizer(stores[-1], tokenizer)
        else:
            stores.append(TokenStore(prepare(each, tokenizer, progress=progress)))
    if data.stage and reads:
        from multipack.data.stores.staging import stage

        stores, staged = stage(stores, data.stage, progress)
    if data.verify == "full" and reads:
        from multipack.data.stores.staging import verify_once

        verify_once(stores, cache_folder(data.cache), progress)
    return stores, staged


def _load_stored(
    data: DataConfig, tokenizer: TokenizerConfig, limit: int, progress: Progress, reads: bool
) -> Corpus:
    """The documents of stores, which are prepared first, if necessary."""
    stores, staged = _open_all(sets_of(data), tokenizer, progress, reads)
    parts = [_divided(store, data, limit) for store in stores]
    names = _names([store.path for store in stores])
    trains, validations = _in_one_store(
        stores, names, [part.train for part in parts], [part.validation for part in parts]
    )
    train, description = trains[0], stores[0].description
    shares: tuple[Share, ...] = ()
    if data.source == "mixture":
        from multipack.data.views.mixture import mix

        train, shares = mix(trains, names, data.weights, data.split_seed)
        description = "mixture by tokens: " + ", ".join(
            f"{share.name} {share.actual:.1%}" for share in shares
        )
    store, train_fit = train.store, reduce(add, (part.train_fit for part in parts))
    if not len(train):
        raise ValueError(f"{store.path} has no documents to train on: {train_fit.describe()}")
    if not train.target_counts.any():
        raise nothing_learned(
            f"the {len(train):,} training documents of {store.path}",
            f"look at the answers, and at data.overlong={data.overlong}, which may cut them off"
            " (data.train_on_prompt=true makes all tokens targets)",
        )
    return Corpus(
        train=train,
        validation=Documents.joined(validations),
        description=description,
        train_fit=train_fit,
        validation_fit=reduce(add, (part.validation_fit for part in parts)),
        skipped=store.noted.lines(),
        store_path=stores[0].path,
        mixture=shares,
        sources=tuple((share.name, len(part.validation)) for share, part in zip(shares, parts, strict=False)),
        staged=staged,
    )


class _Divided(NamedTuple):
    """Documents of one store, none of them too long, and reports of the cuts."""

    train: Documents
    validation: Documents
    train_fit: FitReport
    validation_fit: FitReport


def _divided(store: TokenStore, data: DataConfig, limit: int) -> _Divided:
    """The training and validation documents of a store, cut to `limit` tokens."""
    whole, block = Documents.whole(store, data.train_on_prompt), data.block_size or limit
    if store.header.split_by == "document":
        if data.block_size:
            raise ValueError(
                f"data.block_size={data.block_size} cuts a stream, and {store.path} holds {len(whole):,} documents;"
                " data.overlong=split cuts those that are too long"
            )
        views = whole.hold_out(data.validation_share, data.split_seed)
    else:
        if block > limit:
            raise ValueError(
                f"data.block_size={block:,} exceeds the limit of {limit:,} tokens for a document: lower it, or raise"
                " plan.capacity (and the model's context)"
            )
        train, validation = whole.hold_out_end(data.validation_share)
        views = train.cut(block), validation.cut(block)
    shared_from = None if data.share_prefixes == "off" else data.min_prefix
    (train, train_fit), (validation, validation_fit) = (
        view.fit(limit, data.overlong, data.overlap, data.repeat_prompt, shared_from) for view in views
    )
    return _Divided(train, validation, train_fit, validation_fit)


def _names(paths: Sequence[Path | str]) -> list[str]:
    """Names of sources: their paths, relative to the deepest folder that holds all of them."""
    places = [Path(path).expanduser().absolute() for path in paths]
    return [str(place.relative_to(os.path.commonpath(places))) for place in places]


def _in_one_store(
    stores: Sequence[TokenStore], names: Sequence[str], *views: Sequence[Documents]
) -> list[list[Documents]]:
    """Views of each store, as views of one: several are joined, and names of documents begin with `names`."""
    if len(stores) == 1:
        return [list(each) for each in views]
    joined = TokenStore.joined(stores[0].path.parent, stores, names)
    first = np.cumsum([0, *(store.num_documents for store in stores[:-1])]).tolist()
    return [[view.within(joined, start) for view, start in zip(each, first, strict=True)] for each in views]


def _load_stream(data: DataConfig, tokenizer: TokenizerConfig, limit: int) -> Corpus:
    """The documents of a stream: some held back for validation, and an iterator over the others."""
    from multipack.data.views.arriving import GrowingFolder, StreamedRecords

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
        description=f"{arriving.name}, documents as they arrive",
        train_fit=arriving.fit,
        validation_fit=arriving.validation_fit,
        skipped=[],
        store_path=validation.store.path,
        arriving=arriving,
    )


def _check_tokenizer(store: TokenStore, config: TokenizerConfig) -> None:
    """Refuse a store whose tokenizer is not the requested one."""
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
