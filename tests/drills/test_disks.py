"""A full and a read-only disk: one line that names the file and the last good checkpoint, and the run continues."""

import subprocess
from contextlib import contextmanager

import forked
import pytest

pytestmark = pytest.mark.timeout(1200)

STEPS = ["train.steps=8", "train.eval_every=4", "train.checkpoint_every=2"]


@contextmanager
def _disk(folder, size):
    """A file system of its own; skips the test where none may be mounted."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _remount(folder, option):
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)


@pytest.fixture
def whole(tmp_path, run_of):
    """An uninterrupted run."""
    assert forked.start(tmp_path, forked.run, run_of(tmp_path / "whole")).wait().code == 0
    return tmp_path / "whole"


def _is_one_line(ended, *names):
    """Whether the error is one line that names these."""
    return (
        ended.code == 2 and ended.error.startswith("error: ") and all(name in ended.error for name in names)
    )


BACKGROUND = "train.checkpoint_async=true"
SIZES = {
    "prepare": [4, 8, 40, 100, 200, 300, 400, 500],  # KiB; the store has 0.5 MiB
    "cache": [4, 8, 40, 100, 200, 300, 400, 500],
    "export": [4, 100, 300, 500],
    # From none to a few checkpoints of 1.1 MiB: start, log, the first and later ones find no room.
    "run": [12, 100, 600, 1300, 1800, 2500, 3100],
    "run in the background": [12, 100, 600, 1300, 1800, 2500, 3100],
}


@pytest.mark.parametrize("work", SIZES)
def test_a_disk_that_fills_up(tmp_path, words, run_of, whole, finish, work):
    """A store, the cache of a run, an export, a run: refused in one line, and made when there is room."""
    source, sizes = tmp_path / "source.txt", SIZES[work]
    source.write_text("\n\n".join(f"line {number} of the source, {number**3:x}" for number in range(12_000)))
    of_text = [*words, "data=text", "data.documents=blank_line", f"data.path={source}"]
    of_text += [*STEPS, "train.eval_every=0"]

    def start(disk):
        function, *given = {
            "prepare": (forked.prepare_store, str(source), str(disk)),
            "cache": (
                forked.run,
                [*of_text, f"data.cache={disk / 'cache'}", f"out={tmp_path / disk.name}-run"],
            ),
            "export": (forked.write_export, str(whole), str(disk / "export")),
            "run": (forked.run, run_of(disk / "run")),
            "run in the background": (forked.run, run_of(disk / "run", BACKGROUND)),
        }[work]
        return forked.start(tmp_path, function, *given).wait()

    def different(disk):
        if work.startswith("run"):
            return forked.different(disk / "run", whole)
        made = {"prepare": "store", "cache": "cache/stores", "export": "export"}[work]
        found = forked.content(disk / made)
        return [] if found == forked.content(roomy / made) else sorted(found)

    roomy, lost, refused = tmp_path / "roomy", [], 0
    roomy.mkdir()
    assert start(roomy).code == 0
    for size in sizes:
        disk = tmp_path / f"disk-{size}"
        with _disk(disk, f"{size}k"):
            ended = start(disk)
            refused += ended.code == 2
            if ended.code != 0 and not _is_one_line(ended, str(disk), "No space left"):
                lost.append((size, ended.code, ended.error))
            _remount(disk, "size=64m")
            again = start(disk) if ended.code else ended
            lost += [(size, each) for each in ([again.error] if again.code else different(disk))]
    finish(lost, sizes=len(sizes), refused_in_one_line=refused)
    assert refused >= len(sizes) // 2


@pytest.mark.parametrize("more", [[], [BACKGROUND]], ids=["sync", "async"])
def test_a_disk_that_becomes_read_only(tmp_path, run_of, whole, finish, more):
    """It stays so, and the run is refused in one line; afterwards it continues."""
    lost, disk = [], tmp_path / "disk"
    with _disk(disk, "64m"):
        run = run_of(disk / "run", *more)
        first = forked.start(tmp_path, forked.run_until_read_only, run, str(disk), 5).wait()
        if not _is_one_line(first, "Read-only file system", "step-00000004 is complete: resume with"):
            lost.append((first.code, first.error))
        closed = forked.start(tmp_path, forked.run, run).wait()
        if not _is_one_line(closed, "Read-only file system"):
            lost.append((closed.code, closed.error))
        _remount(disk, "rw")
        last = forked.start(tmp_path, forked.run, run).wait()
        lost += [last.error] if last.code != 0 else forked.different(disk / "run", whole)
    finish(lost, runs=3)
