"""Advice: silent where nothing limits, and where something does, what is promised is what comes of it."""

import re

import numpy as np
import pytest

from multipack.planning import measure
from multipack.planning.advice import round_up
from multipack.planning.plan import plan


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
    return found, float(re.search(r"lifts the ceiling to ([\d.]+)%$", found).group(1)) / 100


def test_ordinary_documents_need_no_advice():
    lengths = np.random.default_rng(0).integers(1, 500, 5000)
    report = plan(lengths, capacity=8192, packs_per_step=8).report(8)
    assert report.cost_utilization_ceiling > 0.99
    assert report.advice == []


def test_what_is_advised_is_what_it_brings(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=16, window=1)
    report = made.report(16)
    first = report.advice[0]
    assert f"{report.cost_utilization_ceiling:.1%}" in first
    assert f"{heavy.max():,} tokens" in first
    assert f"κ = {report.kappa:.2f}" in first
    assert report.cost_utilization_ceiling < 0.9

    said, promised = _find(report.advice, "budget=")
    budget, capacity = (int(number.replace(",", "")) for number in re.findall(r"=([\d,]+)", said)[:2])
    assert budget >= 1.05 * report.kappa * heavy.max()
    assert budget < capacity
    wide = plan(heavy, capacity=capacity, budget=budget, packs_per_step=16, window=1).report(16)
    assert promised > 0.99
    assert wide.cost_utilization > 0.99

    said, promised = _find(report.advice, "sync=step with")
    each = int(re.search(r"with (\d+) micro-batches", said).group(1))
    assert each > 1
    more = plan(heavy, capacity=65_536, packs_per_step=16 * each, window=1).report(16, "step")
    assert more.cost_utilization_ceiling == pytest.approx(promised, abs=0.03)
    assert more.cost_utilization_ceiling > report.cost_utilization_ceiling + 0.02

    said, promised = _find(report.advice, "context parallelism")
    count, limit = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:doc|tok)", said))
    assert count == (heavy > limit).sum()
    assert promised > report.cost_utilization_ceiling


def test_meeting_less_often_is_advised_where_ranks_meet_often(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=32, window=1)
    often, seldom = made.report(16, "micro"), made.report(16, "step")
    _, promised = _find(often.advice, "sync=step (ranks meet once a step")
    assert promised == pytest.approx(seldom.cost_utilization_ceiling, abs=0.03)
    assert not any("sync=step (ranks" in sentence for sentence in seldom.advice)


def test_ranks_that_do_not_divide_the_packs_are_told(heavy):
    made = plan(heavy, capacity=65_536, packs_per_step=16, window=1)
    _, promised = _find(made.report(12).advice, "packs_per_step=24, a multiple of the 12 ranks,")
    assert promised > made.report(12).cost_utilization_ceiling


def test_what_the_documents_do_not_fill_is_not_advised():
    report = plan([1000] + [10] * 30, capacity=1000, packs_per_step=4, window=1).report(4)
    assert report.cost_utilization_ceiling < 0.5
    assert not any(sentence.startswith(("budget", "sync")) for sentence in report.advice)
    assert measure.report(plan([50, 1], capacity=50, packs_per_step=1), 1).advice == []


@pytest.mark.parametrize(
    ("tokens", "rounded"), [(1, 1), (31.2, 32), (33, 34), (1000, 1024), (35_002, 36_864)]
)
def test_round_up(tokens, rounded):
    assert round_up(tokens) == rounded
