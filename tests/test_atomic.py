import errno
import os

import pytest

from multipack.atomic import atomic_folder, is_free, move_into_place, read_file, sweep, write_atomically


def test_a_file_is_replaced_whole_or_the_error_says_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    write_atomically(path, b"old")
    for code, advice in ((errno.ENOSPC, "make room"), (errno.EROFS, "choose a folder"), (errno.EIO, "")):

        def fail(descriptor, code=code):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match=f"{os.strerror(code)}.*{advice}.*: '{path}'") as refused:
                write_atomically(path, b"new")
        assert refused.value.errno == code
        assert path.read_bytes() == b"old"
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_several_exclusive_writers_one_succeeds(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), "partial")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    write_atomically(tmp_path / "file", b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", b"second", exclusive=True)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_appears_at_the_end_or_not_at_all(tmp_path):
    path = tmp_path / "made"
    with pytest.raises(IsADirectoryError), atomic_folder(path) as folder:
        folder.write_text("a folder is no file")
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(path) as folder:
        (folder / "a").write_text("a")
        assert not path.exists()
    with pytest.raises(FileExistsError, match=r"another process .*made'"), atomic_folder(path) as folder:
        (folder / "b").write_text("b")
    assert [file.name for file in path.iterdir()] == ["a"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_whole(tmp_path):
    path = tmp_path / "made"
    for name in ("old", "new"):
        (partial := tmp_path / "partial").mkdir()
        (partial / name).write_text(name)
        move_into_place(partial, path, replace=True)
    assert [file.name for file in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_killed_writers_are_removed_and_restored(tmp_path):
    for content in ("first", "second"):
        (old := tmp_path / ".made.1234.old").mkdir()
        (old / content).write_text("")
        (tmp_path / ".made.dead.partial").mkdir()
        sweep(tmp_path / "made")
        assert [path.name for path in tmp_path.iterdir()] == ["made"]
        assert [path.name for path in (tmp_path / "made").iterdir()] == ["first"]


def test_leftovers_of_killed_writers_can_be_ignored(tmp_path):
    assert is_free(tmp_path / "none")
    assert is_free(tmp_path)
    (tmp_path / ".a.12ab.partial").write_text("")
    assert not is_free(tmp_path)
    assert is_free(tmp_path, leftovers=True)
    (tmp_path / "a").write_text("")
    assert not is_free(tmp_path, leftovers=True)
    assert not is_free(tmp_path / "a", leftovers=True)


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="file is larger than 4 bytes"):
        read_file(tmp_path / "file", 4)
    os.mkfifo(tmp_path / "pipe")  # without a writer: opening it would wait
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_file(path)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_file(tmp_path)


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_files_have_the_permissions_that_umask_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "folder" / "file", b"content")
        with atomic_folder(tmp_path / "made"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "folder" / "file").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o777 & ~umask
