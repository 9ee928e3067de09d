"""`prepare`: what a store holds, when it is reused, parts and shards, and that an interrupted call changes no byte."""

import builtins
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.atomic import locked
from multipack.data.stores import prepare as module
from multipack.data.stores import writer as writer_module
from multipack.data.stores.prepare import items_of, prepare
from multipack.data.stores.shards import Shard
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import encoded, shard_of
from multipack.data.text.data_config import DataConfig
from multipack.data.text.records import RecordForm
from multipack.data.text.skipped import Noted
from multipack.data.text.texts import SourceDocument, TextPart
from multipack.data.text.tokenizer import TokenizerConfig, byte_tokenizer
from multipack.data.views.corpus import load_corpus
from plain_shard import plain

FORK = multiprocessing.get_context("fork")
BYTE, CHAR, BPE = TokenizerConfig("byte"), TokenizerConfig("char"), TokenizerConfig("bpe", "", 300)


@pytest.fixture
def pairs(text_file):
    """Twenty prompts and completions as jsonl."""
    lines = [json.dumps({"prompt": f"Q{n}", "completion": "a" * (n + 1)}) for n in range(20)]
    return text_file("\n".join(lines), "pairs.jsonl")


@pytest.fixture
def corpus(text_file):
    """900 documents of some 40 bytes, a third of them twice, some without a completion."""
    lines = [
        json.dumps({"prompt": f"question {n}", "completion": "answer " * (n % 7)})
        for n in [number % 600 for number in range(900)]
    ]
    return text_file("\n".join(lines), "corpus.jsonl")


@pytest.fixture
def folder(tmp_path):
    """Seven files of records, and one of another kind."""
    path = tmp_path / "records"
    path.mkdir()
    for number in range(7):
        lines = [
            json.dumps({"text": f"{number} {line} " + "x" * (7 * line % 31)}) for line in range(9 + number)
        ]
        (path / f"{number}.jsonl").write_text("\n".join([*lines, json.dumps({"text": " "})]))
    (path / "notes.md").write_text("another kind")
    return str(path)


def files(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


# --- what is in a store ----------------------------------------------------------------------------------


def test_documents_end_with_an_end_token_that_is_a_target(config, pairs, text_file, content):
    store = TokenStore(prepare(config(source="jsonl", path=pairs), BYTE))
    assert store.num_documents == 20
    assert content(store)[4] == ("pairs.jsonl:5", [*b"Q4\naaaaa", 256], [[3, 9]])
    assert store.description == "pairs.jsonl, 20 documents (prompt → completion)"
    assert store.header.split_by == "document"
    data = config(source="text", path=text_file("ab<>c<><>d"), separator="<>")
    store = TokenStore(prepare(data, CHAR))  # which has no end token
    assert store.lengths.tolist() == [2, 1, 1]
    assert store.noted.skipped == {"empty documents": 1}


def test_a_stream_is_one_document_with_ends_between_files(config, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 3)
    data = config(source="text", path=str(tmp_path), block_size=4)
    store = TokenStore(prepare(data, BYTE))
    assert store.tokens_of(0).tolist() == [*b"aaa", 256, *b"bbb", 256, *b"ccc", 256]
    assert (store.num_documents, store.spans_of(0).tolist()) == (1, [[0, 12]])
    assert store.header.split_by == "position"
    assert store.description == f"{tmp_path.name}, one stream of 3 files"


def test_a_stream_of_several_shards_is_one_document_a_shard(config, text_file, tmp_path, monkeypatch):
    text = "def f(x):\n    return x  + 1\n\n\nprint( f(2) )\n" * 40
    data = config(source="text", path=text_file(text), documents="stream")
    whole = TokenStore(prepare(data, BPE, tmp_path / "whole"))
    monkeypatch.setattr("multipack.data.text.texts.CHUNK", 64)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 64)
    monkeypatch.setattr(writer_module, "SHARD_TOKENS", 100)
    parts = TokenStore(prepare(data, BPE, tmp_path / "parts"))
    assert whole.num_documents == 1
    assert parts.num_documents > 3
    joined = np.concatenate([parts.tokens_of(number) for number in range(parts.num_documents)])
    assert joined.tolist() == whole.tokens_of(0).tolist()
    assert all(len(parts.spans_of(number)) == 1 for number in range(parts.num_documents))


# --- reading and reuse -----------------------------------------------------------------------------------


