"""Kills at random moments and at changes of files: what follows equals a run without kills, bit for bit."""

import random
import shutil

import forked
import pytest

pytestmark = pytest.mark.timeout(1200)  # a busy machine takes several times as long as an idle one

STEPS = ["train.steps=12", "train.eval_every=4", "train.checkpoint_every=2", "train.keep_best=true"]
STEPS += ["model.dropout=0.1"]
AIMED = {"sync": [], "async": ["train.checkpoint_async=true"]}


def _whole(tmp_path, words_of, size=1, *more):
    """An uninterrupted run; how its last rank ended."""
    out = tmp_path / f"whole-{size}{len(more)}"
    ended = forked.together(tmp_path, words_of(out, *more), size) if size > 1 else []
    ended = ended or [forked.start(tmp_path, forked.run, words_of(out, *more)).wait()]
    assert [each.code for each in ended] == [0] * size, ended[0].text
    return out, ended[0]


def _attempt(tmp_path, words, lost, **kill):
    """Whether a run came to its end; problems other than the kill are added to `lost`."""
    ended = forked.start(tmp_path, forked.run, words, **kill).wait()
    if ended.code not in (0, -9):
        lost.append((ended.code, ended.error))
    return ended.code == 0


def _drill(tmp_path, run_of, kills, draw, each=3, more=()):
    """Kill runs `each` times and let them finish; problems, differences, and the number of kills."""
    whole, ended = _whole(tmp_path, run_of, 1, *more)
    lost, done, number = [], 0, 0
    while done < kills:
        out, number = tmp_path / f"run-{number}", number + 1
        for _ in range(each):
            done += not _attempt(tmp_path, run_of(out, *more), lost, **draw(ended))
        if not _attempt(tmp_path, run_of(out, *more), lost):
            lost.append((out.name, "did not end"))
        else:
            lost += forked.different(out, whole)
        shutil.rmtree(out, ignore_errors=True)
    return lost, done


def test_kills_at_random_moments(tmp_path, run_of, finish):
    rng = random.Random(0)
    lost, done = _drill(tmp_path, run_of, 20, lambda ended: {"cpu": rng.uniform(0.0, ended.seconds)})
    finish(lost, kills=done)


@pytest.mark.parametrize("how", AIMED)
def test_kills_while_files_are_written(tmp_path, run_of, finish, how):
    rng = random.Random(how)
    draw = lambda ended: {"event": rng.randrange(2, 2 * ended.events + 2)}  # noqa: E731
    lost, done = _drill(tmp_path, run_of, 12, draw, each=4, more=AIMED[how])
    finish(lost, kills=done)


def test_kills_while_exporting(tmp_path, run_of, finish):
    whole, _ = _whole(tmp_path, run_of)
    expected = tmp_path / "expected"
    ended = forked.start(tmp_path, forked.write_export, str(whole), str(expected)).wait()
    files = {file.name: file.read_bytes() for file in expected.iterdir()}
    rng, lost, done = random.Random(2), [], 0
    events = rng.sample(range(2, 2 * ended.events + 2), min(10, 2 * ended.events))
    for event in events:
        out = tmp_path / "exported"
        killed = forked.start(tmp_path, forked.write_export, str(whole), str(out), event=event).wait()
        done += killed.code == -9
        if not out.exists():
            forked.start(tmp_path, forked.write_export, str(whole), str(out)).wait()
        if {file.name: file.read_bytes() for file in out.iterdir()} != files or list(
            tmp_path.glob(".exported*")
        ):
            lost.append(event)
        shutil.rmtree(out)
    finish(lost, kills=done)


@pytest.mark.parametrize("how", AIMED)
def test_kills_of_one_of_two_ranks(tmp_path, run_of, finish, how):
    more = [*AIMED[how], "parallel.data=zero3", "parallel.timeout_seconds=20"]
    whole, ended = _whole(tmp_path, run_of, 2, *more)
    rng, lost, kills, out = random.Random(how), [], 0, tmp_path / "run"
    while kills < 6:
        kill = (
            {"cpu": rng.uniform(0.0, ended.seconds)}
            if kills % 2
            else {"event": rng.randrange(2, 2 * ended.events)}
        )
        found = forked.together(tmp_path, run_of(out, *more), 2, killed=kills % 3 % 2, **kill)
        kills += any(each.code == -9 for each in found)
        lost += ["hung" for each in found if each.code is None]
        if all(each.code == 0 for each in found):
            lost += forked.different(out, whole)
            shutil.rmtree(out)
    last = forked.together(tmp_path, run_of(out, *more), 2)
    lost += [each.error for each in last if each.code != 0] or forked.different(out, whole)
    finish(lost, kills=kills)
