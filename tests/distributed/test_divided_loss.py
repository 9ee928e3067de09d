"""Losses over a vocabulary that ranks divide, in tiles too, equal those of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from multipack.ops.loss import linear_cross_entropy, linear_log_probabilities

TERMS = {"z_loss": 0.03, "label_smoothing": 0.2}


def _distance(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def losses(world, dtype):
    """Worst error over options, with 28 words divided and chunks of 7 rows; and the loss without targets."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(24, 10, generator=draw, dtype=torch.float64).mul(3).to(dtype)
    weight = torch.randn(28, 10, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 28, (24,), generator=draw)
    targets[[0, 7, 8, 23]] = -100
    weights = torch.rand(24, generator=draw)
    upstream = torch.randn(24, generator=draw, dtype=torch.float64).to(dtype)
    words = 28 // world.size
    own = slice(words * world.rank, words * (world.rank + 1))
    worst = 0.0
    for loss, tiles, terms in (
        (linear_cross_entropy, 1, {}),
        (linear_cross_entropy, 1, {**TERMS, "weights": weights}),
        (linear_cross_entropy, 3, {**TERMS, "weights": weights}),
        (linear_log_probabilities, 1, {}),
        (linear_log_probabilities, 3, {}),
    ):
        divided = partial(loss, chunk_tokens=7, num_targets=20, group=dist.group.WORLD, **terms)
        wanted = [each.clone().requires_grad_() for each in (hidden, weight)]
        found = [each.clone().requires_grad_() for each in (hidden, weight[own])]
        results = loss(*wanted, targets, **terms), divided(*found, targets, vocabulary_tiles=tiles)
        for result in results:
            (result * upstream if result.dim() else result * 0.7).sum().backward()
        dist.all_reduce(found[0].grad)  # each rank has the part of its words
        assert results[1].dtype == results[0].dtype
        errors = [_distance(results[1], results[0]), _distance(found[0].grad, wanted[0].grad)]
        worst = max(worst, *errors, _distance(found[1].grad, wanted[1].grad[own]))
        with torch.no_grad():
            assert torch.equal(divided(*found, targets, vocabulary_tiles=tiles), results[1])
    nothing = linear_cross_entropy(*found, torch.full_like(targets, -100), group=dist.group.WORLD)
    nothing.backward()
    return worst, nothing.item()


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"), [(4, torch.float64, 1e-13), (2, torch.float32, 1e-5)]
)
def test_a_divided_vocabulary_equals_one_process(pools, size, dtype, tolerance):
    for worst, nothing in pools(size).run(losses, dtype):
        assert worst < tolerance
        assert nothing == 0
