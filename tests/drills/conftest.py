"""Drills try what no fast test can: kills at random instants, mutants of every file, full disks, lost ranks.

Each drill records what it tried and what was lost, and the summary after the tests lists both: `make drills`.
"""

import contextlib
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from attempts import Drill

from multipack.data.stores.prepare import prepare
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.training.run_config import compose_run
from multipack.training.train import train


@pytest.fixture
def outcome(record_property):
    """Record a number for the summary of the drills: `outcome("kills", 50)`, `outcome("different", 0)`."""
    return lambda what, count: record_property(what, count)


@pytest.fixture
def finish(outcome):
    """Record numbers and what was lost, of which there must be nothing: `finish(lost, kills=50)`."""

    def end(lost, **counts):
        for what, count in counts.items():
            outcome(what.replace("_", " "), count)
        outcome("lost", len(lost))
        assert not lost, lost

    return end


@pytest.fixture
def drill(outcome):
    """Runs mutants and counts what was lost; see `attempts.Drill`."""
    return Drill(outcome)


@pytest.fixture
def store(tmp_path):
    """A store of 40 documents in three shards."""
    source = tmp_path / "text"
    source.mkdir()
    for number in range(40):
        (source / f"{number:02}.txt").write_text(f"document {number} " * (number + 1))
    data = DataConfig(source="text", path=str(source), cache=str(tmp_path / "cache"))
    return prepare(data, TokenizerConfig("byte"), tmp_path / "store", shards=3)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of six steps."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n} " * (n % 7 + 1)}) + "\n" for n in range(60))
    )
    words = f"data=jsonl data.path={folder}/a.jsonl data.cache={folder}/cache tokenizer=byte model=tiny model.layers=1"
    words += (
        " plan.capacity=256 plan.packs_per_step=2 train.steps=6 train.eval_every=3 train.checkpoint_every=3"
    )
    words += f" train.dtype=fp32 train.sample_tokens=4 log.documents=true out={folder}/run"
    with contextlib.redirect_stdout(None):
        train(compose_run(words.split()))
    return folder / "run"


@pytest.fixture
def run_of(words, request):
    """Path, more words → the words of a run with the STEPS of the test's module that begins or continues there."""
    steps = request.module.STEPS
    return lambda path, *more: [*words, *steps, *more, "train.resume=auto", f"out={path}"]


def pytest_collection_modifyitems(items):
    """Only `make drills` runs these tests."""
    for item in items:
        if "drills" in item.path.parts:
            item.add_marker(pytest.mark.drill)


def pytest_terminal_summary(terminalreporter):
    """Print a line per drill: what was tried, and what was lost."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and report.user_properties
    ]
    if reports:
        terminalreporter.section("drills")
    for report in reports:
        counts = ", ".join(f"{what} {count}" for what, count in report.user_properties)
        terminalreporter.write_line(f"{report.outcome} {report.nodeid.split('::')[-1]}: {counts}")
