"""The vocabulary-parallel losses on a process by itself, which has all words: equal to those of one device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.ops.loss import linear_cross_entropy, linear_log_probabilities
from multipack.parallel.vocabulary import vocabulary_cross_entropy, vocabulary_log_probabilities

PAIRS = [
    (linear_cross_entropy, vocabulary_cross_entropy),
    (linear_log_probabilities, vocabulary_log_probabilities),
]


def _inputs(seed, tokens, words=11, width=5, scale=2.0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=draw, dtype=torch.float64).mul_(scale)
    weight = torch.randn(words, width, generator=draw, dtype=torch.float64)
    targets = torch.randint(-2, words, (tokens,), generator=draw)
    return hidden.requires_grad_(), weight.requires_grad_(), targets.where(targets >= 0, -100)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 13),
    chunk=st.integers(1, 14),
    scale=st.sampled_from([0.1, 1.0, 300.0]),
    z_loss=st.sampled_from([0.0, 0.01]),
    smoothing=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
)
def test_equals_the_loss_of_one_device(seed, tokens, chunk, scale, z_loss, smoothing, weighted):
    hidden, weight, targets = _inputs(seed, tokens, scale=scale)
    weights = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) if weighted else None
    terms = {"weights": weights, "z_loss": z_loss, "label_smoothing": smoothing}
    for (whole, divided), keywords in zip(PAIRS, (terms, {}), strict=True):
        results = []
        for function in (whole, divided):
            out = function(hidden, weight, targets, chunk_tokens=chunk, **keywords)
            up = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view_as(out)
            results.append((out.detach(), *torch.autograd.grad((out * up).sum(), (hidden, weight))))
        for wanted, found in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10 * scale)


@pytest.mark.parametrize("divided", [vocabulary_cross_entropy, vocabulary_log_probabilities])
def test_gradients_are_those_of_differences(divided):
    hidden, weight, targets = _inputs(3, tokens=6)
    assert torch.autograd.gradcheck(lambda h, w: divided(h, w, targets, chunk_tokens=4), (hidden, weight))


@pytest.mark.parametrize("pair", PAIRS)
def test_autocast_is_followed(pair):
    hidden, weight, targets = (each.detach() for each in _inputs(4, tokens=40, words=30, width=16))
    results = []
    for function in pair:
        own = [each.float().requires_grad_() for each in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*own, targets, chunk_tokens=16)
        out.sum().backward()
        assert out.dtype == own[0].grad.dtype == own[1].grad.dtype == torch.float32
        results.append((out.detach(), *(each.grad for each in own)))
    for wanted, found in zip(*results, strict=True):
        assert (found - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize("divided", [vocabulary_cross_entropy, vocabulary_log_probabilities])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden": torch.zeros(6, 4)}, r"weight \(V / 1, d\), got \(6, 4\) and \(11, 5\)"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, r"needs targets \(6,\) of all of them, got \(5,\)"),
        ({"targets": torch.full((6,), 11)}, "target 11 is outside the vocabulary of 11"),
        ({"hidden": torch.zeros(6, 5)}, r"hidden is torch.float32 but weight is torch.float64"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"num_targets": 9}, r"num_targets=9, but 6 targets are not -100"),
    ],
)
def test_what_does_not_go_together_is_refused(divided, changes, told):
    hidden, weight, _ = _inputs(0, tokens=6)
    arguments = {"hidden": hidden, "weight": weight, "targets": torch.zeros(6, dtype=torch.int64), **changes}
    with pytest.raises(ValueError, match=told):
        divided(**arguments)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weights": torch.ones(5)}, r"targets \(6,\) need floating point weights of the same shape"),
        ({"weights": torch.ones(6, requires_grad=True)}, "weights get no gradient"),
        ({"z_loss": -1.0}, "z_loss must not be negative"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\)"),
    ],
)
def test_terms_that_cannot_be_meant_are_refused(changes, told):
    hidden, weight, targets = _inputs(0, tokens=6)
    with pytest.raises(ValueError, match=told):
        vocabulary_cross_entropy(hidden, weight, targets, **changes)
