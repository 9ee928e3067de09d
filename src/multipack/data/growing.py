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
from multipack.data.shards import HEADER, RECIPE, find_shards
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
        self._found: TokenStore | None = None  # with the shards that are there
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
        store = self._awaited(self._shard)
        if store is not None and self._data.verify == "full":
            store.verify()
        return store

    def _awaited(self, shard: int) -> TokenStore | None:
        """A shard, once it is there; None if there will be none."""
        began = time.monotonic()
        while True:
            self._look(shard)
            found, there = self._found, 0 if self._found is None else len(self._found.header.shards)
            if found is not None and shard < there:
                store = found.shard(shard)
                self._first = self._first or store
                return store
            if found is not None and found.is_complete:
                return None
            if time.monotonic() - began > self._patience_seconds:
                raise DocumentsLate(
                    f"waited {self._patience_seconds:g} s for shard {shard} of {self._folder} ({there:,} shards are"
                    f" there, and no {HEADER} that completes the store): resume with train.resume when it has arrived,"
                    " or raise data.patience_seconds"
                )
            if self.interrupted:
                raise StreamInterrupted(f"while shard {shard} of {self._folder} was awaited")
            time.sleep(min(POLL_SECONDS, self._patience_seconds / 8))

    def _look(self, shard: int) -> None:
        """Read the folder again, unless the shard is known."""
        found, folder = self._found, self._folder
        if found is not None and (found.is_complete or shard < len(found.header.shards)):
            return
        if not ((folder / HEADER).is_file() or (folder / RECIPE).is_file()):
            return
        header, is_complete = find_shards(folder, found.header.shards if found is not None else ())
        files = [folder / entry.name for entry in header.shards]
        self._found = TokenStore(folder, header=header, shards=files)
        self._found.is_complete = is_complete
        if header.split_by == "position":
            raise ValueError(
                f"{folder} holds one stream of text, which cannot be trained on while it arrives: divide the text into"
                " documents (data.documents), or wait for it and leave data.stream out"
            )

    def _overlong(self, store: TokenStore) -> str:
        return store.overlong

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
            store = self._awaited(shard)
            if store is None:
                raise ValueError(
                    f"shard {shard} of {self._folder} is no longer there, and its documents are needed"
                )
            self._keep(shard, self._trained_on(store, shard)[0])
        self._open.move_to_end(shard)
        return self._open[shard]

    def document(self, item: dict[str, Any]) -> Document:
        """See `Arriving`."""
        return self._view(item["shard"])[item["number"]]

    def document_name(self, item: dict[str, Any]) -> str:
        """See `Arriving`."""
        return f"shard {item['shard']}: {self._view(item['shard']).names(item['number'])}"
