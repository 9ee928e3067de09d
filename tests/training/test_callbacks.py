"""Callbacks: the order of hooks, spike guard, early stopping, gradient noise, traces."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.run import RunDirectory
from multipack.training.assemble import build_callbacks
from multipack.training.callbacks import trackers
from multipack.training.callbacks.callback import RunStopped
from multipack.training.callbacks.early_stopping import EarlyStopping
from multipack.training.callbacks.gradient_noise import GradientNoise
from multipack.training.callbacks.profiler import Trace
from multipack.training.callbacks.spikes import DECAY, MOST_IN_A_ROW, WARM_UP, RunningMoments, SpikeGuard
from multipack.training.optimizer import build_optimizer
from multipack.training.run_config import compose, compose_run
from multipack.training.settings import OptimizerConfig
from multipack.training.train import train


class Distance(nn.Module):
    """Σ ½ |θ − x|² over the rows x: a row's gradient is θ − x, with mean θ − E x and covariance Cov x."""

    def __init__(self, size):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size - 2))
        self.second = nn.Parameter(torch.zeros(2))

    def forward(self, rows):
        theta = torch.cat([self.first, self.second])
        return 0.5 * (theta - rows.to(theta.dtype)).square().sum().float()


def _engine(model, dtype=torch.float32, **options):
    optimizer = build_optimizer(model, OptimizerConfig(**options))
    return ModelEngine([model], optimizer, Mesh(World()), dtype)


def _restored(callback):
    """The state of a callback after a checkpoint."""
    return json.loads(json.dumps(callback.state()))


# The loop


def test_hooks_are_called_in_order_and_a_skipped_step_changes_nothing(
    words, tmp_path, watched, recorder, files
):
    seen, other = (
        recorder(gradient=lambda step: {"my_metric": float(step)}, accept=lambda step: False),
        recorder(),
    )
    other.name = "other"
    watched += [seen, other]
    more = ["plan.packs_per_step=4", "train.steps=2", "train.eval_every=2"]
    train(compose([*words, *more, f"out={tmp_path / 'run'}"]))
    micro = [("micro_batch", index) for index in range(3)]

    def hooks(step):
        names = ["gradient", "accept", "after_step", "record"]
        return [("before_step", step), *micro, *[(name, step) for name in names]]

    def evaluation(step):
        return [("record", step), ("stop_reason", step), ("sample", step)]

    assert seen.seen == [*evaluation(0), *hooks(1), *hooks(2), *evaluation(2), ("close", False)]
    assert other.seen == seen.seen
    found = files(tmp_path / "run")
    assert [record["my_metric"] for record in found.steps] == [1.0, 2.0]
    assert [record["skipped"] for record in found.steps] == [1.0, 1.0]
    assert found.evaluations[0]["val_loss"] == found.evaluations[1]["val_loss"]  # no step changed the weights


def test_a_callback_ends_a_run_that_can_be_resumed(words, tmp_path, watched, recorder, capsys):
    watched.append(recorder(stop_reason=lambda step: "enough is enough" if step == 2 else ""))
    out = tmp_path / "run"
    result = train(compose([*words, "train.steps=4", "train.eval_every=2", f"out={out}"]))
    assert (result.step, result.stopped_by) == (2, None)
    assert "ended after step 2 of 4: enough is enough" in capsys.readouterr().out
    assert RunDirectory(out).latest_checkpoint().name == "step-00000002"
    watched[0] = recorder()
    assert train(compose_run([f"out={out}", "train.resume=true"])).step == 4
    assert watched[0].loaded > 0


def test_each_setting_adds_its_callback(trainer, monkeypatch, tmp_path):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", ("json", None))
    everything = {
        "train.profile=true": "trace",
        "log.gradient_noise=true": "gradient_noise",
        "train.spike=skip": "spikes",
        "train.patience=2": "stopping",
        "track.to=[wandb]": "trackers",
    }
    assert [callback.name for callback in trainer(*everything).callbacks] == list(everything.values())
    assert trainer("track.to=[wandb]", "track.mode=disabled").callbacks == []
    config, run = compose(["train.profile=true"]), RunDirectory(tmp_path)
    assert build_callbacks(config, World(rank=1), run, print) == []
    (tmp_path / "trace.json").touch()  # of an earlier process of the run
    assert build_callbacks(config, World(), run, print) == []


