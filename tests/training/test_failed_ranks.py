"""What a rank does when its run fails, after it has reported its error."""

import os
import threading

import pytest

from multipack.parallel.world import World
from multipack.training import train as train_module


@pytest.mark.parametrize(("error", "code"), [(ValueError("document 17 is damaged"), 2), (MemoryError(), 1)])
def test_closing_files_never_waits_long_for_other_ranks(monkeypatch, error, code):
    """A thread that writes a checkpoint may wait for a rank that is in another collective."""
    codes, ended = [], threading.Event()
    monkeypatch.setattr(train_module, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    with train_module._closing(World(size=2), error):
        assert ended.wait(10)
    assert codes == [code]


def test_files_that_close_in_time_end_no_process(monkeypatch):
    codes = []
    monkeypatch.setattr(train_module, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", codes.append)
    for size in (1, 2):
        with train_module._closing(World(size=size), ValueError("document 17 is damaged")):
            threading.Event().wait(0.1 if size == 1 else 0.0)
        threading.Event().wait(0.1)
    assert codes == []
