"""Steps whose numbers are read one step later, as on a GPU: equal records, and no wait for the device in a step."""

import itertools
import traceback

import pytest
import torch
from torch import Tensor

from multipack.models.decoder import Decoder
from multipack.training import apply
from multipack.training.apply import may_read_later
from multipack.training.callbacks.callback import NonFiniteLoss
from multipack.training.callbacks.early_stopping import EarlyStopping
from multipack.training.callbacks.gradient_noise import GradientNoise
from multipack.training.callbacks.spikes import SpikeGuard
from multipack.training.run_config import compose
from multipack.training.train import train

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
"""Methods of tensors that wait for the device."""
ON_CPUS_ONLY = ("attention/loop.py", "checked_targets", "check_tokens")
"""Where values are read of tensors on a CPU, and of no others."""


@pytest.fixture
def reads(monkeypatch):
    """The functions of multipack that read a tensor, innermost first, one list a read."""
    found = []

    def counted(name, method):
        def call(tensor, *arguments, **named):
            frames = traceback.extract_stack()[:-1]
            own = [
                f"{each.filename} in {each.name}"
                for each in reversed(frames)
                if "/multipack/" in each.filename
            ]
            if own and not any(place in own[0] or place in own[1] for place in ON_CPUS_ONLY):
                found.append(own)
            return method(tensor, *arguments, **named)

        monkeypatch.setattr(Tensor, name, call)

    for name in READS:
        counted(name, getattr(Tensor, name))
    return found


@pytest.fixture
def later(monkeypatch):
    monkeypatch.setattr(apply, "may_read_later", lambda engine, callbacks: True)


def test_a_step_waits_for_nothing_but_the_numbers_of_the_step_before_it(words, tmp_path, files, later, reads):
    train(compose([*words, "train.steps=3", f"out={tmp_path / 'later'}"]))
    inside = [
        own
        for own in reads
        if any("apply.py in apply" in place or "forward_backward" in place for place in own)
    ]
    waits = [own[0] for own in inside if "in settle" not in own[0]]  # for the step before
    assert not waits
    assert len(inside) <= 3
    found = files(tmp_path / "later")
    assert [record["step"] for record in found.steps] == [1, 2, 3]


@pytest.mark.usefixtures("later")
def test_numbers_that_are_read_later_are_the_same(finished, words, tmp_path, files):
    train(compose([*words, f"out={tmp_path / 'later'}"]))
    now, found = (files(path).untimed for path in (finished, tmp_path / "later"))
    assert [record["step"] for record in now] == [record["step"] for record in found]
    for one, other in zip(now, found, strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_a_loss_that_is_not_finite_is_found_one_step_later_and_never_saved(
    words, tmp_path, files, later, monkeypatch
):
    forward, calls = Decoder.forward, itertools.count(1)

    def spoiled(self, batch):
        loss = forward(self, batch)
        return loss * float("nan") if self.training and next(calls) == 8 else loss  # of step 4

    monkeypatch.setattr(Decoder, "forward", spoiled)
    with pytest.raises(
        NonFiniteLoss, match=r"step 4 is not finite; nothing was saved after it.*step-00000003"
    ):
        train(compose([*words, f"out={tmp_path / 'run'}"]))
    assert [record["step"] for record in files(tmp_path / "run").steps] == [1, 2, 3]


class Engine:
    """What decides whether numbers may be read later."""

    def __init__(self, device="cuda", parameters="cuda", dtype=torch.bfloat16):
        self.world = type("World", (), {"device": torch.device(device)})
        self.parameters = {"weight": type("Parameter", (), {"is_cuda": parameters == "cuda"})}
        self.dtype = dtype


def test_numbers_are_read_at_once_where_they_decide():
    assert may_read_later(Engine(), [EarlyStopping(2)])
    for engine, callbacks in (
        (Engine("cpu", "cpu"), []),
        (Engine(parameters="cpu"), []),  # offload
        (Engine(dtype=torch.float16), []),
        (Engine(), [SpikeGuard("skip")]),
        (Engine(), [GradientNoise()]),
    ):
        assert not may_read_later(engine, callbacks)
