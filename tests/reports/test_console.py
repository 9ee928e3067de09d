import io
import re

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


def test_all_ranks_say_when_and_who():
    out = io.StringIO()
    Console(rank=2, all_ranks=True, stream=out).line("one\ntwo")
    assert re.fullmatch(r"(\[\d\d:\d\d:\d\d\.\d{3}\]\[rank 2\] (one|two)\n){2}", out.getvalue())


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


def test_a_terminal_gets_a_frame_and_a_bar_with_time_left():
    out = Terminal()
    console = Console(stream=out)
    console.table("legend", ["metric", "meaning"], [["loss", "falls"]])
    with console.progress("training") as advance:
        advance(3, 10, "loss 3.2")
        console.line("step=3")
    printed = out.getvalue()
    assert "metric" in printed
    assert "┏" in printed
    assert "step=3" in printed
    for told in ("training", "3/10", "left", "loss 3.2"):
        assert told in printed


def test_sections_align():
    out = io.StringIO()
    Console(stream=out).section("run", [("a", "1"), ("long name", "2")])
    assert out.getvalue() == "\nrun\n  a          1\n  long name  2\n"


def test_control_characters_cannot_steer_the_terminal():
    out = io.StringIO()
    Console(stream=out).line("a\x1b[2Jb\x07cd\0\ne")
    assert out.getvalue() == "a�[2Jb�cd�\ne\n"
