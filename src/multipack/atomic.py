"""Files and folders that appear whole or not at all, whatever kills their writer.

atomic_folder(store)      .store.1f3a9c.partial/ …  ──fsync, rename──▶  store/
killed in the middle      .store.1f3a9c.partial/    swept away by the next writer of the same path
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of what is still being written; nothing with it ever loads."""

_WRITER = "writer.lock"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that `path` holds the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `path` to write into, which becomes `path` when the block ends well.

    Whoever writes the files syncs them; the folder itself is synced here. After an exception, or a kill,
    `path` is as it was before.

    Args:
        path: the folder to make.
        replace: put it in the place of a folder that exists.

    Raises:
        FileExistsError: `path` exists, is not an empty folder, and `replace` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    if not (replace or is_free(path)):
        raise FileExistsError(errno.EEXIST, "already exists", str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    partial.mkdir()
    try:
        with open(partial / _WRITER, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield partial
            (partial / _WRITER).unlink()
            sync_folder(partial)
            _move_into_place(partial, path, replace)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(path.parent)


def is_free(path: Path, leftovers: bool = False) -> bool:
    """Whether there is nothing at `path`, or an empty folder; with `leftovers`, one with what killed writers left."""
    if not path.is_dir():
        return not path.exists()
    return all(leftovers and entry.name.endswith(PARTIAL) for entry in path.iterdir())


def _move_into_place(partial: Path, path: Path, replace: bool) -> None:
    if not replace or is_free(path):
        os.rename(partial, path)  # fails if something has come to be there meanwhile
        return
    old = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    os.rename(path, old)
    try:
        os.rename(partial, path)
    except BaseException:
        os.rename(old, path)
        raise
    shutil.rmtree(old)


def sweep(path: Path) -> None:
    """Remove what killed writers of `path` left beside it, and restore what they were about to replace.

    Writers still at work are left alone.
    """
    for old in path.parent.glob(f".{_glob_safe(path.name)}.*.old"):
        if path.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)
    for partial in path.parent.glob(f".{_glob_safe(path.name)}.*{PARTIAL}"):
        if not partial.is_dir():
            continue
        with suppress(FileNotFoundError, BlockingIOError):
            lock = partial / _WRITER
            if lock.exists():
                with open(lock, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial)


def _glob_safe(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
