import math
from dataclasses import astuple

import pytest

from multipack.training.metrics import (
    LEGEND,
    RunningLoss,
    StepMeasure,
    format_line,
)


@pytest.fixture
def measure():
    return StepMeasure(
        step=7,
        loss_sum=300.0,
        target_tokens=100,
        denominator=100,
        documents=12,
        tokens=160,
        slots=200,
        flops=8e9,
        seconds=2.0,
        forward_seconds=0.5,
        backward_seconds=1.0,
        optimizer_seconds=0.25,
        data_seconds=0.125,
        devices=4,
        peak_flops=1e10,
        learning_rate=1e-3,
        grad_norm=0.5,
        cost_spread=0.01,
    )


def test_every_metric_follows_from_its_definition(measure):
    metrics = measure.metrics()
    memory = metrics.pop("memory")
    assert memory > 0
    assert metrics == {
        "step": 7,
        "loss": 3.0,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "dt": 2.0,
        "dtf": 0.5,
        "dtb": 1.0,
        "dto": 0.25,
        "data_time": 0.125,
        "sps": 6.0,
        "sps_per_device": 1.5,
        "tps": 80.0,
        "tps_per_device": 20.0,
        "target_tokens": 100,
        "padding": pytest.approx(0.2),
        "mfu": pytest.approx(100 * 8e9 / 2.0 / 4e10),
        "cost_spread": 0.01,
    }


def test_the_legend_explains_every_metric_and_nothing_else(measure):
    assert set(LEGEND) == set(measure.metrics()) | {"train_loss", "val_loss"}
    assert all(LEGEND.values())


def test_a_mean_over_documents_is_divided_by_documents(measure):
    from dataclasses import replace

    metrics = replace(measure, loss_sum=24.0, denominator=12).metrics()
    assert (metrics["loss"], metrics["target_tokens"]) == (2.0, 100)


def test_a_step_without_targets_or_known_peak_divides_by_nothing(measure):
    from dataclasses import replace

    empty = replace(
        measure, target_tokens=0, denominator=0, loss_sum=0.0, peak_flops=0.0, seconds=0.0
    ).metrics()
    assert empty["loss"] == 0.0
    assert empty["mfu"] == 0.0
    assert all(math.isfinite(value) for value in empty.values())


def test_lines_are_in_wordplays_manner(measure):
    line = format_line(measure.metrics())
    assert line.startswith("step=7 loss=3.0000 lr=0.001 ")
    assert "tps=80 " in line


def test_running_loss_is_weighted_by_targets_and_starts_anew():
    running = RunningLoss()
    assert running.take() is None
    running.add(10.0, 5)
    running.add(2.0, 1)
    assert running.take() == 2.0
    assert running.take() is None


def test_running_loss_never_adds_sums_over_tokens_to_sums_over_documents():
    running = RunningLoss(10.0, 5)
    assert running.weigh("token") == []
    assert (running.loss_sum, running.denominator) == (10.0, 5)
    (note,) = running.weigh("document")
    assert "train.loss_weighting was token until now and is document" in note
    assert running.take() is None
    assert RunningLoss(*astuple(running)) == running
