"""Token stores, copied to where they are read quickly before training begins: into memory, or to a folder of this host.

    data.path=/shared/books   ──▶  read in place                                        data.stage=
                              ──▶  arrays in the memory of each process                 data.stage=memory
                              ──▶  /local/3f9a…/ tokens.bin, …, header.json             data.stage=/local

A copy is named by the checksum of its store, which holds the hash of every file: equal stores share one, whatever
their paths, and a store that was prepared again gets another. One process copies, under a lock on that folder, while
the others wait; so a folder that is local to a host (also /dev/shm, which is memory) is filled once a host. A copy
appears whole or not at all. Shards are copied one by one, so that an interruption leaves those that are done.

A staged store keeps the path by which people know it, and its checksum: documents, plans and saved runs are the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from multipack.atomic import atomic_folder
from multipack.data.cache import locked
from multipack.data.header import HEADER
from multipack.data.joint import JointStore, Store
from multipack.data.memory import MemoryStore
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Progress

MEMORY = "memory"
"""The value of `data.stage` that means no folder."""
_CHUNK = 1 << 24
"""Bytes that are read at once."""
_LOCK = ".staging.lock"
_COPY = re.compile(r"[0-9a-f]{32}")
"""Name of a copy: the beginning of its store's checksum."""


class Staging:
    """Brings token stores to where a run reads them, and verifies them on the way.

    Args:
        where: `memory`, a folder, or nothing: stores are read where they are.
        verify: whether the content is compared with the hashes in its headers: while it is copied, or where it lies.
        progress: told how many bytes are done.

    Attributes:
        where: as given.
        told: what was done, in a sentence for people; empty = nothing.
    """

    def __init__(self, where: str = "", verify: bool = True, progress: Progress | None = None) -> None:
        self.where, self.told = where, ""
        self._verify, self._progress = verify, progress

    def take(self, stores: Sequence[Store]) -> list[Store]:
        """The same stores, ready to be read.

        Raises:
            ValueError: a store is damaged; there is no room, or the folder cannot be written.
        """
        if not self.where:
            if self._verify:
                for store in stores:
                    store.verify(self._progress)
            return list(stores)
        single = [part for store in stores for part in _parts(store)]
        found = iter(self._into_memory(single) if self.where == MEMORY else self._into_folder(single))
        return [_rebuilt(store, [next(found) for _ in _parts(store)]) for store in stores]

    def _into_memory(self, stores: Sequence[TokenStore]) -> list[TokenStore]:
        total, free = sum(map(_array_bytes, stores)), available_memory()
        if free is not None and total > free:
            raise ValueError(
                f"data.stage={MEMORY}: the token stores have {total:,} bytes, of which each process of a host holds a"
                f" copy, and {free:,} are free: set data.stage=/dev/shm (one copy a host), a local folder, or nothing"
            )
        ready, done = list[TokenStore](), 0
        for store in stores:
            held = TokenStore(store.path, in_memory=True)
            _expect_same(held, store)
            if self._verify:
                held.verify()
            ready.append(held)
            done += _array_bytes(held)
            self._tell(done, total, "bytes read into memory")
        self.told = (
            f"{total:,} bytes of tokens and offsets were read into memory, once in every process;"
            " data.stage=/dev/shm keeps one copy for all processes of a host"
        )
        return ready

    def _into_folder(self, stores: Sequence[TokenStore]) -> list[TokenStore]:
        folder = Path(self.where).expanduser().absolute()
        copies = {store.checksum: folder / store.checksum[:32] for store in stores}
        ready = {store.checksum: self._find(store, copies[store.checksum]) for store in stores}
        copied = 0
        missing = [store for store in stores if ready[store.checksum] is None]
        if missing:
            with ExitStack() as held:
                self._lock(held, folder)
                for store in missing:  # another process may have been faster
                    ready[store.checksum] = self._find(store, copies[store.checksum])
                wanted = {store.checksum: store for store in missing if ready[store.checksum] is None}
                total = sum(map(_folder_bytes, wanted.values()))
                self._check_room(folder, total)
                for checksum, store in wanted.items():
                    self._copy(store, copies[checksum], copied, total)
                    copied += _folder_bytes(store)
                    ready[checksum] = TokenStore(store.path, copies[checksum])
        whole = sum(_folder_bytes(store) for store in {store.checksum: store for store in stores}.values())
        how = f"{copied:,} copied now" if copied else "a copy that was there already"
        self.told = f"tokens are read from {folder}: {whole:,} bytes, {how}"
        return [cast(TokenStore, ready[store.checksum]) for store in stores]

    def _find(self, store: TokenStore, copy: Path) -> TokenStore | None:
        """The copy of a store, if it is there and right."""
        try:
            found = TokenStore(store.path, copy)
            if self._verify:
                found.verify(self._progress)
        except (ValueError, FileNotFoundError):  # not there, damaged, or replaced by another process just now
            return None
        return found if found.checksum == store.checksum else None

    def _lock(self, held: ExitStack, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / _LOCK, lambda: self._tell(0, None, "waiting for a copy")))
        except OSError as error:
            raise ValueError(
                f"data.stage={self.where}: the folder cannot be written ({error.strerror}): name one on this host that"
                " can, such as /dev/shm or a local disk"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"data.stage={self.where}: this file system has no file locks, by which one process copies and others"
                " wait: name a folder on this host, such as /dev/shm or a local disk"
            ) from error

    def _check_room(self, folder: Path, needed: int) -> None:
        free = shutil.disk_usage(folder).free
        if needed > free:
            copies = [entry for entry in folder.iterdir() if _COPY.fullmatch(entry.name)]
            others = sum(file.stat().st_size for copy in copies for file in copy.iterdir() if file.is_file())
            kept = (
                f", and copies of other stores there take {others:,}: remove those"
                if others
                else ": remove files"
            )
            raise ValueError(
                f"data.stage={self.where}: {needed:,} bytes are to be copied, {free:,} are free{kept}, name another"
                " folder, or leave data.stage out"
            )

    def _copy(self, store: TokenStore, copy: Path, done: int, total: int) -> None:
        """Copy a store's files, the header last; `done` of `total` bytes were copied before.

        Raises:
            ValueError: a file changed or is damaged where it is copied from, or could not be written.
        """
        try:
            with atomic_folder(copy, replace=True) as partial:
                for name in [*store.header.files, HEADER]:
                    digest = hashlib.sha256()
                    with open(store.folder / name, "rb") as source, open(partial / name, "xb") as target:
                        while chunk := source.read(_CHUNK):
                            target.write(chunk)
                            if self._verify:
                                digest.update(chunk)
                            done += len(chunk)
                            self._tell(done, total, "bytes copied")
                        target.flush()
                        os.fsync(target.fileno())
                    if (
                        self._verify
                        and name != HEADER
                        and digest.hexdigest() != store.header.files[name]["sha256"]
                    ):
                        raise ValueError(
                            f"{store.folder / name} was edited (its sha256 differs): the store is damaged; prepare it"
                            " again"
                        )
                _expect_same(TokenStore(store.path, partial), store)
        except OSError as error:
            raise ValueError(
                f"data.stage={self.where}: {store.path} could not be copied to {copy} ({error.strerror}): make room,"
                " name another folder, or leave data.stage out"
            ) from error

    def _tell(self, done: int, total: int | None, unit: str) -> None:
        if self._progress is not None:
            self._progress(done, total, unit)


