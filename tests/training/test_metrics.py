"""Metrics by their definitions, the dtype of forward passes, the matmul peak, and deterministic runs."""

import math
import time
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from multipack.parallel.engine import StepResult
from multipack.planning.packing import Packs
from multipack.training.feed import StepData
from multipack.training.metrics import LEGEND, RunningLoss, format_line, step_metrics
from multipack.training.precision import deterministic, matmul_peak, published_peak, resolve_dtype
from multipack.training.run_config import compose
from multipack.training.trainer import train

CPU = torch.device("cpu")
DATA = StepData(
    micro_batches=[],
    target_tokens=100,
    denominator=100,
    documents=np.arange(12),
    lengths=np.full(10, 16),
    cost_spread=0.01,
    predicted_seconds=None,
    packs=Packs(np.arange(12), np.array([0, 12])),
    wait_seconds=0.125,
    index=0,
)
RESULT = StepResult([], 0.5, 1.0)
MEASURED = {
    "loss_sum": 300.0,
    "slots": 200,
    "learning_rate": 1e-3,
    "grad_norm": 0.5,
    "flops": 8e9,
    "seconds": 2.0,
    "optimizer_seconds": 0.25,
    "devices": 4,
    "peak_flops": 1e10,
}


def test_every_metric_follows_its_definition():
    metrics = step_metrics(7, DATA, RESULT, **MEASURED)
    assert set(LEGEND) == set(metrics) | {"train_loss", "val_loss"}
    assert all(LEGEND.values())
    assert metrics.pop("memory") > 0
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
    line = format_line(step_metrics(7, DATA, RESULT, **MEASURED))
    assert line.startswith("step=7 loss=3.0000 lr=0.001 ")
    assert "tps=80 " in line


def test_losses_are_divided_by_the_denominator_and_nothing_by_zero():
    documents = step_metrics(7, replace(DATA, denominator=12), RESULT, **{**MEASURED, "loss_sum": 24.0})
    assert (documents["loss"], documents["target_tokens"]) == (2.0, 100)
    zeros = {"loss_sum": 0.0, "peak_flops": 0.0, "seconds": 0.0, "skipped": True, "predicted_seconds": 1.0}
    empty = step_metrics(7, replace(DATA, target_tokens=0, denominator=0), RESULT, **{**MEASURED, **zeros})
    assert (empty["loss"], empty["mfu"], empty["skipped"], empty["dt_predicted"]) == (0.0, 0.0, 1.0, 1.0)
    assert all(math.isfinite(value) for value in empty.values())


def test_the_running_loss_is_weighted_and_reset():
    running = RunningLoss()
    assert running.take() is None
    running.add(10.0, 5)
    running.add(2.0, 1)
    assert (running.take(), running.take()) == (2.0, None)
    running = RunningLoss(10.0, 5)
    assert running.weigh("token") == []
    assert (running.loss_sum, running.denominator) == (10.0, 5)
    (note,) = running.weigh("document")  # sums over tokens and over documents do not add up
    assert "train.loss_weighting" in note
    assert running.take() is None
    assert RunningLoss(*astuple(running)) == running


def test_the_dtype_auto_is_what_the_device_computes_natively(monkeypatch):
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert resolve_dtype("auto", CPU) == expected
    assert resolve_dtype("bf16", CPU) == torch.bfloat16


def test_a_measured_peak_is_that_of_a_product_and_draws_no_random_numbers(monkeypatch):
    """The clock advances by a second per reading, so a product takes a second."""
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    before = torch.get_rng_state()
    assert matmul_peak(CPU, torch.float32, seconds=7, size=32) == pytest.approx(2 * 32**3)
    assert torch.equal(before, torch.get_rng_state())


def test_known_gpus_are_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch, "mm", lambda *_: pytest.fail("a known GPU was measured"))
    assert matmul_peak(torch.device("cuda"), torch.bfloat16) == 312e12
    names = ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "Imaginary 9000")
    assert [published_peak(name, torch.bfloat16) for name in names] == [756e12, 989e12, 0.0]
    assert published_peak("NVIDIA H100 PCIe", torch.float32) == 0.0


def test_determinism_is_switched_on_and_back(monkeypatch):
    with deterministic(True, CPU):
        assert torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        deterministic(True, torch.device("cuda")).__enter__()
    assert not torch.are_deterministic_algorithms_enabled()


def test_two_deterministic_runs_are_equal_bit_for_bit(words, tmp_path, files, changed):
    more = ["train.deterministic=true", "train.dtype=fp16", "train.steps=2", "train.eval_every=2"]
    for name in ("a", "b"):
        train(compose(changed(words, *more, f"out={tmp_path / name}")))
    assert files(tmp_path / "a").untimed == files(tmp_path / "b").untimed
