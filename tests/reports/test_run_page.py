"""`multipack report`: the page and the text of runs, whatever their directories hold."""

import json
import os
import re
import shutil

import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.reports.curve import text_curve
from multipack.reports.run_data import RunData, communication
from multipack.reports.run_page import key_figures, padding_cost, run_page, time_shares, warnings


def _data(page: bytes):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.decode(), re.DOTALL)
    return json.loads(found[1])


def _run(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)


def test_a_report_says_where_communication_is(trained):
    found = RunData(trained)
    assert communication(found) == ""  # of one process
    found.start["run"] = [["parallel", "zero3 2 x tensor 2"]]
    assert "zero3 2 x tensor 2 is in forward, backward" in communication(found)
    found.steps.values["dtc"] = found.steps.values["dtb"]
    assert communication(found).startswith("Communication is the synchronization of gradients")


def test_a_run_has_its_page(trained):
    page = (trained / "report.html").read_bytes()
    assert not re.search(rb"""(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)""", page)
    data = _data(page)
    (run,) = data["runs"]
    assert [each["event"] for each in run["sessions"]] == ["start", "end", "start", "end"]
    assert run["steps"]["step"] == list(range(1, 21))
    assert {"tps", "mfu", "padding", "memory", "lr", "grad_norm", "cost_spread"} <= set(run["steps"])
    assert sum(share for *_, share in run["parts"]) == pytest.approx(1, abs=0.02)
    assert [each["text"].split(":")[0] for each in run["padding"]] == ["packed", "padded, batches of 8"]
    assert "of the slots hold tokens" in dict(run["plan"])["packing efficiency"]
    assert ["model.layers", False, "1"] in data["config"]
    assert run["checkpoints"][-1][-1].startswith("latest")
    assert [step for step, _ in run["samples"]] == [0, 3, 6, 9, 12, 15, 18, 20]


def test_figures_follow_from_the_records(written):
    found = RunData(written())
    figures = dict(key_figures(found))
    assert figures["steps"] == "60 of 60"
    assert figures["tokens trained"] == "60 k"
    assert figures["time in steps"] == "30 s"
    assert time_shares(found.steps) == pytest.approx(
        {"waiting for data": 0.06, "forward": 0.4, "backward": 0.4, "optimizer": 0.04, "other": 0.1}
    )
    found.history = [{"event": "start", "padded_share": 0.3, "padded_batch_size": 8}]
    bars, note = padding_cost(found)
    assert [bar["slots"] for bar in bars] == pytest.approx([60_000 / 0.9, 60_000 / 0.3])
    assert "30 s in steps would have been 1 min 30 s with padding (3.00 times)" in note
    found.history.append({"event": "end", "step": 60, "reason": "", "comparison": {"ratio": 2.0}})
    assert "would have been 1 min 0 s with padding" in padding_cost(found)[1]


def test_several_runs_are_compared(written):
    paths = [written("a"), written("b", lr="0.01")]
    data = _data(run_page([RunData(path) for path in paths]))
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["config"][0] == ["optimizer.lr", True, "0.002", "0.01"]
    assert not any(differs for _, differs, *_ in data["config"][1:])
    shown = _run("report", *paths).output
    assert (
        shown.index("settings that differ") < shown.index("optimizer.lr  0.002  0.01") < shown.index("run ")
    )


def test_communication_is_a_part_of_the_backward_passes(written):
    path = written(steps=4)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    timed = [line | {"dtc": 0.05} if "dtb" in line else line for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timed))
    found = time_shares(RunData(path).steps)
    assert found["backward"] == pytest.approx(0.3)
    assert found["communication"] == pytest.approx(0.1)
    assert sum(found.values()) == pytest.approx(1)


def test_documents_left_out_are_warnings_and_choices_are_not(written, trained):
    path = written()
    said = {
        "left_out": ["skipped: 2 broken lines: a.jsonl:1, 5"],
        "notes": ["few steps"],
        "details": ["in bf16"],
    }
    (path / "history.jsonl").write_text(json.dumps({"event": "start", "step": 0} | said) + "\n")
    assert warnings(RunData(path))[:2] == [*said["left_out"], *said["notes"]]
    assert _data(run_page([RunData(path)]))["runs"][0]["facts"] == [["note", "in bf16"]]
    assert {"left_out", "notes", "details"} <= set(RunData(trained).start)


def test_long_runs_are_shown_by_means(written):
    data = _data(run_page([RunData(written(steps=2500))]))
    steps = data["runs"][0]["steps"]
    assert data["mean_of"] == 3
    assert len(steps["loss"]) == 834
    assert steps["step"][:2] == [3, 6]
    assert steps["cost_spread"][0] == pytest.approx(0.01)


