"""Each rank asks for its own bytes; stores staged in memory or in a folder are the same stores, copied once."""

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from multipack.data import staging
from multipack.data.collate import PackedCollator
from multipack.data.corpus import load_corpus
from multipack.data.documents import Documents
from multipack.data.joint import open_store
from multipack.data.loader import PackedLoader
from multipack.data.prepare import prepare
from multipack.data.sampler import PackedBatchSampler
from multipack.data.staging import Staging, bytes_asked
from multipack.data.store import TokenStore
from multipack.data.tokenizer import TokenizerConfig

BYTE = TokenizerConfig("byte")
AUTO = TokenizerConfig("auto")


@pytest.fixture
def store(write_store):
    """Sixty documents of very different lengths, each with a prompt."""
    lengths = np.random.default_rng(2).integers(3, 90, 60)
    return write_store([[(int(length) // 3, False), (int(length), True)] for length in lengths])


@pytest.fixture
def records(text_file):
    """A JSONL file of documents that differ by the letter that was given."""

    def write(letter, count=30):
        lines = [json.dumps({"text": letter * (number % 17 + 2)}) for number in range(count)]
        return text_file("\n".join(lines), f"{letter}.jsonl")

    return write


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "local"


def content(store):
    return [
        (store.name(n), store.tokens_of(n, 0, int(store.lengths[n])).tolist(), store.spans_of(n).tolist())
        for n in range(store.num_documents)
    ]


def edit(file):
    """Change one byte of a file, in place."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def inodes(folder):
    return {path.relative_to(folder): path.stat().st_ino for path in folder.rglob("*") if path.name[0] != "."}


# What a rank asks for


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_asks_for_its_own_documents(write_store, ranks):
    lengths = np.clip(np.random.default_rng(5).lognormal(3.0, 0.7, 600), 2, 120).astype(int)
    path = write_store([[(2, False), (int(length), True)] for length in lengths]).path
    whole = TokenStore(path)
    once = whole.num_tokens * whole.tokens.itemsize + whole.spans.nbytes
    seen, asked = [], []
    for rank in range(ranks):
        store = TokenStore(path)  # as in a process of its own
        documents = Documents.whole(store)
        sampler = PackedBatchSampler(
            documents.lengths,
            targets=documents.target_counts,
            capacity=256,
            packs_per_step=8,
            rank=rank,
            world_size=ranks,
        )
        assert store.bytes_asked == 0  # planning asks for no tokens
        own = [number for pack in sampler for number in pack]
        loader = PackedLoader(documents, sampler, PackedCollator.of(sampler))
        assert sum(batch.num_tokens for batch in loader) == loader.tokens_read
        tokens, spans = int(documents.lengths[own].sum()), len(own)  # one range a document
        assert store.bytes_asked == tokens * store.tokens.itemsize + 16 * spans
        assert loader.tokens_read == tokens
        seen += own
        asked.append(store.bytes_asked)
    assert sorted(seen) == list(range(len(lengths)))
    assert sum(asked) == once
    assert max(asked) < once / ranks * 1.03
    assert min(asked) > once / ranks * 0.97


def test_pieces_and_joint_stores_are_counted(config, tmp_path, records):
    joint = open_store(
        prepare(config(source="jsonl", path=records("a")), BYTE, tmp_path / "shards", shards=3)
    )
    documents = Documents.whole(joint, train_on_prompt=True).cut(4)
    assert bytes_asked(joint) == 0
    list(documents)
    assert bytes_asked(joint) == joint.num_tokens * 2  # no ranges: every token is a target


def test_packs_are_ready_before_they_are_asked_for(store):
    """A collator that stands still proves what the thread had made."""
    documents = Documents.whole(store)
    sampler = PackedBatchSampler(documents.lengths, capacity=256, packs_per_step=4)
    inner, gate, made = PackedCollator.of(sampler), threading.Event(), []
    gate.set()

    def gated(pack):
        assert gate.wait(20)
        made.append(1)
        return inner(pack)

    with PackedLoader(documents, sampler, gated, prefetch=3) as loader:
        batches = iter(loader)
        next(batches)
        deadline = time.monotonic() + 20
        while len(made) < 5 and time.monotonic() < deadline:  # one handed out, three ready, one in hand
            time.sleep(0.005)
        gate.clear()
        ready = [next(batches) for _ in range(3)]
        assert len(made) == 5
        gate.set()
    assert len(ready) == 3


# Memory


def test_a_store_in_memory_is_the_same_store(store, folder):
    told = []
    (held,) = Staging("memory", progress=lambda *call: told.append(call)).take([store])
    assert held.in_memory
    assert held.checksum == store.checksum
    assert held.path == store.path
    assert Documents.whole(held).fingerprint == Documents.whole(store).fingerprint
    size = sum(file.stat().st_size for file in store.path.glob("*.bin"))
    assert held.bytes_asked == size  # once, all of it
    assert told == [(size, size, "bytes read into memory")]
    shutil.rmtree(store.path)
    assert len(content(held)) == 60  # with no file left
    assert held.bytes_asked == size
    assert not isinstance(held.tokens.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        held.tokens[0] = 1


def test_memory_holds_what_the_files_held(store):
    (held,) = Staging("memory").take([store])
    assert content(held) == content(store)
    again = pickle.loads(pickle.dumps(held))
    assert again.in_memory
    assert content(again) == content(store)


@pytest.mark.parametrize("name", ["tokens.bin", "spans.bin", "tokenizer.json"])
@pytest.mark.parametrize("where", ["", "memory", "folder"])
def test_a_damaged_store_is_found_wherever_it_goes(store, folder, where, name):
    edit(store.path / name)
    where = str(folder) if where == "folder" else where
    with pytest.raises(ValueError, match=f"{name} was edited"):
        Staging(where).take([store])
    assert not list(folder.glob("[!.]*"))
    assert [each.num_documents for each in Staging(where, verify=False).take([store])] == [60]


def test_memory_that_is_not_there(store, monkeypatch):
    monkeypatch.setattr(staging, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"data.stage=memory: .* 1,000 are free: set data.stage=/dev/shm"):
        Staging("memory").take([store])
    monkeypatch.setattr(staging, "available_memory", lambda: None)
    Staging("memory").take([store])


def test_available_memory_is_a_number_here():
    assert staging.available_memory() > 1 << 20


# Folders


def test_a_copy_is_made_once_and_used_again(store, folder):
    told = []
    first = Staging(str(folder), progress=lambda *call: told.append(call))
    (staged,) = first.take([store])
    copy = folder / store.checksum[:32]
    assert (staged.path, staged.folder) == (store.path, copy)
    assert content(staged) == content(store)
    assert staged.bytes_asked > 0
    assert Documents.whole(staged).fingerprint == Documents.whole(store).fingerprint
    names = {file.name for file in store.path.iterdir()}
    assert {file.name for file in copy.iterdir()} == names
    assert all((copy / name).read_bytes() == (store.path / name).read_bytes() for name in names)
    total = sum((copy / name).stat().st_size for name in names)
    assert told[-1] == (total, total, "bytes copied")
    assert first.told == f"tokens are read from {folder}: {total:,} bytes, {total:,} copied now"
    before = inodes(folder)
    second = Staging(str(folder))
    second.take([TokenStore(store.path)])
    assert inodes(folder) == before
    assert second.told.endswith("a copy that was there already")
    again = pickle.loads(pickle.dumps(staged))
    assert (again.path, again.folder) == (store.path, copy)


@pytest.mark.parametrize("damage", ["edited", "short", "no header", "other", "half"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_copy_is_replaced(store, folder, write_store, damage, verify):
    Staging(str(folder)).take([store])
    copy = folder / store.checksum[:32]
    if damage == "edited":
        edit(copy / "tokens.bin")
    elif damage == "short":
        (copy / "tokens.bin").write_bytes(b"")
    elif damage == "no header":
        (copy / "header.json").unlink()
    elif damage == "half":
        shutil.rmtree(copy)
        (folder / f".{copy.name}.0000.partial").mkdir()
    else:
        other = write_store([[(4, True)]], "other")
        shutil.rmtree(copy)
        shutil.copytree(other.path, copy)
    again = Staging(str(folder), verify=verify)
    (staged,) = again.take([store])
    if damage == "edited" and not verify:  # which is what data.verify=false means
        assert again.told.endswith("there already")
        return
    assert again.told.endswith("copied now")
    assert content(staged) == content(store)
    staged.verify()
    assert sorted(path.name for path in folder.iterdir()) == [".staging.lock", copy.name]


def test_equal_stores_share_a_copy_and_new_ones_do_not(store, folder, tmp_path, write_store):
    shutil.copytree(store.path, tmp_path / "twin")
    other = write_store([[(4, True)]], "other")
    first, twin, third = Staging(str(folder)).take([store, TokenStore(tmp_path / "twin"), other])
    assert (first.folder, twin.path) == (twin.folder, tmp_path / "twin")
    assert third.folder != first.folder
    assert len(inodes(folder)) == 2 * (1 + len(list(store.path.iterdir())))


Usage = namedtuple("Usage", "total used free")


def test_room_is_looked_at_before(store, folder, write_store, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10000, 9000, 1000))
    with pytest.raises(ValueError, match=r"data.stage=.*local: [\d,]+ bytes .* 1,000 are free: remove files"):
        Staging(str(folder)).take([store])
    assert [path.name for path in folder.iterdir()] == [".staging.lock"]
    monkeypatch.undo()
    Staging(str(folder)).take([store])
    (folder / "of somebody else").mkdir()
    (folder / "of somebody else" / "file").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10000, 9999, 1))
    Staging(str(folder)).take([store])  # a copy that is there needs none
    size = sum(file.stat().st_size for file in store.path.iterdir())
    with pytest.raises(ValueError, match=f"1 are free, and copies of other stores there take {size:,}"):
        Staging(str(folder)).take([write_store([[(4, True)]], "other")])


def test_folders_that_cannot_be(store, tmp_path, folder, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data.stage=.*file: the folder cannot be written"):
        Staging(str(tmp_path / "file")).take([store])
    with pytest.raises(ValueError, match=r"data.stage=.*below: the folder cannot be written"):
        Staging(str(tmp_path / "file" / "below")).take([store])

    def no_locks(*_):
        raise ValueError("the file system has no file locks")

    monkeypatch.setattr(staging, "locked", no_locks)
    with pytest.raises(ValueError, match=r"data.stage=.*local: this file system has no file locks"):
        Staging(str(folder)).take([store])


def test_a_store_that_is_replaced_meanwhile(store, folder, write_store):
    shutil.rmtree(store.path)
    write_store([[(4, True)]])
    for where in ("memory", str(folder)):
        with pytest.raises(ValueError, match="replaced by another store while it was copied"):
            Staging(where, verify=False).take([store])
    assert not list(folder.glob("[!.]*"))


# Several processes


def _stage_together(path, folder, barrier, told):
    store = TokenStore(path)
    barrier.wait(30)
    copy = Staging(folder)
    (staged,) = copy.take([store])
    told.put((copy.told.endswith("copied now"), content(staged) == content(store)))


def test_one_process_copies_and_the_others_wait(store, folder):
    fork = multiprocessing.get_context("fork")
    barrier, told = fork.Barrier(4), fork.Queue()
    arguments = (store.path, str(folder), barrier, told)
    processes = [fork.Process(target=_stage_together, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    found = [told.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
    assert sorted(copied for copied, _ in found) == [False, False, False, True]
    assert all(same for _, same in found)


def _stage_and_die(path, folder, at_byte):
    def progress(done, total, unit):
        if done >= at_byte:
            os.kill(os.getpid(), signal.SIGKILL)

    Staging(folder, progress=progress).take([open_store(path)])


def test_a_killed_copy_leaves_nothing_and_its_finished_shards(config, records, tmp_path, folder):
    shards = prepare(config(source="jsonl", path=records("a")), BYTE, tmp_path / "shards", shards=3)
    first = sum(file.stat().st_size for file in (shards / "shard-00000").iterdir())
    killed = multiprocessing.get_context("fork").Process(
        target=_stage_and_die, args=(shards, str(folder), first + 100)
    )
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    done = [path for path in folder.iterdir() if path.name[0] != "."]
    assert len(done) == 1  # the first shard, and of the second nothing that loads
    assert list(folder.glob(".*.partial"))
    before = inodes(done[0])
    store = open_store(shards)
    again = Staging(str(folder))
    (staged,) = again.take([store])
    assert content(staged) == content(store)
    assert inodes(done[0]) == before
    assert not list(folder.glob(".*.partial"))
    assert again.told.endswith("copied now")


# In a corpus


def same_corpus(one, other):
    assert one.train.fingerprint == other.train.fingerprint
    assert one.validation.fingerprint == other.validation.fingerprint
    assert (one.description, one.corpus_hash, one.store_path) == (
        other.description,
        other.corpus_hash,
        other.store_path,
    )
    assert one.train.names(0) == other.train.names(0)
    for documents, others in ((one.train, other.train), (one.validation, other.validation)):
        for own, theirs in zip(documents, others, strict=True):
            assert np.array_equal(own.tokens, theirs.tokens)
            assert np.array_equal(own.spans, theirs.spans)
    assert one.prompts == other.prompts


@pytest.mark.parametrize("where", ["memory", "folder"])
@pytest.mark.parametrize("kind", ["store", "shards", "mixture", "jsonl"])
def test_a_staged_corpus_is_the_same_corpus(config, records, tmp_path, folder, kind, where):
    made = [
        prepare(config(source="jsonl", path=records(letter)), BYTE, tmp_path / letter, shards=shards)
        for letter, shards in (("a", 0), ("b", 3))
    ]
    fields = {
        "store": {"source": "store", "path": str(made[0])},
        "shards": {"source": "store", "path": str(made[1])},
        "mixture": {"source": "mixture", "paths": [str(path) for path in made], "weights": [1, 2]},
        "jsonl": {"source": "jsonl", "path": records("a")},
    }[kind]
    tokenizer = BYTE if kind == "jsonl" else AUTO
    plain = load_corpus(config(**fields), tokenizer, limit=64)
    data = config(**fields, stage=str(folder) if where == "folder" else "memory")
    before = asdict(data)
    staged = load_corpus(data, tokenizer, limit=64)
    same_corpus(staged, plain)
    assert asdict(data) == before  # the configuration keeps the original paths
    assert plain.staged == ""
    assert ("copied now" if where == "folder" else "into memory") in staged.staged
    if where == "folder":
        copies = {path.name for path in folder.iterdir() if path.name[0] != "."}
        assert len(copies) == {"store": 1, "shards": 3, "mixture": 4, "jsonl": 1}[kind]
        again = load_corpus(data, tokenizer, limit=64)
        same_corpus(again, plain)
        assert "already" in again.staged


def test_a_rank_that_reads_nothing_verifies_and_copies_nothing(config, records, tmp_path, folder):
    path = prepare(config(source="jsonl", path=records("a")), BYTE, tmp_path / "store")
    whole = load_corpus(config(source="store", path=str(path)), AUTO, limit=64)
    edit(path / "names.bin")
    data = config(source="store", path=str(path), stage=str(folder))
    other = load_corpus(data, AUTO, limit=64, reads=False)
    assert other.train.fingerprint == whole.train.fingerprint
    assert np.array_equal(other.train.target_counts, whole.train.target_counts)
    assert not folder.exists()
    assert other.staged == ""
    with pytest.raises(ValueError, match=r"names\.bin was edited"):
        load_corpus(data, AUTO, limit=64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"readers": -1}, "data.readers=-1: data-parallel ranks, 1 or more"),
        ({"readers": 2, "stream": True, "source": "store", "path": "x"}, "leave data.readers out"),
        ({"stage": "/x", "stream": True, "source": "store", "path": "x"}, "data.stage=/x is about documents"),
    ],
)
def test_settings_that_cannot_be_meant(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields).check()


def test_a_store_has_no_copy_where_none_was_asked_for(store):
    plain = Staging(verify=False)
    assert plain.take([store]) == [store]
    assert plain.told == ""
    assert Path(store.folder) == store.path
