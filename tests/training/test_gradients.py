import json

import pytest
import torch
from torch import nn

from multipack.models.decoder import Decoder
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.shapes import SHAPES
from multipack.training.gradients import GradientNoise, LayerNorms, layer_of
from multipack.training.optimizer import build_optimizer
from multipack.training.settings import OptimizerConfig


class Distance(nn.Module):
    """Σ ½ |θ − x|² over the rows x: a row's gradient is θ − x, of mean θ − E x and covariance Cov x."""

    def __init__(self, size):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size - 2))
        self.second = nn.Parameter(torch.zeros(2))

    def forward(self, rows):
        return 0.5 * (torch.cat([self.first, self.second]) - rows).square().sum()


def _engine(model, dtype=torch.float32, **options):
    return ModelEngine([model], build_optimizer(model, OptimizerConfig(**options)), Mesh(World()), dtype)


def _watched_step(noise, engine, micro_batches):
    """One step as the loop makes it; nothing is applied."""
    sizes = [len(rows) for rows in micro_batches]
    noise.before_step(1)
    engine.forward_backward(
        micro_batches,
        sum(sizes),
        lambda index: noise.micro_batch(index, engine, float(sum(sizes[: index + 1])), float(sum(sizes))),
    )
    found = noise.gradient(1, engine)
    engine.discard()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_noise_of_a_known_covariance_is_found(dtype):
    size, draw = 6, torch.Generator().manual_seed(3)
    deviations = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.5])
    mean = torch.full((size,), 0.5)
    expected = float(deviations.square().sum() / mean.square().sum())  # θ stays 0
    noise, engine = GradientNoise(), _engine(Distance(size), dtype)
    assert (engine.loss_scale > 1) == (dtype == torch.float16)
    noise.decay = 0.9999
    for step in range(1500):
        sizes = [4 + step % 3, 1 + step % 7, 9]  # small batches and steps of any size
        batches = [mean + deviations * torch.randn(rows, size, generator=draw) for rows in sizes]
        found = _watched_step(noise, engine, batches)
    assert found["gradient_noise"] == pytest.approx(expected, rel=0.15)
    assert expected == pytest.approx(11.67, abs=0.01)


def test_the_equations_of_the_appendix_for_a_single_step():
    noise, engine = GradientNoise(), _engine(Distance(3))
    small, rest = (
        torch.tensor([[1.0, 0.0, 2.0]]),
        torch.tensor([[1.0, 1.0, 2.0], [1.0, 0.5, 1.0], [1.0, 0.5, 1.0]]),
    )
    found = _watched_step(noise, engine, [small, rest])["gradient_noise"]
    small_square = float(small.mean(0).square().sum())
    big_square = float(torch.cat([small, rest]).mean(0).square().sum())
    trace = (small_square - big_square) / (1 / 1 - 1 / 4)
    square = (4 * big_square - 1 * small_square) / (4 - 1)
    assert found == pytest.approx(trace / square, rel=1e-5)


def test_no_noise_is_reported_where_the_gradient_is_all_noise_or_unseen():
    noise, engine = GradientNoise(), _engine(Distance(3))
    rows = torch.tensor([[9.0, 0.0, 0.0]])
    assert _watched_step(noise, engine, [rows, -rows]) == {}  # |G|² comes out negative
    alike = [torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[3.0, 0.0, 0.0]])]
    assert _watched_step(GradientNoise(), engine, alike) == {}  # tr Σ does: the whole has the larger gradient
    noise = GradientNoise()
    assert _watched_step(noise, engine, [rows, torch.zeros(0, 3)]) == {}  # all targets are in one micro-batch
    assert _watched_step(GradientNoise(), engine, [torch.zeros(0, 3), rows]) == {}  # none in the first


def test_a_step_that_overflowed_says_nothing():
    engine, noise, norms = _engine(Distance(3), torch.float16), GradientNoise(), LayerNorms()
    rows = [torch.tensor([[1.0, 2.0, 1.0]]), torch.tensor([[1.0, 1.0, 1.0]])]
    found, state = _watched_step(noise, engine, rows), noise.state()
    assert _watched_step(noise, engine, [rows[0], torch.full((1, 3), torch.inf)]) == found
    assert _watched_step(noise, engine, [torch.full((1, 3), torch.inf), rows[0]]) == found
    assert noise.state() == state
    engine.forward_backward([torch.full((1, 3), torch.inf)], 1)
    assert norms.gradient(1, engine) == {}


def test_one_micro_batch_is_an_error_that_says_what_to_set():
    noise, engine = GradientNoise(), _engine(Distance(3))
    with pytest.raises(ValueError, match=r"each rank has 1 a step: set plan\.packs_per_step"):
        _watched_step(noise, engine, [torch.ones(2, 3)])


def test_a_resumed_noise_goes_on():
    draw = torch.Generator().manual_seed(0)
    steps = [[1 + torch.randn(2, 3, generator=draw) for _ in range(3)] for _ in range(20)]
    engine, whole, before, after = _engine(Distance(3)), GradientNoise(), GradientNoise(), GradientNoise()
    expected = [_watched_step(whole, engine, batches) for batches in steps]
    for batches in steps[:10]:
        _watched_step(before, engine, batches)
    after.load_state(json.loads(json.dumps(before.state())))
    assert [_watched_step(after, engine, batches) for batches in steps[10:]] == expected[10:]
    assert expected[-1]["gradient_noise"] > 0


def test_norms_by_layer_are_those_of_their_tensors_and_sum_to_the_global_one():
    torch.manual_seed(0)
    model = Decoder(SHAPES["tiny"].with_vocabulary(50))
    engine = _engine(model, rules=["blocks.1.feed_forward freeze"])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    found = LayerNorms().gradient(1, engine)
    layers = {name.partition("/")[2] for name in found}
    blocks = {f"blocks.{number}" for number in range(len(model.blocks))}
    assert layers == blocks | {"embedding", "norm"} | ({"head"} if hasattr(model, "head") else set())
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for layer in layers:
        own = [p for name, p in trained if layer_of(name) == layer]
        gradient = torch.cat([p.grad.reshape(-1) for p in own]).double().norm()
        weight = torch.cat([p.detach().reshape(-1) for p in own]).double().norm()
        assert found[f"grad_norm/{layer}"] == pytest.approx(float(gradient), rel=1e-5)
        assert found[f"weight_norm/{layer}"] == pytest.approx(float(weight), rel=1e-5)
    together = sum(value**2 for name, value in found.items() if name.startswith("grad_norm/")) ** 0.5
    assert together == pytest.approx(engine.clip(0.0), rel=1e-5)


def test_norms_of_bf16_weights_are_summed_in_float32():
    model = Distance(4096).to(torch.bfloat16)
    engine = _engine(model)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.ones_like(parameter)
    found = LayerNorms().gradient(1, engine)
    assert found["weight_norm/first"] == pytest.approx(4094**0.5, rel=1e-6)


def test_layers_are_named_by_their_blocks():
    names = [
        "blocks.3.attention.query.weight",
        "blocks.12.up.bias",
        "embedding.weight",
        "norm.weight",
        "scale",
    ]
    assert [layer_of(name) for name in names] == ["blocks.3", "blocks.12", "embedding", "norm", "scale"]
