"""RMSNorm as one function: torch's results and gradients, and what it saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from multipack.ops.norm import RMSNorm, rms_norm


def test_equals_torch_and_its_gradients_are_right():
    x, weight = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((7, 5), (5,)))
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), F.rms_norm(x, (5,), weight, 1e-5), rtol=0, atol=1e-14
    )
    assert torch.autograd.gradcheck(lambda *inputs: rms_norm(*inputs, 1e-5), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_keeps_dtypes_and_accuracy(dtype):
    x, upstream = torch.randn(300, 192, dtype=dtype), torch.randn(300, 192, dtype=dtype)
    ours, exact = RMSNorm(192, eps=1e-5, dtype=dtype), torch.nn.RMSNorm(192, eps=1e-5, dtype=torch.float64)
    inputs = x.requires_grad_(), x.detach().double().requires_grad_()
    results = ours(inputs[0]), exact(inputs[1])
    found = results[0], *torch.autograd.grad(results[0], (inputs[0], ours.weight), upstream)
    expected = results[1], *torch.autograd.grad(results[1], (inputs[1], exact.weight), upstream.double())
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == dtype
        noise = 5e-7 if dtype == torch.float32 else 1e-2
        assert (got.double() - wanted).norm() < noise * wanted.norm()


def test_saves_its_input_and_one_number_a_row():
    x, weight, saved = torch.randn(64, 32, requires_grad=True), torch.randn(32, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
        rms_norm(x, weight, 1e-5)
    others = [tensor for tensor in saved if tensor.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert sum(tensor.numel() for tensor in others) == 64
