"""Files and folders that appear as a whole or not at all, also if their writer is killed.

atomic_folder(store)      .store.1f3a9c.partial/ …  ──fsync, rename──▶  store/
killed while writing      .store.1f3a9c.partial/    removed by the next writer of the same path

Also the user's cache folder, and locks between processes.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of files and folders that are being written; none of them is ever read."""


def write_atomically(path: Path, content: bytes, exclusive: bool = False) -> None:
    """Write a file so that `path` has the old content or the new one, never a part of it.

    Args:
        path: its folder is created if needed.
        content: of the file.
        exclusive: fail if there is a file already.

    Raises:
        FileExistsError: with `exclusive`, of several writers all but the first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(partial, path)
        else:
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def partial_path(path: Path) -> Path:
    """A new name beside `path` for what will become `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` that becomes `path` when the block ends without an exception.

    The block syncs the files that it writes; the folder itself is synced here. What a killed writer of the same path
    left is removed first, so only one process at a time may write it.

    Raises:
        OSError: `path` exists and is not an empty folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    partial = partial_path(path)
    partial.mkdir()
    try:
        yield partial
        move_into_place(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_free(path: Path, leftovers: bool = False) -> bool:
    """Whether `path` does not exist or is an empty folder; with `leftovers`, what killed writers left is ignored."""
    if not path.is_dir():
        return not path.exists()
    return all(leftovers and entry.name.endswith(PARTIAL) for entry in path.iterdir())


def move_into_place(partial: Path, path: Path, replace: bool = False) -> None:
    """Give a complete folder its name, with `replace` also if another folder has it."""
    sync_folder(partial)
    if not replace or is_free(path):
        # Fails if another process has made a folder of this name meanwhile.
        os.rename(partial, path)
    else:
        old = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
        os.rename(path, old)
        try:
            os.rename(partial, path)
        except BaseException:
            os.rename(old, path)
            raise
        shutil.rmtree(old)
    sync_folder(path.parent)


def sweep(path: Path) -> None:
    """Remove what killed writers of `path` left beside it, and restore a folder that they were about to replace.

    No other process may be writing `path`.
    """
    name = glob.escape(path.name)
    for old in path.parent.glob(f".{name}.*.old"):
        if path.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)
    for partial in path.parent.glob(f".{name}.*{PARTIAL}"):
        shutil.rmtree(partial)


def sync_folder(folder: Path) -> None:
    """Write a folder's list of names to disk, so that it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder(chosen: str = "") -> Path:
    """The folder of trained tokenizers and token stores: `chosen`, or the user's cache folder; it is not created.

    The user's is `$XDG_CACHE_HOME/multipack` if that variable holds an absolute path (the XDG base directory
    specification requires one), else `~/.cache/multipack`.
    """
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "multipack"


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock between processes on the file `path`, which is created and remains.

    The operating system releases the lock when its process ends or is killed.

    Args:
        path: the lock file.
        on_wait: called once, before waiting, when another process holds the lock.

    Raises:
        ValueError: the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise ValueError(
                f"the file system of {path.parent} has no file locks; set data.cache to a local folder"
            ) from error
        yield
