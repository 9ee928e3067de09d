"""Losses over a vocabulary and tokens that ranks divide: equal to those of one process."""

from functools import partial

import pytest
import torch

from multipack.ops.loss import linear_cross_entropy, linear_log_probabilities
from multipack.parallel.vocabulary import vocabulary_cross_entropy, vocabulary_log_probabilities


def _distance(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def losses(world, dtype):
    """Every option in one go, in chunks, against the functions of one process, with words and tokens divided."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(24, 10, generator=draw, dtype=torch.float64).mul(3).to(dtype)
    weight = torch.randn(28, 10, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 28, (24,), generator=draw)
    targets[[0, 7, 8, 23]] = -100
    weights = torch.rand(24, generator=draw)
    upstream = torch.randn(24, generator=draw, dtype=torch.float64).to(dtype)
    tokens, words = 24 // world.size, 28 // world.size
    own_tokens = slice(tokens * world.rank, tokens * (world.rank + 1))
    own_words = slice(words * world.rank, words * (world.rank + 1))
    options = {"chunk_tokens": 7, "num_targets": 20}
    terms = {"weights": weights, "z_loss": 0.03, "label_smoothing": 0.2}
    worst = 0.0
    for whole, divided, keywords in (
        (linear_cross_entropy, vocabulary_cross_entropy, {}),
        (linear_cross_entropy, vocabulary_cross_entropy, terms),
        (linear_log_probabilities, vocabulary_log_probabilities, {}),
    ):
        whole, divided = (partial(each, **options, **keywords) for each in (whole, divided))
        wanted = [each.clone().requires_grad_() for each in (hidden, weight)]
        found = [each.clone().requires_grad_() for each in (hidden[own_tokens], weight[own_words])]
        results = [whole(*wanted, targets), divided(*found, targets)]
        for result in results:
            (result * upstream if result.dim() else result * 0.7).sum().backward()
        assert results[1].dtype == results[0].dtype
        worst = max(
            worst,
            _distance(results[1], results[0]),
            _distance(found[0].grad, wanted[0].grad[own_tokens]),
            _distance(found[1].grad, wanted[1].grad[own_words]),
        )
        with torch.no_grad():
            assert torch.equal(divided(*found, targets), results[1])
    nothing = torch.full_like(targets, -100)
    empty = vocabulary_cross_entropy(found[0], found[1], nothing)
    empty.backward()
    return worst, empty.item()


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"), [(4, torch.float64, 1e-12), (2, torch.float32, 1e-5)]
)
def test_losses_over_a_divided_vocabulary(pools, size, dtype, tolerance):
    for worst, nothing in pools(size).run(losses, dtype):
        assert worst < tolerance
        assert nothing == 0
