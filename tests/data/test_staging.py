"""Stores staged in a folder are the same stores, copied once."""

import json
import multiprocessing
import os
import pickle
import shutil
import signal
from collections import namedtuple
from dataclasses import asdict

import numpy as np
import pytest

from multipack.data.stores.prepare import prepare
from multipack.data.stores.shards import HEADER
from multipack.data.stores.staging import stage, verify_once
from multipack.data.stores.store import TokenStore
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.data.views.corpus import load_corpus
from multipack.data.views.documents import Documents

BYTE, AUTO = TokenizerConfig("byte"), TokenizerConfig("auto")


@pytest.fixture
def store(write_store):
    """Sixty documents of very different lengths, each with a prompt, in several shards."""
    lengths = np.random.default_rng(2).integers(3, 90, 60)
    documents = [[(int(length) // 3, False), (int(length), True)] for length in lengths]
    return write_store(documents, shard_tokens=1000)


@pytest.fixture
def records(text_file):
    """A JSONL file of documents that differ by the given letter."""

    def write(letter, count=30):
        lines = [json.dumps({"text": letter * (number % 17 + 2)}) for number in range(count)]
        return text_file("\n".join(lines), f"{letter}.jsonl")

    return write


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "local"


def own(folder):
    """The user's own folder in a folder for copies."""
    return folder / f"multipack-{os.getuid()}"


def inodes(folder):
    return {path.relative_to(folder): path.stat().st_ino for path in folder.rglob("*") if path.name[0] != "."}


def test_a_copy_is_made_once_and_used_again(store, folder, content):
    calls = []
    (staged,), line = stage([store], str(folder), lambda *call: calls.append(call))
    copy = own(folder) / store.checksum[:32]
    assert (staged.path, staged.folder) == (store.path, copy)
    assert content(staged) == content(store)
    assert Documents.whole(staged).fingerprint == Documents.whole(store).fingerprint
    assert {file.name for file in copy.iterdir()} == {file.name for file in store.path.iterdir()}
    total = sum(file.stat().st_size for file in copy.iterdir())
    assert calls[-1] == (total, total, "bytes copied")
    assert line.endswith(f"{total:,} copied now")
    before = inodes(folder)
    _, line = stage([TokenStore(store.path)], str(folder))
    assert inodes(folder) == before
    assert line.endswith("a copy that was there already")
    again = pickle.loads(pickle.dumps(staged))
    assert (again.path, again.folder, content(again)) == (store.path, copy, content(store))


@pytest.mark.parametrize("damage", ["short", "missing", "no header"])
def test_a_copy_that_is_not_whole_is_completed(store, folder, damage, content):
    stage([store], str(folder))
    copy = own(folder) / store.checksum[:32]
    shard = sorted(copy.glob("shard*"))[1]
    if damage == "short":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (shard if damage == "missing" else copy / HEADER).unlink()
    (staged,), line = stage([store], str(folder))
    assert content(staged) == content(store)
    assert line.endswith("copied now")


def test_a_damaged_copy_is_removed_by_the_full_check(store, folder, tmp_path):
    (copy,), _ = stage([store], str(folder))
    shard = copy.shards[0].file
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match="start again"):
        verify_once([copy], tmp_path)
    (copy,), _ = stage([store], str(folder))
    verify_once([copy], tmp_path)


def test_a_store_that_was_prepared_again_gets_another_copy(store, folder, write_store, content):
    shutil.rmtree(store.path)
    again = write_store([[(4, True)]])
    with pytest.raises(ValueError, match=r"data\.stage="):
        stage([store], str(folder))  # the store that was opened is gone
    (staged,), _ = stage([again], str(folder))
    assert content(staged) == content(again)
    assert staged.folder == own(folder) / again.checksum[:32]


def test_folders_that_cannot_be_written(store, tmp_path, folder, monkeypatch):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=rf"data.stage={where}: .*name a folder of this host"):
            stage([store], str(where))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(1000))
        with pytest.raises(ValueError, match=r"data\.stage=.*bytes are to be copied, 1,000 are free"):
            stage([store], str(folder))


def test_copies_are_their_users_own(store, folder, monkeypatch):
    """Nobody else can read them, or prepare the folder for another user."""
    folder.mkdir(mode=0o777)
    stage([store], str(folder))
    assert own(folder).stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == [own(folder)]
    other = os.getuid() + 1
    (folder / f"multipack-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ValueError, match=rf"multipack-{other} is not a folder of this user"):
        stage([store], str(folder))
    (folder / f"multipack-{other}").rmdir()
    (folder / f"multipack-{other}").symlink_to(folder / "elsewhere")
    with pytest.raises(ValueError, match=r"data\.stage="):
        stage([store], str(folder))


def _stage_and_die(path, folder, at_byte):
    def progress(done, total, unit):
        if done >= at_byte:
            os.kill(os.getpid(), signal.SIGKILL)

    stage([TokenStore(path)], folder, progress)


def test_a_killed_copy_is_continued(store, folder, content):
    arguments = (store.path, str(folder), store.shards[0].bytes)
    killed = multiprocessing.get_context("fork").Process(target=_stage_and_die, args=arguments)
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    (copy,) = own(folder).glob("[!.]*")
    with pytest.raises(ValueError, match="not a token store"):
        TokenStore(copy)
    before = inodes(copy)
    (staged,), _ = stage([TokenStore(store.path)], str(folder))
    assert content(staged) == content(store)
    assert inodes(copy).items() >= before.items()


# --- in a corpus -----------------------------------------------------------------------------------------


def test_a_staged_mixture_is_the_same_corpus(config, records, tmp_path, folder):
    made = [
        prepare(config(source="jsonl", path=records(letter)), BYTE, tmp_path / letter, shards=shards)
        for letter, shards in (("a", 0), ("b", 3))
    ]
    fields = {"source": "mixture", "paths": [str(path) for path in made], "weights": [1, 2]}
    plain = load_corpus(config(**fields), AUTO, limit=64)
    data = config(**fields, stage=str(folder))
    before = asdict(data)
    staged = load_corpus(data, AUTO, limit=64)
    assert asdict(data) == before  # the configuration keeps the original paths
    assert (plain.staged, bool(staged.staged)) == ("", True)
    for one, other in ((staged.train, plain.train), (staged.validation, plain.validation)):
        assert one.fingerprint == other.fingerprint
        assert [document.tokens.tolist() for document in one] == [
            document.tokens.tolist() for document in other
        ]
        assert one.name(0) == other.name(0)
    for name in ("description", "corpus_hash", "store_path", "prompts"):
        assert getattr(staged, name) == getattr(plain, name)


def test_a_rank_that_reads_nothing_copies_nothing(config, records, tmp_path, folder):
    path = prepare(config(source="jsonl", path=records("a")), BYTE, tmp_path / "store")
    data = config(source="store", path=str(path), stage=str(folder), verify="full")
    whole = load_corpus(config(source="store", path=str(path)), AUTO, limit=64)
    other = load_corpus(data, AUTO, limit=64, reads=False)
    assert other.train.fingerprint == whole.train.fingerprint
    assert np.array_equal(other.train.target_counts, whole.train.target_counts)
    assert (folder.exists(), other.staged) == (False, "")
