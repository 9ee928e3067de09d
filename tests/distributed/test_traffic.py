"""Bytes that ranks send in a step, counted as they are handed to collectives, against those that `advise` predicts."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from parallel_tables import traffic
from parallel_tables.step import third_step


def counted(world, case):
    case = traffic.Case(*case)
    step = third_step(world, case.config, case.lengths)
    return step.calls, step.sent


FAST, *SLOW = (traffic.CASES[number] for number in (6, 1, 3, 4, 5, 8))


@pytest.mark.parametrize(
    "case", [FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_counted_bytes_are_predicted(pools, case):
    found = max(pools(case.ranks).run(counted, tuple(case)), key=lambda each: each[1].total())
    assert traffic.compared(case, *found)[-2:] == pytest.approx([1, 1], rel=traffic.CLOSE)
