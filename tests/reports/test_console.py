import io
import time

from multipack.reports.console import Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_only_rank_0_prints():
    out = io.StringIO()
    Console(rank=1, stream=out).line("silence")
    Console(rank=1, stream=out).table("t", ["a"], [["b"]])
    assert out.getvalue() == ""
    Console(rank=0, stream=out).line("speech")
    assert out.getvalue() == "speech\n"


def test_without_a_terminal_lines_are_plain_and_whole():
    out = io.StringIO()
    console = Console(stream=out)
    console.table("legend", ["metric", "meaning"], [["loss", "what [bold] falls"], ["dt", "x" * 300]])
    with console.progress("training") as advance:
        advance(1, 2, "loss 3")
    printed = out.getvalue()
    assert "\x1b" not in printed
    assert "  loss    what [bold] falls\n" in printed  # markup is text
    assert "x" * 300 in printed  # nothing is folded


def test_a_terminal_gets_a_bar_with_time_left():
    out = Terminal()
    console = Console(stream=out)
    with console.progress("training") as advance:
        advance(3, 10, "loss 3.2")
        console.line("step=3")
    printed = out.getvalue()
    assert all(text in printed for text in ("step=3", "training", "3/10", "left", "loss 3.2"))


def test_values_are_aligned_and_wrapped_below_themselves(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()
    console = Console(stream=out)
    console.section("run", [("a", "one two three four five six seven eight"), ("name", "x" * 50)])
    assert out.getvalue().splitlines() == [
        "",
        "run",
        "  a     one two three four five six",
        "        seven eight",
        "  name  " + "x" * 50,
    ]
    console = Console(stream=(out := io.StringIO()))
    console.table("t", ["metric", "meaning"], [["loss", "mean over the targets of a whole step"]])
    assert out.getvalue().splitlines()[-2:] == [
        "  loss    mean over the targets of a",
        "          whole step",
    ]
    console = Console(stream=(out := io.StringIO()))
    console.paragraph("well-known words are never broken in the middle")
    assert all(len(line) <= 40 for line in out.getvalue().splitlines())
    assert "well-known words" in out.getvalue()


def test_without_a_terminal_there_are_80_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    out = io.StringIO()
    Console(stream=out).section("run", [("a", "word " * 40)])
    assert max(map(len, out.getvalue().splitlines())) in range(74, 81)


def test_control_characters_cannot_steer_the_terminal():
    out = io.StringIO()
    Console(stream=out).line("a\x1b[2Jb\x07cd\0\ne")
    assert out.getvalue() == "a�[2Jb�cd�\ne\n"


def test_a_notice_is_printed_only_if_a_block_takes_long():
    out = io.StringIO()
    console = Console(stream=out)
    with console.notice("never", seconds=60):
        pass
    with console.notice("at once", seconds=0):
        while not out.getvalue():
            time.sleep(0.001)
    assert out.getvalue() == "at once\n"
