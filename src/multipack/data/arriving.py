"""Documents that arrive while a run trains on them, and where reading them stands.

    chunk 0        chunk 1        chunk 2 …            a shard of a growing folder, or some hundred records
    |AA|B|CCC|D|   |E|FFFF|GG|    (awaited)
       × held back to validate on, from the first chunk only
    ─▶ split, fit ─▶ items A0 A1 C0 C1 D0 E0 …         what a `PackStream` plans, and its state holds

An item is plain data from which its document is made when its pack is collated. The place is the number of the chunk
and that of the next item in it; with the items in flight, which the stream's state holds, it is all that a run needs
to go on: nothing that was read before is read again, but the chunk in which reading stopped.

Every rank reads the same documents and takes its share of each step; so the steps are those of any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import numpy as np

from multipack.data.data_config import DataConfig
from multipack.data.documents import Document, Documents
from multipack.data.fit import Fit, FitReport
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Tokenizer
from multipack.planning.lengths import check_integer

HEAD = 2048
"""Documents, the first ones of the stream, some of which are held back to validate on."""


class StreamInterrupted(Exception):
    """Waiting for documents was ended, because the run shall stop."""


class DocumentsLate(ValueError):
    """The next documents did not come in time; whoever waits may save what was done before."""


class Arriving(ABC):
    """Documents that arrive, as items; it goes on where it stands whenever it is iterated.

    Of the first `HEAD` documents (or of those of the first chunk, where it has fewer) the share `data.validation`,
    chosen by `data.split_seed`, is held back and never trained on. All later documents are.

    Args:
        data: what becomes of the documents.
        limit: most tokens of a document.

    Attributes:
        interrupted: whether nothing is waited for any more.
        report: what was done to documents that were too long, in all chunks that were left behind.
        validation: the documents that are held back, none of them too long.
        validation_fit: what was done for that.

    Raises:
        ValueError: the first chunk has too few documents to hold some back; see `Fit`.
    """

    def __init__(self, data: DataConfig, limit: int) -> None:
        self._data, self._limit = data, limit
        self.interrupted = False
        self._restart()
        first = self._store()
        if first is None:
            raise ValueError(f"{self.name} has ended, and there was no document in it")
        whole = self._whole(first)
        head = whole.take(np.arange(min(len(whole), HEAD)))
        if data.validation and len(np.unique(head.pieces.document)) < 2:
            raise ValueError(
                f"data.validation={data.validation} holds documents back from the first ones that arrive, but"
                f" {self.name} begins with {len(head)}: set data.validation=0 (and train.eval_every=0)"
            )
        validation = head.split(data.validation, data.split_seed)[1]
        self._held = validation.pieces.document
        self._first_checksum = first.checksum
        self.validation, self.validation_fit = validation.fit(limit, self._fit(first))
        self.restart()

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the stream, for people."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Whose tokens these are."""

    @property
    def chat_template(self) -> str:
        """The template of its chats, as JSON; empty = there are none."""
        return ""

    @property
    def has_pairs(self) -> bool:
        """Whether the documents are preference pairs."""
        return self.validation.store.has_pairs

    @property
    def skipped(self) -> dict[str, int]:
        """What was left out so far: reason → how many."""
        return {}

    @property
    def fingerprint(self) -> str:
        """Sha256 of how the stream begins, and of what decides which documents it becomes."""
        data = self._data
        settings = {name: getattr(data, name) for name in _DECISIVE}
        said = json.dumps([self._first_checksum, self._limit, settings], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    @abstractmethod
    def _restart(self) -> None:
        """Make the first chunk the present one."""

    @abstractmethod
    def _store(self) -> TokenStore | None:
        """The present chunk, waited for if need be; None after the last."""

    @abstractmethod
    def _leave(self) -> None:
        """Make the next chunk the present one."""

    @abstractmethod
    def _item(self, documents: Documents, number: int) -> dict[str, Any]:
        """Plain data from which `document` makes this one of the present chunk again."""

    @abstractmethod
    def document(self, item: dict[str, Any]) -> Document:
        """The document of an item."""

    @abstractmethod
    def document_name(self, item: dict[str, Any]) -> str:
        """The name of an item's document."""

    @abstractmethod
    def _place(self) -> dict[str, Any]:
        """Where the present chunk is, as plain data."""

    @abstractmethod
    def _go_to(self, place: dict[str, Any]) -> None:
        """Make the chunk of a saved place the present one."""

    def interrupt(self) -> None:
        """Wait for nothing any more: whoever waits for the next chunk gets `StreamInterrupted`.

        It takes no lock, so that a signal's handler may call it.
        """
        self.interrupted = True

    def restart(self) -> None:
        """Stand at the beginning."""
        self._restart()
        self._chunk = self._number = 0
        self._documents: Documents | None = None
        self.report = FitReport(self._limit, "error")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Items, from where the stream stands: each with its `length` and its `targets`."""
        while (documents := self._present()) is not None:
            lengths, targets = documents.lengths, documents.target_counts
            while self._number < len(documents):
                number = self._number
                item = self._item(documents, number)
                item |= {"length": int(lengths[number]), "targets": int(targets[number])}
                self._number += 1
                yield item
            self.report += self._chunk_report
            self._leave()
            self._chunk, self._number, self._documents = self._chunk + 1, 0, None

    def _present(self) -> Documents | None:
        """The documents of the present chunk, as they are trained on."""
        if self._documents is None:
            store = self._store()
            if store is None:
                return None
            self._documents, self._chunk_report = self._trained_on(store, self._chunk)
        return self._documents

    def _trained_on(self, store: TokenStore, chunk: int) -> tuple[Documents, FitReport]:
        """What is trained on of a chunk: what is not held back, none of it too long."""
        whole = self._whole(store)
        if chunk == 0 and len(self._held):
            whole = whole.take(np.flatnonzero(~np.isin(whole.pieces.document, self._held)))
        fit, tokens = self._fit(store), whole.num_tokens
        if fit.policy == "drop" and len(whole) and whole.lengths.min() > self._limit:  # others may follow
            report = FitReport(self._limit, "drop", dropped_documents=len(whole), dropped_tokens=tokens)
            return whole.take([]), report
        return whole.fit(self._limit, fit)

    def _whole(self, store: TokenStore) -> Documents:
        return Documents.whole(store, self._data.train_on_prompt)

    def _fit(self, store: TokenStore) -> Fit:
        data = self._data
        policy: str = self._overlong(store) if data.overlong == "auto" else data.overlong
        return Fit(policy, data.overlap, data.repeat_prompt)

    def _overlong(self, store: TokenStore) -> str:
        """What becomes of documents that are too long, where the configuration leaves it to the stream."""
        return "error"

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands, as plain data."""
        return {
            "fingerprint": self.fingerprint,
            "chunk": self._chunk,
            "number": self._number,
            "report": list(astuple(self.report)[2:]),
            "place": self._place(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: it is damaged, or of another stream.
        """
        missing = [key for key in ("fingerprint", "chunk", "number", "report", "place") if key not in state]
        if missing:
            raise ValueError(f"the saved place in {self.name} lacks {', '.join(missing)}")
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the saved place is in another stream than {self.name}: its first documents, its tokenizer, the limit"
                f" of {self._limit:,} tokens, or one of data.{', data.'.join(_DECISIVE)} was another"
            )
        self.restart()
        self._chunk = check_integer("the saved chunk", state["chunk"], 0)
        self._number = check_integer("the saved number in the chunk", state["number"], 0)
        self.report = FitReport(self._limit, "error", *state["report"])
        self._go_to(state["place"])


_DECISIVE = ("validation", "split_seed", "overlong", "overlap", "repeat_prompt", "train_on_prompt")
"""Settings that decide which items a stream has."""
