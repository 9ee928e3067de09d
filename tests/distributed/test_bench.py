"""`multipack bench collectives`: definitions, checks of what is measured, and the command."""

import json
import subprocess
import sys
from fractions import Fraction
from itertools import count

import pytest

from multipack.cli import main
from multipack.launch import bandwidth
from multipack.launch.bandwidth import DTYPES, OPERATIONS, bus_factor, measure
from multipack.parallel.world import World


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_bus_bandwidth_counts_what_every_rank_must_send(ranks):
    """n ranks that each hold S bytes: transfers of S/n, on n wires (one wire where one rank sends or gets all)."""
    share = Fraction(ranks - 1, ranks)
    wanted = dict.fromkeys(OPERATIONS, share) | {"all_reduce": 2 * share, "reduce": 1, "broadcast": 1}
    assert {name: Fraction(bus_factor(name, ranks)).limit_denominator(100) for name in OPERATIONS} == wanted


@pytest.mark.parametrize("ranks", [1, 2, 7, 128, 1_024, 5_000])
def test_sums_are_exact_in_every_dtype(ranks):
    each = 200
    total = bandwidth._expected("reduce_scatter", 0, ranks, each, "int64")
    assert 0 < total.max() < 256
    for dtype in DTYPES:
        assert bandwidth._expected("reduce_scatter", 0, ranks, each, dtype).long().equal(total)


def one_measurement(world, operation, dtype):
    ticks = count(0, world.rank + 1)  # rank r's clock says that all took r + 1 seconds
    return measure(world, operation, 1_001, dtype, repeats=2, clock=lambda: float(next(ticks)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_measured_is_checked_and_the_slowest_rank_counts(pools, operation):
    for dtype, kind in DTYPES.items():
        found = pools(4).run(one_measurement, operation, dtype)
        assert found == [found[0]] * 4
        row = found[0]
        assert row.wrong_ranks == ()
        assert row.bytes == -(-1_001 // (4 * kind.itemsize)) * 4 * kind.itemsize
        assert row.seconds == 4 / 2
        assert row.algorithm_bytes_per_second == row.bytes / 2
        assert row.bus_bytes_per_second == row.bytes / 2 * bus_factor(operation, 4)


def a_wrong_measurement(world):
    right = bandwidth.run_collective

    def wrong(*arguments):
        result = right(*arguments)
        result[-1] += world.rank == 1
        return result

    bandwidth.run_collective = wrong
    try:
        return measure(world, "reduce_scatter", 64, repeats=1).wrong_ranks
    finally:
        bandwidth.run_collective = right


def test_a_rank_that_gets_something_wrong_is_named(pools):
    assert pools(2).run(a_wrong_measurement) == [(1,), (1,)]


def test_a_process_on_its_own_measures_copies():
    row = measure(World(), "all_gather", 64, repeats=1)
    assert (row.ranks, row.bytes, row.bus_bytes_per_second, row.wrong_ranks) == (1, 64, 0.0, ())


def _run(*words):
    command = [sys.executable, "-m", "multipack", "bench", "collectives", "--device", "cpu", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_starts_processes_and_prints_json_alone():
    done = _run(
        "-n", "2", "--sizes", "1KiB, 96", "--operations", "all_to_all,reduce", "--json", "--repeats", "2"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["operation"], row["bytes"], row["ranks"]) for row in rows] == [
        (operation, size, 2) for operation in ("all_to_all", "reduce") for size in (1024, 96)
    ]
    assert all(row["seconds"] > 0 and row["wrong_ranks"] == [] for row in rows)


def test_a_launcher_s_processes_are_used_and_a_table_printed(monkeypatch, capsys):
    """What torchrun starts, here with one process: no other is started."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        sys,
        "argv",
        ["multipack", "bench", "collectives", "--sizes", "64", "--repeats", "1", "--device", "cpu"],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "collectives of 1 process, none on cpu, fp32" in printed
    assert sum(line.endswith("correct") for line in printed.splitlines()) == len(OPERATIONS)
    monkeypatch.setattr(bandwidth, "run_collective", lambda name, own, _: own + (name == "scatter"))
    with pytest.raises(SystemExit) as ended:
        main()
    out, error = capsys.readouterr()
    assert ended.value.code == 3
    assert "WRONG on rank 0" in out
    assert "scatter of 64 bytes has a wrong result on rank 0 (1 of 8 measurements are wrong)" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "1kb"], "--sizes '1kb'"),
        (["--sizes", "0"], "--sizes '0'"),
        (["--operations", "all_redcue"], "did you mean all_reduce?"),
        (["--dtype", "fp8"], "--dtype fp8 is not one of fp32, fp64, bf16, fp16, int64"),
        (["--device", "tpu"], "--device tpu is not one of auto, cpu, cuda"),
        (["-n", "-2", "--device", "cpu"], "-n -2"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multipack", "bench", "collectives", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_another_number_of_processes_than_the_launcher_s_is_refused(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["multipack", "bench", "collectives", "-n", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "-n 4, but RANK and WORLD_SIZE started 2 processes: leave -n out" in capsys.readouterr().err
