"""A share of the slow tests, as a pytest plugin: `pytest -p slow_share -m slow` with tests/ on PYTHONPATH.

Slow tests are divided into eight shares by a hash of their names. A landing, which is what is pushed at once, runs the
share of its number; tests of the rooms that it touched follow, from the other shares, until the minutes are over.
Eight landings in a row have eight numbers, and see all slow tests.

The number is `.ci/landing`, to which a landing's last commit adds 1, plus the commits since that one: landings of one
commit have numbers in a row without it. Neither needs more of the history than a shallow clone has.
"""

import subprocess
import time
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARES = 8
ALSO = {
    "cli": ["tests"],
    "docs": ["tests"],
    "models": ["integrations", "training"],
    "ops": ["models"],
    "parallel": ["distributed"],
    "shapes": ["models"],
    "training": ["distributed"],
}
"""Rooms whose slow tests run code of a room, beside the folder of tests of its name."""


def landing(root):
    """A landing's number, and the files that it changed, of the tree at `root`.

    Without git, or before the history's first landing, no file is known to be changed.
    """
    number = int((root / ".ci" / "landing").read_text())
    counts = _git(root, "log", "--first-parent", "--format=%H", "--", ".ci/landing")
    since = _git(root, "rev-list", "--first-parent", f"{counts[0]}..HEAD") if counts else []
    before = counts[:1] if since else counts[1:2]  # the end of the landing before this one
    return number + len(since), _git(root, "diff", "--name-only", *before, "HEAD") if before else []


def _git(root, *words):
    """The lines that a git command prints, none where it fails."""
    try:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True).stdout.split("\n")[
            :-1
        ]
    except OSError:
        return []


def room(path):
    """The room of a file: planning, data, …; tests of no room, and files of none, are of `tests`."""
    parts = Path(path).parts
    if parts[:2] == ("src", "multipack"):
        parts = parts[1:]
    if parts[0] in ("tests", "multipack"):
        return parts[1] if len(parts) > 2 else "tests"
    return parts[0] if parts[0] in ("benchmarks", "docs") else "tests"


def touched_rooms(files):
    """Rooms whose tests may say something else after a change of these files."""
    rooms = {room(file) for file in files}
    return rooms.union(*(ALSO.get(each, []) for each in rooms))


def chosen(names, number, rooms):
    """Names of tests in the order in which landing `number`, which touched `rooms`, runs them.

    Its own share is whole, and comes first; of the other shares come tests of these rooms.
    """
    ranked = []
    for name in names:
        is_touched = room(name.partition("::")[0]) in rooms
        later = (zlib.crc32(name.encode()) - number) % SHARES  # 0: this landing's; 1: the next one's
        if later == 0 or is_touched:
            ranked.append(((later, not is_touched), name))
    return [name for _, name in sorted(ranked, key=lambda each: each[0])]


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, default=12.0, help="no slow test starts after so many minutes")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["slow_share_started"] = node.config.stash[STARTED]


STARTED = pytest.StashKey[float]()


def pytest_configure(config):
    given = getattr(config, "workerinput", {})  # of a process of pytest-xdist
    config.stash[STARTED] = given.get("slow_share_started", time.time())


def pytest_report_header():
    number, files = landing(ROOT)
    return (
        f"slow tests: share {number % SHARES + 1} of {SHARES}, then those of"
        f" {', '.join(sorted(touched_rooms(files))) or 'no room'}"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    number, files = landing(ROOT)
    items_by_name = {item.nodeid: item for item in items}
    names = chosen(items_by_name, number, touched_rooms(files))
    config.hook.pytest_deselected(
        items=[item for name, item in items_by_name.items() if name not in {*names}]
    )
    items[:] = [items_by_name[name] for name in names]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    minutes = item.config.getoption("minutes")
    if time.time() > item.config.stash[STARTED] + 60 * minutes:
        pytest.skip(f"not run: {minutes:g} minutes are over")
