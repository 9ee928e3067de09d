"""`multipack watch`: what is on the screen while another process writes the run."""

import io
import json
import time

from rich.console import Console
from typer.testing import CliRunner

from multipack.cli import app
from multipack.reports.run_data import RunData
from multipack.reports.watch import frame, watch


def _append(file, *records, end="\n"):
    with file.open("a") as opened:
        opened.write("".join(json.dumps(record) + end for record in records))


def _screen(shown, now=None, rows=40):
    console = Console(file=io.StringIO(), width=90, markup=False)
    console.print(frame(shown, 90, rows, time.time() if now is None else now))
    return console.file.getvalue()


def _step(step):
    return {"step": step, "loss": 9.0 - step, "dt": 2.0, "tps": 500.0}


def test_new_records_are_shown_and_cut_ones_are_not(written):
    path = written(steps=0)
    metrics, history = path / "metrics.jsonl", path / "history.jsonl"
    metrics.write_text("")
    _append(history, {"event": "start", "step": 0, "steps": 8, "notes": ["take [b]care[/b]\x1b[2J"]})
    shown = RunData(path)
    assert "no step yet" in _screen(shown)
    _append(metrics, _step(1), _step(2))
    _append(metrics, _step(3), end="")  # half written
    shown.update()
    assert "2/8, 12 s left" in _screen(shown)
    assert "incomplete" not in _screen(shown)
    _append(metrics, {"step": 3, "val_loss": 2.0})  # the other half is another record's, and is left out
    _append(metrics, _step(4))
    shown.update()
    screen = _screen(shown)
    assert "4/8" in screen
    assert "5.0000  " in screen
    assert "line 3 cannot be read" in screen
    assert "take [b]care[/b]" in screen
    assert "\x1b" not in screen
    assert "last record 1 min" in _screen(shown, now=metrics.stat().st_mtime + 61)
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0])  # resumed from a checkpoint after step 1
    shown.update()
    assert "1/8" in _screen(shown)
    assert "cannot be read" not in _screen(shown)


def test_it_fits_the_terminal(trained):
    shown = RunData(trained)
    for rows in (24, 30, 50):
        screen = _screen(shown, rows=rows).splitlines()
        assert len(screen) < rows
        assert max(map(len, screen)) <= 90
    assert "sample after" in "\n".join(screen)


def test_it_ends_with_the_run(written, monkeypatch):
    path = written(steps=3)
    _append(path / "history.jsonl", {"event": "start", "step": 0, "steps": 6})
    looks = []

    def wait(seconds):
        looks.append(seconds)
        _append(path / "metrics.jsonl", _step(3 + len(looks)))
        if len(looks) == 3:
            _append(path / "history.jsonl", {"event": "end", "step": 6, "reason": "SIGTERM"})

    console = Console(file=io.StringIO(), width=90, height=40, force_terminal=True, color_system=None)
    monkeypatch.setattr(time, "sleep", wait)
    watch(path, 0.5, False, console)
    assert looks == [0.5, 0.5, 0.5]
    screen = console.file.getvalue()
    assert all(f"{step}/6" in screen for step in (3, 4, 5, 6))
    assert "ended after step 6: SIGTERM" in screen


def test_the_command(written, trained, tmp_path):
    result = CliRunner().invoke(app, ["watch", str(trained)])  # no terminal: once
    assert result.exit_code == 0
    assert "ended after step 20" in result.output
    assert "sample after step 20" in result.output
    assert "is neither a run directory" in str(CliRunner().invoke(app, ["watch", str(tmp_path)]).exception)
    path = written()
    (path / "samples.txt").write_bytes(b"=== step 6\n\xff\x1b[31m red\n")
    assert "\x1b[31m" not in CliRunner().invoke(app, ["watch", str(path), "--once"]).output
