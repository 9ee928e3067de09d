from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.ops.loss import linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 37, 12, 29


@pytest.fixture
def inputs():
    """(hidden, weight, targets) of a dtype; a third of the targets are ignored."""

    def make(dtype=torch.float32, tokens=TOKENS):
        hidden = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
        weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, VOCABULARY, (tokens,))
        targets[torch.rand(tokens) < 0.33] = -100
        return hidden, weight, targets

    return make


def reference(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 8, 1024])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_equals_cross_entropy(inputs, distance, dtype, tolerance, chunk_tokens):
    hidden, weight, targets = inputs(dtype)
    ours, theirs = (
        linear_cross_entropy(hidden, weight, targets, chunk_tokens),
        reference(hidden, weight, targets),
    )
    assert ours.dtype == dtype
    assert ours.dim() == 0
    assert abs(ours - theirs) <= tolerance * theirs
    gradients = [torch.autograd.grad(loss * 0.37, (hidden, weight)) for loss in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert distance(mine, other) < tolerance


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1024])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_weights_weigh_each_rows_loss(inputs, distance, dtype, tolerance, chunk_tokens):
    hidden, weight, targets = inputs(dtype)
    weights = torch.rand(TOKENS, dtype=dtype)
    weights[::5] = 0.0
    ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens, weights=weights)
    each = F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=-100, reduction="none")
    theirs = (each * weights).sum()
    assert ours.dtype == dtype
    assert abs(ours - theirs) <= tolerance * theirs
    gradients = [torch.autograd.grad(loss * 0.37, (hidden, weight)) for loss in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert distance(mine, other) < tolerance


def test_weights_of_one_change_nothing(inputs):
    hidden, weight, targets = inputs()
    plain = linear_cross_entropy(hidden, weight, targets, 8)
    weighted = linear_cross_entropy(hidden, weight, targets, 8, weights=torch.ones(TOKENS))
    assert torch.equal(plain, weighted)
    for a, b in zip(
        torch.autograd.grad(plain, (hidden, weight)),
        torch.autograd.grad(weighted, (hidden, weight)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_weights_under_autocast_are_close(inputs, distance):
    hidden, weight, targets = inputs(tokens=400)
    weights = torch.rand(400)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 64, weights=weights)
    loss.backward()
    each = F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=-100, reduction="none")
    expected = (each * weights).sum()
    exact = torch.autograd.grad(expected, (hidden, weight))
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert abs(loss - expected) < 5e-3 * expected
    assert distance(hidden.grad, exact[0]) < 2e-2
    assert distance(weight.grad, exact[1]) < 2e-2


def test_weights_are_constants_of_the_right_shape(inputs):
    hidden, weight, targets = inputs()
    for wrong in (torch.ones(TOKENS - 1), torch.ones(TOKENS, 1), torch.ones(TOKENS, dtype=torch.int64)):
        with pytest.raises(ValueError, match="needs floating point weights \\(37,\\)"):
            linear_cross_entropy(hidden, weight, targets, weights=wrong)
    with pytest.raises(ValueError, match="weights get no gradient"):
        linear_cross_entropy(hidden, weight, targets, weights=torch.ones(TOKENS, requires_grad=True))


def test_gradcheck_with_weights(inputs):
    hidden, weight, targets = inputs(torch.float64, tokens=9)
    weights = torch.rand(9, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, 4, weights=weights), (hidden, weight)
    )


def test_gradcheck(inputs):
    hidden, weight, targets = inputs(torch.float64, tokens=9)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, 4), (hidden, weight))


def test_backward_twice_gives_the_same(inputs):
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("which", ["hidden", "weight", "neither"])
def test_only_the_gradients_that_are_wanted(inputs, which, distance):
    hidden, weight, targets = inputs()
    hidden.requires_grad_(which == "hidden")
    weight.requires_grad_(which == "weight")
    loss, expected = linear_cross_entropy(hidden, weight, targets), reference(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    if which == "neither":
        assert not loss.requires_grad
        return
    wanted = hidden if which == "hidden" else weight
    mine, other = (torch.autograd.grad(x, wanted)[0] for x in (loss, expected))
    assert distance(mine, other) < 1e-6


def test_no_target_is_zero_and_still_connected(inputs):
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), num_targets=0)
    assert loss.item() == 0.0
    loss.backward()
    assert hidden.grad.shape == hidden.shape
    assert not hidden.grad.any()
    assert weight.grad.shape == weight.shape
    assert not weight.grad.any()


def test_autocast_bfloat16_is_close_and_sums_in_float32(inputs, distance):
    hidden, weight, targets = inputs(tokens=400)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 64)
        ragged = linear_cross_entropy(hidden.bfloat16(), weight, targets, 64)
    loss.backward()
    expected = reference(hidden, weight, targets)
    exact = torch.autograd.grad(expected, (hidden, weight))
    assert loss.dtype == ragged.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert abs(loss - expected) < 5e-3 * expected
    assert torch.equal(loss, ragged)
    assert distance(hidden.grad, exact[0]) < 2e-2
    assert distance(weight.grad, exact[1]) < 2e-2


def test_bfloat16_weights_get_bfloat16_gradients(inputs, distance):
    hidden, weight, targets = inputs(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, 8)
    mine = torch.autograd.grad(loss, (hidden, weight))
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(reference(*wide, targets), wide)
    for ours, theirs in zip(mine, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert distance(ours.float(), theirs) < 2e-2


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([2, 2]))
    assert loss.item() == pytest.approx(400.0)
    loss.backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_logits_never_exceed_a_chunk(inputs):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[-1] == VOCABULARY:
                self.elements = max(self.elements, out.numel())
            return out

    hidden, weight, targets = inputs(tokens=400)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, 16).backward()
    assert 0 < largest.elements <= 16 * VOCABULARY


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, -99])
def test_targets_outside_the_vocabulary_are_named(inputs, wrong):
    hidden, weight, targets = inputs()
    targets[5] = wrong
    with pytest.raises(ValueError, match=f"target {wrong} is outside the vocabulary of {VOCABULARY}"):
        linear_cross_entropy(hidden, weight, targets)


def test_shapes_and_options_that_do_not_fit_are_refused(inputs):
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="hidden \\(T, d\\) and weight"):
        linear_cross_entropy(hidden, weight[:, 1:], targets)
    with pytest.raises(ValueError, match="needs targets \\(37,\\)"):
        linear_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        linear_cross_entropy(hidden, weight, targets, 0)
    with pytest.raises(ValueError, match="use one, or autocast"):
        linear_cross_entropy(hidden, weight.bfloat16(), targets)
    with pytest.raises(ValueError, match="num_targets=3, but"):
        linear_cross_entropy(hidden, weight, targets, num_targets=3)


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch):
    from multipack.ops import loss as module

    wanted, chunks = [], module._chunks

    def watched(*arguments):
        wanted.append(arguments[-2:])
        return chunks(*arguments)

    monkeypatch.setattr(module, "_chunks", watched)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets = torch.tensor([1, 2, -100, 3, 8, 0])
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, targets)
    with_gradient = linear_cross_entropy(hidden, weight, targets)
    assert wanted == [(False, False), (True, True)]
    assert torch.equal(without, with_gradient.detach())
