"""Documents that arrive while a run trains on them: a growing token store, or a stream of records.

    chunk 0        chunk 1        chunk 2 …            a shard of a growing store, or a few hundred records
    |AA|B|CCC|D|   |E|FFFF|GG|    (awaited)
       × held back for validation, from the first chunk only
    ─▶ split, fit ─▶ items A0 A1 C0 C1 D0 E0 …         planned by a `PackStream`, whose state holds those in flight

An item is plain data (JSON types) from which its document is made when its pack is collated. A run resumes from the
number of the chunk, the number of the next item in it and the items in flight: only that chunk is read again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from multipack.data.data_config import DataConfig
from multipack.data.documents import Document, Documents
from multipack.data.overlong import FitReport
from multipack.data.records import RecordReader, without_nulls
from multipack.data.shards import HEADER, StoreHeader, find_shards
from multipack.data.sources import open_template
from multipack.data.store import TokenStore
from multipack.data.texts import SourceDocument
from multipack.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from multipack.data.writer import ShardBuilder, encode
from multipack.planning.lengths import check_integer

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


class StreamInterrupted(Exception):
    """The run stops while it waits for documents."""


class DocumentsLate(ValueError):
    """The next documents did not arrive within `data.patience_seconds`."""


class Arriving(ABC):
    """Base class of the streams: iterates over items, continuing at the current position.

    Of the first `HEAD` documents (or those of the first chunk, if it has fewer) the share `data.validation`, chosen by
    `data.split_seed`, is held back for validation. All other documents are trained on, none longer than `limit` tokens.

    Attributes:
        name: name of the stream, for messages.
        tokenizer: the tokenizer of the documents.
        chat_template: the template of chats, as JSON; empty without chats.
        report: counts of shortened, divided and dropped documents, over all finished chunks.
        skipped: reason → number of records without a document, in all finished chunks.
        has_pairs: whether the documents are preference pairs.
        validation: the validation documents, none longer than `limit`.
        validation_fit: like `report`, for the validation documents.

    Raises:
        ValueError: the first chunk has too few documents to hold some back; see also `Documents.fit`.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: str = ""

    def __init__(self, data: DataConfig, limit: int) -> None:
        self._data, self._limit = data, limit
        self.interrupted = False
        self._documents: tuple[Documents, FitReport] | None = None
        self._held = np.empty(0, dtype=np.int64)
        self.restart()
        first = self._read_chunk(0)
        if first is None:
            raise ValueError(f"{self.name} has ended without a document")
        whole = Documents.whole(first, data.train_on_prompt)
        head = whole.take(np.arange(min(len(whole), HEAD)))
        if data.validation and len(head) < 2:
            raise ValueError(
                f"data.validation={data.validation} holds back some of the first documents, but {self.name} begins with"
                f" {len(head)}: set data.validation=0 (and train.eval_every=0)"
            )
        validation = head.split(data.validation, data.split_seed)[1]
        self._held = validation.pieces["document"]
        self._first_checksum, self.has_pairs = first.checksum, first.has_pairs
        self.validation, self.validation_fit = validation.fit(limit, *self._fit(first))
        self._documents = self._training(first, 0)

    @abstractmethod
    def _read_chunk(self, number: int) -> TokenStore | None:
        """Return a chunk (the current one, except of a folder), waiting for it; None after the last chunk."""

    @abstractmethod
    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        """What `document` needs to make document `number` of the current chunk again, as plain data."""

    @abstractmethod
    def document(self, item: dict[str, Any]) -> Document:
        """The document of an item."""

    @property
    def fingerprint(self) -> str:
        """Sha256 of the first chunk and of all settings that determine the items."""
        settings = {name: getattr(self._data, name) for name in DECISIVE}
        decisive = json.dumps([self._first_checksum, self._limit, settings], sort_keys=True)
        return hashlib.sha256(decisive.encode()).hexdigest()

    def interrupt(self) -> None:
        """Make every wait raise `StreamInterrupted`. Takes no lock, so a signal handler may call it."""
        self.interrupted = True

    def restart(self) -> None:
        """Go to the beginning."""
        self._chunk = self._number = 0
        self._documents = None
        self.report = FitReport(self._limit, "error")
        self.skipped: dict[str, int] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Items from the current position, each with its `name`, and its `length` and `targets` in tokens."""
        while (found := self._documents or self._open(self._chunk)) is not None:
            documents, report = self._documents = found
            lengths, targets = documents.lengths, documents.target_counts
            while self._number < len(documents):
                number = self._number
                self._number += 1
                sizes = {"length": int(lengths[number]), "targets": int(targets[number])}
                yield {"name": documents.names(number)} | self._item(documents, number) | sizes
            self.report += report
            self._advance()

    def _advance(self) -> None:
        """Go to the next chunk."""
        self._chunk, self._number, self._documents = self._chunk + 1, 0, None

    def _open(self, chunk: int) -> tuple[Documents, FitReport] | None:
        """The training documents of a chunk; None after the last one."""
        store = self._read_chunk(chunk)
        return None if store is None else self._training(store, chunk)

    def _training(self, store: TokenStore, chunk: int) -> tuple[Documents, FitReport]:
        """The documents of a chunk that are not held back, none longer than the limit."""
        whole = Documents.whole(store, self._data.train_on_prompt)
        if chunk == 0:
            whole = whole.take(np.setdiff1d(whole.pieces["document"], self._held))
        policy, overlap, repeat_prompt = self._fit(store)
        # `Documents.fit` raises if it would drop all documents; later chunks may have shorter ones.
        if policy == "drop" and len(whole) and whole.lengths.min() > self._limit:
            dropped = {"dropped_documents": len(whole), "dropped_tokens": whole.num_tokens}
            return whole.take([]), FitReport(self._limit, "drop", **dropped)
        return whole.fit(self._limit, policy, overlap, repeat_prompt)

    def _fit(self, store: TokenStore) -> tuple[str, int, bool]:
        """Policy for long documents, overlap, and whether prompts are repeated; see `Documents.fit`."""
        data = self._data
        policy = store.header.overlong if data.overlong == "auto" else data.overlong
        return policy, data.overlap, data.repeat_prompt

    def state_dict(self) -> dict[str, Any]:
        """The current position, as plain data."""
        return {
            "fingerprint": self.fingerprint,
            "chunk": self._chunk,
            "number": self._number,
            "report": list(astuple(self.report)[2:]),
            "skipped": dict(self.skipped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position; `ValueError` if it is damaged or belongs to another stream."""
        missing = [key for key in ("fingerprint", "chunk", "number", "report", "skipped") if key not in state]
        if missing:
            raise ValueError(f"the saved position in {self.name} lacks {', '.join(missing)}")
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the saved position belongs to another stream than {self.name}: its first documents, its tokenizer,"
                f" the limit of {self._limit:,} tokens, or one of data.{', data.'.join(DECISIVE)} was different"
            )
        self.restart()
        self._chunk = check_integer("the saved chunk", state["chunk"], 0)
        self._number = check_integer("the saved number in the chunk", state["number"], 0)
        self.report = FitReport(self._limit, "error", *state["report"])
        self.skipped = dict(state["skipped"])


