"""INT8: values as LLM.int8 defines them, in numpy."""

import numpy as np
import torch

from multipack.ops.int8 import Int8
from multipack.ops.quantized import linear


def test_values_and_products_equal_the_definition():
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 36, generator=draw)
    weight[5] = 0
    found = Int8.quantize(weight)
    exact = weight.double().numpy()
    absmax = np.abs(exact).max(1, keepdims=True)
    codes = np.rint(127 * exact / np.where(absmax > 0, absmax, 1))
    np.testing.assert_array_equal(found.codes.view(torch.int8).numpy(), codes)
    assert found.codes.dtype == found.steps.dtype == torch.uint8
    held = found.codes.numel() + found.steps.numel()
    assert held == 24 * 36 + 4 * 24
    expected = codes * absmax / 127
    np.testing.assert_allclose(found.to(torch.float64).numpy(), expected, atol=1e-6)
    assert torch.equal(found[slice(4, 9)].to(torch.float32), found.to(torch.float32)[4:9])
    x = torch.randn(7, 36, generator=draw, requires_grad=True)
    gradient = torch.randn(7, 24, generator=draw)
    out = linear(x, found)
    out.backward(gradient)
    np.testing.assert_allclose(out.detach().numpy(), x.detach().numpy() @ expected.T, atol=1e-5)
    np.testing.assert_allclose(x.grad.numpy(), gradient.numpy() @ expected, atol=1e-5)
