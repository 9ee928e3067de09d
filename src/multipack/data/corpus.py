"""From token stores to the documents that a run trains and validates on.

TokenStore ─▶ split ─▶ fit ─▶ Corpus(train, validation, …)      views: nothing is copied
  several  ─▶ split ─▶ fit ─▶ mix                               each source by itself, then as one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

from multipack.data.arriving import Arriving
from multipack.data.cache import cache_folder
from multipack.data.data_config import DataConfig
from multipack.data.documents import Documents
from multipack.data.fit import Fit, FitReport
from multipack.data.growing import GrowingFolder
from multipack.data.joint import JointStore, Store, open_store
from multipack.data.memory import MemoryStore
from multipack.data.mixture import Share, mix
from multipack.data.prepare import prepare
from multipack.data.sources import open_dataset, open_source
from multipack.data.staging import Staging
from multipack.data.streamed import StreamedRecords
from multipack.data.tokenizer import Progress, Tokenizer, TokenizerConfig, build_tokenizer


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
        store_path: the token store behind all this; of a mixture, the first one.
        mixture: what an epoch has of each source of a mixture.
        arriving: the documents to train on where they arrive during the run; `train` is empty then.
        staged: where tokens were copied before training, in a sentence for people; empty = nowhere.
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
    arriving: Arriving | None = None
    staged: str = ""

    @property
    def chat_template(self) -> str:
        """The template of its chats, as JSON; empty = there are none."""
        if self.arriving is not None:
            return self.arriving.chat_template
        store = self.train.store
        return "" if isinstance(store, MemoryStore) else store.chat_template


def load_corpus(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    limit: int,
    progress: Progress | None = None,
    reads: bool = True,
) -> Corpus:
    """The documents that a run trains and validates on; prepared first, where they are not yet.

    Args:
        data: the source, or a token store, and what becomes of it.
        tokenizer: the tokenizer; `auto` takes a store's own.
        limit: most tokens of a document: a pack's capacity or the model's context, whichever is less.
        progress: see `prepare`.
        reads: whether this process reads documents to train on. One that gets packs of another (`data.readers`) copies
            and verifies no tokens; it plans from lengths and ranges of targets.

    Raises:
        ValueError: see `prepare`, `TokenStore` and `Staging`; a store of another tokenizer; too few documents or tokens
            to validate on; documents that are too long, unless `data.overlong` says what becomes of them.
    """
    data.check()
    tokenizer.check()
    if data.stream:
        return _load_stream(data, tokenizer, limit)
    staging = Staging(data.stage if reads else "", data.verify and reads, progress)
    if data.source == "mixture":
        return _load_mixture(data, tokenizer, limit, staging)
    if data.source == "store":
        store = staging.take([_open(data.path, tokenizer)])[0]
    else:
        store = open_store(prepare(data, tokenizer, progress=progress))
        if staging.where:  # what `prepare` gives back was verified
            store = staging.take([store])[0]
    views = _views(store, data, limit)
    return _corpus(store, views, store.header.description, limit, staging)


def find_tokenizer(
    data: DataConfig, tokenizer: TokenizerConfig, *, limit: int, progress: Progress | None = None
) -> Tokenizer:
    """The tokenizer that `load_corpus` will have, before it tokenizes; one that is trained is made now, and kept.

    Args:
        data: the source, or a token store.
        tokenizer: the tokenizer; `auto` takes a store's own.
        limit: most tokens of a document.
        progress: see `prepare`.

    Raises:
        ValueError: see `load_corpus`.
    """
    if data.stream:
        return _load_stream(data, tokenizer, limit).tokenizer
    if data.source in ("store", "mixture"):
        return _open(data.path if data.source == "store" else data.paths[0], tokenizer).tokenizer
    return build_tokenizer(tokenizer, open_source(data, tokenizer), cache_folder(data.cache), progress)


@dataclass(frozen=True)
class _Views:
    """The documents of one store, divided, none of them too long."""

    train: Documents
    validation: Documents
    train_fit: FitReport
    validation_fit: FitReport


def _views(store: Store, data: DataConfig, limit: int) -> _Views:
    train, validation = _split(store, data, limit)
    fit = Fit(store.overlong if data.overlong == "auto" else data.overlong, data.overlap, data.repeat_prompt)
    train, train_fit = train.fit(limit, fit)
    validation, validation_fit = validation.fit(limit, fit)
    return _Views(train, validation, train_fit, validation_fit)


def _corpus(
    store: Store,
    views: _Views,
    description: str,
    limit: int,
    staging: Staging,
    mixture: tuple[Share, ...] = (),
) -> Corpus:
    first = store.stores[0] if mixture and isinstance(store, JointStore) else store
    return Corpus(
        train=views.train,
        validation=views.validation,
        tokenizer=store.tokenizer,
        corpus_hash=store.header.source_hash,
        description=description,
        train_fit=views.train_fit,
        validation_fit=views.validation_fit,
        skipped=store.header.skipped,
        prompts=_prompts(views.validation if len(views.validation) else views.train, store.tokenizer, limit),
        store_path=first.path,
        mixture=mixture,
        staged=staging.told,
    )


def _open(path: str, tokenizer: TokenizerConfig) -> Store:
    store = open_store(Path(path).expanduser())
    _check_tokenizer(store, tokenizer)
    return store


def _load_mixture(data: DataConfig, tokenizer: TokenizerConfig, limit: int, staging: Staging) -> Corpus:
    stores = staging.take([_open(path, tokenizer) for path in data.paths])
    names = _names([store.path for store in stores])
    joint = JointStore(stores[0].path.parent, stores, names)
    # Each source is split and fitted by itself: what validates is what validates when it is trained on alone.
    parts = [_views(store, data, limit) for store in stores]
    train = [part.train.within(joint, number) for number, part in enumerate(parts)]
    validation = [part.validation.within(joint, number) for number, part in enumerate(parts)]
    mixed, shares = mix(train, names, data.weights, data.weigh_by, data.mixture_ends, data.split_seed)
    views = _Views(
        train=mixed,
        validation=Documents.joined(validation),
        train_fit=reduce(add, (part.train_fit for part in parts)),
        validation_fit=reduce(add, (part.validation_fit for part in parts)),
    )
    said = ", ".join(f"{share.name} {share.got:.1%}" for share in shares)
    return _corpus(joint, views, f"mixture by {data.weigh_by}: {said}", limit, staging, shares)


def _load_stream(data: DataConfig, tokenizer: TokenizerConfig, limit: int) -> Corpus:
    arriving: Arriving
    if data.source == "store":
        folder = GrowingFolder(data, limit)
        _check_tokenizer(folder.first, tokenizer)
        arriving = folder
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


def _names(paths: Sequence[Path]) -> list[str]:
    """The stores' names, with as many folders before them as tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _check_tokenizer(store: Store, config: TokenizerConfig) -> None:
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


def _split(store: Store, data: DataConfig, limit: int) -> tuple[Documents, Documents]:
    whole = Documents.whole(store, data.train_on_prompt)
    if store.header.split_by == "position":
        return _split_stream(whole, data, limit)
    if data.block_size:
        raise ValueError(
            f"data.block_size={data.block_size} cuts a stream, and {store.path} holds "
            f"{len(whole):,} documents; data.overlong=split cuts those that are too long"
        )
    if data.validation and len(whole) < 2:
        raise ValueError(
            f"data.validation={data.validation}: {len(whole)} document ({whole.names(0)}) of {store.path} cannot"
            " be split in two; set data.validation=0 (and train.eval_every=0), add documents, or divide a text with"
            " data.documents"
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
