import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multipack.data import batches, workers
from multipack.data.header import HEADER
from multipack.data.prepare import prepare
from multipack.data.store import TokenStore
from multipack.data.tokenizer import TokenizerConfig

BYTE, CHAR, BPE = TokenizerConfig("byte"), TokenizerConfig("char"), TokenizerConfig("bpe", "", 300)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 7)


@pytest.fixture
def pairs(text_file):
    """200 prompts and completions, 50 of them twice, 6 empty."""
    lines = [
        json.dumps({"prompt": f"Q{n} é", "completion": "" if n % 40 == 7 else "word " * (n % 23 + 1)})
        for n in [number % 150 for number in range(200)]
    ]
    return text_file("\n".join(lines), "pairs.jsonl")


def files_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("dedup", [False, True])
def test_workers_change_no_byte(config, pairs, tmp_path, dedup):
    made = {}
    for count in (1, 2, 3):
        data = config(source="jsonl", path=pairs, workers=count, dedup=dedup)
        made[count] = files_of(prepare(data, BPE, tmp_path / f"{count}"))
    assert made[1] == made[2] == made[3]
    header = TokenStore(tmp_path / "2").header
    assert header.documents == (146 if dedup else 194)
    assert header.skipped == {"empty completions": 6, **({"duplicates": 48} if dedup else {})}


def test_a_stream_is_the_same_with_workers(config, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("multipack.data.text_files.CHUNK", 64)
    path = text_file("def f(x):\n    return x  + 1\n\n\nprint( f(2) )\n" * 40)
    made = [
        files_of(
            prepare(config(source="text", path=path, documents="stream", workers=n), BPE, tmp_path / str(n))
        )
        for n in (1, 2)
    ]
    assert made[0] == made[1]


def test_workers_are_started_when_there_is_enough_to_do(config, pairs, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    make = workers.Workers
    monkeypatch.setattr(workers, "Workers", lambda *given: started.append(given[1]) or make(*given))
    few = prepare(config(source="jsonl", path=pairs), BYTE, tmp_path / "few")
    assert started == []
    monkeypatch.setattr(workers, "WORTH_WORKERS", 1000)
    many = prepare(config(source="jsonl", path=pairs), BYTE, tmp_path / "many")
    assert started == [2]
    assert files_of(few) == files_of(many)


def test_text_that_the_tokenizer_lacks_is_named(config, text_file, tmp_path):
    prepare(config(source="text", path=text_file("abc")), CHAR, tmp_path / "abc")
    text = "\n\n".join(["ab"] * 30 + ["ax"] + ["c"] * 9)
    other = config(source="text", path=text_file(text, "other.txt"), documents="blank_line", workers=2)
    with pytest.raises(ValueError, match=r"^other\.txt:61: .* does not know 'x'"):
        prepare(other, TokenizerConfig("file", str(tmp_path / "abc" / "tokenizer.json")), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_worker_that_is_killed_is_an_error_and_leaves_nothing_torn(config, pairs, tmp_path, monkeypatch):
    made = []
    make = workers.Workers
    monkeypatch.setattr(workers, "Workers", lambda *given: made.append(make(*given)) or made[-1])

    killed = []

    def kill(done, total, unit):
        if unit == "bytes tokenized" and not killed:
            killed.append(made[0].process_ids[0])
            os.kill(killed[0], signal.SIGKILL)

    data = config(source="jsonl", path=pairs, workers=2)
    with pytest.raises(ChildProcessError, match=r"was killed by signal 9; .* lower data\.workers"):
        prepare(data, BYTE, tmp_path / "out", progress=kill)
    assert not list(tmp_path.glob("*out*"))
    for worker in made[0]._processes:  # and none is left behind
        assert worker.process.returncode is not None
    assert TokenStore(prepare(data, BYTE, tmp_path / "out")).num_documents == 194


def test_a_worker_that_cannot_start_is_an_error(config, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_START", "raise SystemExit(5)")
    with pytest.raises(ChildProcessError, match="ended with exit status 5"):
        prepare(config(source="jsonl", path=pairs, workers=2), BYTE, tmp_path / "out")


SCRIPT = """
import sys
from pathlib import Path
from multipack.data.data_config import DataConfig
from multipack.data.prepare import prepare
from multipack.data.tokenizer import TokenizerConfig

print("once", flush=True)
data = DataConfig(source="jsonl", path=sys.argv[1], cache=sys.argv[2], workers=2)
prepare(data, TokenizerConfig("byte"), Path(sys.argv[3]))
"""


def test_scripts_need_no_guard(pairs, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    given = [
        sys.executable,
        str(tmp_path / "script.py"),
        pairs,
        str(tmp_path / "cache"),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(given, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("once\n", "")
    assert (tmp_path / "out" / HEADER).exists()


def test_workers_end_with_whoever_started_them(tmp_path):
    code = (
        "import sys, time; from multipack.data.tokenizer import byte_tokenizer;"
        "from multipack.data.workers import Workers;"
        "print(*Workers(byte_tokenizer(), 2).process_ids, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    left = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(left) == 2
    for _ in range(600):
        left = [pid for pid in left if _runs(pid)]
        if not left:
            return
        time.sleep(0.05)
    pytest.fail(f"processes {left} still run")


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
