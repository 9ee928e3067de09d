"""The table of choices: every row is what a plan of that choice reports."""

import json

import numpy as np
import pytest

from multipack.planning import report as measure
from multipack.planning.explore import explore
from multipack.planning.plan import plan

LENGTHS = np.random.default_rng(4).lognormal(5, 1, 1500).astype(int).clip(1, 1024)


def test_rows_are_what_reports_say():
    rows = explore(
        LENGTHS, capacity=1024, packs_per_step=4, world_size=2, sync="step", windows=(1, 8), seed=3
    )
    assert len(rows) == 2 * (1 + 2 * 2)  # budgets × (window 1, and windows 4 and 8 with and without grouping)
    for row in rows:
        made = plan(
            LENGTHS, capacity=1024, packs_per_step=4, seed=3,
            window=row.window, budget=row.budget, group=row.group,
        )  # fmt: skip
        report = measure.report(made, 2, "step")
        told = report.to_dict()
        mine = row.to_dict()
        for name in set(mine) & set(told) - {"seconds"}:
            assert mine[name] == told[name], name
        assert row.cost_utilization <= row.cost_utilization_ceiling
    assert json.loads(json.dumps([row.to_dict() for row in rows]))[0]["window"] == 1


def test_the_given_settings_are_among_the_rows_once():
    rows = explore(
        LENGTHS, capacity=1024, packs_per_step=4, windows=(1, 2), budgets=(None, 900),
        window=3, budget=950, group=False, tail="carry", balance="joint",
    )  # fmt: skip
    (chosen,) = [row for row in rows if row.chosen]
    assert (chosen.window, chosen.budget, chosen.group) == (3, 950, False)
    assert {row.budget for row in rows} == {1024, 950, 900}
    assert {row.window for row in rows} == {1, 2, 3}
    assert [row.budget for row in rows] == sorted((row.budget for row in rows), reverse=True)
    defaults = explore(LENGTHS, capacity=1024, packs_per_step=4)
    (chosen,) = [row for row in defaults if row.chosen]
    assert (chosen.window, chosen.budget, chosen.group) == (4, 1024, True)


def test_windows_beyond_the_epoch_are_left_out():
    steps = plan(LENGTHS, capacity=1024, packs_per_step=64).num_steps
    assert 1 < steps < 16
    rows = explore(LENGTHS, capacity=1024, packs_per_step=64, budgets=(None,), groups=(True,))
    assert [row.window for row in rows] == [1, 4, 16]
    rows = explore(LENGTHS, capacity=1024, packs_per_step=64, budgets=(None,), groups=(True,), window=64)
    assert [row.window for row in rows] == [1, 4, 16, 64]
    assert rows[-1].chosen
    assert rows[-1].steps == rows[-2].steps


def test_progress_ends_at_the_end():
    seen = []
    explore(
        LENGTHS,
        capacity=1024,
        packs_per_step=64,
        progress=lambda done, total, note: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] >= len(seen) - 1
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_steps_with_many_documents_are_sampled_more_thinly():
    lengths = np.ones(200_000, dtype=np.int64)
    options = {"capacity": 1000, "packs_per_step": 4, "budgets": (None,), "windows": (1,), "window": 1}
    (row,) = explore(lengths, **options)
    assert (row.steps, row.measured_steps) == (50, 25)  # 100,000 documents are dealt
    (row,) = explore(lengths, sample=None, **options)
    assert row.measured_steps == 50
    (row,) = explore(lengths, sample=3, **options)
    assert row.measured_steps == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"windows": (0,)}, "window must be a whole number of at least 1"),
        ({"budgets": (2000,)}, "budget=2,000"),
        ({"world_size": 9}, "9 ranks cannot share"),
        ({"balance": "weight"}, "balance='weight'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        explore(LENGTHS, capacity=1024, packs_per_step=4, **options)
