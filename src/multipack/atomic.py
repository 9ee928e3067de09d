"""Files and folders that appear whole or not at all, even if their writer is killed; the cache folder; file locks.

atomic_folder(store)      .store.1f3a9c.partial/ …  ──fsync, rename──▶  store/
killed while writing      .store.1f3a9c.partial/    removed by the next writer of the same path
"""

from __future__ import annotations

import errno
import fcntl
import glob
import math
import os
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from multipack.untrusted import one_line

PARTIAL = ".partial"
"""Suffix of files and folders that are being written; they are never read."""
MOST_BYTES = 1 << 26
"""Bytes of the largest file that `read_file` reads by default."""
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; make room, and give the same command again"),
    errno.EROFS: "; choose a folder that can be written",
}
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links, such as exFAT and many in user space."""
_CHOOSE_CACHE = "set XDG_CACHE_HOME (or data.cache) to a folder that you can write"
PATIENCE, _POLL = 5.0, 0.05
"""Seconds before the holder of a lock is named, and between attempts to take it."""


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is a pipe or a device, which could be read without end, or larger.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"{path} is larger than {most:,} bytes")
        return file.read()


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """A regular file opened for reading.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is a pipe or a device, which could be read without end.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file")
        yield file


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def write_atomically(path: Path, content: bytes | Iterable[bytes], exclusive: bool = False) -> None:
    """Write a file, and its folder if needed, so that `path` has the old content or the new one, never a part of it.

    Raises:
        FileExistsError: with `exclusive`, the file exists; of several concurrent writers all but one get this error.
        OSError: the file cannot be written; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with open(partial, "xb") as file:
            file.writelines((content,) if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        (_claim if exclusive else os.replace)(partial, path)
    except OSError as error:
        raise with_advice(error, path) from error
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def _claim(partial: Path, path: Path) -> None:
    """Rename a file to `path`, or fail if it exists; without hard links an empty file claims the name first."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.replace(partial, path)


def with_advice(error: OSError, path: Path) -> OSError:
    """The error of writing `path` with its name, which the error of a full disk lacks, and with advice."""
    if error.errno not in _ADVICE and error.filename is not None:
        return error
    return OSError(error.errno, f"{error.strerror or error}{_ADVICE.get(error.errno or 0, '')}", str(path))


def partial_path(path: Path) -> Path:
    """An unused path beside `path`, for content that is renamed to `path` when it is complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` that becomes `path` when the block ends without an exception.

    The block syncs the files that it writes; the folder itself is synced here. Partial folders of killed writers of the
    same path are removed first, so only one process at a time may write it.

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
    """Whether `path` does not exist or is an empty folder; `leftovers` allows partial files of killed writers in it."""
    if not path.is_dir():
        return not path.exists()
    return all(leftovers and entry.name.endswith(PARTIAL) for entry in path.iterdir())


def move_into_place(partial: Path, path: Path, replace: bool = False) -> None:
    """Rename a complete folder to `path`; `replace` removes another folder there.

    Raises:
        FileExistsError: another process has made something of this name.
    """
    sync_folder(partial)
    if not replace or is_free(path):
        try:
            os.rename(partial, path)
        except OSError as error:
            if is_free(path):
                raise
            message = "another process has written it meanwhile: choose another folder, or keep that one"
            raise FileExistsError(errno.EEXIST, message, str(path)) from error
    else:
        old = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
        os.rename(path, old)
        try:
            os.rename(partial, path)
        except BaseException:
            os.rename(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)  # if it fails, the next writer's sweep removes it
    sync_folder(path.parent)


def sweep(path: Path) -> None:
    """Remove partial folders of killed writers of `path`, and restore a folder that they were about to replace.

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
    """The folder of trained tokenizers and token stores, which may not exist: `chosen`, or the user's cache folder.

    That is `$XDG_CACHE_HOME/multipack` if the variable holds an absolute path (the XDG base directory specification
    requires one), else `~/.cache/multipack`.

    Raises:
        ValueError: the user has no home folder, as in containers that run under a number.
    """
    if chosen:
        return Path(chosen).expanduser()
    if (found := _users_cache()) is None:
        raise ValueError(f"this user has no home folder for the cache: {_CHOOSE_CACHE}")
    return found


def _users_cache() -> Path | None:
    """The user's cache folder; None if there is neither the variable nor a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "multipack"
    home = os.path.expanduser("~")  # Path.home() raises instead
    return Path(home) / ".cache" / "multipack" if home != "~" else None


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. Existing ones keep it, except the user's cache.

    Raises:
        OSError: it cannot be created.
    """
    cache = _users_cache()
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            try:
                with suppress(FileExistsError):  # of another process, just now
                    each.mkdir(mode=0o700)
            except OSError as error:
                if cache not in (folder, *folder.parents):
                    raise
                raise OSError(error.errno, f"{error.strerror}: {_CHOOSE_CACHE}", str(folder)) from error
        elif each == cache:  # earlier versions let others read it
            with suppress(PermissionError):  # of another user
                each.chmod(0o700)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def own_folder(where: Path) -> Path:
    """The folder `multipack-UID` of this user in one that users share; created with mode 0700.

    Raises:
        OSError: it cannot be created.
        ValueError: its name belongs to a link or to another user.
    """
    folder = where / f"multipack-{os.getuid()}"
    make_private(folder)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        raise ValueError(f"{folder} is not a folder of this user")
    return folder


@contextmanager
def locked(path: Path, *, temporary: bool = False) -> Iterator[None]:
    """Context that holds an exclusive lock between processes on the file `path`; a symbolic link is not followed.

    The operating system releases the lock when its process ends or is killed. When another process has held it for
    `PATIENCE` seconds, a line names the holder.

    Args:
        path: the lock file; it and missing folders are created, folders with mode 0700.
        temporary: remove the file at the end.

    Raises:
        ValueError: the file system has no locks.
        OSError: the file cannot be opened.
    """
    make_private(path.parent)
    descriptor = _acquire(path)
    try:
        with suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)
        yield
    finally:
        if temporary:
            with suppress(FileNotFoundError, PermissionError):  # another user's, in a folder such as /tmp
                path.unlink()
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """The descriptor of the lock file `path`, locked."""
    announced = time.monotonic() + PATIENCE
    while True:
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        except PermissionError:  # another user's file, which can be locked if it can be read
            descriptor = os.open(path, os.O_RDONLY | flags)
        is_held = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # its holder has removed the file meanwhile
                is_held = os.path.samestat(os.fstat(descriptor), os.stat(path))
            if is_held:
                return descriptor
        except BlockingIOError:
            if time.monotonic() > announced:
                holder = one_line(os.pread(descriptor, 200, 0).decode(errors="replace").strip())
                waiting = f"waiting for {holder or 'another process'}, which holds the lock {path}"
                print(waiting, file=sys.stderr)
                announced = math.inf
            time.sleep(_POLL)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise ValueError(
                f"the file system of {path.parent} has no file locks; set data.cache to a local folder"
            ) from error
        finally:
            if not is_held:
                os.close(descriptor)
