import json
import pickle
import resource
import shutil

import numpy as np
import pytest

from multipack.data.blocks import BlockBuilder, TokenBlock
from multipack.data.header import BORDERS, CHAT_TEMPLATE, HEADER, StoreHeader
from multipack.data.store import StoreWriter, TokenStore
from multipack.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe


@pytest.fixture
def path(write_store):
    """A store of two documents."""
    return write_store([[(2, False), (3, True)], [(4, True)]], description="two", split_by="document").path


def edit_header(path, **fields):
    """A header with other fields and a checksum that fits them, as a malicious writer would make it."""
    content = json.loads((path / HEADER).read_text()) | fields
    checksum = content.pop("checksum")
    for name in ("format", "version"):
        content.pop(name)
    checksum = StoreHeader(**content).checksum if isinstance(content["files"], dict) else checksum
    kept = json.loads((path / HEADER).read_text())
    (path / HEADER).write_text(json.dumps({**kept, **fields, "checksum": checksum}))


def test_what_was_written_is_read(write_store):
    store = write_store([[(2, False), (3, True)], [(4, True)], [(1, False)]], description="three")
    assert (store.num_documents, store.num_tokens, store.vocabulary_size) == (3, 10, 257)
    np.testing.assert_array_equal(store.tokens, np.arange(10))
    np.testing.assert_array_equal(store.lengths, [5, 4, 1])
    assert [store.spans_of(i).tolist() for i in range(3)] == [[[2, 5]], [[0, 4]], []]
    assert [store.name(i) for i in range(3)] == ["doc0", "doc1", "doc2"]
    assert store.header.description == "three"
    assert store.tokenizer.hash == byte_tokenizer().hash
    assert store.tokenizer.name == "byte"
    assert store.tokens.dtype == np.uint16
    store.verify()


def test_neighboring_targets_are_one_range(write_store):
    store = write_store([[(2, True), (1, True), (1, False), (0, True), (2, True)]])
    assert store.spans_of(0).tolist() == [[0, 3], [4, 6]]


def test_a_stream_is_one_document(tmp_path):
    with StoreWriter(tmp_path / "s", byte_tokenizer(), source_hash="s", split_by="position") as writer:
        for piece in ([1, 2], [3], [4, 5]):
            writer.add("piece", [(piece, True)], continues=True)
        writer.end_document("stream")
    store = TokenStore(tmp_path / "s")
    assert (store.num_documents, store.name(0), store.spans_of(0).tolist()) == (1, "stream", [[0, 5]])


def test_large_vocabularies_take_four_bytes(tmp_path):
    fields = json.loads(train_bpe(iter(["ab"]), 257).to_json())
    fields["added_tokens"].append({**fields["added_tokens"][0], "id": 257, "content": "<extra>"})
    tokenizer = Tokenizer(json.dumps(fields))
    tokenizer.vocabulary_size = 70_000
    with StoreWriter(tmp_path / "s", tokenizer, source_hash="s") as writer:
        writer.add("a", [([1, 69_999], True)])
    store = TokenStore(tmp_path / "s")
    assert store.tokens.dtype == np.uint32
    assert store.tokens.tolist() == [1, 69_999]


def test_blocks_and_documents_one_by_one_give_the_same_bytes(tmp_path):
    documents = [
        (f"é{n}", [([n] * (n % 5 + 1), n % 2 == 0), ([1, 2, 3], True)], 2 * (n % 3 == 1)) for n in range(40)
    ]
    for name, sizes in (("one by one", [1] * 40), ("in blocks", [7, 1, 30, 2]), ("at once", [40])):
        rest = iter(documents)
        with StoreWriter(tmp_path / name, byte_tokenizer(), source_hash="s") as writer:
            for size in sizes:
                if size == 1:
                    title, parts, border = next(rest)
                    writer.add(title, parts, border=border)
                    continue
                builder = BlockBuilder(257)
                for _ in range(size):
                    builder.add(*next(rest))
                writer.extend(TokenBlock.from_bytes(builder.finish().to_bytes()))
    first = TokenStore(tmp_path / "at once")
    assert first.name(39) == "é39"
    for name in ("one by one", "in blocks"):
        for file in (*first.header.files, HEADER):
            assert (tmp_path / name / file).read_bytes() == (first.path / file).read_bytes()


def test_stretches_of_a_stream_join(tmp_path):
    with StoreWriter(tmp_path / "s", byte_tokenizer(), source_hash="s") as writer:
        builder = BlockBuilder(257)
        for parts in ([([1, 2], True)], [([3], False), ([4], True)], [([5], True)]):
            builder.add("stretch", parts)
        writer.extend(builder.finish(), continues=True)
        writer.add("end", [([6], True)], continues=True)
        writer.add("named", [([7], False)])
        writer.add("next", [([8], True)])
    store = TokenStore(tmp_path / "s")
    assert [store.name(number) for number in range(2)] == ["named", "next"]
    assert store.spans_of(0).tolist() == [[0, 2], [3, 6]]
    assert store.tokens_of(0).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_documents_are_slices_of_the_map(path):
    store = TokenStore(path)
    assert isinstance(store.tokens.base, np.memmap)
    assert not store.tokens.flags.writeable


