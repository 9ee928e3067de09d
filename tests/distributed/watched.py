"""Run by torchrun from test_observers.py: what observers see on every rank."""

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import nn

from multipack.parallel.build import plain_engine
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.world import connected
from multipack.training.averaging import MovingAverage
from multipack.training.gradients import GradientNoise, LayerNorms
from multipack.training.optimizer import build_optimizer
from multipack.training.settings import OptimizerConfig

sys.path.append(str(Path(__file__).parent))
tiny = importlib.import_module("sharding")


class Distance(nn.Module):
    """Σ ½ |θ − x|² over the rows x: a row's gradient is θ − x, of mean θ − E x and covariance Cov x."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4))
        self.second = nn.Parameter(torch.zeros(2))

    def forward(self, rows):
        return 0.5 * (torch.cat([self.first, self.second]) - rows).square().sum()


def main():
    with connected("cpu", timeout_seconds=20) as world:
        torch.manual_seed(0)
        model = Distance()
        optimizer = build_optimizer(model, OptimizerConfig())
        engine = plain_engine(model, optimizer, build_mesh(ParallelConfig(), world))
        average, noise, norms = MovingAverage(0.9), GradientNoise(), LayerNorms()
        noise.decay = 0.9999
        draw = torch.Generator().manual_seed(world.rank)
        for step in range(1, 601):
            # Ranks have unlike small batches, rank 1 now and then none at all.
            sizes = [[3 + step % 2, 5], [step % 4, 7]][world.rank]
            whole = 3 + step % 2 + 5 + step % 4 + 7
            rows = [0.5 + torch.randn(size, 6, generator=draw) for size in sizes]
            noise.before_step(step)

            def watch(index, step=step, sizes=sizes, whole=whole):
                noise.micro_batch(index, engine, float(sum(sizes[: index + 1])), float(whole))

            engine.forward_backward(rows, whole, watch)
            found = {**noise.gradient(step, engine), **norms.gradient(step, engine)}
            if step > 590:
                engine.step(1e-3)
                average.after_step(step, engine, applied=True)
            else:
                engine.discard()
        report = {
            "found": found,
            "noise": noise.state(),
            "means": tiny.state_hash({"means": average.tensors()}),
            "steps": average.steps,
        }
        (Path(sys.argv[1]) / f"rank-{world.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