class GrowingFolder(Arriving):
    """The documents of a token store that still grows (`data.source=store data.stream=true`); a chunk is a shard.

    An item holds the number of its shard and of its document among the shard's training documents, because any shard
    can be opened again. Iterating raises `DocumentsLate` if no shard appears within `data.patience_seconds`.
    """

    def __init__(self, data: DataConfig, limit: int) -> None:
        self._folder = Path(data.path).expanduser()
        self.name = str(self._folder)
        self._store: TokenStore | None = None  # with the shards that are known
        super().__init__(data, limit)
        self._open = lru_cache(OPEN_SHARDS)(self._open)  # type: ignore[method-assign]

    def _read_chunk(self, number: int) -> TokenStore | None:
        began = time.monotonic()
        while self._store is None or number >= len(self._store.shards):
            if self._store is not None and self._store.is_complete:
                return None
            if self._refresh():
                continue
            count = 0 if self._store is None else len(self._store.shards)
            patience = self._data.patience_seconds
            if time.monotonic() - began > patience:
                raise DocumentsLate(
                    f"waited {patience:g} s for shard {number} of {self.name} ({count:,} shards are there, and"
                    " none of them is the last): resume with train.resume when it has arrived, or raise"
                    " data.patience_seconds"
                )
            if self.interrupted:
                raise StreamInterrupted(f"while shard {number} of {self.name} was awaited")
            time.sleep(min(POLL_SECONDS, patience / 8))
        shard = self._store.shard(number)
        if self._data.verify == "full":
            shard.verify()
        return shard

    def _refresh(self) -> bool:
        """Read the folder; return whether it has more shards."""
        if not (self._folder / HEADER).is_file():
            return False
        known = [] if self._store is None else self._store.shards
        header = StoreHeader.read(self._folder)
        shards = find_shards(self._folder, header.parts, known)
        if len(shards) == len(known):
            return False
        if header.split_by == "position":
            raise ValueError(
                f"{self.name} holds one stream of text, which cannot be trained on while it arrives: divide the text"
                " into documents (data.documents), or wait for it and leave data.stream out"
            )
        self._store = TokenStore(self._folder, header=header, shards=shards)
        self.tokenizer, self.chat_template = self._store.tokenizer, header.chat_template
        return True

    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        return {
            "name": f"shard {self._chunk}: {documents.names(number)}",
            "shard": self._chunk,
            "number": number,
        }

    def document(self, item: dict[str, Any]) -> Document:
        """See `Arriving`."""
        found = self._open(item["shard"])
        if found is None:
            raise ValueError(
                f"shard {item['shard']} of {self.name} has disappeared, and its documents are needed"
            )
        return found[0][item["number"]]


