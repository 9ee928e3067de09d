"""The user's cache folder, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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
        if not _try_lock(file.fileno(), path):
            if on_wait is not None:
                on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise ValueError(
                f"the file system of {path.parent} has no file locks; set data.cache to a local folder"
            ) from error
        raise
    return True