def test_other_metrics_have_charts(written):
    path = written()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "loss": 2.0, "reward_margin": 0.5}\n')
        file.write('{"step": 61, "val_loss": 2.0, "val_loss/books": 2.1, "val_reward_margin": 0.4}\n')
    data = _data(run_page([RunData(path)]))
    assert data["charts"][-1]["key"] == "reward_margin"
    assert data["validation"] == ["val_loss", "val_loss/books"]
    assert data["evaluated"] == ["val_reward_margin"]


def test_text_of_a_run_is_never_markup(written):
    path = written("<img src=x onerror=alert(1)>")
    (path / "samples.txt").write_text("=== step 6\n</script><script>alert(1)</script>▌<b>\n")
    page = run_page([RunData(path)]).decode()
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert _data(page.encode())["runs"][0]["samples"] == [[6, "</script><script>alert(1)</script>▌<b>"]]


def test_what_cannot_be_read_is_left_out_and_named(written):
    path = written()
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[3], lines[5], lines[7] = "not json", "[1]", json.dumps({"loss": 1.0})
    huge = {"step": 61, "loss": 10**400, "lr": "x", "grad_norm": None, "new": float("inf")}
    (path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(huge), '{"step": 62, "lo']))
    (path / "history.jsonl").write_text(
        '{"event": "start", "step": [], "plan": {"packs": "<"}, "notes": 3, "run": [[1], ["a", {}]]}\n{"event": 1}\n'
    )
    (path / "checkpoints" / "step-00000003").mkdir()
    found = RunData(path)
    assert found.problems == [
        "metrics.jsonl: line 4 and 1 more cannot be read and is left out",
        "metrics.jsonl: the last line is incomplete and is left out",
        "metrics.jsonl: 1 records have no step and are left out",
    ]
    assert found.checkpoints()["step-00000003"][1] == "incomplete"
    assert "killed after step 61" in warnings(found)[-1]
    data = _data(run_page([found]))
    assert data["runs"][0]["steps"]["loss"][-1] is None
    os.remove(path / "samples.txt")
    os.mkfifo(path / "samples.txt")
    assert "samples are left out" in RunData(path).problems[-1]


@pytest.mark.parametrize(
    ("break_run", "message"),
    [
        (lambda path: shutil.rmtree(path), "there is no folder"),
        (lambda path: (path / "config.yaml").unlink(), "is neither a run directory"),
        (lambda path: (path / "config.yaml").write_bytes(b"\xff{"), "cannot be read"),
        (lambda path: (path / "config.yaml").write_text("- 1\n"), "must hold"),
        (lambda path: (path / "metrics.jsonl").write_text(""), "has no records"),
        (lambda path: (path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2}\n'), "has no records"),
    ],
    ids=["missing", "foreign", "not text", "no groups", "empty", "other version"],
)
def test_a_folder_that_is_no_run_is_refused_in_one_line(written, break_run, message):
    path = written()
    break_run(path)
    error = _run("report", path).exception
    assert message in str(error)
    assert "\n" not in str(error)


def test_a_run_that_was_killed_at_its_start_and_torn_files_are_shown(written, tmp_path):
    path = written()
    for name in ("metrics.jsonl", "samples.txt"):
        (path / name).write_bytes((path / name).read_bytes()[:-5])
    assert "the last line is incomplete" in _run("report", path).output
    assert "60/60" in _run("watch", path, "--once").output
    only = tmp_path / "only"
    only.mkdir()
    shutil.copy(path / "config.yaml", only)
    assert "no step yet" in _run("watch", only, "--once").output
    for command, message in (
        ("report", "has no records"),
        ("audit", "no step was taken"),
        ("evaluate", "checkpoint"),
    ):
        error = str(_run(command, only).exception)
        assert message in error
        assert "\n" not in error


def test_the_command_writes_what_the_name_ends_with(written, tmp_path):
    path = written()
    shown = _run("report", path).output
    assert "of 60" in shown
    assert "⠀" in shown or "⠁" in shown or "│" in shown
    assert _run("report", path, "--output", tmp_path / "a.html").exit_code == 0
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert "must end with .html" in str(_run("report", path, "-o", tmp_path / "a.pdf").exception)


def test_curves_of_text():
    assert text_curve([1, 2], [float("nan")] * 2) == ["(no values)"]
    falling = text_curve(range(1, 101), [100 - step for step in range(100)], columns=40, rows=5)
    assert falling[0].startswith("100 │⠉⠒")
    assert falling[4].startswith("  1 │\u2800")
    assert len(falling[4]) == 40
    assert falling[5].split() == ["1", "100"]
    assert max(map(len, falling)) == 40
    assert len(text_curve([5], [1.0], rows=2)) == 3
