import fcntl
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from multipack import atomic
from multipack.atomic import cache_folder, locked


def test_cache_folder_follows_the_choice_then_xdg_then_home(monkeypatch):
    assert cache_folder("/some/where") == Path("/some/where")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/multipack")
    for ignored in ("relative/folder", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == Path.home() / ".cache" / "multipack"


def test_without_a_home_folder_the_setting_is_named(monkeypatch, tmp_path):
    """As in containers that run under a number; with a store of one's own, locks need no cache of the user."""
    import pwd

    def nobody(number):
        raise KeyError(number)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(ValueError, match=r"XDG_CACHE_HOME .*data\.cache"):
        cache_folder()
    assert cache_folder(str(tmp_path)) == tmp_path
    with locked(tmp_path / "multipack" / "lock"):
        pass
    monkeypatch.setenv("HOME", "/dev/null")  # one that cannot be made, as that of nobody
    with (
        pytest.raises(OSError, match=r"XDG_CACHE_HOME .*data\.cache"),
        locked(cache_folder() / "stores" / "lock"),
    ):
        pass


def _hold(path, entered, leave):
    with locked(path):
        entered.set()
        leave.wait(30)


def test_a_lock_keeps_other_processes_out_until_its_holder_ends(tmp_path, monkeypatch, capsys):
    spawn = multiprocessing.get_context("spawn")
    entered, leave = spawn.Event(), spawn.Event()
    holder = spawn.Process(target=_hold, args=(tmp_path / "lock", entered, leave))
    holder.start()
    assert entered.wait(30)
    monkeypatch.setattr(atomic, "PATIENCE", 0.1)
    # When the holder is named it ends; the operating system releases the lock.
    monkeypatch.setattr(atomic, "print", lambda *line, file: print(*line) or holder.kill(), raising=False)
    with locked(tmp_path / "lock"):
        (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"waiting for process {holder.pid} of ")
    assert line.endswith(f"holds the lock {tmp_path / 'lock'}")
    holder.join()


def test_a_temporary_lock_keeps_others_out_and_leaves_nothing(tmp_path):
    path, inside = tmp_path / "lock", []

    def enter():
        for _ in range(50):
            with locked(path, temporary=True):
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside
    assert list(tmp_path.iterdir()) == []


def test_folders_of_locks_are_their_users_own_and_links_are_not_followed(tmp_path):
    (tmp_path / "there").mkdir(mode=0o755)
    with locked(tmp_path / "there" / "cache" / "stores" / "lock"):
        pass
    modes = [(tmp_path / "there" / name).stat().st_mode & 0o777 for name in ("", "cache", "cache/stores")]
    assert modes == [0o755, 0o700, 0o700]
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link"), locked(tmp_path / "link"):
        pass
    assert not (tmp_path / "target").exists()


def test_a_cache_of_an_earlier_version_becomes_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache, other = tmp_path / "multipack", tmp_path / "other" / "multipack"
    for folder in (cache, other):
        folder.mkdir(mode=0o755, parents=True)
        with locked(folder / "stores" / "lock"):
            pass
    assert [folder.stat().st_mode & 0o777 for folder in (cache, other)] == [0o700, 0o755]


def test_a_lock_file_of_another_user_is_locked_too(tmp_path, monkeypatch):
    path, opened = tmp_path / "lock", os.open
    path.touch()

    def reading_only(name, flags, *mode):
        if flags & os.O_RDWR and name == path:
            raise PermissionError(13, "Permission denied", str(name))
        return opened(name, flags, *mode)

    monkeypatch.setattr(os, "open", reading_only)
    with locked(path), path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(atomic.errno.ENOSYS, "not implemented")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"no file locks; set data\.cache"), locked(tmp_path / "lock"):
        pass
