"""Eight landings in a row run every slow test, whatever else they run, and stop in time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slow_share

NAMES = [
    f"tests/{room}/test_{n // 4}.py::test_{n}"
    for room in ("data", "distributed", "launch")
    for n in range(80)
]


def commit(root, *files):
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(int(path.read_text()) + 1) if path.exists() else "7")
    git = ["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "a change"], check=True)


@pytest.fixture
def tree(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit(tmp_path, ".ci/landing", "src/multipack/words.py")
    return tmp_path


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "one commit each"])
def test_eight_landings_see_all(tree, counted):
    seen = []
    for landing in range(8):
        for _ in range(landing % 3 if counted else 0):
            commit(tree, "src/multipack/data/stores/store.py")
        commit(tree, "README.md", *([".ci/landing"] if counted else []))
        seen += slow_share.chosen(NAMES, slow_share.landing(tree)[0], ())
    assert sorted(seen) == sorted(NAMES)  # each once


def test_touched_rooms_are_those_since_the_landing_before(tree):
    commit(tree, "tests/data/test_store.py", ".ci/landing")
    commit(tree, "src/multipack/parallel/world.py")
    assert slow_share.touched_rooms(slow_share.landing(tree)[1]) == {"parallel", "distributed"}
    commit(tree, "docs/guide.md", ".ci/landing")  # ends the landing
    number, files = slow_share.landing(tree)
    assert number == 9
    assert slow_share.touched_rooms(files) == {"parallel", "distributed", "docs", "tests"}


def test_a_shallow_clone_has_its_share(tree, tmp_path_factory):
    clone = tmp_path_factory.mktemp("clone")
    subprocess.run(["git", "clone", "-q", "--depth", "1", tree.as_uri(), clone], check=True)
    assert slow_share.landing(clone) == (7, [])


def test_touched_rooms_come_first_in_the_share_and_again_after_it():
    own = slow_share.chosen(NAMES, 3, ())
    order = slow_share.chosen(NAMES, 3, {"distributed"})
    assert sorted(order[: len(own)]) == sorted(own)
    is_touched = ["distributed" in name for name in order]
    assert is_touched[: len(own)] == sorted(is_touched[: len(own)], reverse=True)
    assert all(is_touched[len(own) :])
    assert sum(is_touched) == 80


@pytest.mark.slow
def test_no_test_starts_when_the_minutes_are_over(tmp_path):
    test = "import pytest\n\n@pytest.mark.parametrize('n', range(64))\ndef test_it(n):\n    assert n < 0\n"
    (tmp_path / "test_one.py").write_text(test)
    environment = {**os.environ, "PYTHONPATH": str(Path(slow_share.__file__).parent)}
    # Processes of pytest-xdist count from the start of the one that starts them.
    for minutes, processes, code, outcome in ((0, 1, 0, "skipped"), (1, 0, 1, "failed")):
        options = ["-p", "slow_share", "-n", str(processes), "--tb=no", f"--minutes={minutes}"]
        command = [sys.executable, "-m", "pytest", *options, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        assert re.search(rf"= \d+ {outcome}[^a-z]", done.stdout.splitlines()[-1])
