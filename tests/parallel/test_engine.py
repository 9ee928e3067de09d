"""`ModelEngine` in one process; several are in tests/distributed."""

import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.parallel.engine import DeviceClock, ModelEngine, StepResult
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.training.optimizer import build_optimizer
from multipack.training.settings import OptimizerConfig

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
tiny = importlib.import_module("sharding")


class SumOfSquares(nn.Module):
    """A model in miniature: takes a batch, returns a summed loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, batch):
        return (self.linear(batch) * self.scale).square().sum()


def same(state, other):
    return state.keys() == other.keys() and all(
        state[group].keys() == other[group].keys()
        and all(torch.equal(value, other[group][name]) for name, value in state[group].items())
        for group in state
    )


def engine_of(*options, **more):
    model = SumOfSquares()
    return ModelEngine([model], build_optimizer(model, OptimizerConfig()), Mesh(World()), *options, **more)


def weights_of(engine):
    return [parameter.detach().clone() for parameter in engine.model.parameters()]


def norm_of(model):
    return float(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).norm())


@pytest.fixture
def engine():
    torch.manual_seed(0)
    ticks, made = itertools.count(), engine_of()
    made.clock.mark = lambda: float(next(ticks))
    return made


def test_places_of_a_step_increase_in_the_order_of_its_passes():
    model, watch = SumOfSquares(), tiny.Places()
    engine = ModelEngine([model], torch.optim.SGD(model.parameters()), Mesh(World(watch=watch)))
    for step in (7, 8):
        engine.world.watch.at_step(step)
        engine.forward_backward([torch.randn(2, 3)] * 2, 4)
        engine.clip(1.0)
        engine.step(0.1)
    assert watch.seen == sorted(watch.seen)
    assert [f"{number} {stage}" for step, number, stage in watch.seen if step == 8] == [
        "0 reading its packs",
        "1 forward and backward passes",
        "2 forward pass of micro-batch 1",
        "3 backward pass of micro-batch 1",
        "4 forward pass of micro-batch 2",
        "5 backward pass of micro-batch 2",
        "6 after its backward passes",
        "7 optimizer step",
        "8 after the optimizer step",
    ]


def test_micro_batches_accumulate_the_gradient_of_the_whole(engine):
    rows = torch.randn(6, 3)
    result = engine.forward_backward([rows[:1], rows[1:4], rows[4:]], denominator=5)
    gradients = [p.grad.clone() for p in engine.model.parameters()]
    assert len(result.losses) == result.forward_seconds == result.backward_seconds == 3
    engine.model.zero_grad()
    loss = engine.model(rows)
    (loss / 5).backward()
    assert sum(result.losses) == pytest.approx(float(loss.detach()), rel=1e-6)
    for found, parameter in zip(gradients, engine.model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6)


def test_clip_returns_the_norm_before_and_zero_never_clips(engine):
    rows = torch.randn(4, 3)
    engine.forward_backward([rows], 1)
    norm = norm_of(engine.model)
    assert engine.clip(0.0) == pytest.approx(norm, rel=1e-6)
    assert engine.clip(0.5) == pytest.approx(norm, rel=1e-6)
    assert norm_of(engine.model) == pytest.approx(0.5, rel=1e-4)


def test_a_checkpoint_of_another_model_is_refused(engine):
    state = engine.state()
    fewer = {name: tensor for name, tensor in state["model"].items() if name != "scale"}
    longer = {**state["model"], "scale": torch.ones(3)}
    for model, named in ((fewer, "lacks scale"), (longer, r"scale \(3,\) instead of \(2,\)")):
        with pytest.raises(ValueError, match=named):
            engine.load_state(tiny.Whole({"model": model}))


def test_evaluation_changes_neither_mode_nor_gradients(engine):
    engine.model.train()
    with engine.evaluating() as model:
        assert not model.training
        assert not model(torch.randn(2, 3)).requires_grad
    assert engine.model.training


@pytest.fixture
def half():
    torch.manual_seed(0)
    return engine_of(torch.float16)


def test_fp16_scales_the_loss_and_gives_the_gradient_of_fp32(half):
    rows = torch.randn(6, 3)
    expected = SumOfSquares()
    expected.load_state_dict(half.model.state_dict())
    (expected(rows) / 600).backward()
    seen = []
    half.forward_backward([rows[:2], rows[2:]], 600, lambda index: seen.append((index, half.loss_scale)))
    assert seen == [(0, 65536.0)]  # after every micro-batch but the last
    assert half.clip(0.0) == pytest.approx(norm_of(expected), rel=5e-3)
    assert not half.overflowed
    for found, wanted in zip(half.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-2, atol=1e-2)
    before = weights_of(half)
    half.step(1e-2)
    assert any(not torch.equal(a, b) for a, b in zip(before, half.model.parameters(), strict=True))


def test_an_overflow_is_reported_and_halves_the_scale(half):
    before = weights_of(half)
    half.forward_backward([torch.full((2, 3), 300.0)], 1)  # squares beyond 65,504
    half.clip(1.0)
    assert half.overflowed
    half.discard()
    assert not half.overflowed
    assert half.loss_scale == 32768.0
    assert all(torch.equal(a, b) for a, b in zip(before, half.model.parameters(), strict=True))
    half.forward_backward([torch.randn(2, 3)], 600)
    half.clip(1.0)
    assert not half.overflowed
    half.step(1e-3)
    other = engine_of(torch.float16)
    other.load_state(tiny.Whole(half.state()))
    assert other.loss_scale == half.loss_scale == 32768.0
    assert same(other.state(), half.state())


def test_parameter_groups_scale_the_learning_rate_and_discard_skips_a_step(engine):
    before = weights_of(engine)
    engine.forward_backward([torch.randn(2, 3)], 1)
    engine.discard()
    assert not engine.gradients()
    engine.optimizer.param_groups[0]["lr_scale"] = 0.5
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True))
    engine.forward_backward([torch.randn(2, 3)], 1)
    engine.step(0.2)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1, 0.2]


class Reads(TorchDispatchMode):
    """Counts operators that read values of tensors on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator.name() in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")
        return operator(*args, **(kwargs or {}))


