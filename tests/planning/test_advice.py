"""Advice: none where nothing limits, else what it states is reached."""

import re

import numpy as np
import pytest

from multipack.cli.plan_settings import PlanCommand
from multipack.planning import report as measure
from multipack.planning.advice import advise
from multipack.planning.plan import plan
from multipack.words import merge


@pytest.fixture(scope="module")
def heavy():
    """Mostly short documents, and one in a thousand of about 30,000 tokens."""
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(6.5, 0.9, 20_000)
    long = rng.random(20_000) < 0.001
    lengths[long] = rng.lognormal(10.3, 0.4, long.sum())
    return np.clip(lengths, 1, 65_536).astype(int)


def advice(made, ranks, sync="micro"):
    return advise(made, measure.report(made, ranks, sync))


def _find(said, start):
    (found,) = [sentence for sentence in said if sentence.startswith(start)]
    return found, float(re.search(r"raises the ceiling to ([\d.]+)%", found).group(1)) / 100


def test_ordinary_documents_need_no_advice():
    lengths = np.random.default_rng(0).integers(1, 500, 5000)
    made = plan(lengths, capacity=8192, packs_per_step=8)
    report = measure.report(made, 8)
    assert report.cost_utilization_ceiling > 0.99
    assert advise(made, report) == []


def test_advice_is_what_other_settings_reach(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=16, window=1)
    report = measure.report(made, 16)
    said_all = advise(made, report)
    first = said_all[0]
    assert f"{report.cost_utilization_ceiling:.1%}" in first
    assert f"{heavy.max():,} tokens" in first
    assert f"κ = {report.kappa:.2f}" in first
    assert report.cost_utilization_ceiling < 0.9

    said, promised = _find(said_all, "plan.capacity=")
    capacity, budget = map(int, re.match(r"plan\.capacity=(\d+) plan\.budget=(\d+) \(", said).groups())
    filled = [
        float(share) / 100
        for share in re.search(r"efficiency of ([\d.]+)% instead of ([\d.]+)%$", said).groups()
    ]
    assert budget >= 1.05 * report.kappa * heavy.max()
    assert budget < capacity
    wide = measure.report(plan(heavy, capacity=capacity, budget=budget, packs_per_step=16, window=1), 16)
    assert promised > 0.99
    assert wide.cost_utilization > 0.99
    assert wide.efficiency_but_last == pytest.approx(filled[0], abs=0.02)
    assert report.efficiency == pytest.approx(filled[1], abs=0.001)

    said, promised = _find(said_all, "sync=step plan.packs_per_step=")
    packs, each = map(int, re.search(r"=(\d+) instead of 16 \((\d+) micro-batches", said).groups())
    assert packs == 16 * each > 16
    more = measure.report(plan(heavy, capacity=65_536, packs_per_step=16 * each, window=1), 16, "step")
    assert more.cost_utilization_ceiling == pytest.approx(promised, abs=0.03)
    assert more.cost_utilization_ceiling > report.cost_utilization_ceiling + 0.02

    said, promised = _find(said_all, "context parallelism")
    count, limit = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:doc|tok)", said))
    assert count == (heavy > limit).sum()
    assert promised > report.cost_utilization_ceiling


def test_fewer_sync_points_and_a_multiple_of_the_ranks(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=32, window=1)
    often, seldom = measure.report(made, 16, "micro"), measure.report(made, 16, "step")
    _, promised = _find(advise(made, often), "sync=step (ranks wait once a step")
    assert promised == pytest.approx(seldom.cost_utilization_ceiling, abs=0.03)
    assert not any("sync=step (ranks" in sentence for sentence in advise(made, seldom))
    made = plan(heavy, capacity=65_536, packs_per_step=13, window=1)
    _, promised = _find(advice(made, 12), "plan.packs_per_step=24 instead of 13 (a multiple of the 12 ranks)")
    assert promised > measure.report(made, 12).cost_utilization_ceiling


def test_what_the_documents_do_not_fill_is_not_advised():
    made = plan([1000] + [10] * 30, capacity=1000, packs_per_step=4, window=1)
    assert measure.report(made, 4).cost_utilization_ceiling < 0.5
    assert not any(sentence.startswith(("plan.", "sync")) for sentence in advice(made, 4))
    assert advice(plan([50, 1], capacity=50, packs_per_step=1), 1) == []


def test_settings_in_advice_are_words_that_the_command_line_takes(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=14, window=1)
    words = [
        word
        for sentence in advice(made, 12)
        for word in sentence.split(" (")[0].split(" instead")[0].split()
        if "=" in word and word[0] != "κ"
    ]
    assert len(words) >= 5
    for word in words:
        merge(PlanCommand, [word, *(["plan.capacity=10000000"] if "budget" in word else [])])


def test_grouped_steps_are_reported():
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(4000) < 0.3, rng.integers(4000, 8192, 4000), rng.integers(20, 200, 4000))
    options = {"capacity": 8192, "packs_per_step": 8, "window": 16}
    made, random = plan(lengths, **options), plan(lengths, **options, group=False)
    grouped = [sentence for sentence in advice(made, 8) if "plan.group=false" in sentence]
    assert measure.report(made, 8).mean_length_spread > 3
    assert "at a lower cost utilization" in grouped[0]
    assert not any("plan.group" in sentence for sentence in advice(random, 8))
    (alone,) = advice(made, 1)
    assert "with one rank grouping has no benefit" in alone


def test_a_curriculum_is_not_called_grouped(heavy):
    made = plan(np.sort(heavy), capacity=65_536, packs_per_step=4, order="given")
    assert measure.report(made, 1).mean_length_spread > 3
    assert advice(made, 1) == []