# Spike guard


def _judge(guard, losses, norms=None, first=1):
    norms = np.ones(len(losses)) if norms is None else norms
    pairs = zip(losses, norms, strict=True)
    return [guard.accept(first + i, float(loss), float(norm)) for i, (loss, norm) in enumerate(pairs)]


def _normal(count, seed=0):
    draw = np.random.default_rng(seed)
    return 3 + 0.1 * draw.standard_normal(count), 1 + 0.05 * draw.standard_normal(count)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60))
@settings(deadline=None, max_examples=50)
def test_moments_are_those_of_the_weighted_values(values):
    moments = RunningMoments()
    for value in values:
        moments.add(value)
    weights = DECAY ** np.arange(len(values) - 1, -1, -1)
    mean = np.average(values, weights=weights)
    variance = np.average((np.array(values) - mean) ** 2, weights=weights)
    assert moments.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert moments.variance == pytest.approx(variance, rel=1e-7, abs=1e-9)


def test_a_spike_of_either_is_skipped_and_reported():
    for loss, norm, named in ((5.0, 1.0, "loss 5"), (3.0, 40.0, "grad_norm 40")):
        reported = []
        guard = SpikeGuard("skip", reported.append)
        assert all(_judge(guard, *_normal(300)))
        before = guard.state()["moments"]
        assert not guard.accept(301, loss, norm)
        assert guard.state()["moments"] == before  # skipped steps do not enter the statistics
        assert "step 301" in reported[0]
        assert named in reported[0]
        assert guard.accept(302, 3.0, 1.0)


def test_what_is_not_a_spike():
    guard = SpikeGuard("stop")
    assert all(_judge(guard, [3.0] * (WARM_UP - 1) + [50.0]))  # the statistics are not full
    guard = SpikeGuard("stop")
    _judge(guard, *_normal(WARM_UP))
    assert guard.accept(WARM_UP + 1, 0.1, 0.01)  # a low value
    guard = SpikeGuard("stop")
    _judge(guard, [2.0] * 100)
    assert guard.accept(101, 2.001, 1.0)  # rounding of a constant loss
    with pytest.raises(RunStopped, match=r"step 102 .*loss 2\.1 .*train\.spike=stop"):
        guard.accept(102, 2.1, 1.0)


def test_many_consecutive_skips_stop_the_run():
    guard = SpikeGuard("skip", lambda line: None)
    _judge(guard, *_normal(100))
    for first in (101, 111):
        assert not any(_judge(guard, [9.0] * (MOST_IN_A_ROW - 1), first=first))
        assert guard.accept(first + 9, 3.0, 1.0)  # an applied step resets the count
    _judge(guard, [9.0] * (MOST_IN_A_ROW - 1), first=121)
    with pytest.raises(RunStopped, match=f"{MOST_IN_A_ROW} consecutive steps"):
        guard.accept(130, 9.0, 1.0)


def test_a_resumed_guard_decides_as_one_that_never_stopped():
    whole, before, after = (SpikeGuard("skip", lambda line: None) for _ in range(3))
    losses, norms = _normal(300, seed=1)
    losses[200::23] += 1.0
    decisions = _judge(whole, losses, norms)
    assert not all(decisions[150:])
    first = _judge(before, losses[:150], norms[:150])
    after.load_state(_restored(before))
    assert first + _judge(after, losses[150:], norms[150:], first=151) == decisions
    assert after.state() == whole.state()


# Early stopping


def test_the_run_stops_when_patience_ends():
    """Resumed after every evaluation."""
    for patience, losses, stops in (
        (2, [3.0, 2.0, 2.5, 1.9, 2.0, 1.95], [5]),
        (1, [2.0, 2.0], [1]),  # an equal loss is no improvement
    ):
        stopping, reasons = EarlyStopping(patience), []
        for number, loss in enumerate(losses):
            reasons.append(stopping.stop_reason(10 * number, loss))
            state, stopping = _restored(stopping), EarlyStopping(patience)
            stopping.load_state(state)
        assert [number for number, reason in enumerate(reasons) if reason] == stops
        assert all(f"train.patience={patience}" in reason for reason in reasons if reason)


