"""The cost of a document: L* of published shapes, FLOPs counted by hand, integers that cannot overflow."""

import numpy as np
import pytest

from multipack.planning.cost import CostModel, weigh
from multipack.shapes import SHAPES, ModelShape


def test_default_is_llama_8b():
    assert CostModel.from_shape().linear == 57_256
    assert CostModel.from_shape(SHAPES["llama-8b"]) == CostModel.from_shape()


@pytest.mark.parametrize(("name", "linear"), [("llama-1b", 37_712), ("llama-70b", 106_051)])
def test_published_shapes(name, linear):
    assert CostModel.from_shape(SHAPES[name]).linear == linear


def test_cost_is_linear_and_squares():
    model = CostModel.from_shape()
    cost = model.cost([1, 2, 8192])
    assert cost.dtype == np.int64
    assert cost.tolist() == [57_258, 114_518, 57_256 * 8192 + 8192 * 8193]
    share = 8192 * 8193 / cost[2]
    assert share == pytest.approx(0.125, abs=5e-4)  # the quadratic share of 8k tokens in an 8B model


def test_flops_count_every_matrix_and_pair():
    shape = ModelShape(layers=3, heads=4, kv_heads=2, d_model=8, d_ff=16, head_dim=6, vocabulary_size=11)
    per_layer = 8 * 24 * 2 + 8 * 12 * 2 + 3 * 8 * 16
    assert shape.layer_parameters == per_layer
    pairs = sum(length * (length + 1) // 2 for length in (5, 9))
    forward = 2 * 14 * (3 * per_layer + 8 * 11) + 3 * pairs * 4 * 24  # a matrix element 2, a pair 4 · H · e
    model = CostModel.from_shape(shape)
    assert model.flops([5, 9]) == 3 * forward
    assert model.flops([5, 9], vocabulary_size=0) == 3 * (forward - 2 * 14 * 8 * 11)


def test_flops_are_proportional_to_cost():
    model = CostModel.from_shape()
    lengths = np.array([10, 5000])
    ratio = [model.flops([length]) / float(model.cost([length])[0]) for length in lengths]
    assert ratio[0] == pytest.approx(ratio[1], rel=1e-5)


def test_overflow_is_refused():
    with pytest.raises(ValueError, match="int64"):
        weigh(np.full(1000, 1 << 27), 1 << 25, 1)
    with pytest.raises(ValueError, match="at least 1 token"):
        CostModel.from_shape().cost([0])
