import time

import pytest
import torch

from multipack.training.peak import matmul_peak, published_peak

CPU = torch.device("cpu")


def test_a_measured_peak_is_that_of_a_product_and_moves_no_random_numbers(monkeypatch):
    """On a clock that ticks a second each time it is looked at, a product takes a second."""
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    before = torch.get_rng_state()
    assert matmul_peak(CPU, torch.float32, seconds=7, size=32) == pytest.approx(2 * 32**3)
    assert torch.equal(before, torch.get_rng_state())


def test_known_gpus_are_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch, "mm", lambda *_: pytest.fail("a known GPU was measured"))
    assert matmul_peak(torch.device("cuda"), torch.bfloat16) == 312e12


def test_published_peaks_are_those_of_the_very_device_in_bf16():
    names = ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "Imaginary 9000")
    assert [published_peak(name, torch.bfloat16) for name in names] == [756e12, 989e12, 0.0]
    assert published_peak("NVIDIA H100 PCIe", torch.float32) == 0.0
