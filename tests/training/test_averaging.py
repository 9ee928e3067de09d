import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.training.averaging import MovingAverage
from multipack.training.optimizer import build_optimizer
from multipack.training.settings import OptimizerConfig


class SumOfSquares(nn.Module):
    """A model in miniature: takes a batch, returns a summed loss."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, batch):
        return (self.linear(batch.to(self.scale.dtype)) * self.scale).square().sum().float()


def _engine(dtype=torch.float32, rules=()):
    torch.manual_seed(0)
    model = SumOfSquares(dtype)
    return ModelEngine([model], build_optimizer(model, OptimizerConfig(rules=list(rules))), Mesh(World()))


def _steps(engine, average, first, last, left_out=()):
    """Steps first … last, each followed by `after_step`; returns the weights after each applied one."""
    history = []
    for step in range(first, last + 1):
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        engine.forward_backward([rows], 4)
        if step in left_out:
            engine.optimizer.zero_grad()
        else:
            engine.step(0.05)
            history.append({name: p.detach().double().clone() for name, p in engine.model.named_parameters()})
        average.after_step(step, engine, applied=step not in left_out)
    return history


def test_the_mean_is_the_weighted_one_over_applied_steps_and_forgets_the_beginning():
    engine, average = _engine(), MovingAverage(0.8)
    history = _steps(engine, average, 1, 6, left_out={3})
    assert average.steps == 5
    shares = [0.8 ** (4 - i) for i in range(5)]
    for name, mean in average.tensors().items():
        expected = sum(s * weights[name] for s, weights in zip(shares, history, strict=True)) / sum(shares)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)


def test_after_one_step_the_mean_is_the_weights_themselves():
    engine, average = _engine(), MovingAverage(0.999)
    assert average.weightings(engine) == []  # there is nothing to evaluate before
    assert average.tensors() == {}
    _steps(engine, average, 1, 1)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(average.tensors()[name], parameter)


def test_weights_of_less_precision_are_averaged_in_float32():
    engine, average = _engine(torch.bfloat16), MovingAverage(0.5)
    history = _steps(engine, average, 1, 4)
    shares = [0.5 ** (3 - i) for i in range(4)]
    for name, mean in average.tensors().items():
        assert mean.dtype == torch.float32
        expected = sum(s * weights[name] for s, weights in zip(shares, history, strict=True)) / sum(shares)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-7)


def test_the_model_has_the_mean_inside_the_context_and_its_own_weights_after_it_even_after_an_error():
    engine, average = _engine(), MovingAverage(0.9)
    _steps(engine, average, 1, 4)
    own = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    means = {name: mean.clone() for name, mean in average.tensors().items()}

    def look_and_fail():
        [(suffix, context)] = average.weightings(engine)
        assert suffix == "_ema"
        with context, engine.evaluating() as model:
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, means[name])
                assert not torch.equal(parameter, own[name])
            raise KeyError("in the evaluation")

    with pytest.raises(KeyError):
        look_and_fail()
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, own[name])
        assert torch.equal(average.tensors()[name], means[name])
        assert parameter.requires_grad


def test_frozen_weights_have_no_mean():
    engine, average = _engine(rules=["linear freeze"]), MovingAverage(0.9)
    _steps(engine, average, 1, 2)
    assert set(average.tensors()) == {"scale"}


def test_a_resumed_mean_is_bit_for_bit_the_one_that_never_stopped(tmp_path):
    whole_engine, whole = _engine(), MovingAverage(0.9)
    _steps(whole_engine, whole, 1, 8)
    engine, before = _engine(), MovingAverage(0.9)
    _steps(engine, before, 1, 5)
    save_file(before.tensors(), tmp_path / "average.safetensors")
    state = json.loads(json.dumps(before.state()))
    after = MovingAverage(0.9)
    after.load_state(state)
    after.load_tensors(load_file(tmp_path / "average.safetensors"))
    _steps(engine, after, 6, 8)
    assert after.state() == whole.state()
    for name, mean in whole.tensors().items():
        assert torch.equal(mean, after.tensors()[name]), name


def test_a_mean_of_other_weights_is_refused():
    engine, average = _engine(), MovingAverage(0.9)
    average.load_state({"steps": 3})
    average.load_tensors({"linear.weight": torch.zeros(2, 3), "other": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"over other weights: linear\.bias, other, scale"):
        average.after_step(4, engine, applied=True)
    average.load_tensors({name: torch.zeros(5) for name, _ in engine.model.named_parameters()})
    with pytest.raises(ValueError, match=r"has shape \(5,\)"):
        _ = [context.__enter__() for _, context in average.weightings(engine)]
