"""The documents of a run: from a source or a prepared store, split, fitted; full verification once a host."""

import json
import os
import re
from dataclasses import replace

import pytest

from multipack.data.stores.prepare import prepare
from multipack.data.stores.shards import HEADER
from multipack.data.stores.store import TokenStore
from multipack.data.text import stdlib
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.data.views import corpus as module
from multipack.data.views.corpus import load_corpus
from multipack.data.views.stored_lengths import read_lengths

AUTO, BYTE, CHAR, BPE = (TokenizerConfig(*given) for given in ((), ("byte",), ("char",), ("bpe", "", 300)))


@pytest.fixture
def pairs(text_file):
    """Twenty prompts and completions as jsonl."""
    lines = [json.dumps({"prompt": f"Q{n}", "completion": "a" * (n + 1)}) for n in range(20)]
    return text_file("\n".join(lines), "pairs.jsonl")


def texts(documents):
    tokenizer = documents.store.tokenizer
    return [tokenizer.decode(document.tokens.tolist()) for document in documents]


def test_prompts_and_completions(config, pairs):
    data = config(source="jsonl", path=pairs)
    corpus = load_corpus(data, BYTE, limit=64)
    assert (len(corpus.train), len(corpus.validation)) == (18, 2)
    found = sorted(texts(corpus.train) + texts(corpus.validation))
    assert found == sorted(f"Q{n}\n" + "a" * (n + 1) for n in range(20))
    assert set(corpus.prompts) == {text.split("\n")[0] + "\n" for text in texts(corpus.validation)}
    assert corpus.corpus_hash == TokenStore(corpus.store_path).checksum
    assert corpus.train.target_counts.sum() + corpus.validation.target_counts.sum() == sum(range(2, 22))
    data.train_on_prompt = True
    everything = load_corpus(data, BYTE, limit=64)
    assert everything.train.target_counts.tolist() == (everything.train.lengths - 1).tolist()
    assert everything.train.lengths.tolist() == corpus.train.lengths.tolist()


def test_preference_pairs(config, text_file):
    lines = [json.dumps({"prompt": f"Q{n}", "chosen": "good" * n, "rejected": "bad"}) for n in range(21)]
    corpus = load_corpus(config(source="jsonl", path=text_file("\n".join(lines), "p.jsonl")), BYTE, limit=128)
    assert (len(corpus.train), len(corpus.validation)) == (18, 2)
    assert corpus.skipped[0].startswith("1 pair with an empty answer: ")
    assert all(prompt.startswith("Q") for prompt in corpus.prompts)
    chosen, rejected = corpus.train.members(0)
    assert chosen.tokens.tolist() == [*b"Q2\ngoodgood", 256]
    assert rejected.tokens.tolist() == [*b"Q2\nbad", 256]


def test_weights_are_kept_by_store_and_views(config, text_file):
    lines = [json.dumps({"text": "a" * (n + 2), "w": n % 3}) for n in range(12)]
    data = config(
        source="jsonl", path=text_file("\n".join(lines), "w.jsonl"), weight_field="w", overlong="split"
    )
    corpus = load_corpus(data, BYTE, limit=8)
    whole = load_corpus(config(source="jsonl", path=data.path), BYTE, limit=64)
    assert whole.train.weights is None
    assert whole.corpus_hash != corpus.corpus_hash
    for view in (corpus.train, corpus.validation):  # a piece has the weight of its document
        expected = [int(view.name(n).split(":")[1].split()[0]) % 3 for n in range(len(view))]
        assert view.weights.tolist() == [(each - 1) % 3 for each in expected]
        assert [view[n].weight for n in range(len(view))] == view.weights.tolist()
    halves = [TokenStore(corpus.store_path), whole.train.store]
    joined = TokenStore.joined(corpus.store_path, halves, ["a", "b"])
    assert joined.weights.tolist() == [n % 3 for n in range(12)] + [1] * 12
    TokenStore(corpus.store_path).verify()


def test_validation_documents_are_drawn_by_the_seed_and_can_be_none(config, pairs, text_file):
    chosen = set()
    for seed in range(4):
        corpus = load_corpus(config(source="jsonl", path=pairs, split_seed=seed), BYTE, limit=64)
        chosen.add(tuple(texts(corpus.validation)))
    assert len(chosen) > 1
    corpus = load_corpus(config(source="jsonl", path=pairs, validation=0.0), BYTE, limit=64)
    assert (len(corpus.train), len(corpus.validation)) == (20, 0)
    assert corpus.prompts == ("Q0\n", "Q1\n", "Q2\n")
    long = text_file(json.dumps({"prompt": "p" * 90, "completion": "c"}), "long.jsonl")
    corpus = load_corpus(config(source="jsonl", path=long, validation=0.0), BYTE, limit=100)
    assert corpus.prompts == ("p" * 48,)
    stream = config(source="text", path=text_file("abcdefgh"), block_size=4, validation=0.0)
    assert len(load_corpus(stream, CHAR, limit=64).train) == 2