def test_a_source_is_read_once_and_once_more_for_a_tokenizer(config, pairs, monkeypatch):
    opened, real, calls, size = [], builtins.open, [], Path(pairs).stat().st_size
    monkeypatch.setattr(
        builtins, "open", lambda file, *rest, **more: opened.append(str(file)) or real(file, *rest, **more)
    )
    data = config(source="jsonl", path=pairs)
    for tokenizer, passes in ((BPE, 2), (BYTE, 1)):
        opened.clear()
        calls.clear()
        path = prepare(data, tokenizer, progress=lambda *given: calls.append(given))
        assert calls[-1] == (size, size, "bytes tokenized")
        assert ("bytes read for the tokenizer" in {unit for _, _, unit in calls}) == (passes == 2)
        assert opened.count(pairs) <= passes + 1  # and the first record, which decides the form of all
    monkeypatch.setattr(Shard, "hash", None)  # nothing is hashed when the store is used again
    opened.clear()
    assert prepare(data, BYTE) == path
    assert opened.count(pairs) <= 1
    assert load_corpus(data, BYTE, limit=64).store_path == path


def test_a_store_is_made_once(config, pairs, monkeypatch):
    made, write = [], module._write_part
    monkeypatch.setattr(module, "_write_part", lambda *given: made.append(given[0]) or write(*given))
    data = config(source="jsonl", path=pairs)
    path = prepare(data, BYTE)
    assert prepare(config(source="jsonl", path=pairs, validation=0.5, train_on_prompt=True), BYTE) == path
    assert (len(made), path.parent) == (1, Path(data.cache) / "stores")
    assert prepare(data, BPE) != path
    assert prepare(config(source="jsonl", path=pairs, dedup=True), BYTE) != path
    Path(pairs).write_text(json.dumps({"text": "other"}))
    assert prepare(data, BYTE) != path
    assert len(made) == 4
    before, shard = files(path := prepare(data, BYTE)), next(path.glob("shard*"))
    shard.write_bytes(shard.read_bytes()[:-2])  # a damaged store is made again
    assert prepare(data, BYTE) == path
    assert files(path) == before


def test_other_files_and_stores_are_never_overwritten(config, pairs, text_file, tmp_path):
    folder, file, out = tmp_path / "folder", tmp_path / "file", tmp_path / "out"
    folder.mkdir()
    out.mkdir()  # an empty folder is accepted
    data, other = config(source="jsonl", path=pairs), config(source="text", path=text_file("abc"))
    (folder / "precious.txt").write_text("precious")
    file.write_text("precious")
    for path in (folder, file):
        with pytest.raises(ValueError, match="exists and is not a token store"):
            prepare(data, BYTE, path)
    assert file.read_text() == (folder / "precious.txt").read_text() == "precious"
    assert prepare(data, BYTE, out) == out
    before = files(out)
    for part in ("1/1", "1/2"):
        with pytest.raises(ValueError, match="holds a token store of other documents"):
            prepare(other, BYTE, out, part=part)
    assert files(out) == before


def test_bad_input_leaves_no_store(config, text_file, tmp_path):
    prepare(config(source="text", path=text_file("abc")), CHAR, tmp_path / "abc")
    letters = TokenizerConfig("file", str(tmp_path / "abc" / "tokenizer.json"))
    bad = config(source="jsonl", path=text_file('{"text": "a"}\n{"text": 1}\n', "bad.jsonl"))
    empty = config(source="text", path=text_file(" ", "empty.txt"), separator="x")
    other = config(source="text", path=text_file("ab\n\nax", "other.txt"), documents="blank_line")
    for data, tokenizer, complaint in (
        (bad, BYTE, r"bad\.jsonl, line 2"),
        (empty, BYTE, r"empty\.txt: there are no documents \(1 empty document: empty\.txt#1\)"),
        (other, letters, r"other\.txt:3: .* does not know 'x'"),
    ):
        with pytest.raises(ValueError, match=complaint):
            prepare(data, tokenizer, tmp_path / "out")
        assert not (tmp_path / "out").exists()


# --- shards and parts ------------------------------------------------------------------------------------


