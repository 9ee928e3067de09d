"""The terms that only training adds to the loss, and the log-probability of each target."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from multipack.ops.loss import linear_cross_entropy, linear_log_probabilities, training_loss

TOKENS, WIDTH, VOCABULARY = 37, 12, 29


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


def reference(hidden, weight, targets, z_loss, label_smoothing, weights=None):
    """Both terms as autograd would have them."""
    logits = F.linear(hidden, weight)
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * torch.logsumexp(logits, dim=-1).square() * (targets != -100)
    return (losses if weights is None else losses * weights).sum()


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1024])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("z_loss", "label_smoothing"), [(0.3, 0.0), (0.0, 0.1), (1e-4, 0.25)])
def test_both_terms_equal_autograd(inputs, distance, z_loss, label_smoothing, weighted, chunk_tokens):
    hidden, weight, targets = inputs()
    weights = torch.rand(TOKENS, dtype=torch.float64) if weighted else None
    loss = training_loss(z_loss, label_smoothing)
    ours = loss(hidden, weight, targets, chunk_tokens, weights=weights)
    theirs = reference(hidden, weight, targets, z_loss, label_smoothing, weights)
    assert abs(ours - theirs) <= 1e-13 * theirs
    gradients = [torch.autograd.grad(each * 0.37, (hidden, weight)) for each in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert distance(mine, other) < 1e-13


def test_gradcheck(inputs):
    hidden, weight, targets = inputs(tokens=9)
    loss = training_loss(0.2, 0.3)
    assert torch.autograd.gradcheck(lambda h, w: loss(h, w, targets, 4), (hidden, weight))


def test_the_terms_are_close_in_bfloat16(inputs, distance):
    hidden, weight, targets = inputs(torch.float32, tokens=400)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, targets, 64, z_loss=1e-2, label_smoothing=0.1)
    theirs = reference(hidden, weight, targets, 1e-2, 0.1)
    assert ours.dtype == torch.float32
    assert abs(ours - theirs) < 5e-3 * theirs
    mine, exact = (torch.autograd.grad(each, (hidden, weight)) for each in (ours, theirs))
    assert distance(mine[0], exact[0]) < 2e-2
    assert distance(mine[1], exact[1]) < 2e-2


def test_without_terms_it_is_the_plain_function():
    assert training_loss() is linear_cross_entropy


@pytest.mark.parametrize(("z_loss", "label_smoothing"), [(-1.0, 0.0), (0.0, 1.0), (0.0, -0.1)])
def test_impossible_terms_are_named(inputs, z_loss, label_smoothing):
    with pytest.raises(ValueError, match="z_loss must not" if z_loss else "label_smoothing must be in"):
        training_loss(z_loss, label_smoothing)
    with pytest.raises(ValueError, match="z_loss must not" if z_loss else "label_smoothing must be in"):
        linear_cross_entropy(*inputs(), z_loss=z_loss, label_smoothing=label_smoothing)


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1024])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_log_probabilities_equal_log_softmax(inputs, distance, dtype, tolerance, chunk_tokens):
    hidden, weight, targets = inputs(dtype)
    ours = linear_log_probabilities(hidden, weight, targets, chunk_tokens)
    theirs = -F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")
    assert ours.dtype == dtype
    assert distance(ours, theirs) < tolerance
    assert not ours[targets == -100].any()
    upstream = torch.randn(TOKENS, dtype=dtype)
    gradients = [torch.autograd.grad(each, (hidden, weight), upstream) for each in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert distance(mine, other) < tolerance


def test_log_probabilities_gradcheck(inputs):
    hidden, weight, targets = inputs(tokens=9)
    assert torch.autograd.gradcheck(lambda h, w: linear_log_probabilities(h, w, targets, 4), (hidden, weight))


def test_log_probabilities_under_autocast(inputs, distance):
    hidden, weight, targets = inputs(torch.float32, tokens=400)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_log_probabilities(hidden, weight, targets, 64)
    theirs = -F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")
    assert ours.dtype == torch.float32
    assert distance(ours, theirs) < 1e-2
    mine, exact = (torch.autograd.grad(each.sum(), (hidden, weight)) for each in (ours, theirs))
    assert distance(mine[0], exact[0]) < 2e-2
    assert distance(mine[1], exact[1]) < 2e-2


def test_log_probabilities_of_no_target_are_connected_zeros(inputs):
    hidden, weight, targets = inputs()
    found = linear_log_probabilities(hidden, weight, torch.full_like(targets, -100), num_targets=0)
    found.sum().backward()
    assert not found.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_only_the_gradient_that_is_wanted(inputs):
    hidden, weight, targets = inputs()
    hidden.requires_grad_(False)
    (found,) = torch.autograd.grad(linear_log_probabilities(hidden, weight, targets).sum(), (weight,))
    assert found.shape == weight.shape
    with torch.no_grad():
        assert not linear_log_probabilities(hidden, weight, targets).requires_grad


def test_inputs_that_do_not_fit_are_refused(inputs):
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="needs targets"):
        linear_log_probabilities(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match="num_targets=3, but"):
        linear_log_probabilities(hidden, weight, targets, num_targets=3)
