import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from multipack.data import batches, text_files
from multipack.data import prepare as room
from multipack.data.corpus import load_corpus
from multipack.data.data_config import DataConfig
from multipack.data.header import HEADER
from multipack.data.prepare import prepare
from multipack.data.store import TokenStore
from multipack.data.tokenizer import TokenizerConfig

BYTE, CHAR, BPE = TokenizerConfig("byte"), TokenizerConfig("char"), TokenizerConfig("bpe", "", 300)


@pytest.fixture
def pairs(text_file):
    """Twenty prompts and completions as jsonl."""
    lines = [json.dumps({"prompt": f"Q{n}", "completion": "a" * (n + 1)}) for n in range(20)]
    return text_file("\n".join(lines), "pairs.jsonl")


def texts(documents):
    tokenizer = documents.store.tokenizer
    return [tokenizer.decode(document.tokens.tolist()) for document in documents]


# --- what is in a store ---------------------------------------------------------------------------------


def test_documents_end_with_an_end_token_that_is_a_target(config, pairs):
    store = TokenStore(prepare(config(source="jsonl", path=pairs), BYTE))
    assert store.num_documents == 20
    assert store.tokens[: store.lengths[0]].tolist() == [*b"Q0\na", 256]
    assert store.spans_of(0).tolist() == [[3, 5]]
    assert store.name(4) == "pairs.jsonl:5"
    assert store.header.description == "pairs.jsonl, 20 documents (prompt → completion)"
    assert (store.header.split_by, store.header.end_id) == ("document", 256)


def test_characters_have_no_end_token(config, text_file):
    store = TokenStore(
        prepare(config(source="text", path=text_file("ab\n\nc"), documents="blank_line"), CHAR)
    )
    assert store.lengths.tolist() == [2, 1]
    assert store.header.end_id is None


def test_a_stream_is_one_document_with_ends_between_files(config, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 3)
    store = TokenStore(prepare(config(source="text", path=str(tmp_path), block_size=4), BYTE))
    assert store.num_documents == 1
    assert store.tokens.tolist() == [*b"aaa", 256, *b"bbb", 256, *b"ccc", 256]
    assert store.spans.tolist() == [[0, 12]]
    assert (store.header.split_by, store.header.description) == (
        "position",
        f"{tmp_path.name}, one stream of 3 files",
    )


def test_a_stream_read_in_stretches_has_the_tokens_of_the_whole(config, text_file, tmp_path, monkeypatch):
    text = "def f(x):\n    return x  + 1\n\n\nprint( f(2) )\n" * 40
    data = config(source="text", path=text_file(text), documents="stream")
    whole = TokenStore(prepare(data, BPE, tmp_path / "whole"))
    monkeypatch.setattr(text_files, "CHUNK", 64)
    parts = TokenStore(prepare(data, BPE, tmp_path / "parts"))
    assert whole.num_tokens < len(text) / 2
    np.testing.assert_array_equal(parts.tokens, whole.tokens)


def test_skipped_documents_are_counted(config, text_file):
    path = text_file("a<>b<><>c")
    store = TokenStore(prepare(config(source="text", path=path, separator="<>"), BYTE))
    assert store.header.skipped == {"empty documents": 1}
    assert store.num_documents == 3


def test_batches_change_nothing(config, pairs, tmp_path, monkeypatch):
    first = TokenStore(prepare(config(source="jsonl", path=pairs), BYTE, tmp_path / "one"))
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 20)
    second = TokenStore(prepare(config(source="jsonl", path=pairs), BYTE, tmp_path / "two"))
    assert first.checksum == second.checksum


def test_progress_tells_how_far_it_is(config, pairs):
    told = []
    prepare(config(source="jsonl", path=pairs), BPE, progress=lambda *given: told.append(given))
    size = Path(pairs).stat().st_size
    assert {unit for _, _, unit in told} == {"bytes read for the tokenizer", "bytes tokenized"}
    assert told[-1] == (size, size, "bytes tokenized")


# --- where a store is -------------------------------------------------------------------------------------