def test_shards_appear_one_by_one_and_hold_the_documents_of_one(config, corpus, tmp_path, content):
    data, seen = config(source="jsonl", path=corpus, dedup=True), []
    whole = TokenStore(prepare(data, BYTE, tmp_path / "whole"))
    for shards in (2, 5):
        path = tmp_path / f"{shards}"

        def look(done, total, unit, path=path):
            store = TokenStore(path, growing=True)
            seen.append(len(store.shards))
            assert not store.is_complete

        store = TokenStore(prepare(data, BYTE, path, look, shards=shards))
        assert 1 < len(store.shards) <= shards
        assert content(store) == content(whole)
        assert store.checksum == whole.checksum
        assert (store.noted.skipped, store.header.key) == (whole.noted.skipped, whole.header.key)
    assert {0, 1, 2} <= set(seen)
    assert whole.noted.skipped["empty completions"] == 129


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2]])
def test_parts_in_any_order_are_one_store(config, folder, tmp_path, order, content):
    data = config(source="jsonl", path=folder)
    whole = TokenStore(prepare(data, BYTE, tmp_path / "whole"))
    for number in order:
        with pytest.raises(ValueError, match=r"not a (complete )?token store"):
            TokenStore(tmp_path / "out")
        prepare(data, BYTE, tmp_path / "out", part=f"{number}/3")
    store = TokenStore(prepare(data, BYTE, tmp_path / "out", part="2/3"))
    assert content(store) == content(whole)
    assert store.noted.skipped == whole.noted.skipped == {"files of other kinds": 1, "empty documents": 7}
    assert store.description == whole.description
    assert len(store.shards) == 3
    for number in (1, 2, 3):  # more parts than files
        prepare(config(source="jsonl", path=f"{folder}/3.jsonl"), BYTE, tmp_path / "one", part=f"{number}/3")
    assert TokenStore(tmp_path / "one").num_documents == 12


def test_impossible_requests_are_refused(config, corpus, tmp_path, text_file):
    data, out = config(source="jsonl", path=corpus), tmp_path / "out"
    stream = config(source="text", path=text_file("abc"), documents="stream")
    for asked, options, found in (
        (data, {"shards": -1}, "--shards -1"),
        (data, {"engine": "rey"}, r"--engine='rey'.*nearest: ray"),
        (data, {"part": "0/3"}, "--part 0/3"),
        (data, {"part": "4/3"}, "--part 4/3"),
        (data, {"part": "a"}, "--part a"),
        (data, {"part": "1/2", "shards": 2}, "--part.*--shards 2"),
        (data, {"part": "1/2", "engine": "ray"}, "leave --part out"),
        (config(source="jsonl", path=corpus, dedup=True), {"part": "1/2"}, "data.dedup=true"),
        (stream, {"part": "1/2"}, "a stream is one"),
        (config(source="text", path=text_file("abc"), documents="stream", dedup=True), {}, "data.dedup=true"),
    ):
        with pytest.raises(ValueError, match=found):
            prepare(asked, BYTE, out, **options)
    with pytest.raises(ValueError, match="--part needs the folder"):
        prepare(data, BYTE, part="1/2")
    assert not out.exists()


# --- interruptions ---------------------------------------------------------------------------------------


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(writer_module, "SHARD_TOKENS", 1500)


def _prepare_and_die(data, out, batches, options):
    def progress(done, total, unit):
        nonlocal batches
        batches -= "tokenized" in unit
        if batches == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare(data, BYTE, out, progress, **options)


def start(data, out, batches=0, **options):
    """Prepare in another process, which is killed after this number of batches."""
    process = FORK.Process(target=_prepare_and_die, args=(data, out, batches, options))
    process.start()
    return process


