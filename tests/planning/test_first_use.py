"""Loops compiled ahead: all that a plan uses, and a cache that is believed only while it is true."""

import os
import subprocess
import sys
import types

import pytest

from multipack.planning.first_use import compile_packer, compile_planner
from multipack.planning.jit import cached
from multipack.planning.kernels import balancing, fit, placing
from multipack.planning.options import PlanOptions

COMPILED_AHEAD = """
import importlib, pkgutil, sys
import numpy as np
from multipack.planning import kernels
from multipack.planning.first_use import compile_packer, compile_planner
from multipack.planning.options import PlanOptions
from multipack.planning.packing import pack
from multipack.planning import report as measure
from multipack.planning.plan import plan

names = [room.name for room in pkgutil.iter_modules(kernels.__path__)]
rooms = [importlib.import_module(f"multipack.planning.kernels.{name}") for name in names]

def signatures():
    return {
        (room.__name__, name, str(signature))
        for room in rooms
        for name, kernel in vars(room).items()
        for signature in getattr(kernel, "signatures", ())
    }

lengths = np.random.default_rng(0).lognormal(6, 1.2, 5000).astype(int).clip(1, 4096)
for options in ({}, {"balance": "joint", "window": 1}, {"tail": "carry", "max_documents": 30, "budget": 3800}):
    for world, sync in ((1, "micro"), (3, "step"), (8, "micro")):
        keywords = {"capacity": 4096, "packs_per_step": 8, **options}
        compile_planner(PlanOptions(**keywords), world, sync)
        before = signatures()
        assert before
        measure.report(plan(lengths, **keywords), world, sync, sample=20)
        assert signatures() == before, (keywords, world, sync, signatures() - before)
for method in ("next_fit", "best_fit", "first_fit_decreasing", "fewest"):
    compile_packer(4096, method)
    before = signatures()
    pack(lengths, 4096, method, time_budget=1.0)
    assert signatures() == before, (method, signatures() - before)
"""


def test_nothing_is_left_to_compile():
    subprocess.run([sys.executable, "-c", COMPILED_AHEAD], check=True)


def test_it_is_announced_once(monkeypatch):
    said = []
    compile_planner(PlanOptions(capacity=100, packs_per_step=2))  # from here on the cache has what is needed
    compile_packer(100, "best_fit")
    if not cached(placing, balancing, fit):
        pytest.skip("no cache folder can be written to here")
    compile_planner(PlanOptions(capacity=100, packs_per_step=2), announce=lambda: said.append("plan"))
    compile_packer(100, "best_fit", announce=lambda: said.append("pack"))
    assert said == []
    monkeypatch.setattr("multipack.planning.first_use.cached", lambda *rooms: False)
    compile_planner(PlanOptions(capacity=100, packs_per_step=2), announce=lambda: said.append("plan"))
    compile_packer(100, "best_fit", announce=lambda: said.append("pack"))
    assert said == ["plan", "pack"]


def test_a_cache_older_than_its_source_does_not_count(tmp_path):
    source = tmp_path / "loops.py"
    source.write_text("")
    kernel = types.SimpleNamespace(stats=types.SimpleNamespace(cache_path=str(tmp_path / "cache")))
    room = types.SimpleNamespace(__file__=str(source), kernel=kernel, other=7)
    assert not cached(room)
    (tmp_path / "cache").mkdir()
    assert not cached(room)
    index = tmp_path / "cache" / f"loops.kernel-1.py{sys.version_info.major}{sys.version_info.minor}.nbi"
    index.touch()
    assert cached(room)
    assert cached(room, room)
    os.utime(index, (0, 0))
    assert not cached(room)


def test_settings_far_beyond_the_invented_documents():
    compile_planner(PlanOptions(capacity=2**27, packs_per_step=4096, budget=2**26, align=2**20), 2048)
    compile_planner(PlanOptions(capacity=2, packs_per_step=1, max_documents=1))
    compile_packer(2**27, "best_fit")
    compile_packer(1, "next_fit")
    assert placing.place.signatures
    assert fit.next_fit.signatures
