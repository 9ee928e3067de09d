"""AdamW and Muon: groups, rules on parameters' names, their definitions, and what the header says."""

import math
from pkgutil import resolve_name
from typing import get_args

import pytest
import torch

from multipack.models.decoder import Decoder
from multipack.parallel.optimizers import OPTIMIZERS, SMALLER_STATES, OptimizerName
from multipack.shapes import ModelShape
from multipack.training.checks import check
from multipack.training.optimizer import build_optimizer, optimizer_text, parameter_options
from multipack.training.run_config import compose
from multipack.training.settings import OptimizerConfig, read_rule


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder(ModelShape(2, 2, 2, 16, 32, 11, 8, "learned", "layernorm", "gelu", bias=True))


def test_only_matrices_and_embeddings_decay(model):
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    groups = {group["weight_decay"]: group for group in optimizer.param_groups}
    assert {p.dim() for p in groups[0.3]["params"]} == {2}
    assert {p.dim() for p in groups[0.0]["params"]} == {1}
    assert len(groups) == len(optimizer.param_groups)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert all(group["lr_scale"] == 1.0 for group in optimizer.param_groups)


@pytest.mark.parametrize("fused", ["auto", "true", "false"])
def test_adamw_equals_its_definition_in_float64(fused):
    weight = torch.nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.1]], dtype=torch.float64))
    config = OptimizerConfig(lr=0.1, min_lr=0.1, weight_decay=0.2, beta1=0.9, beta2=0.95, fused=fused)
    optimizer = build_optimizer(torch.nn.ParameterList([weight]), config)
    assert bool(optimizer.param_groups[0]["fused"]) == (fused != "false")
    expected, m, v = weight.detach().clone(), 0.0, 0.0
    for step in range(1, 4):
        gradient = torch.sin(weight.detach() * step)
        weight.grad = gradient.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        expected = expected * (1 - 0.1 * 0.2)
        expected = expected - 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_muon_updates_matrices_of_blocks_and_adamw_the_rest(model):
    """A matrix's update is orthogonal but for its scale, 0.2 √max(rows, columns); the rest is AdamW's."""
    other = Decoder(model.shape)
    other.load_state_dict(model.state_dict())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {"lr": 1e-2, "weight_decay": 0.0, "rules": ["blocks.1 lr=0.5"]}
    for name, each in (("muon", model), ("adamw", other)):
        optimizer = build_optimizer(each, OptimizerConfig(name=name, **options))
        torch.manual_seed(1)
        for parameter in each.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    adamw = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        moved = parameter.detach() - before[name]
        if not (name.startswith("blocks.") and parameter.dim() == 2):
            assert torch.equal(parameter, adamw[name]), name
            continue
        rate = 5e-3 if name.startswith("blocks.1") else 1e-2
        values = torch.linalg.svdvals(moved) / (rate * 0.2 * max(moved.shape) ** 0.5)
        assert values.min() > 0.5, name
        assert values.max() < 1.4, name


def test_devices_without_a_fused_kernel_have_several():
    model = torch.nn.Linear(2, 2, device="meta")
    group = build_optimizer(model, OptimizerConfig()).param_groups[0]
    assert (bool(group["foreach"]), bool(group["fused"])) == (True, False)


def test_the_first_matching_rule_applies(model):
    rules = ["embedding lr=0.5", "blocks.0.*.bias lr=2 weight_decay=0.05", "blocks.0 freeze", "*.bias lr=3"]
    found = parameter_options(dict(model.named_parameters()), OptimizerConfig(weight_decay=0.1, rules=rules))
    for name, lr_scale, decay, frozen in (
        ("embedding.weight", 0.5, 0.1, False),
        ("blocks.0.attention.query.bias", 2.0, 0.05, False),
        ("blocks.0.attention.query.weight", 1.0, 0.0, True),
        ("blocks.1.attention.query.bias", 3.0, 0.0, False),
        ("blocks.1.attention.query.weight", 1.0, 0.1, False),
    ):
        treatment = found[name]
        assert (treatment.lr_scale, treatment.weight_decay, treatment.frozen) == (lr_scale, decay, frozen), (
            name
        )
    rule = read_rule("blocks.1 freeze")  # the name of a module matches all its parameters
    assert [rule.matches(name) for name in ("blocks.1.up.weight", "blocks.10.up.weight")] == [True, False]


def test_frozen_weights_stay_and_rates_are_scaled(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rules = ["blocks.0 freeze", "embedding lr=0", "positions lr=2 weight_decay=0"]
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.0, eps=1e-20, rules=rules))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    moved = {name: float((before[name] - p.detach()).abs().max()) for name, p in model.named_parameters()}
    assert all(moved[name] == 0 for name in moved if name.startswith(("blocks.0.", "embedding.")))
    assert moved["positions.weight"] == pytest.approx(2e-2, rel=1e-4)
    assert moved["blocks.1.attention.query.weight"] == pytest.approx(1e-2, rel=1e-4)
    assert not model.blocks[0].attention.query.weight.requires_grad


def test_rules_without_effect_are_refused(model):
    for rules, message in (
        (["embeding lr=0.5"], "'embeding lr=0.5' matches no parameter; there are embedding"),
        (["blocks freeze", "blocks.0 lr=2"], "no effect after 'blocks freeze'"),
        (["norm lr=2", "norm lr=2"], "norm lr=2"),
        (["* freeze"], "nothing is left to train"),
    ):
        with pytest.raises(ValueError, match=message):
            build_optimizer(model, OptimizerConfig(rules=rules))


def test_every_row_has_a_name_of_the_settings_and_a_function():
    assert set(OPTIMIZERS) == set(get_args(OptimizerName)) > set(SMALLER_STATES)
    for name, row in OPTIMIZERS.items():
        assert callable(resolve_name(f"multipack.training.{row.module}:{name}"))


def test_illegal_settings_are_refused_by_name():
    for rule in ("", "embedding", "lr=0.5", "embedding rate=0.5", "embedding lr", "embedding lr=fast"):
        with pytest.raises(ValueError, match=r"optimizer\.rules"):
            OptimizerConfig(rules=[rule])
    for rule in ("embedding lr=-1", "embedding weight_decay=inf", "embedding freeze lr=2"):
        with pytest.raises(ValueError, match=r"optimizer\.rules"):
            OptimizerConfig(rules=[rule])
    for name, value in (("lr", math.inf), ("min_lr", 1.0), ("beta2", 1.0), ("momentum", 1.0), ("clip", -1.0)):
        with pytest.raises(ValueError, match=f"optimizer.{name}"):
            OptimizerConfig(**{name: value})
    words = ["optimizer.name=muon", "parallel.data=zero3", "parallel.offload=cpu"]
    with pytest.raises(ValueError, match=r"optimizer\.name=muon .*parallel\.offload=none"):
        check(compose(words), 2)


def test_the_header_counts_parameters_by_treatment(model):
    named = dict(model.named_parameters())
    plain = optimizer_text(named, OptimizerConfig(lr=1e-3))
    decayed = sum(p.numel() for p in named.values() if p.dim() == 2)
    assert plain.startswith("AdamW; decayed: ")
    assert f"{decayed:,} parameters; not decayed: " in plain
    ruled = optimizer_text(named, OptimizerConfig(rules=["norm freeze", "embedding lr=2 weight_decay=0"]))
    assert "frozen: 2 tensors, 32 parameters" in ruled
    assert "with another learning rate: 1 tensors" in ruled
    assert "by Muon: 12 tensors" in optimizer_text(named, OptimizerConfig(name="muon"))
