"""What a rank does when its run fails."""

import os
import threading

import pytest

from multipack.parallel.world import World
from multipack.training import train as train_module


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (ValueError("document 17 is damaged"), 2, "error: document 17 is damaged"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_an_error_is_printed_before_files_are_closed_which_may_wait(monkeypatch, capsys, error, code, last):
    """A thread that writes a checkpoint may wait for a rank that is in another collective."""
    codes, ended = [], threading.Event()
    monkeypatch.setattr(train_module, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    with train_module._ending(World(size=2), error):
        assert capsys.readouterr().err.splitlines()[-1] == last
        assert ended.wait(10)
    assert codes == [code]


def test_one_process_leaves_its_error_to_the_caller(capsys):
    with train_module._ending(World(), ValueError("document 17 is damaged")):
        pass
    assert capsys.readouterr().err == ""
