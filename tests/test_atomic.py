import os

import pytest

from multipack.atomic import atomic_folder, is_free, sweep, write_atomically


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


def test_of_several_exclusive_writers_one_succeeds(tmp_path):
    write_atomically(tmp_path / "file", b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", b"second", exclusive=True)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert len(list(tmp_path.iterdir())) == 1


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


def test_a_folder_made_by_another_process_is_not_lost(tmp_path):
    path = tmp_path / "made"
    path.mkdir()
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


def test_sweep_removes_what_killed_writers_left_and_nothing_else(tmp_path):
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


def test_leftovers_of_killed_writers_can_be_ignored(tmp_path):
    assert is_free(tmp_path / "none")
    assert is_free(tmp_path)
    (tmp_path / ".a.12ab.partial").write_text("")
    assert not is_free(tmp_path)
    assert is_free(tmp_path, leftovers=True)
    (tmp_path / "a").write_text("")
    assert not is_free(tmp_path, leftovers=True)
    assert not is_free(tmp_path / "a", leftovers=True)
