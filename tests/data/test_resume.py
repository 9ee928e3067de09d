"""A prepare that is killed leaves nothing torn, and the next one takes over what was finished."""

import json
import random
import signal
import subprocess
import sys

import pytest

from multipack.data import batches, parts
from multipack.data.header import HEADER
from multipack.data.parts import Parts, folder_of_parts
from multipack.data.prepare import prepare
from multipack.data.shards import ShardsHeader, list_shards
from multipack.data.store import TokenStore
from multipack.data.tokenizer import TokenizerConfig

BYTE = TokenizerConfig("byte")

PREPARE = """
import json, sys, time
from pathlib import Path
from multipack.data import batches, parts
from multipack.data.data_config import DataConfig
from multipack.data.prepare import prepare
from multipack.data.tokenizer import TokenizerConfig

given = json.loads(sys.argv[1])
batches.BATCH_DOCUMENTS, parts.PART_TOKENS = 10, 1500

def progress(done, total, unit):
    if "tokenized" in unit:
        print(done, flush=True)
        time.sleep(given["pause"])

prepare(DataConfig(**given["data"]), TokenizerConfig("byte"), Path(given["out"]), progress, shards=given["shards"])
"""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(parts, "PART_TOKENS", 1500)


@pytest.fixture
def corpus(text_file):
    """900 documents of some 40 bytes, a third of them twice."""
    lines = [
        json.dumps({"prompt": f"question {n}", "completion": "answer " * (n % 7)})
        for n in [number % 600 for number in range(900)]
    ]
    return text_file("\n".join(lines), "corpus.jsonl")


@pytest.fixture
def start(tmp_path):
    """Starts `prepare` in a process of its own; it is ended after the test, if it still runs."""
    started = []

    def start(data, out, shards=0, pause=0.02):
        given = {"data": data, "out": str(out), "shards": shards, "pause": pause}
        words = [sys.executable, "-c", PREPARE, json.dumps(given)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def kill_after(process, batches_done, how=signal.SIGKILL):
    for _ in range(batches_done):
        process.stdout.readline()
    process.send_signal(how)
    process.wait()


def content(path):
    return {
        str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
    }


@pytest.mark.parametrize("fields", [{}, {"dedup": True}, {"workers": 2}], ids=["plain", "dedup", "workers"])
def test_a_killed_prepare_goes_on_where_it_was(config, corpus, start, tmp_path, fields):
    data = config(source="jsonl", path=corpus, **fields)
    out, told = tmp_path / "out", []
    kill_after(start(vars(data), out), 20)
    left = sorted(path.name for path in folder_of_parts(out).glob("*.part"))
    assert len(left) >= 2
    assert not out.exists()
    tokenized = []
    prepare(data, BYTE, out, lambda *given: tokenized.append(given), tell=told.append)
    assert len(told) == 1
    assert told[0].endswith("are taken over from an interrupted prepare")
    taken = int(told[0].split()[0])
    assert taken >= 60
    assert not folder_of_parts(out).exists()
    whole = prepare(data, BYTE, tmp_path / "whole")
    assert content(out) == content(whole)
    assert len(tokenized) == -(-(TokenStore(whole).num_documents - taken) // 10)  # nothing was done again


def test_killed_again_and_again_at_any_moment(config, corpus, start, tmp_path):
    data = config(source="jsonl", path=corpus, dedup=True)
    out, draw = tmp_path / "out", random.Random(5)
    for number in range(6):
        process = start(vars(data), out, pause=0.001)
        how = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3]
        kill_after(process, draw.randrange(1, 12), how)
        for folder in tmp_path.glob("*out*"):  # the store is whole, or nothing loads
            if folder != out:
                with pytest.raises(ValueError, match="not a token store"):
                    TokenStore(folder)
    told = []
    prepare(data, BYTE, out, tell=told.append)
    TokenStore(out).verify()
    assert content(out) == content(prepare(data, BYTE, tmp_path / "whole"))
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out"]


def test_parts_of_another_corpus_are_not_used(config, corpus, start, text_file, tmp_path):
    out, told = tmp_path / "out", []
    kill_after(start(vars(config(source="jsonl", path=corpus)), out), 20)
    assert folder_of_parts(out).exists()
    other = text_file(json.dumps({"text": "other"}), "other.jsonl")
    prepare(config(source="jsonl", path=other), BYTE, out, tell=told.append)
    assert told == []
    assert TokenStore(out).num_documents == 1
    assert not folder_of_parts(out).exists()


def test_damaged_parts_are_made_again_and_foreign_files_stay(config, corpus, start, tmp_path):
    data, out, told = config(source="jsonl", path=corpus), tmp_path / "out", []
    kill_after(start(vars(data), out), 30)
    folder = folder_of_parts(out)
    second = sorted(folder.glob("*.part"))[1]
    second.write_bytes(second.read_bytes()[:-1])
    (folder / "precious.txt").write_text("precious")
    prepare(data, BYTE, out, tell=told.append)
    assert len(told) == 1
    assert content(out) == content(prepare(data, BYTE, tmp_path / "whole"))
    assert [path.name for path in folder.iterdir()] == ["precious.txt"]


def test_small_corpora_write_no_parts_and_bad_input_leaves_none(config, corpus, tmp_path, monkeypatch):
    written = []
    add = Parts.add
    monkeypatch.setattr(Parts, "add", lambda self, block: add(self, block) or written.append(self._number))
    monkeypatch.setattr(parts, "PART_TOKENS", 10**9)
    prepare(config(source="jsonl", path=corpus), BYTE, tmp_path / "small")
    assert set(written) == {0}
    monkeypatch.setattr(parts, "PART_TOKENS", 1500)
    with open(corpus, "a") as file:
        file.write('\n{"prompt": 3}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl, line 901"):
        prepare(config(source="jsonl", path=corpus), BYTE, tmp_path / "bad")
    assert max(written) > 5
    assert not list(tmp_path.glob("*bad*"))


def test_killed_shards_go_on_where_they_were(config, corpus, start, tmp_path):
    data = config(source="jsonl", path=corpus, dedup=True)
    out, told = tmp_path / "out", []
    kill_after(start(vars(data), out, shards=3), 45)
    shards, is_complete = list_shards(out)
    assert shards[:2] == [out / "shard-00000", out / "shard-00001"]
    assert not is_complete
    for shard in shards:
        TokenStore(shard).verify()
    prepare(data, BYTE, out, tell=told.append, shards=3)
    assert told[:2] == ["shard-00000 is there already", "shard-00001 is there already"]
    whole = prepare(data, BYTE, tmp_path / "whole", shards=3)
    assert content(out) == content(whole)
    assert list_shards(out) == ([out / f"shard-0000{number}" for number in range(3)], True)
    assert ShardsHeader.read(out).checksum == ShardsHeader.read(whole).checksum
    assert (out / HEADER).exists()
