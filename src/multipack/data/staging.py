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
import shutil
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from multipack.atomic import PARTIAL, locked, write_atomically
from multipack.data.shards import CHAT_TEMPLATE, HEADER, RECIPE, TOKENIZER
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Progress
from multipack.data.writer import remove_store

MEMORY = "memory"
"""Value of `data.stage` that is no folder."""


def verify_once(stores: Sequence[TokenStore], cache: Path, progress: Progress | None = None) -> None:
    """Compare the content of stores with their hashes, once a host while sizes and times of change stay the same.

    One process of a host reads, under a lock, and leaves a stamp in `cache`; the others find it.

    Raises:
        ValueError: a store is damaged.
    """
    for store in stores:
        files = [(store.folder / entry.name).stat() for entry in store.header.shards]
        state = [(file.st_size, file.st_mtime_ns) for file in files]
        text = f"{socket.gethostname()} {store.folder.absolute()} {store.checksum} {state}"
        stamp = cache / "verified" / hashlib.sha256(text.encode()).hexdigest()[:32]
        with locked(stamp.with_suffix(".lock")):
            if stamp.exists():
                continue
            try:
                store.verify(progress)
            except ValueError as error:
                if store.folder == store.path:
                    raise
                remove_store(store.folder)
                message = f"{store.folder}: the local copy was damaged and is removed; start again"
                raise ValueError(message) from error
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
    if where == MEMORY:
        return _into_memory(stores)
    folder, copied = Path(where).expanduser().absolute(), 0
    waiting = None if progress is None else partial(progress, 0, None, "waiting for a copy")
    try:
        missing = [store for store in stores if _find_copy(store, folder) is None]
        if missing:
            with locked(folder / f".staging-{os.getuid()}.lock", waiting):
                copied = _copy_all(missing, folder, progress)
        ready = [_find_copy(store, folder) for store in stores]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.stage={where}: stores cannot be copied there ({error}): name a folder of this host with file locks"
            " and enough room, such as /dev/shm or a local disk, or leave data.stage out"
        ) from error
    found = [copy for copy in ready if copy is not None]
    if len(found) < len(stores):
        raise ValueError(f"data.stage={where}: a store was replaced while it was copied: start again")
    how = f"{copied:,} copied now" if copied else "a copy that was there already"
    total = sum({store.checksum: _size(store) for store in stores}.values())
    return found, f"tokens are read from {folder}: {total:,} bytes, {how}"


def _into_memory(stores: Sequence[TokenStore]) -> tuple[list[TokenStore], str]:
    total, free = sum(map(_size, stores)), available_memory()
    if free is not None and total > free:
        raise ValueError(
            f"data.stage={MEMORY}: the token stores have {total:,} bytes, of which each process of a host holds a"
            f" copy, and {free:,} are free: set data.stage=/dev/shm (one copy a host), a local folder, or nothing"
        )
    held = [store.in_memory() for store in stores]
    return held, (
        f"{total:,} bytes of tokens and offsets were read into memory, once in every process;"
        " data.stage=/dev/shm keeps one copy for all processes of a host"
    )


def _find_copy(store: TokenStore, folder: Path) -> TokenStore | None:
    """The copy of a store, if it is there and complete."""
    try:
        found = TokenStore(store.path, folder / store.checksum[:32])
    except ValueError:
        return None
    return found if found.checksum == store.checksum else None


def _copy_all(stores: Sequence[TokenStore], folder: Path, progress: Progress | None) -> int:
    """Copy the files that are missing in the copies of these stores, headers last; returns their bytes."""
    files = {
        folder / store.checksum[:32] / name: store.folder / name
        for store in stores
        if _find_copy(store, folder) is None  # another process may have copied meanwhile
        for name in (
            *(name for name in (TOKENIZER, CHAT_TEMPLATE, RECIPE) if (store.folder / name).is_file()),
            *(entry.name for entry in store.header.shards),
            HEADER,
        )
    }
    sizes = {copy: original.stat().st_size for copy, original in files.items()}
    missing = [
        copy
        for copy, size in sizes.items()
        if copy.name == HEADER or not copy.is_file() or copy.stat().st_size != size
    ]
    total, done = sum(sizes[copy] for copy in missing), 0
    if missing and total > (free := shutil.disk_usage(folder).free):
        raise ValueError(f"{total:,} bytes are to be copied, {free:,} are free")
    for copy in missing:
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial_copy = copy.with_name(f".{copy.name}{PARTIAL}")
        shutil.copyfile(files[copy], partial_copy)
        with open(partial_copy, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial_copy, copy)
        done += sizes[copy]
        if progress is not None:
            progress(done, total, "bytes copied")
    return total


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