def test_a_store_of_a_billion_tokens_opens_without_reading_them(path):
    tokens, documents = 10**9, 10**7
    sizes = {
        "tokens.bin": 2 * tokens,
        **dict.fromkeys(("offsets.bin", "span_offsets.bin", "name_offsets.bin"), 8 * (documents + 1)),
        "spans.bin": 16 * documents,
        "names.bin": 10 * documents,
    }
    ends = {"offsets.bin": tokens, "span_offsets.bin": documents, "name_offsets.bin": 10 * documents}
    for name, size in sizes.items():
        with open(path / name, "r+b") as file:
            file.truncate(0)
            file.truncate(size)  # holes: no disk is used
            if name in ends:
                file.seek(size - 8)
                file.write(ends[name].to_bytes(8, "little"))
    files = json.loads((path / HEADER).read_text())["files"]
    files |= {name: {"bytes": size, "sha256": ""} for name, size in sizes.items()}
    edit_header(path, documents=documents, tokens=tokens, spans=documents, files=files)
    before, read = resource.getrusage(resource.RUSAGE_SELF), _bytes_read()
    store = TokenStore(path)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (store.num_tokens, store.num_documents, len(store.tokens)) == (tokens, documents, tokens)
    assert _bytes_read() - read < 1 << 18
    assert (
        after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt < 1000
    )  # pages; it has 600,000


def _bytes_read():
    """By calls of this process so far; 0 where the system does not tell."""
    try:
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])
    except OSError:
        return 0


def test_parts_of_documents(write_store):
    store = write_store([[(5, True)], [(7, True)]])
    assert store.tokens_of(1, 2, 3).tolist() == [7, 8, 9]
    assert store.tokens_of(1).tolist() == list(range(5, 12))
    for start, length in ((0, 8), (-1, 2), (5, 3), (3, -1)):
        with pytest.raises(IndexError, match="of document 1, which has 7"):
            store.tokens_of(1, start, length)


def test_target_counts(tmp_path, write_store):
    store = write_store(
        [[(3, False), (9, True)], [(4, True)], [(2, False)], [(1, False), (2, True), (1, False)]]
    )
    assert store.target_counts.tolist() == [9, 3, 0, 2]
    with StoreWriter(tmp_path / "pairs", byte_tokenizer(), source_hash="s") as writer:
        writer.add("a", [([1, 2], False), ([3], True), ([1, 2], False), ([4, 5], True)], border=3)
        writer.add("b", [([1, 2], True), ([3, 4], True)], border=2)  # its halves have no prompt
    assert TokenStore(tmp_path / "pairs").target_counts.tolist() == [3, 2]


# --- pairs and chats ------------------------------------------------------------------------------------


def test_a_store_of_pairs_knows_their_borders(tmp_path, path):
    with StoreWriter(
        tmp_path / "pairs", byte_tokenizer(), source_hash="s", chat_template='{"é": 1}'
    ) as writer:
        writer.add("no pair", [([1, 2], True)])
        writer.add("pair", [([1], False), ([2], True), ([3, 4], True)], border=2)
    store = TokenStore(tmp_path / "pairs")
    assert store.has_pairs
    assert [store.border(0), store.border(1)] == [0, 2]
    assert store.spans_of(1).tolist() == [[1, 2], [2, 4]]  # no range crosses the border
    assert store.chat_template == '{"é": 1}'
    assert store.header.version == 2
    store.verify()
    plain = TokenStore(path)
    assert (plain.has_pairs, plain.border(1), plain.chat_template, plain.header.version) == (False, 0, "", 1)
    assert json.loads((path / HEADER).read_text())["version"] == 1  # older versions of multipack read it


def test_damaged_borders_and_templates(tmp_path):
    with StoreWriter(tmp_path / "s", byte_tokenizer(), source_hash="s", chat_template="{}") as writer:
        writer.add("pair", [([1, 2], True), ([3, 4], True)], border=2)
    (tmp_path / "s" / CHAT_TEMPLATE).write_text("[]")
    with pytest.raises(ValueError, match=r"chat_template\.json was exchanged"):
        _ = TokenStore(tmp_path / "s").chat_template
    (tmp_path / "s" / BORDERS).write_bytes(np.array([4], "<i8").tobytes())
    with pytest.raises(ValueError, match=r"borders\.bin says 4 for document 0 of 4 tokens"):
        TokenStore(tmp_path / "s").border(0)
    (tmp_path / "s" / BORDERS).write_bytes(b"")
    with pytest.raises(ValueError, match=r"borders\.bin has 0 bytes instead of 8"):
        TokenStore(tmp_path / "s")


def test_a_store_travels_to_other_processes_by_its_path(path):
    data = pickle.dumps(TokenStore(path))
    assert len(data) < 1000
    assert pickle.loads(data).num_tokens == 9


def test_unicode_names_come_back(tmp_path):
    with StoreWriter(tmp_path / "s", byte_tokenizer(), source_hash="s") as writer:
        for name in ("é/日本.txt:1", "half \ud800"):
            writer.add(name, [([1], True)])
    store = TokenStore(tmp_path / "s")
    assert [store.name(0), store.name(1)] == ["é/日本.txt:1", "half ?"]


