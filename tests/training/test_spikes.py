import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.training.spikes import DECAY, MOST_IN_A_ROW, WARM_UP, RunningMoments, SpikeGuard


def _feed(guard, losses, norms=None, first=1):
    norms = np.ones(len(losses)) if norms is None else norms
    pairs = zip(losses, norms, strict=True)
    return [guard.judge(first + i, float(loss), float(norm)) for i, (loss, norm) in enumerate(pairs)]


def _usual(count, seed=0):
    draw = np.random.default_rng(seed)
    return 3 + 0.1 * draw.standard_normal(count), 1 + 0.05 * draw.standard_normal(count)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60))
@settings(deadline=None, max_examples=50)
def test_moments_are_those_of_the_weighted_values(values):
    moments = RunningMoments()
    for value in values:
        moments.add(value)
    weights = DECAY ** np.arange(len(values) - 1, -1, -1)
    mean = np.average(values, weights=weights)
    assert moments.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
    variance = np.average((np.array(values) - mean) ** 2, weights=weights)
    assert moments.variance == pytest.approx(variance, rel=1e-7, abs=1e-9)


def test_usual_steps_are_applied():
    guard = SpikeGuard("stop", 6.0)
    assert set(_feed(guard, *_usual(500))) == {"apply"}
    assert guard.skipped == 0


@pytest.mark.parametrize(("loss", "norm", "named"), [(5.0, 1.0, "loss 5"), (3.0, 40.0, "grad_norm 40")])
def test_a_jump_of_either_is_left_out_and_told(loss, norm, named):
    told = []
    guard = SpikeGuard("skip", 6.0, told.append)
    _feed(guard, *_usual(100))
    before = guard.state()["moments"]
    assert guard.judge(101, loss, norm) == "skip"
    assert guard.state()["moments"] == before  # what is left out is no part of the usual
    [line] = told
    assert re.search(
        rf"step 101 jumps: {named} is above .*recent mean.*the step was left out \(1 so far\)", line
    )
    assert guard.judge(102, 3.0, 1.0) == "apply"


def test_low_values_are_no_spikes_and_nothing_is_judged_before_the_statistics_are_full():
    guard = SpikeGuard("stop", 6.0)
    assert _feed(guard, [3.0] * (WARM_UP - 1) + [50.0]) == ["apply"] * WARM_UP
    guard = SpikeGuard("stop", 6.0)
    _feed(guard, *_usual(WARM_UP))
    assert guard.judge(WARM_UP + 1, 0.1, 0.01) == "apply"
    with pytest.raises(RuntimeError):
        guard.judge(WARM_UP + 2, 60.0, 1.0)


def test_a_constant_loss_makes_no_spike_of_rounding():
    guard = SpikeGuard("stop", 6.0)
    _feed(guard, [2.0] * 100)
    assert guard.judge(101, 2.001, 1.0) == "apply"
    with pytest.raises(RuntimeError, match=r"loss 2\.1 "):
        guard.judge(102, 2.1, 1.0)


def test_stop_names_step_loss_and_limit():
    guard = SpikeGuard("stop", 4.0)
    _feed(guard, *_usual(200))
    message = r"step 201 jumps: loss 9 is above 3\.\d+ \(recent mean .* \+ 4 x .*train\.spike=stop"
    with pytest.raises(RuntimeError, match=message):
        guard.judge(201, 9.0, 1.0)


def test_many_skips_in_a_row_stop_the_run_and_an_applied_step_begins_the_count_anew():
    told = []
    guard = SpikeGuard("skip", 6.0, told.append)
    _feed(guard, *_usual(100))
    assert _feed(guard, [9.0] * (MOST_IN_A_ROW - 1), first=101) == ["skip"] * (MOST_IN_A_ROW - 1)
    assert guard.judge(110, 3.0, 1.0) == "apply"
    _feed(guard, [9.0] * (MOST_IN_A_ROW - 1), first=111)
    with pytest.raises(RuntimeError, match=f"the {MOST_IN_A_ROW}th step in a row"):
        guard.judge(120, 9.0, 1.0)
    assert len(told) == 2 * (MOST_IN_A_ROW - 1)


def test_a_resumed_guard_judges_as_the_one_that_never_stopped():
    whole, before = SpikeGuard("skip", 3.0, print), SpikeGuard("skip", 3.0, print)
    losses, norms = _usual(300, seed=1)
    losses[200::23] += 1.0
    verdicts = _feed(whole, losses, norms)
    assert "skip" in verdicts[150:]
    first = _feed(before, losses[:150], norms[:150])
    after = SpikeGuard("skip", 3.0, print)
    after.load_state(json.loads(json.dumps(before.state())))
    assert first + _feed(after, losses[150:], norms[150:], first=151) == verdicts
    assert after.state() == whole.state()
