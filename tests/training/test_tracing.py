import json

import pytest
import torch
from torch import nn

from multipack.training.tracing import Trace

CPU = torch.device("cpu")


def _run(trace, steps, first=1, model=None):
    model = model or nn.Linear(4, 4)
    for step in range(first, first + steps):
        trace.before_step(step)
        model(torch.ones(2, 4)).sum().backward()
        trace.after_step(step, None, applied=True)


def _step_names(path):
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("step ")}


def test_one_trace_of_a_few_steps_is_written_once(tmp_path):
    told, path = [], tmp_path / "trace.json"
    trace = Trace(path, CPU, tell=told.append)
    _run(trace, 5, first=101)
    assert _step_names(path) == {"step 103", "step 104", "step 105"}
    assert any("addmm" in str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"])
    assert told == [f"trace of steps 103 to 105: {path} (open it in https://ui.perfetto.dev)"]
    written = path.stat().st_mtime_ns
    _run(trace, 7, first=106)
    trace.close(failed=False)
    assert path.stat().st_mtime_ns == written
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    assert len(told) == 1


def test_a_run_that_ends_in_the_middle_still_has_its_trace(tmp_path):
    told, path = [], tmp_path / "trace.json"
    trace = Trace(path, CPU, tell=told.append)
    _run(trace, 3)
    trace.before_step(4)  # and this one raises
    assert not path.exists()
    trace.close(failed=True)
    assert _step_names(path) == {"step 3", "step 4"}
    assert "steps 3 to 4" in told[0]


def test_a_run_too_short_says_that_it_has_no_trace(tmp_path):
    told = []
    trace = Trace(tmp_path / "trace.json", CPU, tell=told.append)
    _run(trace, 2)
    trace.close(failed=False)
    assert list(tmp_path.iterdir()) == []
    assert told == [
        "train.profile=true traces steps 3 to 5 of a process, but this one took 2: no trace was written"
    ]


@pytest.mark.parametrize("steps", [2, 6])
def test_a_rank_without_a_path_does_nothing(steps, capsys):
    trace = Trace(None, CPU)
    _run(trace, steps)
    trace.close(failed=False)
    assert capsys.readouterr().out == ""


def test_a_resumed_run_keeps_its_trace(tmp_path):
    told, path = [], tmp_path / "trace.json"
    path.write_text("the first")
    trace = Trace(path, CPU, tell=told.append)
    _run(trace, 6)
    trace.close(failed=False)
    assert path.read_text() == "the first"
    assert len(told) == 1
    assert "remove it to have another trace" in told[0]
