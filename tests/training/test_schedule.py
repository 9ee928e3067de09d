"""Learning rates of all schedules."""

import itertools
import math

import pytest

from multipack.training.optimizer import learning_rate, schedule_text
from multipack.training.settings import OptimizerConfig


def _rates(steps, **options):
    config = OptimizerConfig(**options)
    return [learning_rate(step, steps, config) for step in range(1, steps + 1)]


def test_warm_up_rises_to_the_peak_and_cosine_falls_to_the_floor():
    rates = _rates(24, lr=1.0, min_lr=0.1, warmup_steps=4)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[13] == pytest.approx(0.1 + 0.9 / 2)  # half-way: the mean of peak and floor
    assert rates[8] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_the_schedule_ends_at_decay_steps_and_stays():
    rates = _rates(100, lr=1.0, min_lr=0.2, warmup_steps=0, decay_steps=10)
    assert rates[4] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 2)))
    assert rates[9:] == pytest.approx([0.2] * 91)


def test_constant_and_linear_schedules():
    constant = _rates(9, lr=0.5, min_lr=0.0, warmup_steps=2, schedule="constant")
    assert constant == [0.25, *[0.5] * 8]
    linear = _rates(12, lr=1.0, min_lr=0.5, warmup_steps=2, schedule="linear")
    assert linear[1:] == pytest.approx([1.0 - 0.05 * step for step in range(11)])


def test_wsd_is_stable_until_the_last_share_of_the_steps():
    options = {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 10, "schedule": "wsd", "decay_share": 0.25}
    rates = _rates(100, **options)
    assert rates[9:75] == [1.0] * 66
    assert rates[75:] == pytest.approx([1 - step / 25 for step in range(1, 26)])
    assert _rates(400, **options)[:75] == rates[:75]  # a longer run begins equally
    whole = _rates(10, **{**options, "warmup_steps": 5, "decay_share": 1.0})
    assert whole == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize(
    ("steps", "options", "text"),
    [
        (60, {"warmup_steps": 6}, "cosine; 0.002 at step 6, 0.0002 at step 60"),
        (60, {"warmup_steps": 100}, "cosine; 0.0012 at step 60"),
        (9, {"warmup_steps": 0, "schedule": "constant"}, "constant; 0.002 at step 1"),
        (
            100,
            {"warmup_steps": 10, "schedule": "wsd"},
            "wsd; 0.002 at step 10, 0.002 at step 80, 0.0002 at step 100",
        ),
    ],
)
def test_the_header_has_the_rates_of_turning_points(steps, options, text):
    assert schedule_text(OptimizerConfig(lr=0.002, **options), steps) == text


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_decay_ends_at_decay_steps(schedule):
    for warmup, steps, decay in itertools.product((0.03, 0, 1, 5), (1, 2, 7, 100), (6, 8, 40)):
        config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=warmup, decay_steps=decay)
        assert learning_rate(decay, steps, config) == pytest.approx(0.1), config


def test_the_warm_up_is_a_share_of_the_schedule_unless_given():
    assert _rates(100, lr=1.0)[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0], abs=1e-3)
    assert _rates(1000, lr=1.0, decay_steps=100)[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert _rates(3, lr=1.0, schedule="constant") == [1.0] * 3
    assert _rates(40, lr=1.0, warmup_steps=0.1)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0], abs=2e-3)


def test_illegal_schedules_are_refused_by_name():
    for options, name in (
        ({"schedule": "wsd", "decay_share": 0.0}, "optimizer.decay_share"),
        ({"decay_share": 1.5}, "optimizer.decay_share"),
        ({"warmup_steps": 10, "decay_steps": 10}, "optimizer.decay_steps"),
        ({"warmup_steps": 1.5}, "optimizer.warmup_steps"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps"),
    ):
        with pytest.raises(ValueError, match=name):
            OptimizerConfig(**options)
