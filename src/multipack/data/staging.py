"""Token stores, copied to fast storage before training, and verified once a host.

    data.path=/shared/books   ──▶  read in place                                        data.stage=
                              ──▶  arrays in the memory of each process                 data.stage=memory
                              ──▶  /local/3f9a…/ shard-0000-00000.safetensors, …        data.stage=/local

A copy is named by the content hash of its store: equal stores share one, and a store that was prepared again gets
another. One process copies, under a lock in that folder, while the others wait. Shards appear whole, and the header
last, so that an interrupted copy is continued. A staged store keeps its path in messages and its hash: documents, plans
and saved runs are the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from multipack.atomic import PARTIAL, locked, write_atomically
from multipack.data.shards import CHAT_TEMPLATE, HEADER, RECIPE, TOKENIZER
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Progress
from multipack.data.writer import remove_store

MEMORY = "memory"
"""Value of `data.stage` that is no folder."""
_COPY = re.compile(r"[0-9a-f]{32}")


def verify_once(stores: Sequence[TokenStore], cache: Path, progress: Progress | None = None) -> None:
    """Compare the content of stores with their hashes, once a host while sizes and times of change stay the same.

    One process of a host reads, under a lock, and leaves a stamp in `cache`; the others find it.

    Raises:
        ValueError: a store is damaged.
    """
    for store in stores:
        files = [store.folder / entry.name for entry in store.header.shards]
        state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        text = f"{socket.gethostname()} {store.folder.absolute()} {store.checksum} {state}"
        stamp = cache / "verified" / hashlib.sha256(text.encode()).hexdigest()[:32]
        with locked(stamp.with_suffix(".lock")):
            if not stamp.exists():
                try:
                    store.verify(progress)
                except ValueError as error:
                    if store.folder == store.path:
                        raise
                    remove_store(store.folder)
                    raise ValueError(
                        f"{store.folder}: the local copy was damaged and is removed; start again"
                    ) from error
                write_atomically(stamp, text.encode())


def stage(
    stores: Sequence[TokenStore], where: str, progress: Progress | None = None
) -> tuple[list[TokenStore], str]:
    """The same stores, copied to memory or to a folder of this host; and one line for people.

    Args:
        stores: stores that are folders.
        where: `memory`, a folder, or empty: stores are read where they are.
        progress: called with (bytes done, total, unit).

    Raises:
        ValueError: no room; the folder cannot be written.
    """
    if not where:
        return list(stores), ""
    return _into_memory(stores) if where == MEMORY else _into_folder(stores, where, progress)


def _into_memory(stores: Sequence[TokenStore]) -> tuple[list[TokenStore], str]:
    total, free = sum(map(_size, stores)), available_memory()
    if free is not None and total > free:
        raise ValueError(
            f"data.stage={MEMORY}: the token stores have {total:,} bytes, of which each process of a host holds a"
            f" copy, and {free:,} are free: set data.stage=/dev/shm (one copy a host), a local folder, or nothing"
        )
    held = [TokenStore(store.path, in_memory=True) for store in stores]
    return held, (
        f"{total:,} bytes of tokens and offsets were read into memory, once in every process;"
        " data.stage=/dev/shm keeps one copy for all processes of a host"
    )


def _into_folder(
    stores: Sequence[TokenStore], where: str, progress: Progress | None
) -> tuple[list[TokenStore], str]:
    folder = Path(where).expanduser().absolute()
    wanted = {store.checksum: store for store in stores}
    missing = [store for store in wanted.values() if _find_copy(store, folder) is None]
    copied = 0
    if missing:
        with ExitStack() as held:
            _lock(held, folder, where, progress)
            missing = [
                store for store in missing if _find_copy(store, folder) is None
            ]  # others may have copied
            copied = sum(_missing_bytes(store, folder / store.checksum[:32]) for store in missing)
            _check_room(folder, where, copied)
            done = 0

            def report(now: int) -> None:
                if progress is not None:
                    progress(now, copied, "bytes copied")

            for store in missing:
                done = _copy(store, folder, where, report, done)
    how = f"{copied:,} copied now" if copied else "a copy that was there already"
    total = sum(map(_size, wanted.values()))
    ready = list[TokenStore]()
    for store in stores:
        copy = _find_copy(store, folder)
        if copy is None:
            raise ValueError(f"{store.path} was replaced by another store while it was copied: start again")
        ready.append(copy)
    return ready, f"tokens are read from {folder}: {total:,} bytes, {how}"


def _find_copy(store: TokenStore, folder: Path) -> TokenStore | None:
    """The copy of a store, if it is there and complete."""
    try:
        found = TokenStore(store.path, folder / store.checksum[:32])
    except ValueError:
        return None
    return found if found.checksum == store.checksum else None


def _lock(held: ExitStack, folder: Path, where: str, progress: Progress | None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        waiting = None if progress is None else partial(progress, 0, None, "waiting for a copy")
        held.enter_context(locked(folder / ".staging.lock", waiting))
    except OSError as error:
        raise ValueError(
            f"data.stage={where}: the folder cannot be written ({error.strerror}): name a folder of this host that can,"
            " such as /dev/shm or a local disk"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"data.stage={where}: this file system has no file locks: name a folder of this host, such as /dev/shm or a"
            " local disk"
        ) from error


def _check_room(folder: Path, where: str, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return
    copies = [entry for entry in folder.iterdir() if _COPY.fullmatch(entry.name)]
    others = sum(file.stat().st_size for copy in copies for file in copy.iterdir() if file.is_file())
    kept = f", and copies of stores there take {others:,}: remove those" if others else ": remove files"
    raise ValueError(
        f"data.stage={where}: {needed:,} bytes are to be copied, {free:,} are free{kept}, name another folder, or leave"
        " data.stage out"
    )


def _files(store: TokenStore) -> list[str]:
    """The files of a store, its header last."""
    texts = [TOKENIZER, *([CHAT_TEMPLATE] if store.header.chat_template_hash else []), RECIPE]
    return [*texts, *(entry.name for entry in store.header.shards), HEADER]


def _missing_bytes(store: TokenStore, copy: Path) -> int:
    try:
        missing = [name for name in _files(store) if not _is_copied(store, copy, name)]
        return sum((store.folder / name).stat().st_size for name in missing)
    except FileNotFoundError as error:
        raise ValueError(
            f"{store.path} was replaced by another store while it was copied: start again"
        ) from error


def _is_copied(store: TokenStore, copy: Path, name: str) -> bool:
    file = copy / name
    return file.is_file() and file.stat().st_size == (store.folder / name).stat().st_size


def _copy(store: TokenStore, folder: Path, where: str, progress: Callable[[int], None], done: int) -> int:
    """Copy the files of a store that are missing; returns the bytes copied so far, `done` of them before."""
    copy = folder / store.checksum[:32]
    try:
        copy.mkdir(exist_ok=True)
        for name in _files(store):
            if _is_copied(store, copy, name):
                continue
            partial = copy / f".{name}{PARTIAL}"
            with open(store.folder / name, "rb") as source, open(partial, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 24)
                target.flush()
                os.fsync(target.fileno())
                done += target.tell()
            os.replace(partial, copy / name)
            progress(done)
    except OSError as error:
        raise ValueError(
            f"data.stage={where}: {store.path} could not be copied to {copy} ({error.strerror}): make room, name"
            " another folder, or leave data.stage out"
        ) from error
    return done


def available_memory() -> int | None:
    """Bytes of memory that new allocations can have, as Linux estimates them; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * kibibytes[0] if kibibytes else None


def _size(store: TokenStore) -> int:
    return sum(entry.bytes for entry in store.header.shards)
