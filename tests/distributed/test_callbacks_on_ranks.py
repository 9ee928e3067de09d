"""Callbacks on two ranks: every rank sees the same values, and the noise is that of the known covariance."""

import pytest
import torch
from torch import nn

from multipack.parallel.build import replicate
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.training.callbacks.gradient_noise import GradientNoise
from multipack.training.optimizer import build_optimizer
from multipack.training.settings import OptimizerConfig


class Distance(nn.Module):
    """Σ ½ |θ − x|² over the rows x: a row's gradient is θ − x, of mean θ − E x and covariance Cov x."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4))
        self.second = nn.Parameter(torch.zeros(2))

    def forward(self, rows):
        return 0.5 * (torch.cat([self.first, self.second]) - rows).square().sum()


def watched(world):
    torch.manual_seed(0)
    model = Distance()
    optimizer = build_optimizer(model, OptimizerConfig())
    mesh = build_mesh(ParallelConfig(), world)
    engine = ModelEngine([model], optimizer, mesh, call=replicate(model, mesh.axis("dp_replicate")))
    noise = GradientNoise()
    noise.decay = 0.9999
    draw = torch.Generator().manual_seed(world.rank)
    for step in range(1, 121):
        # Ranks have small batches of different sizes, rank 1 sometimes none.
        sizes = [[3 + step % 2, 5], [step % 4, 7]][world.rank]
        whole = 3 + step % 2 + 5 + step % 4 + 7
        rows = [0.5 + torch.randn(size, 6, generator=draw) for size in sizes]
        noise.before_step(step)

        def watch(index, step=step, sizes=sizes, whole=whole):
            noise.micro_batch(index, engine, float(sum(sizes[: index + 1])), float(whole))

        engine.forward_backward(rows, whole, watch)
        found = noise.gradient(step, engine)
        engine.discard()
    return found, noise.state()


def test_two_ranks_see_the_same_and_the_noise_of_the_known_covariance(pools):
    first, second = pools(2).run(watched)
    assert first == second
    # tr Σ = 6 · 1, |G|² = 6 · ½².
    assert first[0] == {"gradient_noise": pytest.approx(6 / 1.5, rel=0.15)}