def test_too_few_documents_to_validate_on(config, text_file):
    path = text_file("abc")
    with pytest.raises(ValueError, match=r"1 document of .*set data\.validation=0"):
        load_corpus(config(source="text", path=path), CHAR, limit=64)
    with pytest.raises(ValueError, match="leaves 2 to train and 1 to validate on"):
        load_corpus(config(source="text", path=path, documents="stream"), CHAR, limit=64)


def test_documents_that_are_too_long(config, pairs):
    with pytest.raises(ValueError, match=r"\(pairs\.jsonl:\d+\) has \d+ tokens, more than the limit of 16"):
        load_corpus(config(source="jsonl", path=pairs), BYTE, limit=16)
    corpus = load_corpus(config(source="jsonl", path=pairs, overlong="drop"), BYTE, limit=16)
    assert corpus.train_fit.documents + corpus.validation_fit.documents == 9
    with pytest.raises(ValueError, match=r"no documents to train on: 18 documents .* dropped"):
        load_corpus(config(source="jsonl", path=pairs, overlong="drop"), BYTE, limit=3)
    corpus = load_corpus(config(source="jsonl", path=pairs, overlong="split"), BYTE, limit=16)
    assert corpus.train.num_tokens + corpus.validation.num_tokens == sum(range(5, 25)) + 10


def test_documents_without_any_target_are_refused(config, text_file):
    """A run of them would have a loss of 0."""
    rows = [{"prompt": "a long question " * 4, "completion": "b"} for _ in range(4)]
    path = text_file("".join(json.dumps(row) + "\n" for row in rows), "cut.jsonl")
    cut = config(source="jsonl", path=path, overlong="truncate", validation=0)
    with pytest.raises(ValueError, match=r"none of the 4 training documents .* has a target token"):
        load_corpus(cut, BYTE, limit=16)
    assert len(load_corpus(replace(cut, train_on_prompt=True), BYTE, limit=16).train) == 4


def test_blocks_of_a_stream(config, text_file):
    path = text_file("abcdefghij" * 10)
    corpus = load_corpus(config(source="text", path=path, block_size=16), CHAR, limit=20)
    assert corpus.train.lengths.tolist() == [16] * 5 + [10]
    assert corpus.validation.lengths.tolist() == [10]
    corpus = load_corpus(config(source="text", path=path, documents="stream"), CHAR, limit=20)
    assert corpus.train.lengths.tolist() == [20] * 4 + [10]
    with pytest.raises(ValueError, match=r"data\.block_size=16 exceeds the limit of 15.*plan\.capacity"):
        load_corpus(config(source="text", path=path, block_size=16), CHAR, limit=15)


def test_a_prepared_store_is_a_source(config, pairs, text_file, tmp_path):
    prepare(config(source="jsonl", path=pairs), BPE, tmp_path / "out")
    store = config(source="store", path=str(tmp_path / "out"))
    direct = load_corpus(config(source="jsonl", path=pairs), BPE, limit=64)
    for tokenizer in (AUTO, BPE, TokenizerConfig("file", str(tmp_path / "out"))):
        corpus = load_corpus(store, tokenizer, limit=64)
        assert corpus.train.fingerprint == direct.train.fingerprint
        assert (corpus.corpus_hash, corpus.description) == (direct.corpus_hash, direct.description)
    other = text_file("a\n\nb")
    foreign = load_corpus(config(source="text", path=other, documents="blank_line"), BYTE, limit=64)
    file = TokenizerConfig("file", str(foreign.store_path / "tokenizer.json"))
    for wrong in (BYTE, TokenizerConfig("bpe", "", 301), file):
        with pytest.raises(ValueError, match=rf"with bpe 300 \(hash .* asks for {re.escape(wrong.name)}"):
            load_corpus(store, wrong, limit=64)
    with pytest.raises(ValueError, match=r"holds 20 documents; data\.overlong=split"):
        load_corpus(config(source="store", path=str(tmp_path / "out"), block_size=8), AUTO, limit=64)


