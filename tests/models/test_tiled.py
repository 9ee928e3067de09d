"""Layers in tiles: equal results, and never the whole of what is wide."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.models import tiled as module
from multipack.models.compile import compile_blocks
from multipack.models.decoder import Decoder
from multipack.models.preference import PreferenceDecoder
from multipack.models.recompute import recompute_blocks
from multipack.models.tiled import TiledFeedForward, tile_layers, tiled_feed_forward
from multipack.ops.loss import linear_cross_entropy, linear_log_probabilities

TOKENS, WIDTH, VOCABULARY = 37, 12, 29


class Sizes(TorchDispatchMode):
    """The largest tensor that anything makes, and the dimensions of all of them."""

    def __init__(self):
        super().__init__()
        self.largest, self.shapes = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                self.shapes.add(tuple(tensor.shape))
        return out


def results(model, batch):
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def close(found, expected, tolerance):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert (found[1] - expected[1]).norm() <= tolerance * expected[1].norm()


@pytest.mark.parametrize("tiles", [2, 5, 48])
def test_tiles_equal_the_whole(model, documents, pack, tiles):
    whole, batch = copy.deepcopy(model), pack(documents)
    tile_layers(model, tiles)
    assert list(model.state_dict()) == list(whole.state_dict())
    assert all(isinstance(block.feed_forward, TiledFeedForward) for block in model.blocks)
    close(results(model, batch), results(whole, batch), 1e-6)
    for each in (model, whole):
        each.eval()
    torch.testing.assert_close(model(batch), whole(batch), rtol=1e-6, atol=0)
    close(results(model.double(), batch), results(whole.double(), batch), 1e-13)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("shape", ["gpt2", "llama-gqa"], indirect=True)
def test_tiles_of_blocks_that_are_computed_again(model, documents, pack, kind):
    tile_layers(model, 3)
    batch = pack(documents)
    expected = results(model, batch)
    recompute_blocks(model, kind)
    close(results(model, batch), expected, 0)


@pytest.mark.parametrize("shape", ["gpt2", "llama-gqa"], indirect=True)
def test_autocast_rounds_no_worse(model, documents, pack):
    exact, tiled, batch = copy.deepcopy(model), copy.deepcopy(model), pack(documents)
    tile_layers(tiled, 3)
    expected = results(exact, batch)[1]
    errors = []
    for each in (model, tiled):
        with torch.autocast("cpu", torch.bfloat16):
            each.zero_grad()
            loss = each(batch)
        loss.backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in each.parameters())
        found = torch.cat([parameter.grad.flatten() for parameter in each.parameters()])
        errors.append(float((found - expected).norm()))
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
@pytest.mark.parametrize("shape", ["gpt2", "llama-gqa"], indirect=True)
def test_compiled_tiles(model, documents, pack, kind):
    torch.compiler.reset()
    batch = pack(documents)
    expected = results(model, batch)
    tile_layers(model, 3)
    recompute_blocks(model, kind)
    compile_blocks(model, backend="aot_eager")
    close(results(model, batch), expected, 1e-6)
    torch.compiler.reset()


def layers(gated, bias, dtype=torch.float64, tokens=5, width=4, inner=6):
    make = lambda *shape: torch.randn(*shape, dtype=dtype, requires_grad=True)  # noqa: E731
    count = 1 + gated
    first, biases = [make(inner, width) for _ in range(count)], [make(inner) for _ in range(count * bias)]
    return make(tokens, width), make(width, inner), first, biases


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_operator_keeps_torchs_rules(gated, bias):
    opcheck(tiled_feed_forward, (*layers(gated, bias, torch.float32), 3))
    x, down, first, biases = layers(gated, bias)
    given = [x, down, *first, *biases]

    def call(x, down, *rest):
        return tiled_feed_forward(x, down, list(rest[: len(first)]), list(rest[len(first) :]), 4)

    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("gated", [False, True])
def test_no_tensor_of_the_feed_forward_is_wider_than_a_tile(gated):
    """Of T tokens, forward and backward; what it keeps between is its input alone."""
    tokens, inner, tiles = 64, 48, 4
    x, down, first, biases = layers(gated, True, torch.float32, tokens, 4, inner)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
        out = tiled_feed_forward(x, down, first, biases, tiles)
    parameters = {id(each) for each in (down, *first, *biases)}
    assert [tuple(each.shape) for each in saved if id(each) not in parameters] == [(tokens, 4)]
    with Sizes() as sizes, torch.no_grad():
        module.tiled_feed_forward._init_fn(x, down, first, biases, tiles)
        module._backward._init_fn(torch.ones_like(out), x, down, first, biases, tiles)
    wide = {shape[1] for shape in sizes.shapes if len(shape) == 2 and shape[0] == tokens}
    assert wide == {4, inner // tiles}
    assert sizes.largest == tokens * inner // tiles


@pytest.fixture
def inputs():
    """(hidden, weight, targets) of a dtype; a third of the targets are ignored."""

    def make(dtype=torch.float64, tokens=TOKENS):
        hidden = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
        weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, VOCABULARY, (tokens,))
        targets[torch.rand(tokens) < 0.33] = -100
        return hidden, weight, targets

    return make


@pytest.mark.parametrize(
    "terms", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.2}, {"z_loss": 0.1, "label_smoothing": 0.2}]
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tiles", [2, 3, 29, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_slices_of_the_vocabulary_equal_the_whole(inputs, distance, dtype, tolerance, tiles, weighted, terms):
    hidden, weight, targets = inputs(dtype)
    if weighted:
        terms = {**terms, "weights": torch.rand(TOKENS, dtype=dtype)}
    ours = linear_cross_entropy(hidden, weight, targets, 8, vocabulary_tiles=tiles, **terms)
    theirs = linear_cross_entropy(hidden, weight, targets, 8, **terms)
    assert abs(ours - theirs) <= tolerance * theirs
    gradients = [torch.autograd.grad(loss * 0.37, (hidden, weight)) for loss in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert distance(mine, other) < tolerance


def test_gradcheck_of_slices(inputs):
    hidden, weight, targets = inputs(tokens=5)
    for terms in ({}, {"z_loss": 0.1, "label_smoothing": 0.2}):
        assert torch.autograd.gradcheck(
            lambda h, w, terms=terms: linear_cross_entropy(h, w, targets, 4, vocabulary_tiles=3, **terms),
            (hidden, weight),
        )
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probabilities(h, w, targets, 4, vocabulary_tiles=3), (hidden, weight)
    )


def test_log_probabilities_of_slices(inputs, distance):
    hidden, weight, targets = inputs()
    upstream = torch.randn(TOKENS, dtype=torch.float64)
    found = []
    for tiles in (1, 4):
        values = linear_log_probabilities(hidden, weight, targets, 8, vocabulary_tiles=tiles)
        found.append((values, *torch.autograd.grad(values, (hidden, weight), upstream)))
    for mine, other in zip(*found, strict=True):
        assert distance(mine, other) < 1e-14


def test_large_logits_do_not_overflow_in_slices():
    hidden = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([2, 2]), vocabulary_tiles=3)
    assert loss.item() == pytest.approx(400.0)
    loss.backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probabilities])
def test_logits_never_exceed_a_chunk_of_a_slice(inputs, function):
    hidden, weight, targets = inputs(tokens=400)
    chunk, tiles = 64, 4
    with Sizes() as sizes:
        function(hidden, weight, targets, chunk, vocabulary_tiles=tiles).sum().backward()
    columns = {shape[1] for shape in sizes.shapes if len(shape) == 2 and shape[0] == chunk}
    assert columns <= {1, WIDTH, VOCABULARY // tiles, VOCABULARY // tiles + 1}
    assert max(columns - {WIDTH}) == VOCABULARY // tiles + 1


def test_slices_under_autocast_are_close(inputs, distance):
    hidden, weight, targets = inputs(torch.float32, tokens=400)
    exact = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 64, vocabulary_tiles=3)
    for mine, other in zip(torch.autograd.grad(loss, (hidden, weight)), exact, strict=True):
        assert mine.dtype == torch.float32
        assert distance(mine, other) < 2e-2


@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_preferences_are_tiled_too(shape, distance):
    model = PreferenceDecoder(shape)
    hidden, targets = torch.randn(9, shape.d_model), torch.randint(0, shape.vocabulary_size, (9,))
    expected = model.log_probabilities(hidden, model.output_weight, targets)
    tile_layers(model, 4)
    with Sizes() as sizes:
        found = model.log_probabilities(hidden, model.output_weight, targets)
    assert distance(found, expected) < 1e-6
    assert not any(shape_of[-1:] == (shape.vocabulary_size,) for shape_of in sizes.shapes)


def test_one_tile_changes_nothing(model):
    before = dict(model.named_modules())
    loss = model.loss_function
    tile_layers(model, 1)
    assert dict(model.named_modules()) == before
    assert model.loss_function is loss


def test_numbers_of_tiles_that_cannot_be_are_refused(shape, inputs):
    model = Decoder(dataclasses.replace(shape, d_ff=6))
    with pytest.raises(ValueError, match=r"train.tiles must be at least 1, got 0"):
        tile_layers(model, 0)
    with pytest.raises(ValueError, match=r"train.tiles=7 is more than model.d_ff=6 .* use at most 6"):
        tile_layers(model, 7)
    with pytest.raises(ValueError, match=r"vocabulary_tiles must be at least 1, got 0"):
        linear_cross_entropy(*inputs(), vocabulary_tiles=0)
