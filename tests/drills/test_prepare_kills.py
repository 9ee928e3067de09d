"""`prepare`, killed at random instants and started again, writes the same bytes and leaves nothing else behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

KILLS = 6
PROGRAM = """
import sys
from multipack.data.stores import prepare as module, writer
module.BATCH_DOCUMENTS, writer.SHARD_TOKENS = 10, 3000
from multipack.cli import main
sys.argv[1:1] = ["prepare"]
main()
"""


def start(*words):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def content(folder):
    """Relative path → bytes of all files below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "options",
    [
        ["tokenizer=byte"],
        ["tokenizer=bpe", "--shards=7"],
        ["tokenizer=byte", "--part=2/3"],
        ["data.dedup=true"],
    ],
    ids=["plain", "shards", "part", "dedup"],
)
def test_a_killed_prepare_ends_with_the_same_bytes(tmp_path, outcome, options):
    source = tmp_path / "source"
    source.mkdir()
    for file in range(6):
        lines = [{"text": f"{file} {line % 300} " + "word " * (line % 40)} for line in range(600)]
        (source / f"{file}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["data=jsonl", f"data.path={source}", *options]
    begun = time.monotonic()
    whole = start(*words, f"data.cache={tmp_path / 'cache'}", f"--store={tmp_path / 'whole' / 'store'}")
    assert whole.wait(120) == 0, whole.stderr.read().decode()
    seconds = time.monotonic() - begun
    draw, kills, inside = random.Random(str(options)), 0, 0
    killed = [*words, f"data.cache={tmp_path / 'other'}", f"--store={tmp_path / 'killed' / 'store'}"]
    while kills < KILLS:
        process = start(*killed)
        time.sleep(draw.uniform(0.3, 1.0) * seconds)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
            inside += (tmp_path / "killed").exists()
        process.wait(30)
        if process.returncode == 0:  # it was faster: once more from the beginning
            for path in sorted((tmp_path / "killed").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    last = start(*killed)
    code, text = last.wait(120), last.stderr.read().decode()
    different = content(tmp_path / "killed") != content(tmp_path / "whole")
    outcome("kills", kills)
    outcome("while writing", inside)
    outcome("different or left over", int(different))
    assert (code, different) == (0, False), text
