"""`multipack bench collectives`: definitions, checks of results, and the command."""

import json
import subprocess
import sys
from fractions import Fraction
from functools import partial
from itertools import count

import pytest

from multipack.cli import main
from multipack.launch import bandwidth
from multipack.launch.bandwidth import DTYPE, OPERATIONS, bus_factor, measure
from multipack.parallel.world import World


def test_bus_bandwidth_counts_what_every_rank_must_send():
    """n ranks with S bytes each: transfers of S/n over n links (over one if a single rank sends or receives all)."""
    for ranks in (1, 2, 8):
        share = Fraction(ranks - 1, ranks)
        wanted = dict.fromkeys(OPERATIONS, share) | {"all_reduce": 2 * share, "reduce": 1, "broadcast": 1}
        assert {
            name: Fraction(bus_factor(name, ranks)).limit_denominator(100) for name in OPERATIONS
        } == wanted


def measurements(world):
    """One of every operation; rank r measures r + 1 seconds."""
    ticks = partial(count, 0, world.rank + 1)
    return [
        measure(world, name, 1_001, repeats=2, clock=partial(next, map(float, ticks())))
        for name in OPERATIONS
    ]


def test_results_are_checked_and_the_slowest_rank_counts(pools):
    found = pools(2).run(measurements)
    assert found == [found[0]] * 2
    for row in found[0]:
        size = 2 * DTYPE.itemsize
        assert row.wrong_ranks == ()
        assert row.bytes == -(-1_001 // size) * size
        assert row.seconds == 2 / 2
        assert row.algorithm_bytes_per_second == row.bytes
        assert row.bus_bytes_per_second == row.bytes * bus_factor(row.operation, 2)


def a_wrong_measurement(world):
    correct = bandwidth.call_collective

    def wrong(*arguments):
        result = correct(*arguments)
        result[-1] += world.rank == 1
        return result

    bandwidth.call_collective = wrong
    try:
        return measure(world, "reduce_scatter", 64, repeats=1).wrong_ranks
    finally:
        bandwidth.call_collective = correct


def test_a_rank_with_a_wrong_result_is_named(pools):
    assert pools(2).run(a_wrong_measurement) == [(1,), (1,)]
    row = measure(World(), "all_gather", 64, repeats=1)
    assert (row.ranks, row.bytes, row.bus_bytes_per_second, row.wrong_ranks) == (1, 64, 0.0, ())


@pytest.mark.slow
def test_the_command_starts_processes():
    words = ["--device", "cpu", "-n", "2", "--sizes", "1KiB, 96"]
    command = [sys.executable, "-m", "multipack", "bench", "collectives", *words, "--repeats", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["operation"], row["bytes"], row["ranks"]) for row in rows] == [
        (operation, size, 2) for operation in OPERATIONS for size in (1024, 96)
    ]
    assert all(row["seconds"] > 0 and row["wrong_ranks"] == [] for row in rows)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command in a process that a launcher started."""

    def run(*words, ranks=1):
        launched = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
        for name, value in launched.items() if ranks else ():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "argv", ["multipack", "bench", "collectives", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_processes_of_a_launcher_are_used(command, monkeypatch):
    words = ("--sizes", "64", "--repeats", "1", "--device", "cpu")
    code, printed, _ = command(*words)
    assert code == 0
    assert "1 process, none on cpu, fp32" in printed
    assert sum(line.endswith("correct") for line in printed.splitlines()) == len(OPERATIONS)
    monkeypatch.setattr(bandwidth, "call_collective", lambda name, own, _: own + (name == "scatter"))
    code, printed, error = command(*words)
    assert code == 3
    assert "WRONG on rank 0" in printed
    assert "scatter of 64 bytes has a wrong result on rank 0 (1 of 8" in error
    code, _, error = command("-n", "4", ranks=2)
    assert code == 2
    assert "-n 4" in error


def test_bad_words_are_refused(command):
    for words, named in (
        (["--sizes", "1kb"], "--sizes '1kb'"),
        (["--sizes", "0"], "--sizes '0'"),
        (["--device", "tpu"], "--device tpu is not one of auto, cpu, cuda"),
        (["-n", "-2", "--device", "cpu"], "-n -2"),
    ):
        code, _, error = command(*words, ranks=0)
        assert code == 2
        assert named in error