def test_a_step_reads_no_value_of_the_device():
    torch.manual_seed(0)
    engine, same_engine = engine_of(), engine_of()
    same_engine.model.load_state_dict(engine.model.state_dict())
    rows = [torch.randn(2, 3) for _ in range(4)]
    for max_norm in (0.0, 0.01, 100.0):
        with Reads() as reads:
            engine.forward_backward(rows, 8)
            norm = engine.clip_on_device(max_norm)
            engine.step(0.1)
        assert reads.count == 0
        same_engine.forward_backward(rows, 8)
        assert same_engine.clip(max_norm) == pytest.approx(float(norm))
        same_engine.step(0.1)
        for own, other in zip(weights_of(engine), weights_of(same_engine), strict=True):
            assert torch.allclose(own, other, rtol=1e-5)


def test_weights_are_cast_once_a_step():
    torch.manual_seed(0)
    engine, rows = engine_of(torch.bfloat16), [torch.randn(4, 3) for _ in range(3)]
    engine.forward_backward(rows[:1], 3)
    for batch in rows[1:]:
        engine.forward_backward([batch], 3)
    expected = [parameter.grad.clone() for parameter in engine.model.parameters()]
    engine.discard()
    with tiny.Casts(engine.model.linear.weight.shape) as casts:
        engine.forward_backward(rows, 3)
    assert casts.count == 1
    for parameter, gradient in zip(engine.model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    engine.step(0.1)
    with tiny.Casts(engine.model.linear.weight.shape) as casts:  # the weights have changed
        engine.forward_backward(rows, 3)
    assert casts.count == 1


def test_gradients_are_complete_layer_by_layer_when_they_are_sent(monkeypatch):
    """DDP sends the gradients of a layer while those of earlier layers are computed, in the last micro-batch."""
    monkeypatch.setattr(Mesh, "gradient_size", 2)
    engine, complete = engine_of(torch.bfloat16), []
    engine.model.linear = nn.Sequential(nn.Linear(3, 3), engine.model.linear)
    engine.model.linear[1].weight.register_post_accumulate_grad_hook(lambda _: complete.append("weight"))
    rows = [torch.randn(4, 3, requires_grad=True) for _ in range(3)]
    rows[2].register_hook(lambda _: complete.append("inputs of the first layer"))
    engine.forward_backward(rows, 3)
    assert complete == ["weight", "weight", "weight", "inputs of the first layer"]


def test_synchronization_is_what_the_last_backward_pass_takes_beyond_the_pace_of_the_others():
    clock = DeviceClock(torch.device("cpu"))
    forward, backward = [(0, 1), (3, 5), (9, 10)], [(1, 3), (5, 9), (10, 15)]
    result = StepResult(torch.zeros(3), forward, backward, clock)
    assert result.synchronizing_seconds == 5 - 1 * (2 + 4) / (1 + 2)
    assert StepResult(torch.zeros(3), forward, [*backward[:2], (10, 11)], clock).synchronizing_seconds == 0
    assert math.isnan(StepResult(torch.zeros(1), forward[:1], backward[:1], clock).synchronizing_seconds)