class StreamedRecords(Arriving):
    """The documents of records (`data.source=huggingface data.stream=true`), tokenized in chunks of `RECORDS`.

    An item holds the document itself, because records cannot be looked up by number. A data set with `state_dict` and
    `load_state_dict` (such as `datasets.IterableDataset`) is restored to the current chunk when a run resumes; any
    other iterable is read again from its beginning, and the records before the chunk are not tokenized.

    Args:
        data, limit: see `Arriving`; `data` also gives the form of the records.
        tokenizer: a tokenizer of a kind that is not trained on the corpus.
        records: returns an iterable over the records from the first one.
    """

    def __init__(
        self,
        data: DataConfig,
        limit: int,
        tokenizer: TokenizerConfig,
        records: Callable[[], Iterable[dict[str, Any]]],
    ) -> None:
        if tokenizer.is_trained:
            load_tokenizer(tokenizer)  # raises the error that names the alternatives
        self.name = data.path or "the records"
        self._open_records, self._tokenizer_config = records, tokenizer
        self._reader = RecordReader(data, partial(open_template, data, tokenizer))
        self._source: Any = None  # opened when a chunk is read
        super().__init__(data, limit)

    def restart(self) -> None:
        """See `Arriving`."""
        super().restart()
        self._rows: Iterator[dict[str, Any]] | None = None
        # Before the current chunk, and after it: number of records that were read, and state of the source.
        self._begin: tuple[int, Any] = (0, None)
        self._end = self._begin
        self._skipped_here = Counter[str]()  # in the current chunk

    def state_dict(self) -> dict[str, Any]:
        """See `Arriving`."""
        records, source = self._begin
        return super().state_dict() | {"records": records, "source": source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Arriving`."""
        super().load_state_dict(state)
        self._begin = int(state["records"]), state["source"]

    def _open_rows(self) -> Iterator[dict[str, Any]]:
        """The records from the current chunk on."""
        self._source = self._open_records()
        skips, state = self._begin
        if state is not None and hasattr(self._source, "load_state_dict"):
            self._source.load_state_dict(state)
            skips = 0
        rows = (without_nulls(dict(record)) for record in self._source)
        passed = sum(1 for _ in islice(rows, skips))
        if passed < skips:
            raise ValueError(
                f"{self.name} ends after {passed:,} records, but {skips:,} had been read when the state was saved: it"
                " has changed; continue with the original records, or start a new run"
            )
        return rows

    def _read_chunk(self, number: int) -> TokenStore | None:
        while True:
            if self.interrupted:
                raise StreamInterrupted(f"while records of {self.name} were awaited")
            rows, self._rows = self._rows or self._open_rows(), None  # an error abandons the rows
            size = HEAD if self._begin[0] == 0 else RECORDS
            records = list(islice(rows, size))
            chunk = self._encode(records)
            state = self._source.state_dict() if hasattr(self._source, "state_dict") else None
            self._end = self._begin[0] + len(records), state
            self._rows = rows
            if chunk is not None:
                return chunk
            self._pass_records()  # no document remains of these records
            if len(records) < size:
                return None

    def _encode(self, records: list[dict[str, Any]]) -> TokenStore | None:
        """Tokenize records into a store in memory; None if they give no document."""
        self._skipped_here = Counter()
        entries = list[list[SourceDocument]]()
        for number, record in enumerate(records, self._begin[0] + 1):
            name, where = f"{Path(self.name).name}:{number}", f"{self.name}, row {number}"
            found = self._reader.documents(record, name, where)
            documents = [document for document in found if isinstance(document, SourceDocument)]
            if documents:
                entries.append(documents)
            else:
                self._skipped_here[str(found[0])] += 1
        if not hasattr(self, "tokenizer"):  # the template of the first chunk decides its special tokens
            self.tokenizer = load_tokenizer(self._tokenizer_config, self._reader.special_tokens)
            self.chat_template = self._reader.chat_template
        tokenizer, pairs = self.tokenizer, self._reader.pairs
        builder = ShardBuilder(tokenizer.vocabulary_size)
        for item in encode(entries, tokenizer):
            for name, parts in item:
                builder.add(name, parts)
        if without := len(entries) - len(builder) // (2 if pairs else 1):
            self._skipped_here["documents without tokens"] = without
        if not len(builder):
            return None
        header = StoreHeader(tokenizer.vocabulary_size, tokenizer.name, tokenizer.hash, pairs=pairs)
        return TokenStore(Path(self.name), header=header, shards=[builder.build()])

    def _advance(self) -> None:
        super()._advance()
        self._pass_records()

    def _pass_records(self) -> None:
        """Move the position past the records of the current chunk and count those that were skipped."""
        self._begin = self._end
        self.skipped = {**Counter(self.skipped) + self._skipped_here}

    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        document = documents[number]
        dtype = f"<u{document.tokens.dtype.itemsize}"
        return {
            "dtype": dtype,
            "tokens": base64.b64encode(document.tokens.astype(dtype, copy=False).tobytes()).decode(),
            "spans": document.spans.tolist(),
        }

    def document(self, item: dict[str, Any]) -> Document:
        """See `Arriving`."""
        if item["dtype"] not in ("<u2", "<u4"):
            raise ValueError(f"the saved document {item['name']} has tokens of type {item['dtype']!r}")
        tokens = np.frombuffer(base64.b64decode(item["tokens"]), dtype=item["dtype"])
        return Document(tokens, np.array(item["spans"], dtype=np.int64).reshape(-1, 2))
