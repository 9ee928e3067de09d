"""Documents that arrive while a run trains on them: a growing token store, or a streamed data set.

    chunk 0        chunk 1        chunk 2 …            a shard of a growing store, or a few hundred records
    |AA|B|CCC|D|   |E|FFFF|GG|    (awaited)
       × held back for validation, from the first chunk only
    ─▶ split, fit ─▶ items A0 A1 C0 C1 D0 E0 …         planned by a `PackStream`, whose state holds items in flight

An item is plain data (JSON types) from which its document is made when its pack is collated. A run resumes from the
position of a chunk, the number of the next item in it and the items in flight: only that chunk is read again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from multipack.data.stores.shards import HEADER, Shard, StoreHeader, find_shards
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import encoded, shard_of
from multipack.data.text.data_config import DataConfig
from multipack.data.text.skipped import Noted
from multipack.data.text.sources import Source
from multipack.data.text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from multipack.data.views.documents import Document, Documents
from multipack.data.views.overlong import FitReport
from multipack.planning.lengths import check_integer
from multipack.planning.options import opened

HEAD = 2048
"""Number of first documents of a stream from which the validation documents are drawn."""
RECORDS = 256
"""Records per chunk: they are tokenized together. The first chunk has `HEAD` records."""
OPEN_SHARDS = 16
"""Shards of a growing store that are kept open; documents in flight rarely come from more."""
POLL_SECONDS = 0.25
"""Interval at which a folder is checked for its next shard."""
DECISIVE = ("validation", "split_seed", "overlong", "overlap", "repeat_prompt", "train_on_prompt")
"""Settings in `data` that determine the items of a stream; part of its fingerprint."""
Position = dict[str, Any]
"""Position of a chunk in a stream, as plain data."""


class StreamInterrupted(Exception):
    """The run stops while it waits for documents."""


class DocumentsLate(ValueError):
    """The next documents did not arrive within `data.patience_seconds`."""


class Arriving(ABC):
    """Base class of the streams: iterates over items, continuing where the last iteration stopped.

    The share `data.validation` of the first `HEAD` documents (or of the first chunk, if it has fewer), chosen by
    `data.split_seed`, is held back for validation. All other documents are trained on, none longer than `limit` tokens.

    Attributes:
        unit: key of a position under which the number of shards or records before it stands.
        name: name of the stream, for messages.
        tokenizer: the tokenizer of the documents.
        fit: counts of shortened, divided and dropped documents in the chunks that were read since the start or resume.
        noted: about the records of these chunks.
        validation: the validation documents, none longer than `limit`.
        validation_fit: like `fit`, for the validation documents.

    Raises:
        ValueError: there is no document, or an item is two; see also `Documents.hold_out`, `Documents.fit`.
    """

    unit: str
    name: str
    tokenizer: Tokenizer

    def __init__(self, data: DataConfig, limit: int) -> None:
        self._data, self._limit = data, limit
        self.interrupted = False
        self.restart()
        first, end = self._read(self._begin)
        if first is None:
            raise ValueError(f"{self.name} has ended without a document")
        if first.item_size > 1:
            raise ValueError(
                f"{self.name} holds preference pairs, whose reference is computed over all of them first: prepare them"
                " as a complete store, and leave data.stream out"
            )
        self.tokenizer = first.tokenizer
        whole = Documents.whole(first, data.train_on_prompt)
        head = whole.take(np.arange(min(len(whole), HEAD)))
        validation = head.hold_out(data.validation_share, data.split_seed)[1]
        self._held, self._first = validation.pieces["document"], [first.header.key, first.checksum]
        self.validation, self.validation_fit = self._fit(validation)
        self._enter(first, end)

    @abstractmethod
    def _read(self, begin: Position) -> tuple[TokenStore | None, Position]:
        """Wait for the chunk at a position; returns it (None after the last chunk), and the position after it."""

    @abstractmethod
    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        """Plain data from which `document` makes document `number` of the current chunk again."""

    def document(self, item: dict[str, Any]) -> Document:
        """The document of an item; `ValueError` if it is damaged."""
        try:
            return self._document(item)
        except (LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"a saved document of {self.name} is damaged ({error!r})") from error

    @abstractmethod
    def _document(self, item: dict[str, Any]) -> Document:
        """The document of an item."""

    def _taken(self, begin: Position, number: int) -> str:
        """Digest of the documents before item `number` of a chunk; empty if they cannot be read again."""
        return ""

    @property
    def warnings(self) -> list[str]:
        """Sentences on records read so far that are not trained as they look."""
        kind = "conversations" if self.validation.store.header.chat_template else "documents"
        return [
            f"{count:,} {kind} with {text} (the first: {first})"
            for text, (count, first) in self.noted.notes.items()
        ]

    @property
    def fingerprint(self) -> str:
        """Sha256 of the first chunk, of its preparation, and of all settings that determine the items."""
        settings = {name: getattr(self._data, name) for name in DECISIVE}
        decisive = json.dumps([*self._first, self._limit, settings], sort_keys=True)
        return hashlib.sha256(decisive.encode()).hexdigest()

    def interrupt(self) -> None:
        """Make every wait raise `StreamInterrupted`. Takes no lock, so a signal handler may call it."""
        self.interrupted = True

    def restart(self) -> None:
        """Go to the beginning."""
        self._go({self.unit: 0}, 0)

    def _go(self, begin: Position, number: int) -> None:
        """Go to item `number` of the chunk at a position."""
        self._begin, self._number = begin, number
        self.fit, self.noted = FitReport(self._limit, "error"), Noted()
        self._chunk: Documents | None = None

    def _enter(self, store: TokenStore, end: Position) -> None:
        """Make a store the current chunk, after which the next one begins at `end`."""
        self._chunk, fit = self._training(store, self._begin)
        self.fit, self._end = self.fit + fit, end
        self.noted.add(store.noted)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Items from the current position, each with its `name`, and its `length` and `targets` in tokens."""
        while True:
            if self._chunk is None:
                store, end = self._read(self._begin)
                if store is None:
                    self._begin = end
                    return
                self._enter(store, end)
            documents = self._chunk
            assert documents is not None
            lengths, targets = documents.lengths, documents.target_counts
            while self._number < len(documents):
                number = self._number
                self._number += 1
                sizes = {"length": int(lengths[number]), "targets": int(targets[number])}
                yield {"name": documents.name(number)} | self._item(documents, number) | sizes
            self._begin, self._number, self._chunk = self._end, 0, None

    def _training(self, store: TokenStore, begin: Position) -> tuple[Documents, FitReport]:
        """The documents of a chunk that are not held back, none longer than the limit."""
        whole = Documents.whole(store, self._data.train_on_prompt)
        if begin[self.unit] == 0:
            whole = whole.take(np.setdiff1d(whole.pieces["document"], self._held))
        return self._fit(whole)

    def _fit(self, documents: Documents) -> tuple[Documents, FitReport]:
        data = self._data
        return documents.fit(self._limit, data.overlong, data.overlap, data.repeat_prompt)

    def state_dict(self) -> dict[str, Any]:
        """The current position, as plain data."""
        place = {"fingerprint": self.fingerprint, "begin": self._begin, "number": self._number}
        return {**place, "taken": self._taken(self._begin, self._number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position; `ValueError` if it is damaged or belongs to another stream."""
        with opened(state, f"the saved position in {self.name}", "fingerprint", "begin", "number", "taken"):
            if state["fingerprint"] != self.fingerprint:
                raise ValueError(
                    f"the saved position belongs to another stream than {self.name}: its source, its first"
                    f" documents, its tokenizer, the limit of {self._limit:,} tokens, or one of"
                    f" data.{', data.'.join(DECISIVE)} was different"
                )
            begin, where = state["begin"], f"the saved position in {self.name}"
            check_integer(f"{self.unit} of {where}", begin[self.unit], 0)
            number = check_integer(f"number of {where}", state["number"], 0)
            if state["taken"] != self._taken(begin, number):
                raise ValueError(
                    f"{self.name} holds other documents than those that the saved position has behind it: restore its"
                    " shards, or start a new run with another out="
                )
            self._go(begin, number)


class GrowingFolder(Arriving):
    """The documents of a token store that still grows (`data.source=store data.stream=true`); a chunk is a shard.

    An item holds the number of its shard and of its document among the shard's training documents, because any shard
    can be opened again. Iterating raises `DocumentsLate` if no shard appears within `data.patience_seconds`.
    """

    unit = "shard"

    def __init__(self, data: DataConfig, limit: int) -> None:
        self._folder = Path(data.path).expanduser()
        self.name = str(self._folder)
        self._store: TokenStore | None = None  # with the shards that are known
        self._documents = lru_cache(OPEN_SHARDS)(self._open)
        super().__init__(data, limit)

    @property
    def _shards(self) -> list[Shard]:
        """The shards that are known."""
        return [] if self._store is None else self._store.shards

    def _read(self, begin: Position) -> tuple[TokenStore | None, Position]:
        number, patience = begin["shard"], self._data.patience_seconds
        deadline = time.monotonic() + patience
        while (store := self._store) is None or number >= len(store.shards):
            if store is not None and store.is_complete:
                return None, begin
            if self._refresh():
                continue
            if self.interrupted:
                raise StreamInterrupted(f"while shard {number} of {self.name} was awaited")
            if time.monotonic() > deadline:
                raise DocumentsLate(
                    f"waited {patience:g} s for shard {number} of {self.name} ({len(self._shards):,} shards are there,"
                    " and none of them is the last): resume with train.resume when it has arrived, or raise"
                    " data.patience_seconds"
                )
            time.sleep(min(POLL_SECONDS, patience / 8))
        shard = store.shard(number)
        if self._data.verify == "full":
            shard.verify()
        return shard, {"shard": number + 1}

    def _refresh(self) -> bool:
        """Read the folder; return whether it has more shards."""
        if not (self._folder / HEADER).is_file():
            return False
        header = StoreHeader.read(self._folder)
        shards = list(find_shards(self._folder, range(header.parts), self._shards))
        if len(shards) == len(self._shards):
            return False
        if header.split_by == "position":
            raise ValueError(
                f"{self.name} holds one stream of text, which cannot be trained on while it arrives: divide the text"
                " into documents (data.documents), or wait for it and leave data.stream out"
            )
        self._store = TokenStore(self._folder, header=header, shards=shards)
        return True

    def _taken(self, begin: Position, number: int) -> str:
        """Digest of the shards before this one, and of this one if items of it were taken."""
        count, digest = begin["shard"] + (number > 0), ""
        if len(self._shards) < count:
            self._refresh()
        if len(self._shards) < count:
            raise ValueError(
                f"{self.name} has {len(self._shards)} shards, and documents of {count} were taken: restore them"
            )
        for shard in self._shards[:count]:
            digest = hashlib.sha256(f"{digest} {shard.content:x}".encode()).hexdigest()
        return digest

    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        shard = self._begin["shard"]
        return {"name": f"shard {shard}: {documents.name(number)}", "shard": shard, "number": number}

    def _document(self, item: dict[str, Any]) -> Document:
        shard, number = (check_integer(name, item[name], 0) for name in ("shard", "number"))
        return self._documents(shard)[number]

    def _open(self, shard: int) -> Documents:
        """The training documents of a shard."""
        store, _ = self._read({"shard": shard})
        if store is None:
            raise ValueError(f"shard {shard} of {self.name} has disappeared, and its documents are needed")
        return self._training(store, {"shard": shard})[0]


class StreamedRecords(Arriving):
    """The documents of records (`data.source=huggingface data.stream=true`), tokenized in chunks of `RECORDS`.

    An item holds the document itself, because records cannot be looked up by number. A position consists of the number
    of records before it and the data set's own state there.

    Args:
        data, limit: see `Arriving`; `data` also gives the form of the records.
        tokenizer: a tokenizer of a kind that is not trained on the corpus.
        open_records: opens an iterable of records that can save its state and continue from it (`state_dict`,
            `load_state_dict`), such as `datasets.IterableDataset`.
    """

    unit = "records"

    def __init__(
        self, data: DataConfig, limit: int, tokenizer: TokenizerConfig, open_records: Callable[[], Any]
    ) -> None:
        self.name = data.path
        self._open_records, self._source = open_records, Source(data, tokenizer)
        self._find_tokenizer = lru_cache(1)(partial(load_tokenizer, tokenizer))  # the same for all chunks
        self._records: Any = None
        self._rows: Iterator[Any] = iter(())
        self._rows_begin: Position | None = None  # position of the next row; None = rows must be opened
        super().__init__(data, limit)

    def _read(self, begin: Position) -> tuple[TokenStore | None, Position]:
        while not self.interrupted:
            if self._rows_begin != begin:
                self._records = self._open_records()
                if begin["records"]:
                    self._records.load_state_dict(begin["source"])
                self._rows = iter(self._records)
            self._rows_begin = None  # if an error follows, rows are opened again
            count = begin["records"]
            rows = list(islice(self._rows, RECORDS if count else HEAD))
            store = self._store(rows, count)
            end = {"records": count + len(rows), "source": self._records.state_dict()}
            self._rows_begin = end
            if store.num_documents:
                return store, end
            if not rows:
                return None, end
            self.noted.add(store.noted)
            begin = end  # no document remains of these records
        raise StreamInterrupted(f"while records of {self.name} were awaited")

    def _store(self, rows: list[dict[str, Any]], before: int) -> TokenStore:
        """A store in memory of records, `before` others preceding them; it may have no document."""
        source = self._source.chunk(rows, before)
        items, form = list(source.items()), source.find_form()
        tokenizer = self._find_tokenizer(form.special_tokens)
        header = StoreHeader(tokenizer.vocabulary_size, tokenizer.name, tokenizer.hash, **form.header)
        documents = encoded(items, tokenizer)
        if without := len(items) - len(documents) // header.item_size:
            source.noted.skipped["documents without tokens"] = without
        shard = replace(shard_of(documents, tokenizer.vocabulary_size), noted=source.noted)
        store = TokenStore(Path(self.name), header=header, shards=[shard])
        store.tokenizer = tokenizer  # in memory, too
        return store

    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        document = documents[number]
        return {
            "dtype": document.tokens.dtype.str,
            "tokens": base64.b64encode(document.tokens.tobytes()).decode(),
            "spans": document.spans.tolist(),
        }

    def _document(self, item: dict[str, Any]) -> Document:
        tokens = np.frombuffer(base64.b64decode(item["tokens"]), item["dtype"])
        spans = np.array(item["spans"], dtype=np.int64).reshape(-1, 2)
        most, ends = self.tokenizer.vocabulary_size, (0, *spans.ravel(), len(tokens))
        if (
            tokens.dtype.kind != "u"
            or int(tokens.max(initial=0)) >= most
            or [*map(int, ends)] != sorted(ends)
        ):
            raise ValueError(f"a saved document of {self.name} is damaged")
        return Document(tokens, spans)
