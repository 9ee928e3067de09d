import multiprocessing
import time
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


def _hold(path, entered, leave):
    with locked(path):
        entered.set()
        leave.wait(30)


def test_a_lock_keeps_other_processes_out_until_its_holder_ends(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    entered, leave = spawn.Event(), spawn.Event()
    holder = spawn.Process(target=_hold, args=(tmp_path / "lock", entered, leave))
    holder.start()
    assert entered.wait(30)
    waited = []

    def on_wait():
        waited.append(time.monotonic())
        holder.kill()  # the operating system releases the lock

    with locked(tmp_path / "lock", on_wait):
        assert len(waited) == 1
    holder.join()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(atomic.errno.ENOSYS, "not implemented")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"no file locks; set data\.cache"), locked(tmp_path / "lock"):
        pass
