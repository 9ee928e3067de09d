"""Token stores: what was written is read, in every state of the folder; damage is found before it is believed."""

import json
import os
import pickle
import re
import resource
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from multipack.data.stores.shards import FORMAT, HEADER, open_shard, shard_name
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import StoreWriter
from multipack.data.text.tokenizer import byte_tokenizer, character_tokenizer
from multipack.data.views.documents import Documents

FIRST = shard_name(0, 0)
FIVE = [[(3, False), (9, True)], [(4, True)], [(8, True)], [(5, False)], [(7, True)]]


@pytest.fixture
def path(write_store):
    """A store of two documents."""
    return write_store([[(2, False), (3, True)], [(4, True)]], description="two").path


@pytest.fixture
def three(write_store):
    """Five documents in three shards."""
    return write_store(FIVE, "three.store", shard_tokens=9)


def edit(file, at=-1):
    """Change one byte of a file, in place."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_what_was_written_is_read(write_store, content):
    options = {"description": "{documents} documents", "chat_template": '{"é": 1}'}
    store = write_store([[(2, False), (3, True)], [(4, True)], [(1, False)]], **options)
    assert (store.num_documents, store.num_tokens, store.vocabulary_size) == (3, 10, 257)
    assert content(store) == [
        ("doc0", [0, 1, 2, 3, 4], [[2, 5]]),
        ("doc1", [5, 6, 7, 8], [[0, 4]]),
        ("doc2", [9], []),
    ]
    assert store.lengths.tolist() == [5, 4, 1]
    assert (store.description, store.tokenizer.hash) == ("3 documents", byte_tokenizer().hash)
    assert store.header.chat_template == (store.path / "chat_template.json").read_text() == '{"é": 1}'
    assert (store.tokenizer.name, store.tokens_of(0).dtype) == ("byte", np.uint16)
    store.verify()
    assert not store.tokens_of(0).flags.writeable
    arrays = load_file(store.path / FIRST)
    assert (arrays["tokens"].tolist(), arrays["offsets"].tolist()) == (list(range(10)), [0, 5, 9, 10])
    assert store.tokens_of(1, 2, 1).tolist() == [7]
    for start, length in ((0, 5), (-1, 2), (3, 3), (3, -1)):
        with pytest.raises(IndexError, match="of document 1, which has 4"):
            store.tokens_of(1, start, length)


def test_documents_of_several_shards_are_those_of_one(three, write_store, content):
    assert [len(shard) for shard in three.shards] == [1, 2, 2, 0]
    whole = write_store(FIVE, "whole.store")
    assert content(three) == content(whole)
    assert three.lengths.tolist() == whole.lengths.tolist()
    parts = [content(three.shard(number)) for number in range(3)]
    assert parts == [content(whole)[:1], content(whole)[1:3], content(whole)[3:]]
    shards = [three.shard(number).checksum for number in range(3)]
    assert three.checksum == whole.checksum  # whatever the division into shards
    assert len({three.checksum, *shards}) == 4


def test_a_store_opens_without_reading_its_tokens(write_store, monkeypatch):
    store = write_store([[(250, True)] for _ in range(400)])
    before = _bytes_read()
    opened = TokenStore(store.path)
    assert (opened.num_documents, opened.num_tokens) == (400, 100_000)
    assert _bytes_read() - before < 20_000  # the shard has more than 200,000
    monkeypatch.setattr("hashlib.file_digest", None)
    assert opened.lengths.sum() == 100_000


def _bytes_read():
    """Bytes read by calls of this process."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_stores_travel_to_other_processes(three, content):
    data = pickle.dumps(three)
    assert len(data) < 2000
    assert content(pickle.loads(data)) == content(three)
    moved = shutil.move(three.path, three.path.with_name("elsewhere"))
    assert TokenStore(moved).checksum == three.checksum


def test_a_growing_store_has_the_shards_that_are_there(three):
    assert TokenStore(three.path, growing=True).is_complete
    for missing, there in ((3, 5), (1, 1)):  # up to the first gap
        (three.path / shard_name(0, missing)).unlink()
        with pytest.raises(ValueError, match=r"not a complete token store \(\d shards are there"):
            TokenStore(three.path)
        growing = TokenStore(three.path, growing=True)
        assert (growing.num_documents, growing.is_complete) == (there, False)
    (three.path / HEADER).unlink()
    with pytest.raises(ValueError, match=r"not a token store \(it has no header\.json\)"):
        TokenStore(three.path, growing=True)


