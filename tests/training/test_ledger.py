import json
import subprocess
import sys

import pytest

from multipack.run import RunDirectory
from multipack.training.ledger import NOTHING, AppendedFile, Ledger


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("seed: 1\n")
    return directory


def test_files_are_cut_back_to_their_marks_and_grow_again(run):
    ledger = Ledger(run)
    ledger.record({"step": 1, "loss": 0.1})
    ledger.samples.write("one\n")
    marks = json.loads(json.dumps(ledger.marks()))
    ledger.record({"step": 2, "loss": 0.2})
    ledger.samples.write("two\n")
    ledger.close()
    again = Ledger(run)
    again.check(marks)
    again.cut(marks)
    assert again.marks() == marks
    again.record({"step": 2})
    again.close()
    assert run.metrics.read_text() == '{"step": 1, "loss": 0.1}\n{"step": 2}\n'
    assert run.samples.read_text() == "one\n"


@pytest.mark.parametrize("content", ["short", "other content, and longer than it was before"])
def test_a_file_that_the_mark_never_saw_is_refused_and_kept(tmp_path, content):
    file = AppendedFile(tmp_path / "samples.txt")
    file.write("what was written then\n")
    mark = file.mark()
    file.close()
    (tmp_path / "samples.txt").write_text(content)
    with pytest.raises(ValueError, match="does not begin with what this checkpoint saw"):
        AppendedFile(tmp_path / "samples.txt").check(mark)
    assert (tmp_path / "samples.txt").read_text() == content


def test_the_mark_of_nothing_empties_a_file(tmp_path):
    file = AppendedFile(tmp_path / "metrics.jsonl")
    file.write("abc")
    file.check(NOTHING)
    file.cut(NOTHING)
    assert file.mark() == NOTHING


def test_two_processes_cannot_write_one_run(run):
    code = (
        "import sys; from multipack.run import RunDirectory; from multipack.training.ledger import Ledger;"
        "ledger = Ledger(RunDirectory.at(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="another process is running"):
        Ledger(run)
    other.communicate()
    Ledger(run).close()
