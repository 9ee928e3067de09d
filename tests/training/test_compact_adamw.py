"""AdamW with moments in bfloat16 and in 8 bits: its definition, its bytes and its rounding."""

import pytest
import torch

from multipack.parallel.state import create_optimizer_state, optimizer_state
from multipack.training.checks import check
from multipack.training.optimizer import build_optimizer
from multipack.training.run_config import compose
from multipack.training.settings import OptimizerConfig

KINDS = ["adamw_bf16", "adamw_8bit"]


def optimizer_of(model, name, **options):
    return build_optimizer(model, OptimizerConfig(name=name, **options))


@pytest.mark.parametrize(("name", "limit"), [("adamw_bf16", 2**-7), ("adamw_8bit", 2**-3)])
def test_moments_are_those_of_adamw_but_for_one_rounding(name, limit):
    """Sources: torch's AdamW on one step, of which bfloat16 keeps 8 bits and float8 4, down to 2^-9 of its scale."""
    model, other = (torch.nn.Linear(300, 7) for _ in range(2))
    other.load_state_dict(model.state_dict())
    optimizers = [
        optimizer_of(each, kind, lr=1e-2, weight_decay=0.2)
        for each, kind in ((model, name), (other, "adamw"))
    ]

    def step():
        for each, optimizer in zip((model, other), optimizers, strict=True):
            torch.manual_seed(0)
            for parameter in each.parameters():
                parameter.grad = torch.randn_like(parameter) * torch.logspace(-2, 2, parameter.shape[-1])
            optimizer.step()
        return zip(model.parameters(), other.parameters(), strict=True)

    for ours, theirs in step():
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)  # rounded after the update
    for slot in ("exp_avg", "exp_avg_sq"):
        state, expected = optimizers[0].state[model.weight], optimizers[1].state[other.weight][slot]
        found, least = state[slot].float(), torch.zeros(())
        if name == "adamw_8bit":
            scale = state[f"{slot}_scale"].repeat_interleave(256, 1)[:, :300]
            least = 2**-8 * scale
            found, expected = found * scale, expected.sqrt() if slot == "exp_avg_sq" else expected
        assert ((found - expected).abs() <= expected.abs() * limit + least).all()
    for _ in range(5):  # the mean element moves by the learning rate, as under AdamW
        pairs = list(step())
    assert all((ours - theirs).abs().mean() <= limit * 5e-2 for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("name", "bytes_each"), [("adamw", 8), ("adamw_bf16", 4), ("adamw_8bit", 2 + 2 * 4 / 256)]
)
def test_bytes_of_states(name, bytes_each):
    model = torch.nn.Linear(512, 64, bias=False)
    optimizer = optimizer_of(model, name)
    create_optimizer_state(optimizer)
    state = optimizer_state(optimizer, dict(model.named_parameters()))
    assert sum(each.nbytes for each in state.values()) == bytes_each * 512 * 64 + 4  # and a step counter


@pytest.mark.parametrize("name", KINDS)
def test_small_changes_of_moments_are_not_lost(name):
    """With a gradient of 0 and beta2=0.999 second moments fall to e^-1 in 1,000 steps; to the nearest they stay."""
    model = torch.nn.Linear(256, 8, bias=False)
    optimizer = optimizer_of(model, name, beta2=0.999, lr=0.0)
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()

    def second_moment():
        state = optimizer.state[model.weight]
        second = state["exp_avg_sq"].double()
        return float(((second * state["exp_avg_sq_scale"]) ** 2 if "8" in name[-4:] else second).mean())

    first = second_moment()
    model.weight.grad = torch.zeros_like(model.weight)
    for _ in range(1000):
        optimizer.step()
    assert second_moment() / first == pytest.approx(0.999**1000, rel=0.1)


def test_what_cannot_be_combined_is_one_line():
    words = ["optimizer.name=adamw_8bit", "parallel.tensor=2"]
    with pytest.raises(ValueError, match=r"adamw_8bit .*parallel\.tensor=2 .*adamw_bf16"):
        check(compose(words), 2)
    with pytest.raises(ValueError, match=r"optimizer\.fused=true: adamw_bf16"):
        OptimizerConfig(name="adamw_bf16", fused="true")
