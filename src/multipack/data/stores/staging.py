"""Token stores, copied to fast storage before training, and verified once a host.

    data.path=/shared/books   ──▶  read in place                                        data.stage=
                              ──▶  /local/multipack-1000/3f9a…/ shard-0000-00000…       data.stage=/local

A folder holds the copies of one user, who alone can read them. A copy is named by the content hash of its store: equal
stores share one, and a store that was prepared again gets another. One process copies, under a lock in that folder,
while the others wait. Files appear whole, and the header last, so that an interrupted copy is continued. A staged store
keeps its path in messages and its hash: documents, plans and saved runs are the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from multipack.atomic import PARTIAL, locked, own_folder, write_atomically
from multipack.checksums import remembered
from multipack.data.stores.shards import HEADER, SHARDS, TOKENIZER
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import remove_store
from multipack.data.text.texts import CHAT_TEMPLATE
from multipack.data.text.tokenizer import Progress, silent


def verify_once(stores: Sequence[TokenStore], cache: Path, progress: Progress = silent) -> None:
    """Compare the content of stores with their hashes, once a host while sizes and times of change stay the same.

    One process of a host reads, under a lock, and leaves a stamp in `cache` for the others.

    Raises:
        ValueError: a store is damaged.
    """
    for store in stores:
        files = sorted(store.folder.glob(SHARDS))
        text = f"{store.folder.absolute()} {store.checksum}"

        def verified(store: TokenStore = store) -> str:
            try:
                store.verify(progress)
            except ValueError as error:
                if store.folder == store.path:
                    raise
                remove_store(store.folder)
                message = f"{store.folder}: the local copy was damaged and is removed; start again"
                raise ValueError(message) from error
            return store.checksum

        remembered(files, text, cache, verified)


def stage(
    stores: Sequence[TokenStore], where: str, progress: Progress = silent
) -> tuple[list[TokenStore], str]:
    """The same stores, copied to a folder of this host; and one line for people.

    Raises:
        ValueError: no room; the folder cannot be written.
    """
    total = sum({store.checksum: store.bytes for store in stores}.values())
    try:
        folder = own_folder(Path(where).expanduser().absolute())
        with locked(folder / ".lock"):
            copied = sum(_copy(store, folder / store.checksum[:32], progress) for store in stores)
        copies = [TokenStore(store.path, folder / store.checksum[:32]) for store in stores]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.stage={where}: stores cannot be copied there ({error}): name a folder of this host with file locks"
            " and room, such as /dev/shm, or leave data.stage out"
        ) from error
    if [copy.checksum for copy in copies] != [store.checksum for store in stores]:
        raise ValueError(f"data.stage={where}: a store was replaced while it was copied: start again")
    how = f"{copied:,} copied now" if copied else "a copy that was there already"
    return copies, f"tokens are read from {folder}: {total:,} bytes, {how}"


def _copy(store: TokenStore, copy: Path, progress: Progress) -> int:
    """Copy the files of a store that are missing or of another size, the header last; returns their bytes."""
    names = [file.name for file in sorted(store.folder.glob(SHARDS))] + [CHAT_TEMPLATE, TOKENIZER, HEADER]
    sizes = {name: (store.folder / name).stat().st_size for name in names if (store.folder / name).is_file()}
    missing = {
        name: size
        for name, size in sizes.items()
        if not (copy / name).is_file() or (copy / name).stat().st_size != size
    }
    total, done = sum(missing.values()), 0
    if total > (free := shutil.disk_usage(copy.parent).free):
        raise ValueError(f"{total:,} bytes are to be copied, {free:,} are free")
    for left in copy.glob(f".*{PARTIAL}"):  # by a killed process
        left.unlink()
    for name, size in missing.items():
        write_atomically(copy / name, (store.folder / name).read_bytes())
        done += size
        progress(done, total, "bytes copied")
    return total
