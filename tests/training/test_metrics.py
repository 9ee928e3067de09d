"""Metrics by their definitions, the dtype of forward passes, the matmul peak, and deterministic runs."""

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from multipack.parallel.engine import DeviceClock, StepResult
from multipack.planning.packing import Packs
from multipack.run import unused_folder
from multipack.training.feed import StepData
from multipack.training.metrics import evaluation_line, format_line, sample_line, step_line, step_metrics
from multipack.training.precision import (
    deterministic,
    exact_float32,
    matmul_peak,
    resolve_dtype,
)
from multipack.training.run_config import compose
from multipack.training.train import train

CPU = torch.device("cpu")
DATA = StepData(
    micro_batches=[],
    target_tokens=100,
    denominator=100,
    documents=np.arange(12),
    lengths=np.full(10, 16),
    cost_spread=0.01,
    computed=(np.full(10, 16), None),
    packs=Packs(np.arange(12), np.array([0, 12])),
    wait_seconds=0.125,
    index=0,
)
RESULT = StepResult(torch.zeros(0), [(0.0, 0.5)], [(0.5, 1.0), (1.5, 2.0)], DeviceClock(CPU))


def test_every_rate_follows_its_definition():
    metrics = step_metrics(DATA, RESULT, slots=200, seconds=2.0, devices=4)
    assert metrics.pop("memory") > 0
    assert metrics == {
        "dt": 2.0,
        "dtf": 0.5,
        "dtb": 1.0,
        "data_time": 0.125,
        "sps": 6.0,
        "sps_per_device": 1.5,
        "tps": 80.0,
        "tps_per_device": 20.0,
        "target_tokens": 100,
        "padding": pytest.approx(0.2),
        "cost_spread": 0.01,
    }
    assert all(math.isfinite(value) for value in step_metrics(DATA, RESULT, 0, 0.0, 1).values())
    line = format_line({"step": 7, "lr": 1e-3, "loss": 3.0, "tps": 80.4, "sps": 6.0})
    assert line == "step=7 lr=0.001 loss=3.0000 tps=80 sps=6.00"


def test_a_step_and_an_evaluation_are_a_line():
    record = {"step": 7, "loss": 3.0, "tps": 81234.4, "mfu": 41.25}
    assert step_line(record, 1200, 3.5, 4000.4) == (
        "step    7/1200  loss 3.0000  val 3.5000  81,234 tokens/s  MFU 41.2 %  1:06:40 left"
    )
    assert step_line(record | {"mfu": 0, "skipped": 1.0}, 7, None, 59.9) == (
        "step 7/7  loss 3.0000  81,234 tokens/s  skipped  1:00 left"
    )
    values = {"step": 7, "train_loss": 2.0, "val_loss": 1.5}
    assert evaluation_line(values) == (
        "evaluation after step 7: validation loss 1.5000 (perplexity 4.482), train loss 2.0000"
    )
    assert evaluation_line({"step": 0, "val_loss": 0.5}, tokens=False).endswith("validation loss 0.5000")
    many = {"step": 4, "val_loss": 0.5, **{f"val_rewards_{index}": 0.25 for index in range(9)}}
    line = evaluation_line(many, False, ["val_rewards_7"])
    assert len(line) <= 100
    assert line.endswith(", …")
    assert line.index(" rewards 7") < line.index(" rewards 0")
    pairs = {"step": 12000, "val_loss": 0.5, "val_reward_accuracy": 0.5, "val_reward_margin": -1.5}
    assert evaluation_line(pairs, False).endswith("reward accuracy 0.5000, reward margin -1.5000")


def test_a_sample_is_one_line():
    line = sample_line("def f(x):\n    'Double it.'\n", "return 2 * x\n" * 20)
    assert "▌return 2 * x return" in line
    assert "\n" not in line
    assert len(line) < 100


def test_the_dtype_auto_is_fp32_on_a_cpu_whatever_it_computes(monkeypatch):
    """Equal runs are equal on machines that differ in speed or in load."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True, raising=False)
    assert resolve_dtype("auto", CPU) == "fp32"
    assert resolve_dtype("bf16", CPU) == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert resolve_dtype("auto", torch.device("cuda")) == "bf16"


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    for name in ("now", "now_2", "now_3"):
        assert unused_folder() == Path("runs", name)
        unused_folder().mkdir(parents=True)


def test_float32_is_exact_on_gpus_within_a_run():
    torch.set_float32_matmul_precision("high")
    try:
        with exact_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_measured_peak_is_that_of_a_product_and_draws_no_random_numbers(monkeypatch):
    """The clock advances by a second per reading, so a product takes a second."""
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    before = torch.get_rng_state()
    assert matmul_peak(CPU, torch.float32, seconds=7, size=32) == pytest.approx(2 * 32**3)
    assert torch.equal(before, torch.get_rng_state())


def test_known_gpus_are_not_measured(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda *_: pytest.fail("a known GPU was measured"))
    for name, peak in (
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert matmul_peak(torch.device("cuda"), torch.bfloat16) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 4090 Laptop GPU")
    with pytest.raises((AssertionError, RuntimeError)):  # it is measured, for which there is no GPU here
        matmul_peak(torch.device("cuda"), torch.bfloat16, size=2)


def test_determinism_is_switched_on_and_back(monkeypatch):
    with deterministic(True, CPU):
        assert torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        deterministic(True, torch.device("cuda")).__enter__()
    assert not torch.are_deterministic_algorithms_enabled()


def test_two_deterministic_runs_are_equal_bit_for_bit(words, tmp_path, files, changed):
    more = ["train.deterministic=true", "train.dtype=fp16", "train.steps=2", "train.eval_every=0"]
    for name in ("a", "b"):
        train(compose(changed(words, *more, f"out={tmp_path / name}")))
    assert files(tmp_path / "a").untimed == files(tmp_path / "b").untimed
