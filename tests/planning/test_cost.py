"""The cost of a document: L* of published shapes, FLOPs counted by hand, integers that cannot overflow."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning.cost import CostModel
from multipack.shapes import SHAPES, ModelShape
from multipack.shapes.adapter import AdapterConfig

LLAMA2_7B = ModelShape(32, 32, 32, 4096, 11_008, vocabulary_size=32_000, tied=False)


@pytest.mark.parametrize(
    ("shape", "linear", "flash", "headless"),
    [
        (SHAPES["qwen2.5-0.5b"], 22_971, 19_689, 16_640),
        (SHAPES["llama-1b"], 37_712, 32_325, 29_696),
        (LLAMA2_7B, 50_408, 43_207, 49_408),
        (SHAPES["qwen2.5-7b"], 70_455, 60_390, 65_024),
        (None, 57_256, 49_077, 53_248),  # llama-8b
        (SHAPES["llama-70b"], 106_051, 90_901, 104_448),
        (SHAPES["llama-405b"], 195_578, 167_638, 194_560),
    ],
)
def test_published_shapes(shape, linear, flash, headless):
    assert CostModel.from_shape(shape).linear == linear
    assert CostModel.from_shape(shape, recompute="flash").linear == flash
    shape = shape or SHAPES["llama-8b"]
    assert CostModel.from_shape(shape.with_vocabulary(0)).linear == headless


def test_cost_is_linear_and_squares():
    model = CostModel.from_shape()
    cost = model.cost([1, 2, 8192])
    assert cost.dtype == np.int64
    assert cost.tolist() == [57_258, 114_518, 57_256 * 8192 + 8192 * 8193]
    share = 8192 * 8193 / cost[2]
    assert share == pytest.approx(0.125, abs=5e-4)  # the quadratic share of 8k tokens in an 8B model


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_frozen_matrices_have_no_gradients(recompute, tmp_path):
    """A product with a frozen matrix is 2 FLOPs forward and 2 backward; adapters and what is trained whole have all."""
    shape = ModelShape(
        layers=3, heads=4, kv_heads=2, d_model=8, d_ff=16, head_dim=6, vocabulary_size=11, tied=False
    )
    adapter = AdapterConfig("lora", rank=2, targets=["q_proj", "down_proj"], train=["head", "blocks.2"])
    per_layer, tokens, again = shape.layer_parameters, 14, 2 * (recompute == "full")
    frozen, trained = 2 * per_layer, per_layer + 8 * 11
    added = 2 * 2 * ((8 + 24) + (16 + 8))  # two layers, rank 2
    whole, model = (
        CostModel.from_shape(shape, recompute=recompute, adapter=each)
        for each in (AdapterConfig("none"), adapter)
    )
    expected = tokens * ((6 + again) * (trained + added) + (4 + again) * frozen)
    attention = whole.flops([5, 9], executed=True) - tokens * (6 + again) * (frozen + trained)
    assert model.flops([5, 9], executed=True) == expected + attention
    assert model.linear < whole.linear
    assert whole == CostModel.from_shape(shape, recompute=recompute)


def test_overflow_is_refused():
    with pytest.raises(ValueError, match="int64"):
        CostModel(None, 1 << 25, 1).cost(np.full(1000, 1 << 27))
    with pytest.raises(ValueError, match="at least 1 token"):
        CostModel.from_shape().cost([0])
    model = CostModel.from_shape(dataclasses.replace(SHAPES["tiny"], window=1 << 20))
    exact = sum(int(cost) for cost in model.cost([1 << 16] * 8))
    assert int(model.cost([1 << 16] * 8).sum()) == exact < 1 << 62
    with pytest.raises(ValueError, match="int64"):
        model.cost(np.full(1 << 15, 1 << 27))


# --- sliding windows, latent attention, mixtures ----------------------------------------------


def _pairs(length, window):
    """Query-key pairs of a causal document, counted one by one."""
    return sum(1 for query in range(length) for key in range(length) if 0 <= query - key < window)


@pytest.mark.parametrize(
    ("window", "layers", "sliding"), [(1, 6, 6), (5, 6, 0), (5, 6, 4), (7, 5, 3), (99, 6, 5)]
)
def test_windows_by_counting_pairs(window, layers, sliding):
    shape = ModelShape(layers=layers, window=window, window_layers=sliding, vocabulary_size=100)
    slides = sliding or layers
    model = CostModel.from_shape(shape)
    dense = CostModel.from_shape(dataclasses.replace(shape, window=0, window_layers=0))
    matrices = 6 * (layers * shape.layer_parameters + shape.d_model * 100)
    for length in (1, 2, 5, 6, 30):
        pairs = slides * _pairs(length, window) + (layers - slides) * _pairs(length, length)
        assert model.flops([length]) == matrices * length + 12 * shape.heads * shape.head_width * pairs
        # The integer cost: the same in units of 6·H·e·gcd(layers of each kind), the linear part rounded.
        exact = (
            model.flops([length])
            / (6 * shape.heads * shape.head_width * layers)
            * (model.quadratic + model.sliding)
        )
        assert int(model.cost([length])[0]) == pytest.approx(exact, abs=0.5 * length)
    assert (model.cost([1000]) <= (model.quadratic + model.sliding) * dense.cost([1000])).all()


def test_latent_attention_costs_by_its_widths():
    shape = SHAPES["deepseek-v3"]
    d, heads = 7168, 128
    attention = d * 1536 + 1536 * heads * 192 + d * (512 + 64) + 512 * heads * 256 + heads * 128 * d
    dense, expert = 3 * d * 18_432, 3 * d * 2048
    assert shape.token_parameters == 61 * attention + 3 * dense + 58 * (9 * expert + 256 * d)
    # 4·H·(192 + 128) / 2 FLOPs a pair forward; the backward pass twice that, and the scores anew with flash.
    matrices = shape.token_parameters + d * 129_280
    assert CostModel.from_shape(shape).linear == round(matrices / (61 * heads * 160))
    assert CostModel.from_shape(shape, recompute="flash").linear == round(
        6 * matrices / (61 * heads * (960 + 192))
    )
    assert CostModel.from_shape(shape).flops([100]) == 6.0 * 100 * matrices + 12 * 61 * heads * 160 * _pairs(
        100, 100
    )


models = st.builds(
    CostModel,
    shape=st.none(),
    linear=st.integers(1, 1 << 20),
    quadratic=st.integers(0, 5),
) | st.builds(
    lambda window, slide, recompute: CostModel.from_shape(
        ModelShape(layers=6, window=window, window_layers=slide), recompute=recompute
    ),
    window=st.integers(1, 300),
    slide=st.integers(0, 6),
    recompute=st.sampled_from(["none", "flash", "full"]),
)


@settings(deadline=None, max_examples=30)
@given(model=models, lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=30))
def test_costs_are_positive_integers_that_never_fall(model, lengths):
    rising = np.sort(lengths)
    cost = model.cost(rising)
    assert cost.dtype == np.int64
    assert cost[0] > 0
    assert (np.diff(cost) >= 0).all()


# --- what determines a plan ------------------------------------------------------------------------------


def test_equality_is_that_of_costs():
    llama = CostModel.from_shape()
    assert CostModel(None, 57_256) == llama  # another shape, or none, with the same costs
    assert hash(CostModel(None, 57_256)) == hash(llama)
    assert CostModel(None, 2048, 512) == CostModel(None, 4, 1) != CostModel(None, 4, 2)  # only ratios matter
    assert llama != CostModel.from_shape(recompute="flash")
    assert llama != 57_256
    different = [
        llama,
        CostModel(None, 57_257),
        CostModel(None, 57_256, sliding=1, window=8),
        CostModel(None, 57_256, 2),
    ]
    assert len({json.dumps(model.key()) for model in different}) == len(set(different)) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear": -1}, r"cost\.linear must be a whole number of at least 0, got -1"),
        ({"linear": 1.5}, r"cost\.linear"),
        ({"linear": 0, "quadratic": 0}, "needs a weight above 0"),
        ({"linear": 1, "sliding": 1}, "belong together"),
        ({"linear": 1, "recompute": "some"}, "recompute='some' is unknown; choose one of none, flash, full"),
    ],
)
def test_impossible_models_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        CostModel(None, **fields)
