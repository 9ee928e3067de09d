"""Training from a folder of shards that still grows: each is a token store, and `header.json` says that there are all.

data.source=store data.path=FOLDER data.stream=true
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from multipack.data.arriving import Arriving, DocumentsLate, StreamInterrupted
from multipack.data.data_config import DataConfig
from multipack.data.documents import Document, Documents
from multipack.data.fit import FitPolicy
from multipack.data.header import HEADER
from multipack.data.joint import Store
from multipack.data.memory import MemoryStore
from multipack.data.shards import list_shards, shard_name
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Tokenizer

OPEN_SHARDS = 16
"""Shards that are kept open: documents in flight are seldom of more."""
POLL_SECONDS = 0.25
"""How often a folder is looked at while the next shard is awaited."""


class GrowingFolder(Arriving):
    """The documents of a folder of shards, in order, as they appear.

    An item is (shard, number in its view); any shard can be opened again, so that a run which goes on reads nothing
    twice.

    Args:
        data: `path` names the folder.
        limit: most tokens of a document.

    Raises:
        DocumentsLate: nothing appeared in time.
        ValueError: a shard of another tokenizer than the first; see `Arriving`.
    """

    def __init__(self, data: DataConfig, limit: int) -> None:
        self._folder = Path(data.path).expanduser()
        self._patience_seconds = data.patience_seconds
        self._shards: list[Path] = []
        self._is_complete = False
        self._open: OrderedDict[int, Documents] = OrderedDict()
        self._first: TokenStore | None = None
        super().__init__(data, limit)

    @property
    def name(self) -> str:
        """See `Arriving`."""
        return str(self._folder)

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Arriving`."""
        return self.first.tokenizer

    @property
    def chat_template(self) -> str:
        """See `Arriving`."""
        return self.first.chat_template

    @property
    def first(self) -> TokenStore:
        """The first shard."""
        assert self._first is not None
        return self._first

    def _restart(self) -> None:
        self._shard = 0

    def _place(self) -> dict[str, Any]:
        return {"shard": self._shard}

    def _go_to(self, place: dict[str, Any]) -> None:
        self._shard = int(place["shard"])

    def _leave(self) -> None:
        self._shard += 1

    def _store(self) -> TokenStore | None:
        path = self._awaited(self._shard)
        if path is None:
            return None
        store = self._checked(path)
        if self._data.verify:
            store.verify()
        return store

    def _awaited(self, shard: int) -> Path | None:
        """The path of a shard, once it is there; None if there will be none."""
        began = time.monotonic()
        while True:
            if shard >= len(self._shards) and not self._is_complete and self._folder.is_dir():
                self._shards, self._is_complete = list_shards(self._folder)
            if shard < len(self._shards):
                return self._shards[shard]
            if self._is_complete:
                return None
            if time.monotonic() - began > self._patience_seconds:
                raise DocumentsLate(
                    f"waited {self._patience_seconds:g} s for {self._folder / shard_name(shard)} ({shard:,} shards are"
                    f" there, and no {HEADER} that says these are all): go on with train.resume when it has arrived, or"
                    " raise data.patience_seconds"
                )
            if self.interrupted:
                raise StreamInterrupted(f"while {self._folder / shard_name(shard)} was awaited")
            time.sleep(min(POLL_SECONDS, self._patience_seconds / 8))

    def _checked(self, path: Path) -> TokenStore:
        store = TokenStore(path)
        if store.header.split_by == "position":
            raise ValueError(
                f"{path} holds a stretch of one stream of text, which cannot be trained on while it arrives: divide the"
                " text into documents (data.documents), or wait for it and leave data.stream out"
            )
        first = self._first = self._first or store
        if store.header.tokenizer_hash != first.header.tokenizer_hash or store.has_pairs != first.has_pairs:
            raise ValueError(
                f"{path} was tokenized with {store.header.tokenizer} (hash {store.header.tokenizer_hash[:12]}), and"
                f" {first.path} with {first.header.tokenizer} (hash {first.header.tokenizer_hash[:12]}); the shards of"
                " a folder have one tokenizer, and either all hold preference pairs or none does"
            )
        return store

    def _overlong(self, store: Store | MemoryStore) -> FitPolicy:
        return store.overlong if isinstance(store, TokenStore) else "error"

    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        if self._shard not in self._open:
            self._keep(self._shard, documents)
        return {"shard": self._shard, "number": number}

    def _keep(self, shard: int, documents: Documents) -> Documents:
        self._open[shard] = documents
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return documents

    def _view(self, shard: int) -> Documents:
        if shard not in self._open:
            path = self._awaited(shard)
            if path is None:
                raise ValueError(
                    f"{self._folder / shard_name(shard)} is no longer there, and documents of it are due"
                )
            self._keep(shard, self._trained_on(self._checked(path), shard)[0])
        self._open.move_to_end(shard)
        return self._open[shard]

    def document(self, item: dict[str, Any]) -> Document:
        """See `Arriving`."""
        return self._view(item["shard"])[item["number"]]

    def document_name(self, item: dict[str, Any]) -> str:
        """See `Arriving`."""
        return f"{shard_name(item['shard'])}: {self._view(item['shard']).names(item['number'])}"