@pytest.mark.parametrize(
    ("fields", "options"),
    [({"dedup": True}, {}), ({}, {"shards": 4}), ({}, {"part": "1/2"})],
    ids=["dedup", "shards", "part"],
)
def test_a_killed_prepare_is_continued(config, corpus, tmp_path, small_shards, fields, options):
    data, out, calls, told = config(source="jsonl", path=corpus, **fields), tmp_path / "out", [], []
    start(data, out, 45, **options).join(60)
    there = TokenStore(out, growing=True)
    assert not there.is_complete
    assert there.num_documents >= 60
    prepare(data, BYTE, out, lambda *given: calls.append(given), report=told.append, **options)
    assert len(told) == 1
    assert "interrupted" in told[0]
    whole = tmp_path / "whole"
    prepare(data, BYTE, whole, **options)
    assert files(out) == files(whole)
    if not options:  # and nothing was tokenized again
        assert len(calls) == -(-(TokenStore(whole).num_documents - there.num_documents) // 10)


def test_shards_of_other_documents_are_not_used_and_damaged_ones_made_again(
    config, corpus, text_file, tmp_path, small_shards
):
    data, out = config(source="jsonl", path=corpus), tmp_path / "out"
    start(data, out, 45).join(60)
    assert not TokenStore(out, growing=True).is_complete
    for name in (".header.json.1.partial", ".shard-0000-00009.safetensors.1.partial"):
        (out / name).touch()  # a kill may leave them
    second = sorted(out.glob("shard*"))[1]
    second.write_bytes(second.read_bytes()[:-1])
    (out / "precious.txt").write_text("precious")
    other = config(source="jsonl", path=text_file(json.dumps({"text": "other"}), "other.jsonl"))
    with pytest.raises(ValueError, match="holds a token store of other documents"):
        prepare(other, BYTE, out)
    prepare(data, BYTE, out)
    found = files(out)
    assert found.pop("precious.txt") == b"precious"
    assert found == files(prepare(data, BYTE, tmp_path / "whole"))


def _prepare(path, cache, marks):
    write = module._write_part

    def slow(*given):
        (Path(marks) / str(os.getpid())).touch()
        time.sleep(0.5)
        write(*given)

    module._write_part = slow
    assert len(load_corpus(DataConfig(source="jsonl", path=path, cache=cache), BPE, limit=64).train) == 18


def test_one_process_prepares_while_others_wait(pairs, tmp_path):
    (tmp_path / "marks").mkdir()
    given = (pairs, str(tmp_path / "cache"), str(tmp_path / "marks"))
    processes = [FORK.Process(target=_prepare, args=given) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list((tmp_path / "marks").iterdir())) == 1


def test_one_store_by_processes_with_caches_of_their_own(config, corpus, tmp_path, small_shards):
    out, whole = tmp_path / "some" / "out", tmp_path / "whole"
    caches = [config(source="jsonl", path=corpus, cache=str(tmp_path / f"cache{n}")) for n in range(3)]
    processes = [start(data, out) for data in caches]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert files(out) == files(prepare(caches[0], BYTE, whole))


def test_a_store_whose_lock_cannot_be_opened_is_reported(config, corpus, tmp_path, monkeypatch):
    def refuse(path, **options):
        if path.parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return locked(path, **options)

    monkeypatch.setattr("multipack.data.stores.prepare.locked", refuse)
    lines = []
    prepare(config(source="jsonl", path=corpus), BYTE, tmp_path / "out", report=lines.append)
    assert "no lock keeps other processes from" in lines[0]
    assert str(tmp_path / ".out.1-of-1.lock") in lines[0]


# --- items, batches, tokens ------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
parts = st.lists(st.builds(TextPart, texts, st.booleans(), st.just(False)), min_size=1, max_size=3).map(tuple)
some = st.builds(SourceDocument, st.sampled_from(["a", "é", ""]), parts, st.booleans())


class ListSource:
    """A source of given documents, without duplicates."""

    config = DataConfig(dedup=True)

    def __init__(self, items, pairs=False):
        self.given, self.noted = items, Noted()
        self.form = RecordForm("preference" if pairs else "text")

    def items(self):
        return zip(*[iter(self.given)] * (2 if self.form.pairs else 1), strict=True)

    def find_form(self):
        return self.form


@settings(deadline=None, max_examples=30)
@given(st.lists(some, max_size=6), st.booleans())
def test_shards_are_those_of_a_plain_loop(documents, pairs):
    tokenizer, step = byte_tokenizer(), 2 if pairs else 1
    items = [tuple(documents[at : at + step]) for at in range(0, len(documents) - step + 1, step)]
    shard = shard_of(encoded(items, tokenizer), tokenizer.vocabulary_size)
    arrays, content = plain(items, tokenizer)
    assert {name: getattr(shard, name).tolist() for name in arrays} == {
        name: values.tolist() for name, values in arrays.items()
    }
    assert shard.content == content


@settings(deadline=None, max_examples=20)
@given(st.lists(some, max_size=8), st.booleans())
def test_the_first_of_duplicates_remains(documents, pairs):
    items = documents * 2 if len(documents) % 2 == 0 or not pairs else [*documents, documents[0]] * 2
    step = 2 if pairs else 1
    source = ListSource(items, pairs)
    expected, seen = [], set()
    for at in range(0, len(items), step):
        item = tuple(items[at : at + step])
        text = tuple((one.parts, one.takes_end) for one in item)
        if text not in seen:
            expected.append(item)
            seen.add(text)
    assert list(items_of(source)) == expected
    assert source.noted.skipped.total() == len(items) // step - len(expected)


def test_documents_with_other_tokens_or_targets_are_no_duplicates():
    for first, second in (
        ((TextPart("ab", True),), (TextPart("a", True), TextPart("b", True))),
        ((TextPart("ab", True),), (TextPart("ab", False),)),
        ((TextPart("<e>", True),), (TextPart("<e>", True, True),)),
        ((TextPart("a\0", True), TextPart("b", True)), (TextPart("a", True), TextPart("\0b", True))),
    ):
        items = [SourceDocument("a", first), SourceDocument("b", second), SourceDocument("c", first)]
        assert [one.name for (one,) in items_of(ListSource(items))] == ["a", "b"]
