"""NF4: levels and blocks as the paper defines them, values as in bitsandbytes, products without saved matrices."""

from pkgutil import resolve_name
from statistics import NormalDist
from typing import get_args

import numpy as np
import pytest
import torch

from multipack.ops.nf4 import LEVELS, Nf4
from multipack.ops.quantized import linear
from multipack.shapes.formats import FORMATS, FormatName


@pytest.fixture
def weight():
    """Of 480 blocks: one whole block of 256 scales, and a part of one. A block is 0."""
    found = torch.randn(96, 320, generator=torch.Generator().manual_seed(1))
    found[3, 64:128] = 0
    return found


def nearest(values, table):
    return np.abs(values[..., None] - table).argmin(-1)


def dynamic():
    """7 decades with 1, 2, …, 64 means of equal parts of [0.1, 1], both signs, 0 and 1."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade + 1)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        found += [*means, *-means]
    return np.sort(found)


def test_levels_are_quantiles_of_a_normal_distribution():
    tail = (1 / 32 + 1 / 30) / 2
    positive = [NormalDist().inv_cdf(p) for p in np.linspace(0.5, 1 - tail, 9)[1:]]
    negative = [NormalDist().inv_cdf(p) for p in np.linspace(tail, 0.5, 8)[:-1]]
    expected = np.array([*negative, 0, *positive]) / positive[-1]
    np.testing.assert_allclose(LEVELS.numpy(), expected, atol=3e-5)  # the paper's 0.9677 has 7 digits


@pytest.mark.parametrize("double", [True, False])
def test_values_equal_the_definition(weight, double):
    found = Nf4.quantize(weight, double)
    blocks = weight.double().numpy().reshape(-1, 64)
    absmax = np.abs(blocks).max(1)
    codes = nearest(blocks / np.maximum(absmax, 1e-30)[:, None], LEVELS.double().numpy())
    pairs = codes.reshape(-1, 2)
    np.testing.assert_array_equal(found.codes.reshape(-1).numpy(), pairs[:, 0] * 16 + pairs[:, 1])
    if double:
        centered = np.append(absmax - absmax.mean(), np.zeros(-len(absmax) % 256)).reshape(-1, 256)
        steps = np.abs(centered).max(1, keepdims=True)
        numbers = nearest(centered / steps, dynamic())
        np.testing.assert_array_equal(found.scales.reshape(-1).numpy(), numbers.reshape(-1)[:480])
        absmax = (dynamic()[numbers] * steps).reshape(-1)[:480] + absmax.mean()
    expected = LEVELS.double().numpy()[codes] * absmax[:, None]
    np.testing.assert_allclose(found.to(torch.float64).numpy(), expected.reshape(96, 320), atol=1e-6)
    held = [each for each in (found.codes, found.scales, found.steps) if each is not None]
    assert all(each.dtype == torch.uint8 for each in held)
    held_bytes = sum(each.numel() for each in held)
    bits = 8 * held_bytes / weight.numel()
    assert bits == pytest.approx(4.125 if double else 4.5, abs=0.005)


def test_values_are_those_of_bitsandbytes(weight):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    found = Nf4.quantize(weight)
    assert torch.equal(found.codes.view(-1), codes.view(-1))
    # Its kernel on CPUs misses the nearest value where two are about as near.
    assert (found.scales.view(-1) != state.absmax.view(-1)).float().mean() < 0.01
    steps = torch.cat([state.offset.view(1), state.state2.absmax]).view(torch.uint8)
    theirs = Nf4(codes.view(96, -1), state.absmax.view(96, -1), steps, 320)
    expected = functional.dequantize_4bit(codes, state)
    torch.testing.assert_close(theirs.to(torch.float32), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "columns"), [(slice(40, 60), slice(0, 320)), (slice(0, 96), slice(128, 320))]
)
def test_parts_are_parts_of_the_whole(weight, rows, columns):
    whole = Nf4.quantize(weight)
    codes = whole.codes[rows, columns.start // 2 : columns.stop // 2].contiguous()
    scales = whole.scales[rows, columns.start // 64 : columns.stop // 64].contiguous()
    part = Nf4(codes, scales, whole.steps, 320, (rows.start, columns.start))
    assert torch.equal(part.to(torch.float32), whole.to(torch.float32)[rows, columns])
    if columns.start == 0:
        assert torch.equal(whole[rows].to(torch.float32), part.to(torch.float32))


def test_products_save_only_bytes(weight):
    found, draw = Nf4.quantize(weight), torch.Generator().manual_seed(2)
    x = torch.randn(7, 320, generator=draw, requires_grad=True)
    bias, saved = torch.randn(96, generator=draw), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        out = linear(x, found, bias)
    assert {each.data_ptr() for each in saved} == {
        each.data_ptr() for each in (found.codes, found.scales, found.steps)
    }
    expected = torch.nn.functional.linear(x, found.to(torch.float32), bias)
    gradient = torch.randn(7, 96, generator=draw)
    torch.testing.assert_close(out, expected)
    (own,), (theirs,) = (torch.autograd.grad(each, x, gradient) for each in (out, expected))
    torch.testing.assert_close(own, theirs)


def test_every_format_is_a_setting_and_has_a_class():
    assert set(FORMATS) == set(get_args(FormatName))
    assert all(resolve_name(row.matrix).facts is row for row in FORMATS.values())


def test_rows_without_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="a matrix of 100 columns has no whole blocks of 64"):
        Nf4.quantize(torch.zeros(8, 100))