def test_nothing_is_added_to_a_complete_store(three, content):
    before = content(three)
    with pytest.raises(RuntimeError, match="complete"), StoreWriter(three.path, byte_tokenizer()) as writer:
        writer.add("more", [([1], True)])
    assert content(TokenStore(three.path)) == before


# --- joined stores ---------------------------------------------------------------------------------------


def test_joined_stores_label_their_documents(three, path, content):
    joined = TokenStore.joined(path.parent, [TokenStore(path), three], ["code", "prose"])
    assert [joined.name(number) for number in (0, 2)] == ["code: doc0", "prose: doc0"]
    assert [each[1:] for each in content(joined)] == [
        each[1:] for each in content(TokenStore(path)) + content(three)
    ]
    assert content(pickle.loads(pickle.dumps(joined))) == content(joined)
    other = TokenStore.joined(path.parent, [three, TokenStore(path)], ["a", "b"])
    assert other.checksum != joined.checksum
    edit(three.path / FIRST)
    with pytest.raises(ValueError, match=r"hash differs"):
        joined.verify()


def test_stores_of_different_kinds_are_not_joined(path, write_pairs, tmp_path):
    with StoreWriter(tmp_path / "letters", character_tokenizer(iter("abc"))) as writer:
        writer.add("a", [([0, 1], True)])
    one = TokenStore(path)
    with pytest.raises(
        ValueError, match=r"small\.store with byte .*letters with char.* different tokenizers"
    ):
        TokenStore.joined(tmp_path, [one, TokenStore(tmp_path / "letters")], ["", ""])
    with pytest.raises(ValueError, match=r"holds single documents, and .* preference pairs"):
        TokenStore.joined(tmp_path, [one, write_pairs([(1, 2, 3)])], ["", ""])


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_any_documents_of_any_stores_have_their_ranges(memory_store, data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    part, stores = st.tuples(st.integers(1, 4), st.booleans()), []
    for number, size in enumerate(sizes):
        shapes = [data.draw(st.lists(part, min_size=1, max_size=4)) for _ in range(size)]
        stores.append(memory_store([[([number] * length, on) for length, on in parts] for parts in shapes]))
    joined = TokenStore.joined(stores[0].path, stores, ["x"] * len(stores))
    numbers = np.array(data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=8)), dtype=np.int64)
    view = Documents.whole(joined).take(numbers)
    assert view.target_counts.tolist() == [int((each.shifted_targets() >= 0).sum()) for each in view]


# --- pairs and chats -------------------------------------------------------------------------------------


def test_a_pair_is_two_neighboring_documents(write_pairs):
    store = write_pairs([(1, 2, 3), (2, 1, 4)])
    assert (store.kind, store.num_items) == ("pairs", 2)
    assert (store.num_documents, store.lengths.tolist()) == (4, [3, 4, 3, 6])
    assert [store.spans_of(number).tolist() for number in (2, 3)] == [[[2, 3]], [[2, 6]]]
    store = write_pairs([(1, 2, 3)] * 5, "many", shard_tokens=1)
    assert [len(shard) for shard in store.shards] == [2, 2, 2, 2, 2, 0]  # a pair is never divided


# --- damaged and foreign stores --------------------------------------------------------------------------


def test_a_foreign_folder(tmp_path, path):
    for text, found in (
        (None, r"not a token store \(it has no header\.json\).*multipack prepare"),
        ('{"format": "something"}', "not the header of a token store"),
        ("[]", "not the header of a token store"),
        ('{"form', "not the header"),
        ('{"format": "multipack-token-store", "version": 5}', "has version 5 .* reads version 6: prepare"),
        ('{"format": "multipack-token-store", "version": 6}', "not the header"),
    ):
        if text is not None:
            (tmp_path / HEADER).write_text(text)
        with pytest.raises(ValueError, match=found):
            TokenStore(tmp_path)
    with pytest.raises(ValueError, match="not a token store"):
        TokenStore(path / FIRST)


def test_impossible_shards_are_refused(path):
    file, original = path / FIRST, (path / FIRST).read_bytes()
    for changed in (original[:-1], original + b"\0", b""):
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{FIRST}: not a shard .* damaged"):
            TokenStore(path)
    for change in (
        lambda layout: layout["tokens"].update(shape=[10**12]),
        lambda layout: layout["tokens"].update(shape=[-9]),
        lambda layout: layout["tokens"].update(dtype="F32"),
        lambda layout: layout["tokens"].update(data_offsets=[0, 18]),
        lambda layout: layout.pop("names"),
        lambda layout: layout["__metadata__"].clear(),
        lambda layout: layout.update(tokens=7),
    ):
        file.write_bytes(original)
        rewrite(file, change)
        with pytest.raises(ValueError, match="damaged"):
            open_shard(file)
    for raw in (b"", b"\xff" * 8, b"\0" * 64, b"\x08" + b"\0" * 7 + b"[[[[[[[[", b"\x02" + b"\0" * 7 + b"{}"):
        file.write_bytes(raw)
        with pytest.raises(ValueError, match="damaged"):
            open_shard(file)