def test_content_is_verified_on_request(config, pairs, tmp_path):
    out = prepare(config(source="jsonl", path=pairs), BYTE, tmp_path / "out")
    shard = next(out.glob("shard*"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert len(load_corpus(config(source="store", path=str(out)), AUTO, limit=64).train) == 18
    full = config(source="store", path=str(out), verify="full")
    assert len(load_corpus(full, AUTO, limit=64, reads=False).train) == 18
    with pytest.raises(ValueError, match="hash differs"):
        load_corpus(full, AUTO, limit=64)
    with pytest.raises(ValueError, match=r"data\.verify='sizes'.*nearest: size"):
        config(verify="sizes").check()
    (out / HEADER).unlink()
    with pytest.raises(ValueError, match="not a token store"):
        load_corpus(config(source="store", path=str(out)), AUTO, limit=64)


def test_a_store_is_verified_once_until_its_files_change(config, pairs, tmp_path, monkeypatch):
    out, calls, verify = (
        prepare(config(source="jsonl", path=pairs), BYTE, tmp_path / "out"),
        [],
        TokenStore.verify,
    )
    monkeypatch.setattr(TokenStore, "verify", lambda *given: calls.append(given) or verify(*given))
    data = config(source="store", path=str(out), verify="full")
    for time in (1, None, 2):
        if time:
            os.utime(next(out.glob("shard*")), (time, time))
        load_corpus(data, AUTO, limit=64)
    assert len(calls) == 2


def test_lengths_of_a_store(write_store):
    store = write_store([[(3, False), (9, True)], [(4, True)]])
    assert read_lengths(store.path, 16).tolist() == [12, 4]


def test_the_standard_library(config, monkeypatch):
    root, names = stdlib.library_files()
    monkeypatch.setattr(stdlib, "library_files", lambda: (root, names[:30]))
    corpus = load_corpus(config(), AUTO, limit=256)
    assert re.fullmatch(
        r"Python 3\.\d+\.\S+ standard library, [\d,]+ functions with docstring", corpus.description
    )
    assert corpus.tokenizer.vocabulary_size == 2048
    assert len(corpus.train) + len(corpus.validation) > 50
    assert corpus.train.lengths.max() == 256
    assert corpus.train_fit.documents > 3  # auto: functions longer than the limit are split
    assert len(corpus.prompts) == 3
    assert all(prompt.lstrip().startswith(("def ", "async def ")) for prompt in corpus.prompts)
    monkeypatch.setitem(module.prepare.__globals__, "_write_part", None)
    again = load_corpus(config(), AUTO, limit=256)  # from the cache
    assert again.train.fingerprint == corpus.train.fingerprint


def test_arrays_that_are_no_lengths_are_refused_before_memory_is_asked_for(tmp_path):
    """A header may claim any shape, and be any expression."""
    path, begin = tmp_path / "lengths.npy", b"\x93NUMPY\x01\x00"
    for header in (
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1 << 70,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (18446744073709551617,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1,)",
        "{'descr': '<i8', 'fortran_order': False, 'shape': " + "(" * 9000,
        "",
    ):
        size = len(header).to_bytes(2, "little")
        path.write_bytes(begin + size + header.encode() + b"\0" * 200)
        with pytest.raises(ValueError, match=str(path)) as refused:
            read_lengths(path, 16)
        assert "\n" not in str(refused.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="no such file"):
        read_lengths(path, 16)


def test_validation_documents_come_from_files_of_their_own(config, pairs, text_file, tmp_path):
    rows = [json.dumps({"prompt": f"V{n}", "completion": "b" * (n + 30)}) for n in range(5)]
    files = [text_file("\n".join(rows[:2]), "held/a.jsonl"), text_file("\n".join(rows[2:]), "held/b.jsonl")]
    data = config(source="jsonl", path=pairs, validation_path=files)
    corpus = load_corpus(data, BPE, limit=64)
    assert (len(corpus.train), len(corpus.validation)) == (20, 5)
    assert [text[:2] for text in texts(corpus.validation)] == ["V0", "V1", "V2", "V3", "V4"]
    assert corpus.sources == (("a.jsonl", 2), ("b.jsonl", 3))
    assert corpus.validation.name(4) == "b.jsonl: b.jsonl:3"
    assert corpus.tokenizer.hash == corpus.validation.store.header.tokenizer_hash
    assert "a.jsonl, 2 documents" in corpus.validation_files
    alone = load_corpus(replace(data, validation_path=[], validation=0.0), BPE, limit=64)
    assert corpus.train.fingerprint == alone.train.fingerprint
    # A store of such documents gives the same, for a store, too; too long documents are cut as those of training.
    store = prepare(config(source="jsonl", path=pairs), BPE, tmp_path / "train.store")
    held = prepare(
        config(source="jsonl", path=files[1]), TokenizerConfig("file", str(store)), tmp_path / "held.store"
    )
    stored = config(source="store", path=str(store), validation_path=[str(held)], overlong="truncate")
    again = load_corpus(stored, AUTO, limit=20)
    assert again.validation.lengths.max() == 20
    assert texts(load_corpus(stored, AUTO, limit=64).validation) == texts(corpus.validation)[2:]
    assert again.sources == ()


def test_validation_documents_must_suit_those_of_training(config, pairs, text_file, tmp_path):
    chats = text_file(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    )
    chosen = text_file(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}), "chosen.jsonl")
    other = prepare(config(source="jsonl", path=pairs), TokenizerConfig("char"), tmp_path / "char.store")
    for given, named in (
        ({"validation_path": [chats]}, "special tokens"),
        (
            {"validation_path": [chosen]},
            "holds preference pairs, and the training documents are single documents",
        ),
        ({"validation_path": [str(other)]}, "was tokenized with char"),
        ({"validation_path": [str(tmp_path / "none")]}, r"validation_path=.*no such file"),
        ({"validation_path": [chosen], "validation": 0.2}, "leave one of them out"),
        ({"validation_part": "test"}, "no effect with data.source=jsonl"),
    ):
        with pytest.raises(ValueError, match=named):
            load_corpus(config(source="jsonl", path=pairs, **given), BYTE, limit=64)
    with pytest.raises(ValueError, match=r"data\.validation_path=.* is not a token store"):
        load_corpus(config(source="store", path=str(other), validation_path=[pairs]), AUTO, limit=64)
