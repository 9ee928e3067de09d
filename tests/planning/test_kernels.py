"""Kernels: limits hold, scattered room is gathered, loads are balanced; compiled late, and cached safely."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning import kernels
from multipack.planning.cost import CostModel
from multipack.planning.kernels import Compiled, balancing, interpreted, placing
from multipack.planning.packing import pack
from multipack.planning.plan import plan

CASES = settings(deadline=None, max_examples=30)
FOLDER = Path(kernels.__file__).parent


def falling(lengths):
    return -np.sort(-np.asarray(lengths, dtype=np.int64))


def totals(placed, values, packs):
    inside = placed >= 0
    return np.bincount(placed[inside], weights=values[inside], minlength=packs).astype(np.int64)


@CASES
@given(st.data())
def test_limits_hold(data):
    capacity = data.draw(st.integers(4, 80))
    lengths = falling(data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60)))
    packs, limit = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([2, 4, 99]))
    spare = data.draw(st.sampled_from([0, 5]))
    wanted = np.arange(len(lengths)) % 3 > 0
    visit = np.flatnonzero(wanted)
    placed = placing.place(lengths, lengths * (lengths + 9), packs, capacity, limit, visit, spare)
    assert placed.max() < packs
    assert totals(placed, lengths, packs).max() <= capacity
    sizes = totals(placed, np.ones_like(lengths), packs)
    assert sizes.max() <= limit
    assert (sizes > 0).sum() == min(packs, (placed >= 0).sum())
    added = (placed >= 0) & ~wanted
    assert not added.any() or packs * capacity - lengths[placed >= 0].sum() >= spare


def test_scattered_room_is_gathered():
    """Rooms of 2, 2 and 2 become one of 6: an 8 for a 6, twice."""
    lengths = np.array([8] * 6 + [6] * 4)
    placed = np.array([0, 0, 1, 1, 2, 2, 0, 1, 2, -1])  # 8 + 8 + 6 in each of three packs of 24
    balancing.gather(placed, lengths, 3, 24, 9, 0)
    assert totals(placed, lengths, 3).tolist() == [24, 24, 24]
    assert placed.min() >= 0


def test_gaps_are_filled_with_the_longest_that_fits():
    lengths = np.array([50, 40, 37, 20, 13, 9, 3])
    placed = np.array([0, 1, -1, -1, -1, -1, -1])
    balancing.gather(placed, lengths, 2, 60, 9, 0)
    assert totals(placed, lengths, 2).tolist() == [59, 60]  # 50 + 9, 40 + 20


def balance(placed, lengths, loads, ranks, slots=1, capacity=1 << 40, limit=999, half=5, attempts=99):
    loads = np.stack([loads, np.zeros_like(loads)]) if loads.ndim == 1 else loads
    limits = balancing.PackLimits(capacity, limit, ranks, slots)
    balancing.even_out(placed, lengths, loads, limits, balancing.Exchanges(half, attempts, 24, 0))


@CASES
@given(st.data())
def test_balancing_keeps_limits_and_never_makes_it_worse(data):
    ranks, slots = data.draw(st.sampled_from([(2, 1), (3, 1), (2, 2), (4, 3)]))
    packs = ranks * slots
    lengths = falling(data.draw(st.lists(st.integers(1, 60), min_size=packs, max_size=40)))
    costs, placed = CostModel(None, 30, 1).cost(lengths), np.arange(len(lengths)) % packs
    capacity = int(totals(placed, lengths, packs).max()) + data.draw(st.integers(0, 30))
    limit = int(np.bincount(placed).max()) + data.draw(st.integers(0, 3))

    def most_loaded():
        return totals(placed, costs, packs).reshape(slots, ranks).sum(axis=0).max()

    before = most_loaded()
    balance(placed, lengths, costs, ranks, slots, capacity, limit)
    assert most_loaded() <= before
    assert totals(placed, lengths, packs).max() <= capacity
    assert 1 <= np.bincount(placed, minlength=packs).min() <= np.bincount(placed).max() <= limit


@CASES
@given(st.data())
def test_two_packs_are_rearranged_nearly_optimally(data):
    """Meeting in the middle against every subset."""
    lengths = falling(data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=10, unique=True)))
    costs = CostModel(None, 30, 1).cost(lengths)
    placed = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths))))
    placed[:2] = 0, 1
    ways = [np.array(way) for way in itertools.product((0, 1), repeat=len(lengths))]
    best = min(totals(way, costs, 2).max() for way in ways if 0 < way.sum() < len(way))
    before = totals(placed, costs, 2).max()
    balance(placed, lengths, costs, 2, attempts=8)
    assert best <= totals(placed, costs, 2).max() <= best + (before - best) // 2


def test_two_loads_are_balanced():
    lengths = falling(np.random.default_rng(2).integers(20, 2049, 160))
    placed = np.arange(160) // 20
    balance(placed, lengths, np.stack([1000 * lengths, lengths**2]), 8, half=9)
    assert np.ptp(totals(placed, lengths, 8)) <= 10
    assert np.ptp(totals(placed, lengths**2, 8)) <= 40_000


def test_without_a_cache_folder(monkeypatch):
    real, asked = numba.njit, []

    def njit(*arguments, **options):
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'double': no locator available for file")
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert Compiled(lambda x: 2 * x)(4) == 8
    assert asked == [True, False]


def test_an_unknown_home_is_no_folder(monkeypatch):
    """Where a user has no home, "~" stays as it is, and numba would write its cache to ./~."""
    asked = []
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr(numba, "njit", lambda *, cache: asked.append(cache) or (lambda function: function))
    assert Compiled(abs)(-1) == 1
    assert asked == [False]


def test_interpreted_kernels_give_the_same_plan():
    lengths = np.random.default_rng(3).lognormal(5, 1, 300).clip(1, 2048).astype(np.int64)

    def arrays(balance):
        made = plan(lengths, capacity=2048, packs_per_step=4, balance=balance)
        return [*made.packs(0), *made.deal(1, 2), *made.deal(0, 2, "step"), *pack(lengths, 2048)]

    for balance in ("cost", "joint"):
        with interpreted(60):
            found = arrays(balance)
        assert all(map(np.array_equal, found, arrays(balance)))


def test_numba_is_not_loaded_before_a_kernel_runs():
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    code = (
        "import sys, importlib, multipack.planning.plan;"
        f"[importlib.import_module('multipack.planning.kernels.' + name) for name in {names}];"
        "assert not {'numba', 'torch', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_call_only_kernels_of_their_own_file():
    """numba's cache does not notice a change in a kernel of another file; bit counting does not change."""
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text())
        modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        own = {module for module in modules if module.startswith("multipack.")}
        allowed = ("kernels", "kernels.fit", "lengths")  # the last has no kernels
        assert own <= {f"multipack.planning.{name}" for name in allowed}, path
