import json

import pytest

from multipack.training.stopping import EarlyStopping


def _feed(stopping, losses, first=0):
    return [bool(stopping.evaluated(10 * (first + i), loss)) for i, loss in enumerate(losses)]


def test_the_run_stops_after_as_many_evaluations_as_patience_says():
    stopping = EarlyStopping(patience=2)
    assert _feed(stopping, [3.0, 2.0, 2.5, 1.9, 2.0]) == [False] * 5
    reason = stopping.evaluated(50, 1.95)
    assert "not lowered in 2 evaluations (train.patience=2)" in reason
    assert "1.9000 after step 30 and is 1.9500" in reason


def test_equal_losses_are_no_improvement():
    assert _feed(EarlyStopping(patience=1), [2.0, 2.0]) == [False, True]


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ([2.0, 1.95, 1.92, 1.91], [False, False, False, True]),
        ([2.0, 1.95, 1.92, 1.89, 1.88, 1.87], [False] * 6),  # little by little counts once it adds up
    ],
)
def test_improvements_have_a_least_size(losses, stops):
    stopping = EarlyStopping(patience=3, min_improvement=0.1)
    assert _feed(stopping, losses) == stops
    if stops[-1]:
        assert "not lowered by more than 0.1 in 4 evaluations" in stopping.evaluated(99, losses[-1])


def test_a_resumed_run_remembers():
    losses = [3.0, 2.0, 2.1, 2.2, 2.3]
    whole, before, after = (EarlyStopping(patience=3) for _ in range(3))
    expected = _feed(whole, losses)
    assert expected[-1]
    assert before.state() == {}
    first = _feed(before, losses[:3])
    after.load_state(json.loads(json.dumps(before.state())))
    assert first + _feed(after, losses[3:], first=3) == expected
    assert after.state() == whole.state()
