"""Checksums of files: whole, of their beginning, and once a host while a file stays the same.

The checksum of a file of one block is its sha256, of a longer file the sha256 of its blocks' sha256. Threads share the
blocks.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from multipack.atomic import locked, open_file, write_atomically

BLOCK = 1 << 24
"""Bytes of a file that one thread hashes."""
HASHERS = 8
"""Threads that hash blocks: one core hashes about as much as a fast disk writes."""


def checksum(file: Path) -> str:
    """The checksum of a file."""
    with file.open("rb") as opened:
        read = partial(os.pread, opened.fileno(), BLOCK)
        offsets = range(0, max(os.fstat(opened.fileno()).st_size, 1), BLOCK)
        with ThreadPoolExecutor(HASHERS, "checksum") as threads:
            return joined_checksum(list(threads.map(lambda offset: digest_of([read(offset)]), offsets)))


def digest_of(parts: Iterable[Any]) -> bytes:
    """The sha256 of consecutive bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def joined_checksum(digests: Sequence[bytes]) -> str:
    """The checksum of a file from the sha256 of each of its blocks."""
    return digests[0].hex() if len(digests) == 1 else digest_of(digests).hex()


def begins_with(path: Path, size: int, sha256: str) -> bool:
    """Whether a file begins with `size` bytes of this sha256.

    Raises:
        OSError, ValueError: see `open_file`.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        while size > 0 and (part := file.read(min(size, 1 << 20))):
            digest.update(part)
            size -= len(part)
    return size == 0 and digest.hexdigest() == sha256


def remembered(files: Sequence[Path], what: str, cache: Path, compute: Callable[[], str]) -> str:
    """The result of `compute`, once a host while files stay the same; `what` names it.

    One process of a host computes it, under a lock, and leaves it in `cache` for the others. Files are compared by
    size, times and inode: `cp -p` and `rsync -t` keep size and time, but not the time of change of the inode.
    """
    states = [(str(file.absolute()), file.stat()) for file in files]
    state = [(name, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for name, at in states]
    key = digest_of([f"{socket.gethostname()} {what} {state}".encode()]).hex()[:32]
    stamp = cache / "verified" / key
    with locked(stamp.with_suffix(".lock")):
        if not stamp.exists():
            write_atomically(stamp, compute().encode())
        return stamp.read_text(encoding="utf-8")
