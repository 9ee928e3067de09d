"""Training from records that arrive one by one, tokenized on the way: a streamed data set, or any iterable of records.

data.source=huggingface data.path=NAME data.stream=true tokenizer=gpt2
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from multipack.data.arriving import HEAD, Arriving, StreamInterrupted
from multipack.data.data_config import DataConfig
from multipack.data.documents import Document, Documents
from multipack.data.records import RecordReader, without_nulls
from multipack.data.shards import StoreHeader
from multipack.data.source_document import SourceDocument
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from multipack.data.writer import encode

RECORDS = 256
"""Records that are tokenized together: a chunk. The first one has `HEAD`."""


class StreamedRecords(Arriving):
    """The documents of records, in order; tokenized in chunks of `RECORDS`.

    An item is the document itself: records cannot be found again by their numbers. A data set that tells where it
    stands (`state_dict`, `load_state_dict`, as `datasets.IterableDataset` does) is put back there when a run goes on;
    any other iterable is read again from its beginning and, as far as the run had come, passed over untokenized.

    Args:
        data: what a record is (`format`, `fields`, …) and what becomes of its document.
        limit: most tokens of a document.
        tokenizer: of a kind that is there before any record is.
        records: opens the records, from the beginning.

    Raises:
        ImportError: a package that the tokenizer needs is not installed.
        ValueError: a tokenizer that would be trained on the records; a record that is none; see `Arriving`.
    """

    def __init__(
        self,
        data: DataConfig,
        limit: int,
        tokenizer: TokenizerConfig,
        records: Callable[[], Iterable[dict[str, Any]]],
    ) -> None:
        if tokenizer.is_trained:
            load_tokenizer(tokenizer)  # which says why not, and what to take
        self._records, self._tokenizer_config = records, tokenizer

        def template() -> Any:
            from multipack.data.chat import resolve_template  # Jinja is loaded for chats alone

            return resolve_template(data, tokenizer)

        self._template = template
        self._reader = RecordReader(data, template)
        self._tokenizer: Tokenizer | None = None
        self._source: Iterable[dict[str, Any]] | None = None  # opened when the first chunk is read
        self._was_put = False
        super().__init__(data, limit)

    @property
    def name(self) -> str:
        """See `Arriving`."""
        return self._data.path or "the records"

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Arriving`."""
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def chat_template(self) -> str:
        """See `Arriving`."""
        return self._reader.template.to_json() if self._reader.template is not None else ""

    @property
    def skipped(self) -> dict[str, int]:
        """See `Arriving`."""
        return dict(self._skipped)

    def _restart(self) -> None:
        self._rows: Iterator[dict[str, Any]] | None = None
        self._begin, self._end = 0, 0  # records before the present chunk, and before the next one
        self._source_state: Any = None  # of the source before the present chunk
        self._skipped: dict[str, int] = {}
        self._skipped_here: dict[str, int] = {}  # of the present chunk

    def _place(self) -> dict[str, Any]:
        return {"records": self._begin, "source": self._source_state, "skipped": dict(self._skipped)}

    def _go_to(self, place: dict[str, Any]) -> None:
        self._begin = int(place["records"])
        self._source_state, self._skipped = place["source"], dict(place["skipped"])

    def _open(self) -> Iterator[dict[str, Any]]:
        """The records from the present chunk on."""
        # One that tells where it stands begins anew when it is iterated; unless it was put somewhere.
        if self._source is None or self._was_put or not hasattr(self._source, "load_state_dict"):
            self._source, self._was_put = self._records(), False
        if self._begin and self._source_state is not None and hasattr(self._source, "load_state_dict"):
            self._source.load_state_dict(self._source_state)
            self._was_put = True
            return (without_nulls(dict(record)) for record in self._source)
        rows = (without_nulls(dict(record)) for record in self._source)
        passed = sum(1 for _ in islice(rows, self._begin))
        if passed < self._begin:
            raise ValueError(
                f"{self.name} ends after {passed:,} records, but {self._begin:,} had been read when the state was"
                " saved: it has changed; go on with the records it had, or start a new run"
            )
        return rows

    def _store(self) -> TokenStore | None:
        """The present chunk; None after the last. Chunks of which nothing remains are passed over."""
        while True:
            if self.interrupted:
                raise StreamInterrupted(f"while records of {self.name} were awaited")
            rows, self._rows = self._rows or self._open(), None  # an error leaves the rows behind
            size = HEAD if self._begin == 0 else RECORDS
            records = list(islice(rows, size))
            self._end = self._begin + len(records)
            self._skipped_here = {}
            items = self._items_of(records)
            shard = encode(items, self._with_tokenizer())
            pairs = self._reader.shape is not None and self._reader.shape.form == "preference"
            left_out = len(items) - len(shard) // (2 if pairs else 1)
            if left_out:
                self._skip("documents without tokens", left_out)
            self._rows = rows
            if len(shard):
                return TokenStore.of_documents(Path(self.name), shard, self._header(pairs))
            self._leave()
            if len(records) < size:
                return None

    def _leave(self) -> None:
        self._begin = self._end
        self._source_state = None
        if self._source is not None and hasattr(self._source, "state_dict"):
            self._source_state = self._source.state_dict()
        for reason, count in self._skipped_here.items():
            self._skipped[reason] = self._skipped.get(reason, 0) + count

    def _header(self, pairs: bool) -> StoreHeader:
        tokenizer = self.tokenizer
        return StoreHeader(
            tokenizer.vocabulary_size, tokenizer.end_id, tokenizer.name, tokenizer.hash, pairs=pairs
        )

    def _items_of(self, records: list[dict[str, Any]]) -> list[list[SourceDocument]]:
        items = list[list[SourceDocument]]()
        for number, record in enumerate(records, self._begin + 1):
            name = f"{Path(self.name).name}:{number}"
            found = self._reader.documents(record, name, f"{self.name}, row {number}")
            if isinstance(found, str):
                self._skip(found)
            else:
                items.append(found)
        return items

    def _skip(self, reason: str, count: int = 1) -> None:
        self._skipped_here[reason] = self._skipped_here.get(reason, 0) + count

    def _with_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            template = self._reader.template
            special = template.special_tokens if template is not None else ()
            self._tokenizer = load_tokenizer(self._tokenizer_config, special)
        return self._tokenizer

    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        document = documents[number]
        size = f"<u{document.tokens.dtype.itemsize}"
        return {
            "name": documents.names(number),
            "dtype": size,
            "tokens": base64.b64encode(document.tokens.astype(size, copy=False).tobytes()).decode(),
            "spans": document.spans.tolist(),
        }

    def document(self, item: dict[str, Any]) -> Document:
        """See `Arriving`."""
        if item["dtype"] not in ("<u2", "<u4"):
            raise ValueError(f"the saved document {item['name']} has tokens of type {item['dtype']!r}")
        tokens = np.frombuffer(base64.b64decode(item["tokens"]), dtype=item["dtype"])
        spans = np.array(item["spans"], dtype=np.int64).reshape(-1, 2)
        return Document(tokens, spans)

    def document_name(self, item: dict[str, Any]) -> str:
        """See `Arriving`."""
        return str(item["name"])