def test_a_store_is_made_once(config, pairs, monkeypatch):
    made = []
    write = room._Work.write_store
    monkeypatch.setattr(room._Work, "write_store", lambda *given: made.append(given[1]) or write(*given))
    data = config(source="jsonl", path=pairs)
    path = prepare(data, BYTE)
    assert prepare(config(source="jsonl", path=pairs, validation=0.5, train_on_prompt=True), BYTE) == path
    assert len(made) == 1
    assert path.parent == Path(data.cache) / "stores"
    assert prepare(data, BPE) != path
    Path(pairs).write_text(json.dumps({"text": "other"}))
    assert prepare(data, BYTE) != path
    assert len(made) == 3


def test_a_damaged_store_in_the_cache_is_made_again(config, pairs):
    data = config(source="jsonl", path=pairs)
    path = prepare(data, BYTE)
    before = (path / "tokens.bin").read_bytes()
    for damaged in (before[:-2], before[:-2] + b"aa"):
        (path / "tokens.bin").write_bytes(damaged)
        assert prepare(data, BYTE) == path
        assert (path / "tokens.bin").read_bytes() == before


def test_other_files_and_folders_are_never_overwritten(config, pairs, tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    for path in (folder / "precious.txt", file):
        path.write_text("precious")
        out = folder if path.parent == folder else file
        with pytest.raises(ValueError, match="exists and is not a token store"):
            prepare(config(source="jsonl", path=pairs), BYTE, out, overwrite=True)
        assert path.read_text() == "precious"


def test_another_store_is_overwritten_only_on_request(config, pairs, text_file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is welcome
    data, other = config(source="jsonl", path=pairs), config(source="text", path=text_file("abc"))
    assert prepare(data, BYTE, out) == out
    checksum = TokenStore(out).checksum
    with pytest.raises(ValueError, match="holds a token store of other documents or of another tokenizer"):
        prepare(other, BYTE, out)
    assert TokenStore(out).checksum == checksum
    assert TokenStore(prepare(other, BYTE, out, overwrite=True)).checksum != checksum


def test_bad_input_leaves_no_store(config, text_file, tmp_path):
    path = text_file('{"text": "a"}\n{"text": 1}\n', "bad.jsonl")
    (tmp_path / "made" / "out").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        prepare(config(source="jsonl", path=path), BYTE, tmp_path / "made" / "out")
    assert [list(folder.iterdir()) for folder in (tmp_path / "made", tmp_path / "made" / "out")] == [
        [tmp_path / "made" / "out"],
        [],
    ]
    with pytest.raises(ValueError, match=r"empty\.txt: there are no documents \(1 empty documents\)"):
        prepare(config(source="text", path=text_file(" ", "empty.txt"), separator="x"), BYTE)


def test_characters_that_a_tokenizer_lacks_are_named_with_their_document(config, text_file, tmp_path):
    prepare(config(source="text", path=text_file("abc")), CHAR, tmp_path / "abc")
    other = config(source="text", path=text_file("ab\n\nax", "other.txt"), documents="blank_line")
    with pytest.raises(ValueError, match=r"other\.txt:3: .* does not know 'x'"):
        prepare(other, TokenizerConfig("file", str(tmp_path / "abc" / "tokenizer.json")))


KILLED = """
import sys, time
from pathlib import Path
from multipack.data import batches
from multipack.data import prepare as room
from multipack.data.data_config import DataConfig
from multipack.data.tokenizer import TokenizerConfig
batches.BATCH_DOCUMENTS = 1
batches.BATCH_CHARACTERS = 1

def progress(done, total, unit):
    print(unit, flush=True)
    time.sleep(0.1)

data = DataConfig(source="text", path=sys.argv[1], documents="blank_line", cache=sys.argv[2])
room.prepare(data, TokenizerConfig("byte"), Path(sys.argv[3]), progress)
"""


def test_a_killed_prepare_leaves_nothing_that_loads(config, text_file, tmp_path):
    path, folder = text_file("document\n\n" * 1000), tmp_path / "stores"
    given = [sys.executable, "-c", KILLED, path, str(tmp_path / "cache"), str(folder / "out")]
    process = subprocess.Popen(given, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "bytes tokenized"
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = list(folder.iterdir())
    assert [entry.suffix for entry in left] == [".partial"]
    for entry in (folder / "out", *left):
        with pytest.raises(ValueError, match="not a token store"):
            TokenStore(entry)
    prepare(config(source="text", path=path, documents="blank_line"), BYTE, folder / "out")
    assert list(folder.iterdir()) == [folder / "out"]
    assert TokenStore(folder / "out").num_documents == 1000


def _prepare(path, cache, marks):
    write = room._Work.write_store

    def slow(*given):
        (Path(marks) / str(os.getpid())).touch()
        time.sleep(0.5)
        write(*given)

    room._Work.write_store = slow
    assert len(load_corpus(DataConfig(source="jsonl", path=path, cache=cache), BPE, limit=64).train) == 18


def test_one_process_prepares_while_others_wait(pairs, tmp_path):
    (tmp_path / "marks").mkdir()
    spawn = multiprocessing.get_context("spawn")
    given = (pairs, str(tmp_path / "cache"), str(tmp_path / "marks"))
    processes = [spawn.Process(target=_prepare, args=given) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list((tmp_path / "marks").iterdir())) == 1


# --- the corpus of a run ----------------------------------------------------------------------------------


def test_the_corpus_of_pairs(config, pairs):
    data = config(source="jsonl", path=pairs)
    corpus = load_corpus(data, BYTE, limit=64)
    assert (len(corpus.train), len(corpus.validation)) == (18, 2)
    assert sorted(texts(corpus.train) + texts(corpus.validation)) == sorted(
        f"Q{n}\n" + "a" * (n + 1) for n in range(20)
    )
    assert set(corpus.prompts) == {text.split("\n")[0] + "\n" for text in texts(corpus.validation)}
    assert corpus.corpus_hash == TokenStore(corpus.store_path).header.source_hash
    assert corpus.train.target_counts.sum() + corpus.validation.target_counts.sum() == sum(range(2, 22))
    data.train_on_prompt = True
    everything = load_corpus(data, BYTE, limit=64)
    assert everything.train.target_counts.tolist() == (everything.train.lengths - 1).tolist()
    assert everything.train.lengths.tolist() == corpus.train.lengths.tolist()


def test_long_prompts_are_cut_for_samples(config, text_file):
    lines = [json.dumps({"prompt": "p" * 90, "completion": "c"}) for _ in range(9)]
    data = config(source="jsonl", path=text_file("\n".join(lines), "long.jsonl"))
    assert load_corpus(data, BYTE, limit=100).prompts == ("p" * 48,)


def test_other_seeds_choose_other_validation_documents(config, pairs):
    chosen = {
        tuple(
            texts(load_corpus(config(source="jsonl", path=pairs, split_seed=seed), BYTE, limit=64).validation)
        )
        for seed in range(4)
    }
    assert len(chosen) > 1


def test_validation_can_be_empty(config, pairs, text_file):
    corpus = load_corpus(config(source="jsonl", path=pairs, validation=0.0), BYTE, limit=64)
    assert (len(corpus.train), len(corpus.validation)) == (20, 0)
    assert corpus.prompts == ("Q0\n", "Q1\n", "Q2\n")
    stream = config(source="text", path=text_file("abcdefgh"), block_size=4, validation=0.0)
    corpus = load_corpus(stream, CHAR, limit=64)
    assert (len(corpus.train), len(corpus.validation)) == (2, 0)


def test_too_little_to_validate_on(config, text_file):
    path = text_file("abc")
    with pytest.raises(
        ValueError, match=r"1 document \(text\.txt\).* cannot be split in two; set data\.validation=0"
    ):
        load_corpus(config(source="text", path=path), CHAR, limit=64)
    with pytest.raises(ValueError, match="leaves 2 to train and 1 to validate on"):
        load_corpus(config(source="text", path=path, documents="stream"), CHAR, limit=64)


def test_overlong_documents(config, pairs):
    with pytest.raises(
        ValueError, match=r"document \d+ \(pairs\.jsonl:\d+\) has \d+ tokens, more than the limit of 16"
    ):
        load_corpus(config(source="jsonl", path=pairs), BYTE, limit=16)
    corpus = load_corpus(config(source="jsonl", path=pairs, overlong="drop"), BYTE, limit=16)
    assert corpus.train_fit.dropped_documents + corpus.validation_fit.dropped_documents == 9
    corpus = load_corpus(config(source="jsonl", path=pairs, overlong="split"), BYTE, limit=16)
    assert corpus.train.num_tokens + corpus.validation.num_tokens == sum(range(5, 25)) + 10


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
    for tokenizer in (TokenizerConfig(), BPE, TokenizerConfig("file", str(tmp_path / "out"))):
        corpus = load_corpus(store, tokenizer, limit=64)
        assert corpus.train.fingerprint == direct.train.fingerprint
        assert (corpus.corpus_hash, corpus.description) == (direct.corpus_hash, direct.description)
    for other in (BYTE, TokenizerConfig("bpe", "", 301)):
        with pytest.raises(
            ValueError, match=rf"was tokenized with bpe 300 \(hash .* asks for {re.escape(other.name)}"
        ):
            load_corpus(store, other, limit=64)
    foreign = load_corpus(
        config(source="text", path=text_file("a\n\nb"), documents="blank_line"), BYTE, limit=64
    )
    with pytest.raises(ValueError, match=r"asks for file tokenizer\.json"):
        load_corpus(store, TokenizerConfig("file", str(foreign.store_path / "tokenizer.json")), limit=64)
    with pytest.raises(ValueError, match=r"holds 20 documents; data\.overlong=split"):
        load_corpus(
            config(source="store", path=str(tmp_path / "out"), block_size=8), TokenizerConfig(), limit=64
        )


def test_an_edited_store_is_refused_unless_nobody_looks(config, pairs, tmp_path):
    out = prepare(config(source="jsonl", path=pairs), BYTE, tmp_path / "out")
    tokens = bytearray((out / "tokens.bin").read_bytes())
    tokens[0] = ord("X")
    (out / "tokens.bin").write_bytes(tokens)
    with pytest.raises(ValueError, match=r"tokens\.bin was edited"):
        load_corpus(config(source="store", path=str(out)), TokenizerConfig(), limit=64)
    corpus = load_corpus(config(source="store", path=str(out), verify=False), TokenizerConfig(), limit=64)
    assert len(corpus.train) == 18
    (out / HEADER).unlink()
    with pytest.raises(ValueError, match="not a token store"):
        load_corpus(config(source="store", path=str(out)), TokenizerConfig(), limit=64)


# --- real corpora -----------------------------------------------------------------------------------------


def test_tinyshakespeare_by_characters(shared_data, config):
    data = config(source="text", path=str(shared_data / "text" / "tinyshakespeare.txt"), block_size=1024)
    corpus = load_corpus(data, CHAR, limit=1024)
    assert corpus.tokenizer.vocabulary_size == 65
    assert (corpus.train.num_tokens, corpus.validation.num_tokens) == (1_003_854, 111_540)
    assert (len(corpus.train), len(corpus.validation)) == (981, 109)
    text = (shared_data / "text" / "tinyshakespeare.txt").read_text()
    assert "".join(texts(corpus.train)) == text[:1_003_854]


def test_tinyshakespeare_by_speeches(shared_data, config):
    path = str(shared_data / "text" / "tinyshakespeare.txt")
    corpus = load_corpus(config(source="text", path=path, documents="blank_line"), BYTE, limit=4096)
    assert (len(corpus.train), len(corpus.validation)) == (6500, 722)


def test_gsm8k(shared_data, config):
    path = str(shared_data / "text" / "gsm8k_train.jsonl.gz")
    corpus = load_corpus(config(source="jsonl", path=path, fields=["question", "answer"]), BYTE, limit=4096)
    assert len(corpus.train) + len(corpus.validation) == 7473
    assert (corpus.train.target_counts < corpus.train.lengths - 1).all()
    assert all(prompt.endswith("\n") for prompt in corpus.prompts)


def test_the_standard_library(monkeypatch):
    corpus = load_corpus(DataConfig(), TokenizerConfig(), limit=1024)
    assert re.fullmatch(
        r"Python 3\.\d+\.\S+ standard library, [\d,]+ functions with docstring", corpus.description
    )
    assert corpus.tokenizer.vocabulary_size == 2048
    assert len(corpus.train) + len(corpus.validation) > 4000
    assert corpus.train.lengths.max() == 1024
    assert corpus.train_fit.split_documents > 10  # auto: functions longer than the limit are split
    assert all(prompt.lstrip().startswith(("def ", "async def ")) for prompt in corpus.prompts)
    assert len(corpus.prompts) == 3
    monkeypatch.setattr(room._Work, "write_store", None)
    again = load_corpus(DataConfig(), TokenizerConfig(), limit=1024)  # from the cache
    assert again.train.fingerprint == corpus.train.fingerprint
