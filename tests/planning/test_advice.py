"""Advice: silent where nothing limits, and where something does, what is promised is what comes of it."""

import re

import numpy as np
import pytest

from multipack.cli.plan_settings import PlanCommand
from multipack.planning import report as measure
from multipack.planning.advice import round_up
from multipack.planning.cost import CostModel
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


def _find(advice, start):
    (found,) = [sentence for sentence in advice if sentence.startswith(start)]
    return found, float(re.search(r"lifts the ceiling to ([\d.]+)%", found).group(1)) / 100


def test_ordinary_documents_need_no_advice():
    lengths = np.random.default_rng(0).integers(1, 500, 5000)
    report = measure.report(plan(lengths, capacity=8192, packs_per_step=8), 8)
    assert report.cost_utilization_ceiling > 0.99
    assert report.advice == []


def test_what_is_advised_is_what_it_brings(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=16, window=1)
    report = measure.report(made, 16)
    first = report.advice[0]
    assert f"{report.cost_utilization_ceiling:.1%}" in first
    assert f"{heavy.max():,} tokens" in first
    assert f"κ = {report.kappa:.2f}" in first
    assert report.cost_utilization_ceiling < 0.9

    said, promised = _find(report.advice, "plan.capacity=")
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

    said, promised = _find(report.advice, "sync=step plan.packs_per_step=")
    packs, each = map(int, re.search(r"=(\d+) instead of 16 \((\d+) micro-batches", said).groups())
    assert packs == 16 * each > 16
    more = measure.report(plan(heavy, capacity=65_536, packs_per_step=16 * each, window=1), 16, "step")
    assert more.cost_utilization_ceiling == pytest.approx(promised, abs=0.03)
    assert more.cost_utilization_ceiling > report.cost_utilization_ceiling + 0.02

    said, promised = _find(report.advice, "context parallelism")
    count, limit = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:doc|tok)", said))
    assert count == (heavy > limit).sum()
    assert promised > report.cost_utilization_ceiling


def test_meeting_less_often_is_advised_where_ranks_meet_often(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=32, window=1)
    often, seldom = measure.report(made, 16, "micro"), measure.report(made, 16, "step")
    _, promised = _find(often.advice, "sync=step (ranks meet once a step")
    assert promised == pytest.approx(seldom.cost_utilization_ceiling, abs=0.03)
    assert not any("sync=step (ranks" in sentence for sentence in seldom.advice)


def test_ranks_that_do_not_divide_the_packs_are_told(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=13, window=1)
    _, promised = _find(
        measure.report(made, 12).advice, "plan.packs_per_step=24 instead of 13 (a multiple of the 12 ranks)"
    )
    assert promised > measure.report(made, 12).cost_utilization_ceiling


def test_what_the_documents_do_not_fill_is_not_advised():
    report = measure.report(plan([1000] + [10] * 30, capacity=1000, packs_per_step=4, window=1), 4)
    assert report.cost_utilization_ceiling < 0.5
    assert not any(sentence.startswith(("plan.", "sync")) for sentence in report.advice)
    assert measure.report(plan([50, 1], capacity=50, packs_per_step=1), 1).advice == []


def test_settings_in_advice_are_words_that_the_command_line_takes(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=14, window=1)
    words = [
        word
        for sentence in measure.report(made, 12).advice
        for word in sentence.split(" (")[0].split(" instead")[0].split()
        if "=" in word and word[0] != "κ"
    ]
    assert len(words) >= 5
    for word in words:
        merge(PlanCommand, [word, *(["plan.capacity=10000000"] if "budget" in word else [])])


def test_what_grouping_costs_in_randomness_is_told():
    rng = np.random.default_rng(0)
    lengths = np.where(
        rng.random(10_000) < 0.3, rng.integers(4000, 8192, 10_000), rng.integers(20, 200, 10_000)
    )
    made = plan(lengths, capacity=8192, packs_per_step=8, window=16)
    report = measure.report(made, 8)
    assert report.mean_length_spread > 3
    (said,) = [sentence for sentence in report.advice if "plan.group=false" in sentence]
    about, reached = (
        float(share) / 100 for share in re.search(r"about ([\d.]+)% instead of ([\d.]+)%", said).groups()
    )
    assert reached == pytest.approx(report.cost_utilization, abs=0.001)
    free = measure.report(plan(lengths, capacity=8192, packs_per_step=8, window=16, group=False), 8)
    assert free.mean_length_spread < 3
    assert about == pytest.approx(free.cost_utilization, abs=0.05)
    assert not any("plan.group" in sentence for sentence in free.advice)
    (alone,) = measure.report(made, 1).advice
    assert "with one rank that brings nothing" in alone
    assert measure.report(made, 8, advised=False).advice == []


def test_a_curriculum_is_not_called_grouped(heavy):
    report = measure.report(plan(np.sort(heavy), capacity=65_536, packs_per_step=4, order="given"), 1)
    assert report.mean_length_spread > 3
    assert report.advice == []


@pytest.mark.parametrize(
    ("tokens", "rounded"), [(1, 1), (31.2, 32), (33, 34), (1000, 1024), (35_002, 36_864)]
)
def test_round_up(tokens, rounded):
    assert round_up(tokens) == rounded


def test_few_documents_of_constant_cost():
    """Fewer documents than ranks, and no cost to share: there is nothing that would have to be divided."""
    constant = CostModel(None, linear=0, quadratic=0, constant=1)
    report = measure.report(plan(np.full(9, 10), capacity=10, packs_per_step=8, cost=constant), 8)
    assert report.steps == 2
    assert not any("context parallelism" in said for said in report.advice)