@pytest.mark.parametrize("tokens", [[257], [-1, 3]])
def test_tokens_outside_the_vocabulary_are_not_written(tmp_path, tokens):
    writer = StoreWriter(tmp_path / "s", byte_tokenizer(), source_hash="s")
    with pytest.raises(ValueError, match="vocabulary of 257"), writer:
        writer.add("a", [(tokens, True)])
    assert list(tmp_path.iterdir()) == []


def test_documents_without_tokens_and_unended_ones_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"document 0 \(a\) has no tokens"):  # noqa: SIM117
        with StoreWriter(tmp_path / "s", byte_tokenizer(), source_hash="s") as writer:
            writer.add("a", [([], True)])
    with pytest.raises(ValueError, match="call end_document"):  # noqa: SIM117
        with StoreWriter(tmp_path / "s", byte_tokenizer(), source_hash="s") as writer:
            writer.add("a", [([1], True)], continues=True)
    assert list(tmp_path.iterdir()) == []


# --- damaged and foreign stores -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [9000, 20_000, 200_000])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # no file may become larger
    try:
        with (
            pytest.raises(OSError, match=r"File too large: '.*tokens\.bin'"),
            StoreWriter(tmp_path / "s", byte_tokenizer(), source_hash="s") as writer,
        ):
            writer.add("d", [([0] * (size // 2), True)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_folder(tmp_path, path):
    with pytest.raises(ValueError, match=r"not a token store \(it has no header\.json\).*multipack prepare"):
        TokenStore(tmp_path)
    (tmp_path / HEADER).write_text('{"format": "something"}')
    with pytest.raises(ValueError, match="of another format"):
        TokenStore(tmp_path)
    (tmp_path / HEADER).write_text('{"form')
    with pytest.raises(ValueError, match="not JSON"):
        TokenStore(tmp_path)
    with pytest.raises(ValueError, match="not a token store"):
        TokenStore(path / "tokens.bin")


def test_a_newer_version(path):
    content = json.loads((path / HEADER).read_text())
    (path / HEADER).write_text(json.dumps({**content, "version": 3}))
    with pytest.raises(ValueError, match=r"version 3 .* reads versions up to 2: update multipack"):
        TokenStore(path)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "spans.bin", "names.bin", "tokenizer.json"])
def test_truncated_longer_and_missing_files(path, name):
    original = (path / name).read_bytes()
    for content in (original[:-1], original + b"\0", b""):
        (path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} has .* bytes instead of .* truncated or damaged"):
            TokenStore(path)
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        TokenStore(path)


@pytest.mark.parametrize("name", ["tokens.bin", "spans.bin", "names.bin", "tokenizer.json"])
def test_edited_files_do_not_verify(path, name):
    content = bytearray((path / name).read_bytes())
    content[0] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} was edited"):
        TokenStore(path).verify()


def test_an_edited_header(path):
    content = json.loads((path / HEADER).read_text())
    (path / HEADER).write_text(json.dumps({**content, "documents": 1}))
    with pytest.raises(ValueError, match="was edited"):
        TokenStore(path)
    del content["tokens"]
    (path / HEADER).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="lacks 'tokens'"):
        TokenStore(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": 1},
        {"tokens": 10**15},
        {"tokens": -9},
        {"tokens": 9.0},
        {"dtype": "uint32"},
        {"dtype": "object"},
        {"split_by": "chance"},
        {"overlong": "guess"},
        {"files": {"../../elsewhere": {"bytes": 1, "sha256": ""}}},
        {"files": []},
    ],
)
def test_a_header_that_lies_with_a_right_checksum(path, fields):
    edit_header(path, **fields)
    with pytest.raises(ValueError, match="prepare the store again"):
        TokenStore(path)


def test_offsets_that_do_not_increase(write_store):
    store = write_store([[(2, True)], [(2, True)], [(2, True)]])
    for content, found in (
        ([0, 4, 2, 6], "does not increase at document 1"),
        ([0, 2, 2, 6], "at document 1"),
        ([0, 2, 4, 5], "runs from 0 to 5, not from 0 to 6"),
        ([1, 2, 4, 6], "runs from 1"),
    ):
        (store.path / "offsets.bin").write_bytes(np.array(content, "<i8").tobytes())
        with pytest.raises(ValueError, match=found):
            _ = TokenStore(store.path).lengths


def test_an_exchanged_tokenizer(path):
    text = (path / "tokenizer.json").read_text()
    other = text.replace('"add_prefix_space": false', '"add_prefix_space": true ', 1)
    assert len(other) == len(text)
    assert other != text
    (path / "tokenizer.json").write_text(other)
    with pytest.raises(ValueError, match=r"tokenizer\.json was exchanged"):
        _ = TokenStore(path).tokenizer


def test_a_store_that_is_moved_is_the_same_store(path, tmp_path):
    before = TokenStore(path)
    shutil.move(path, tmp_path / "elsewhere")
    assert TokenStore(tmp_path / "elsewhere").checksum == before.checksum
