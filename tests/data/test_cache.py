import multiprocessing
import os
import time
from pathlib import Path

import pytest

from multipack.data import cache
from multipack.data.cache import atomic_folder, cache_folder, locked, sweep, write_atomically


def test_cache_folder_follows_the_choice_then_xdg_then_home(monkeypatch):
    assert cache_folder("/some/where") == Path("/some/where")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/multipack")
    for ignored in ("relative/folder", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == Path.home() / ".cache" / "multipack"


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    write_atomically(path, b"old")

    def fail(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_appears_only_at_the_end(tmp_path):
    path = tmp_path / "made"
    with atomic_folder(path) as folder:
        (folder / "a").write_text("a")
        assert not path.exists()
    assert [file.name for file in path.iterdir()] == ["a"]
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(IsADirectoryError), atomic_folder(tmp_path / "made") as folder:
        folder.write_text("a folder is no file")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_stays_unless_it_is_to_be_replaced(tmp_path):
    path = tmp_path / "made"
    path.mkdir()
    (path / "old").write_text("old")
    with pytest.raises(FileExistsError), atomic_folder(path):
        pass
    with pytest.raises(RuntimeError, match="stop"), atomic_folder(path, replace=True) as folder:
        raise RuntimeError("stop")
    assert (path / "old").exists()
    with atomic_folder(path, replace=True) as folder:
        (folder / "new").write_text("new")
    assert [file.name for file in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_comes_to_be_there_meanwhile_is_not_lost(tmp_path):
    path = tmp_path / "made"
    path.mkdir()  # empty: it may be taken
    with pytest.raises(OSError, match="not empty"), atomic_folder(path):
        (path / "precious").write_text("precious")
    assert (path / "precious").exists()
    assert list(tmp_path.iterdir()) == [path]


def test_a_replacement_that_was_killed_half_way_is_undone(tmp_path):
    old = tmp_path / ".made.1234.old"
    old.mkdir()
    (old / "a").write_text("a")
    sweep(tmp_path / "made")
    assert (tmp_path / "made" / "a").exists()
    old.mkdir()
    sweep(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_sweep_takes_what_the_dead_left_and_leaves_the_living_alone(tmp_path):
    path = tmp_path / "made"
    stale = tmp_path / ".made.dead.partial"
    stale.mkdir()
    (stale / "writer.lock").write_bytes(b"")
    (tmp_path / ".other.dead.partial").mkdir()
    with atomic_folder(path) as folder:
        assert not stale.exists()
        sweep(path)
        assert folder.exists()
    assert path.is_dir()
    assert (tmp_path / ".other.dead.partial").exists()


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
        raise OSError(cache.errno.ENOSYS, "not implemented")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"no file locks; set data\.cache"), locked(tmp_path / "lock"):
        pass
