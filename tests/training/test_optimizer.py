import itertools
import math

import pytest
import torch

from multipack.models.decoder import Decoder
from multipack.shapes import ModelShape
from multipack.training.optimizer import OptimizerConfig, build_optimizer, decay_groups, learning_rate


def test_warm_up_rises_to_the_peak_and_cosine_falls_to_the_floor():
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(step, 24, config) for step in range(1, 25)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[13] == pytest.approx(0.1 + 0.9 / 2)  # half-way: the mean of peak and floor
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_schedule_ends_at_decay_steps_and_stays():
    config = OptimizerConfig(lr=1.0, min_lr=0.2, warmup_steps=0, decay_steps=10)
    assert learning_rate(10, 100, config) == pytest.approx(0.2)
    assert learning_rate(90, 100, config) == pytest.approx(0.2)
    assert learning_rate(5, 100, config) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 2)))


def test_constant_schedule_keeps_the_peak():
    config = OptimizerConfig(lr=0.5, min_lr=0.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(step, 9, config) for step in (1, 2, 9)] == [0.25, 0.5, 0.5]


def test_only_matrices_and_embeddings_decay():
    model = Decoder(ModelShape(2, 2, 2, 16, 32, 11, 8, "learned", "layernorm", "gelu", bias=True))
    decayed, other = decay_groups(model)
    assert {p.dim() for p in decayed} == {2}
    assert {p.dim() for p in other} == {1}
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_adamw_equals_its_definition_in_float64():
    weight = torch.nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.1]], dtype=torch.float64))
    config = OptimizerConfig(lr=0.1, min_lr=0.1, weight_decay=0.2, beta1=0.9, beta2=0.95)
    optimizer = build_optimizer(torch.nn.ParameterList([weight]), config)
    expected, m, v = weight.detach().clone(), 0.0, 0.0
    for step in range(1, 4):
        gradient = torch.sin(weight.detach() * step)
        weight.grad = gradient.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        expected = expected * (1 - 0.1 * 0.2)
        expected = expected - 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": 0.0}, "optimizer.lr"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "optimizer.min_lr"),
        ({"beta2": 1.0}, "optimizer.beta2"),
        ({"clip": -1.0}, "optimizer.clip"),
    ],
)
def test_impossible_settings_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**wrong)
