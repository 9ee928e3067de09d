"""The run log: resuming truncates it to what the checkpoint saw, and one process writes it."""

import json

import pytest

from multipack.run import RunDirectory
from multipack.training.run_files import RunLog


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("seed: 1\n")
    return directory


def test_files_are_truncated_to_their_marks_and_grow_again(run):
    log = RunLog(run)
    log.record({"step": 1, "loss": 0.1})
    log.sample(1, "one")
    marks = json.loads(json.dumps(log.marks()))
    log.record({"step": 2, "loss": 0.2})
    log.sample(2, "two")
    log.close()
    again = RunLog(run)
    again.cut(marks)
    assert again.marks() == marks
    again.record({"step": 2})
    again.close()
    assert run.metrics.read_text() == '{"step": 1, "loss": 0.1}\n{"step": 2}\n'
    assert run.samples.read_text() == "=== step 1\none\n\n"
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "lo')  # the writer was killed
    last = RunLog(run)
    last.cut(None)
    last.close()
    assert run.metrics.read_text() == run.samples.read_text() == ""
    cut = run.path / "metrics.jsonl.cut", run.path / "samples.txt.cut"
    assert (
        cut[0].read_text()
        == '{"step": 2, "loss": 0.2}\n{"step": 1, "loss": 0.1}\n{"step": 2}\n{"step": 3, "lo\n'
    )
    assert cut[1].read_text() == "=== step 2\ntwo\n\n=== step 1\none\n\n"


@pytest.mark.parametrize("content", ["short", "other content, and longer than it was before"])
def test_a_file_with_another_beginning_is_refused_and_kept(run, content):
    log = RunLog(run)
    log.record({"step": 1})
    log.sample(1, "what was written then")
    marks = log.marks()
    log.close()
    run.samples.write_text(content)
    log = RunLog(run)
    with pytest.raises(ValueError, match="does not begin with what this checkpoint recorded"):
        log.cut(marks)
    log.close()
    assert run.samples.read_text() == content
    assert run.metrics.read_text() == '{"step": 1}\n'


def test_two_processes_cannot_write_one_run(run):
    """The lock is of an opened file, so that a process meets its own."""
    first = RunLog(run)
    with pytest.raises(ValueError, match="another process is running"):
        RunLog(run)
    first.close()
    RunLog(run).close()