def bytes_asked(store: Store | MemoryStore) -> int:
    """Bytes of documents that were asked of storage so far, in this process (see `TokenStore.bytes_asked`)."""
    if isinstance(store, MemoryStore):
        return 0
    return sum(part.bytes_asked for part in _parts(store))


def available_memory() -> int | None:
    """Bytes of memory that new allocations can have, as Linux estimates them; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * kibibytes[0] if kibibytes else None


def _parts(store: Store) -> list[TokenStore]:
    """The single stores of a store, in order."""
    if isinstance(store, TokenStore):
        return [store]
    return [part for each in store.stores for part in _parts(each)]


def _rebuilt(store: Store, parts: list[TokenStore]) -> Store:
    """A store as `open_store` gave it, of copies of its parts; nothing else about it changes."""
    if isinstance(store, TokenStore):
        return parts[0]
    joint = JointStore(store.path, parts)
    joint.header = store.header  # a folder of shards has a header of its own
    return joint


def _expect_same(copy: TokenStore, store: TokenStore) -> None:
    if copy.checksum != store.checksum:
        raise ValueError(f"{store.path} was replaced by another store while it was copied: start again")


def _array_bytes(store: TokenStore) -> int:
    return sum(entry["bytes"] for name, entry in store.header.files.items() if name.endswith(".bin"))


def _folder_bytes(store: TokenStore) -> int:
    files = store.header.files.values()
    return sum(entry["bytes"] for entry in files) + (store.folder / HEADER).stat().st_size