# Gradient noise


def _noisy_step(noise, engine, micro_batches):
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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_a_single_step_follows_the_equations_of_the_appendix(dtype, tolerance):
    """Gradients of fp16 are scaled; tests/distributed/test_callbacks_on_ranks.py has noise of a known covariance."""
    noise, engine = GradientNoise(), _engine(Distance(3), dtype)
    small = torch.tensor([[1.0, 0.0, 2.0]])
    rest = torch.tensor([[1.0, 1.0, 2.0], [1.0, 0.5, 1.0], [1.0, 0.5, 1.0]])
    found = _noisy_step(noise, engine, [small, rest])["gradient_noise"]
    small_square = float(small.mean(0).square().sum())
    big_square = float(torch.cat([small, rest]).mean(0).square().sum())
    trace = (small_square - big_square) / (1 / 1 - 1 / 4)
    square = (4 * big_square - 1 * small_square) / (4 - 1)
    assert found == pytest.approx(trace / square, rel=tolerance)


def test_noise_that_cannot_be_estimated_is_not_reported():
    engine, rows = _engine(Distance(3)), torch.tensor([[9.0, 0.0, 0.0]])
    larger = [torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[3.0, 0.0, 0.0]])]
    nothing = torch.zeros(0, 3)
    for batches in ([rows, -rows], larger, [rows, nothing], [nothing, rows]):
        assert _noisy_step(GradientNoise(), engine, batches) == {}


def test_a_gradient_that_overflowed_is_not_counted():
    engine, noise = _engine(Distance(3), torch.float16), GradientNoise()
    rows, infinite = torch.tensor([[1.0, 2.0, 1.0]]), torch.full((1, 3), torch.inf)
    _noisy_step(noise, engine, [rows, torch.ones(1, 3)])
    state = noise.state()
    _noisy_step(noise, engine, [rows, infinite])
    _noisy_step(noise, engine, [infinite, rows])
    assert noise.state() == state


# Profiler


def _traced_steps(trace, steps):
    model = nn.Linear(4, 4)
    for step in range(1, steps + 1):
        trace.before_step(step)
        model(torch.ones(2, 4)).sum().backward()
        trace.after_step(step, None, applied=True)


@pytest.mark.parametrize(("steps", "traced"), [(7, {2, 3, 4}), (4, {2, 3})])
def test_one_trace_of_a_few_steps_is_written(tmp_path, steps, traced):
    reported, path = [], tmp_path / "trace.json"
    trace = Trace(path, torch.device("cpu"), reported.append)
    _traced_steps(trace, steps)
    trace.close(failed=steps == 4)
    names = {str(event.get("name", "")) for event in json.loads(path.read_text())["traceEvents"]}
    assert {f"ProfilerStep#{number}" for number in traced} <= names
    assert "ProfilerStep#1" not in names
    assert any("addmm" in name for name in names)
    assert [str(path) in line for line in reported] == [True]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_ends_before_its_trace_says_so(tmp_path):
    reported = []
    trace = Trace(tmp_path / "trace.json", torch.device("cpu"), reported.append)
    _traced_steps(trace, 2)
    trace.close(failed=False)
    assert list(tmp_path.iterdir()) == []
    assert ["train.profile" in line for line in reported] == [True]


def test_within_a_step_no_callback_waits_for_the_device():
    """Fake tensors raise where their values are read."""
    with FakeTensorMode():
        weight, gradient = (torch.empty(8, 4, device="cuda") for _ in range(2))
        engine = SimpleNamespace(
            parameters={"weight": weight.requires_grad_()},
            gradients=lambda: {"weight": gradient},
            mesh=SimpleNamespace(gradient_size=1),
            loss_scale=1.0,
        )
        for callback in (GradientNoise(), SpikeGuard("skip")):
            callback.before_step(1)
            callback.micro_batch(0, engine, 3.0, 9.0)
            callback.after_step(1, engine, True)
