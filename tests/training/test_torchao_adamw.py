"""AdamW of torchao with 4-bit moments: equal to its own class."""

import sys

import pytest
import torch

from multipack.training.checks import check
from multipack.training.optimizer import build_optimizer
from multipack.training.run_config import compose
from multipack.training.settings import OptimizerConfig

NAME = "adamw_4bit_ao"


def library():
    return pytest.importorskip("torchao.optim", reason="torchao is not installed")


@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.slow)])
def test_updates_are_those_of_the_library(stance):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Linear(96, 64) for _ in range(2))  # its bias has moments of 32 bits
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 1e-2, "weight_decay": 0.1}
    groups = [{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}]
    expected = library().AdamW4bit(groups, betas=(0.9, 0.95), **options)
    found = build_optimizer(ours, OptimizerConfig(name=NAME, **options))
    for _ in range(3):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        found.step()
        with torch.compiler.set_stance(stance):  # torchao compiles its updates, which ours does on GPUs
            expected.step()
    tolerance = 0.0 if stance == "force_eager" else 1e-6
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
        assert all(type(value) is torch.Tensor for value in found.state[one].values())
    assert found.state[ours.weight]["exp_avg_codes"].dtype == torch.uint8


@pytest.mark.parametrize(
    "more",
    [
        "parallel.data=zero3",
        "parallel.data=zero2",
        "parallel.tensor=2",
        "parallel.offload=cpu parallel.data=zero3",
    ],
)
def test_divided_tensors_are_refused(more):
    with pytest.raises(ValueError, match=rf"{NAME} updates whole tensors .* use parallel\.\w+=\w+, or"):
        check(compose([f"optimizer.name={NAME}", *more.split()]), 2)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match=rf"optimizer.name={NAME} needs .*\[torchao\]"):
        build_optimizer(torch.nn.Linear(2, 2), OptimizerConfig(name=NAME))