def test_headers_of_other_types_are_refused(path):
    """Even with the checksum that belongs to them."""
    header = TokenStore(path).header
    for change in (
        {"vocabulary_size": "7"},
        {"vocabulary_size": -1},
        {"vocabulary_size": True},
        {"tokenizer": None},
        {"tokenizer_hash": ["a"]},
        {"chat_template": 5},
        {"description": {}},
        {"pairs": 1},
        {"labels": True},
        {"parts": 0},
        {"parts": 10**12},
        {"overlong": []},
    ):
        replace(header, **change).write(path)
        with pytest.raises(
            ValueError, match=f"{HEADER}: not the header of a token store .*{next(iter(change))}"
        ):
            TokenStore(path)
    (path / HEADER).unlink()
    os.mkfifo(path / HEADER)
    with pytest.raises(ValueError, match="not a token store"):
        TokenStore(path)


def test_shards_with_counts_of_other_types_are_refused(path):
    file, original = path / FIRST, (path / FIRST).read_bytes()
    for key, value in (
        ("read", float("inf")),
        ("read", -1),
        ("read", "3"),
        ("skipped", 5),
        ("skipped", {"a": "b"}),
        ("skipped", {"a": -1}),
        ("content", 7),
        ("content", "x"),
    ):
        file.write_bytes(original)

        def change(layout, key=key, value=value):
            about = json.loads(layout["__metadata__"][FORMAT])
            layout["__metadata__"][FORMAT] = json.dumps({**about, key: value})

        rewrite(file, change)
        with pytest.raises(ValueError, match="damaged"):
            open_shard(file)


def test_edited_files_are_found(path):
    edit(path / FIRST)
    with pytest.raises(ValueError, match=r"hash differs"):
        TokenStore(path).verify()
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(re.sub(r'("add_prefix_space": ?)false', r"\1true", text, count=1))
    with pytest.raises(ValueError, match=r"tokenizer\.json has changed"):
        _ = TokenStore(path).tokenizer
    other = json.loads((path / HEADER).read_text())
    for change in ({"vocabulary_size": 1}, {"pairs": True}, {"description": "x"}):
        (path / HEADER).write_text(json.dumps({**other, **change}))
        with pytest.raises(ValueError, match="was edited"):
            TokenStore(path)


def rewrite(file, change):
    """Change the layout of a shard's file."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    layout = json.loads(raw[8 : 8 + size])
    change(layout)
    header = json.dumps(layout).encode().ljust(size)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])


def test_offsets_that_do_not_increase(write_store):
    store = write_store([[(2, True)], [(2, True)], [(2, True)]])
    raw = (store.path / FIRST).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    at = 8 + size + json.loads(raw[8 : 8 + size])["offsets"]["data_offsets"][0]
    for numbers, found in (
        ([0, 4, 2, 6], "offsets does not increase at document 1"),
        ([0, 2, 2, 6], "at document 1"),
        ([0, 2, 4, 5], "offsets does not match"),
        ([1, 2, 4, 6], "offsets does not match"),
    ):
        (store.path / FIRST).write_bytes(raw[:at] + np.array(numbers, "<i8").tobytes() + raw[at + 32 :])
        with pytest.raises(ValueError, match=found):
            TokenStore(store.path)


def test_large_vocabularies_take_four_bytes_and_tokens_outside_are_named(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.vocabulary_size = 70_000
    with StoreWriter(tmp_path / "s", tokenizer) as writer:
        writer.add("a", [([1, 69_999], True)])
    assert TokenStore(tmp_path / "s").tokens_of(0).tolist() == [1, 69_999]
    replace(TokenStore(tmp_path / "s").header, vocabulary_size=257).write(tmp_path / "s")
    with pytest.raises(ValueError, match=r"document 0 holds token 69,999, and the vocabulary has 257"):
        TokenStore(tmp_path / "s").tokens_of(0)


def test_a_full_disk_is_named_and_leaves_no_torn_file(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))  # no file may become larger
    try:
        with (
            pytest.raises(OSError, match=rf"File too large: '.*{FIRST}'"),
            StoreWriter(tmp_path / "s", byte_tokenizer()) as writer,
        ):
            writer.add("d", [([0] * 9000, True)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [file for file in (tmp_path / "s").iterdir() if "shard" in file.name]
