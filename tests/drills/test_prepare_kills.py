"""`prepare`, killed at random instants and started again, writes the same bytes and leaves nothing else behind."""

import json
import random
import shutil

import forked
import pytest

KILLS = 6


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
def test_a_killed_prepare_ends_with_the_same_bytes(tmp_path, finish, options):
    source = tmp_path / "source"
    source.mkdir()
    for file in range(6):
        lines = [{"text": f"{file} {line % 300} " + "word " * (line % 40)} for line in range(600)]
        (source / f"{file}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["data=jsonl", f"data.path={source}", *options]
    whole = [*words, f"data.cache={tmp_path / 'cache'}", f"--store={tmp_path / 'whole' / 'store'}"]
    ended = forked.start(tmp_path, forked.prepare_in_parts, whole).wait()
    assert ended.code == 0, ended.text
    draw, kills, inside, killed = random.Random(str(options)), 0, 0, tmp_path / "killed"
    again = [*words, f"data.cache={tmp_path / 'other'}", f"--store={killed / 'store'}"]
    while kills < KILLS:
        cpu = draw.uniform(0.1, 1.0) * ended.seconds
        found = forked.start(tmp_path, forked.prepare_in_parts, again, cpu=cpu).wait()
        kills += found.code == -9
        inside += found.code == -9 and killed.exists()
        if found.code == 0:  # it was faster: once more from the beginning
            shutil.rmtree(killed)
    last = forked.start(tmp_path, forked.prepare_in_parts, again).wait()
    assert last.code == 0, last.text
    files, expected = forked.content(killed), forked.content(tmp_path / "whole")
    lost = [name for name in files.keys() | expected.keys() if files.get(name) != expected.get(name)]
    finish(lost, kills=kills, while_writing=inside)
