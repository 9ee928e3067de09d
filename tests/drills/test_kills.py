"""Kills at random moments and at changes of files: what follows equals work without kills, bit for bit."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.timeout(1200)  # a busy machine takes several times as long as an idle one

STEPS = ["train.steps=12", "train.eval_every=4", "train.checkpoint_every=2", "train.keep_best=true"]
STEPS += ["model.dropout=0.1"]
BACKGROUND = "train.checkpoint_async=true"


@dataclass
class Work:
    """Work that is killed and started again.

    Attributes:
        start: (folder, when it is killed) → how its processes ended.
        different: (folder, folder of the work without kills) → what differs.
    """

    start: Callable[..., list[forked.Ended]]
    different: Callable[[Path, Path], list[str]]

    def kill(self, folder, kills, each, draw):
        """Kill work up to `each` times, then let it end, until there were enough kills, or something is lost.

        `draw` makes the moments of kills from how the work without kills ended. Returns what was lost, and counts.
        """
        whole, lost, done, inside, number = folder / "whole", [], 0, 0, 0
        ended = self.start(whole)
        assert [rank.code for rank in ended] == [0] * len(ended), ended[0].text
        while done < kills and not lost:
            out, number = folder / f"killed-{number}", number + 1
            for _ in range(each):
                found = self.start(out, **draw(ended, done))
                is_killed = any(rank.code == -9 for rank in found)
                done += is_killed
                inside += is_killed and out.exists()
                failed = [rank for rank in found if rank.code is None or (rank.code > 0 and not is_killed)]
                lost += [(rank.code, rank.error) for rank in failed]
                if not any(rank.code for rank in found):  # it was faster
                    break
            last = self.start(out)
            lost += [rank.error or "did not end" for rank in last if rank.code] or self.different(out, whole)
            shutil.rmtree(out, ignore_errors=True)
        return lost, {"kills": done, "while_writing": inside}


def different_files(folder, whole):
    """Names of files that differ; also a temporary folder beside an export."""
    found, expected = forked.content(folder), forked.content(whole)
    names = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
    return names + list(folder.parent.glob(f".{folder.name}*"))


def at_any_moment(seed, least=0.0):
    rng = random.Random(seed)
    return lambda ended, _, rank=0: {"cpu": rng.uniform(least, 1.0) * ended[rank].seconds}


def at_a_change_of_files(seed):
    rng = random.Random(seed)
    return lambda ended, _, rank=0: {"event": rng.randrange(2, 2 * ended[rank].events + 2)}


@pytest.fixture
def training(tmp_path, run_of):
    """More words → runs."""

    def make(*more):
        def start(out, **kill):
            return [forked.start(tmp_path, forked.run, run_of(out, *more), **kill).wait()]

        return Work(start, forked.different)

    return make


def test_kills_at_random_moments(tmp_path, training, finish):
    lost, counts = training().kill(tmp_path, 20, 3, at_any_moment(0))
    finish(lost, **counts)


@pytest.mark.parametrize("more", [[], [BACKGROUND]], ids=["sync", "async"])
def test_kills_while_files_are_written(tmp_path, training, finish, more):
    lost, counts = training(*more).kill(tmp_path, 12, 4, at_a_change_of_files(str(more)))
    finish(lost, **counts)


def test_kills_while_exporting(tmp_path, run_of, finish):
    run = tmp_path / "run"
    assert forked.start(tmp_path, forked.run, run_of(run)).wait().code == 0

    def start(out, **kill):
        if out.exists():  # whole, or it would not have its name
            return [forked.Ended(0)]
        return [forked.start(tmp_path, forked.write_export, str(run), str(out), **kill).wait()]

    lost, counts = Work(start, different_files).kill(tmp_path, 10, 1, at_a_change_of_files(2))
    finish(lost, **counts)


@pytest.mark.parametrize("more", [[], [BACKGROUND]], ids=["sync", "async"])
def test_kills_of_one_of_two_ranks(tmp_path, run_of, finish, more):
    words = [*more, "parallel.data=zero3", "parallel.timeout_seconds=20"]
    moments = at_a_change_of_files(str(more)), at_any_moment(str(more))

    def start(out, rank=0, **kill):
        return forked.together(tmp_path, run_of(out, *words), 2, killed=rank, **kill)

    def draw(ended, kills):
        rank = kills % 3 % 2
        return moments[kills % 2](ended, kills, rank) | {"rank": rank}

    lost, counts = Work(start, forked.different).kill(tmp_path, 6, 6, draw)
    finish(lost, **counts)


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

    def start(out, **kill):
        cache = [f"data.cache={tmp_path / 'caches' / out.name}", f"--store={out / 'store'}"]
        words = ["data=jsonl", f"data.path={source}", *options, *cache]
        return [forked.start(tmp_path, forked.prepare_in_parts, words, **kill).wait()]

    lost, counts = Work(start, different_files).kill(tmp_path, 6, 6, at_any_moment(str(options), 0.1))
    finish(lost, **counts)
