import itertools
import math

import pytest

from multipack.training.schedule import learning_rate, rate_factor, schedule_text
from multipack.training.settings import OptimizerConfig


def _rates(config, steps):
    return [learning_rate(step, steps, config) for step in range(1, steps + 1)]


def test_warm_up_rises_to_the_peak_and_cosine_falls_to_the_floor():
    rates = _rates(OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4), 24)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[13] == pytest.approx(0.1 + 0.9 / 2)  # half-way: the mean of peak and floor
    assert rates[8] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))  # a line would be lower there
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_schedule_ends_at_decay_steps_and_stays():
    config = OptimizerConfig(lr=1.0, min_lr=0.2, warmup_steps=0, decay_steps=10)
    assert learning_rate(10, 100, config) == pytest.approx(0.2)
    assert learning_rate(90, 100, config) == pytest.approx(0.2)
    assert learning_rate(5, 100, config) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 2)))


def test_constant_schedule_keeps_the_peak():
    config = OptimizerConfig(lr=0.5, min_lr=0.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(step, 9, config) for step in (1, 2, 9)] == [0.25, 0.5, 0.5]


def test_linear_schedule_falls_along_a_line():
    rates = _rates(OptimizerConfig(lr=1.0, min_lr=0.5, warmup_steps=2, schedule="linear"), 12)
    assert rates[1:] == pytest.approx([1.0 - 0.05 * step for step in range(11)])


def test_wsd_is_stable_until_the_last_share_of_the_steps():
    config = OptimizerConfig(lr=1.0, min_lr=0.0, warmup_steps=10, schedule="wsd", decay_share=0.25)
    rates = _rates(config, 100)
    assert rates[9:75] == [1.0] * 66
    assert rates[75:] == pytest.approx([1 - step / 25 for step in range(1, 26)])
    # A longer run has the same beginning: that is what the schedule is for.
    assert _rates(config, 400)[:75] == rates[:75]


def test_wsd_decays_along_one_minus_the_root():
    config = OptimizerConfig(
        lr=2.0, min_lr=1.0, warmup_steps=0, schedule="wsd", decay_shape="sqrt", decay_share=0.5
    )
    assert learning_rate(50, 100, config) == 2.0
    assert learning_rate(50 + 18, 100, config) == pytest.approx(1 + (1 - 0.6))  # √(18/50) = 0.6
    assert learning_rate(100, 100, config) == pytest.approx(1.0)


def test_wsd_decays_after_the_warm_up_however_long_its_share_is():
    rates = _rates(OptimizerConfig(lr=1.0, min_lr=0.0, warmup_steps=5, schedule="wsd", decay_share=1.0), 10)
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize(
    ("scaling", "factors"), [("none", [1, 1, 1]), ("sqrt", [0.5, 1, 2]), ("linear", [0.25, 1, 4])]
)
def test_scaling_is_the_identity_at_the_reference(scaling, factors):
    config = OptimizerConfig(lr_scaling=scaling, reference_tokens=1000)
    assert [rate_factor(config, tokens) for tokens in (250, 1000, 4000)] == factors


def test_the_header_says_what_was_scaled_and_when_rates_turn():
    config = OptimizerConfig(
        lr=1e-3, warmup_steps=10, schedule="wsd", lr_scaling="sqrt", reference_tokens=1000, decay_shape="sqrt"
    )
    text = schedule_text(config, 100, 4000)
    assert "peak lr 0.002 after 10 steps" in text
    assert "1 - sqrt decay from step 80 to 0.0002 at step 100" in text
    assert "lr 0.001 x 2 (sqrt in 4,000 targets a step over 1,000)" in text
    assert "0.0001 at step 100" in schedule_text(OptimizerConfig(lr=1e-3), 100, 4000)
    assert (
        schedule_text(OptimizerConfig(schedule="constant"), 9, 1) == "constant, peak lr 0.002 after 20 steps"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr_scaling": "sqrt"}, "optimizer.reference_tokens"),
        ({"schedule": "wsd", "decay_share": 0.0}, "optimizer.decay_share"),
        ({"decay_share": 1.5}, "optimizer.decay_share"),
    ],
)
def test_impossible_schedules_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**wrong)


def test_a_plan_without_targets_scales_nothing():
    with pytest.raises(ValueError, match="steps with targets"):
        rate_factor(OptimizerConfig(lr_scaling="sqrt", reference_tokens=10), 0)
