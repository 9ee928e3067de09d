"""Chunks of a stream's records, tokenized in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from multipack.data.stores.shards import StoreHeader
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import ShardBuilder
from multipack.data.text.data_config import DataConfig
from multipack.data.text.records import RecordReader
from multipack.data.text.skipped import Places, add_places
from multipack.data.text.texts import SourceDocument
from multipack.data.text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer


class RecordChunks:
    """Makes stores of chunks of records, and keeps what people should know about the records.

    Args:
        data: the form of the records, and their source's name.
        tokenizer: a tokenizer of a kind that is not trained on the corpus.
        open_template: returns the chat template of records that need one.

    Attributes:
        places: reason → names of the first records that were left out.
    """

    def __init__(
        self, data: DataConfig, tokenizer: TokenizerConfig, open_template: Callable[[], Any]
    ) -> None:
        self._data, self._tokenizer_config = data, tokenizer
        self._tokenizer: Tokenizer | None = None
        self._reader = RecordReader(data, open_template)
        self._noted = 0  # records whose notes and places are kept; they may be read again
        self.places = Places()

    def encode(self, records: list[dict[str, Any]], before: int) -> tuple[TokenStore | None, Counter[str]]:
        """Tokenize records, `before` others preceding them.

        Returns:
            A store in memory (None: they give no document), and the counts of records without a document.
        """
        skipped, documents, places = Counter[str](), list[SourceDocument](), Places()
        notes = dict(self._reader.notes)
        entries = (
            (record, f"{Path(self._data.path).name}:{number}", f"{self._data.path}, row {number}")
            for number, record in enumerate(records, before + 1)
        )
        for found in chain.from_iterable(self._reader.documents(entries, "rows")):
            if isinstance(found, SourceDocument):
                documents.append(found)
                continue
            if found.fault and self._data.broken == "error":
                raise ValueError(f"{found.fault}; data.broken=skip leaves such rows out")
            skipped[found.reason] += 1
            add_places(places, found.reason, [found.name])
        if before < self._noted:
            self._reader.notes = notes
        else:
            self._noted = before + len(records)
            for reason, names in places.items():
                add_places(self.places, reason, names)
        if self._tokenizer is None:  # the template of the first chunk decides its special tokens
            self._tokenizer = load_tokenizer(self._tokenizer_config, self._reader.special_tokens)
        tokenizer, reader = self._tokenizer, self._reader
        builder = ShardBuilder(tokenizer.vocabulary_size)
        builder.add_batch([(document,) for document in documents], tokenizer)
        if without := len(documents) - len(builder):
            skipped["documents without tokens"] = without
        if not len(builder):
            return None, skipped
        header = StoreHeader(
            tokenizer.vocabulary_size,
            tokenizer.name,
            tokenizer.hash,
            reader.chat_template,
            pairs=reader.pairs,
            labels=reader.form == "label",
        )
        store = TokenStore(Path(self._data.path), header=header, shards=[builder.build()])
        store.tokenizer = tokenizer  # in memory, too
        return store, skipped

    @property
    def warnings(self) -> list[str]:
        """Those of the records that this process read, with the name of the first of each."""
        kind = "conversations" if self._reader.chat_template else "documents"
        notes = self._reader.notes.items()
        return [f"{count:,} {kind} with {text} (the first: {first})" for text, (count, first) in notes]
