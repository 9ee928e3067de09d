import pytest
import torch

from multipack.models.decoder import Decoder
from multipack.shapes import ModelShape
from multipack.training.optimizer import build_optimizer, optimizer_text, treatments
from multipack.training.rules import Rule, read_rule
from multipack.training.run_config import compose
from multipack.training.settings import OptimizerConfig


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


def test_where_there_is_no_fused_kernel_auto_says_so_by_foreach_and_true_by_an_error():
    model = torch.nn.Linear(2, 2, device="meta")
    group = build_optimizer(model, OptimizerConfig()).param_groups[0]
    assert group["foreach"]
    assert not group["fused"]
    with pytest.raises(ValueError, match=r"optimizer\.fused=true has no kernel for parameters on meta"):
        build_optimizer(model, OptimizerConfig(fused="true"))


def test_the_first_rule_that_matches_decides_and_the_rest_is_as_usual(model):
    config = OptimizerConfig(
        weight_decay=0.1,
        rules=[
            "embedding lr=0.5",
            "blocks.0.*.bias lr=2 weight_decay=0.05",
            "blocks.0 freeze",
            "*.bias lr=3",
        ],
    )
    found = treatments(dict(model.named_parameters()), config)
    assert (found["embedding.weight"].lr_scale, found["embedding.weight"].weight_decay) == (0.5, 0.1)
    assert (
        found["blocks.0.attention.query.bias"].lr_scale,
        found["blocks.0.attention.query.bias"].weight_decay,
    ) == (
        2.0,
        0.05,
    )
    assert found["blocks.0.attention.query.weight"].frozen
    assert found["blocks.1.attention.query.bias"].lr_scale == 3.0
    assert found["blocks.1.attention.query.bias"].weight_decay == 0.0
    assert found["blocks.1.attention.query.weight"].weight_decay == 0.1


def test_a_module_name_means_all_that_it_holds_and_no_longer_number():
    rule = read_rule("blocks.1 freeze")
    assert rule.matches("blocks.1.up.weight")
    assert not rule.matches("blocks.10.up.weight")
    assert not rule.matches("blocks.1x")


def test_frozen_weights_and_scaled_rates_train_as_told(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rules = ["blocks.0 freeze", "embedding lr=0", "positions lr=2 weight_decay=0"]
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.0, eps=1e-20, rules=rules))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group["lr_scale"]
    optimizer.step()
    moved = {name: float((before[name] - p.detach()).abs().max()) for name, p in model.named_parameters()}
    assert all(moved[name] == 0 for name in moved if name.startswith(("blocks.0.", "embedding.")))
    assert moved["positions.weight"] == pytest.approx(2e-2, rel=1e-4)
    assert moved["blocks.1.attention.query.weight"] == pytest.approx(1e-2, rel=1e-4)
    assert not model.blocks[0].attention.query.weight.requires_grad
    assert not any(
        p is model.blocks[0].attention.query.weight for g in optimizer.param_groups for p in g["params"]
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["embeding lr=0.5"], r"'embeding lr=0.5' matches no parameter; there are embedding"),
        (["*.biass lr=1"], "matches no parameter"),
        (["blocks freeze", "blocks.0 lr=2"], r"decides nothing.*'blocks freeze' matches blocks\.0"),
        (["norm lr=2", "norm lr=2"], "decides nothing"),
        (["* freeze"], "nothing is left to train"),
    ],
)
def test_rules_that_do_nothing_are_refused(model, rules, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(model, OptimizerConfig(rules=rules))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "PATTERN"),
        ("embedding", "PATTERN"),
        ("lr=0.5", "PATTERN"),
        ("embedding rate=0.5", "'rate=0.5'"),
        ("embedding lr", "'lr'"),
        ("embedding lr=fast", "lr=fast"),
        ("embedding lr=-1", "lr=-1"),
        ("embedding weight_decay=inf", "weight_decay=inf"),
        ("embedding freeze lr=2", "freezes"),
    ],
)
def test_rules_that_cannot_be_read_are_refused_when_the_settings_are(text, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(rules=[text])


def test_rules_come_from_words_and_yaml(tmp_path):
    words = ["optimizer.rules=[embedding lr=0.5 weight_decay=0, *.bias lr=2]", "optimizer.fused=false"]
    config = compose(words).optimizer
    assert [read_rule(text) for text in config.rules] == [
        Rule("embedding lr=0.5 weight_decay=0", "embedding", 0.5, 0.0),
        Rule("*.bias lr=2", "*.bias", 2.0),
    ]
    assert config.fused == "false"
    (tmp_path / "c.yaml").write_text("optimizer:\n  rules:\n  - norm freeze\n  fused: 'true'\n")
    config = compose([f"config={tmp_path / 'c.yaml'}"]).optimizer
    assert (config.rules, config.fused) == (["norm freeze"], "true")


def test_the_header_counts_what_is_treated_how(model):
    named = dict(model.named_parameters())
    plain = optimizer_text(named, OptimizerConfig(lr=1e-3))
    decayed = sum(p.numel() for p in named.values() if p.dim() == 2)
    assert plain.startswith("AdamW, lr 0.001; decayed: ")
    assert f"{decayed:,} parameters; not decayed: " in plain
    assert "frozen" not in plain
    ruled = optimizer_text(named, OptimizerConfig(rules=["norm freeze", "embedding lr=2 weight_decay=0"]))
    assert "frozen: 2 tensors, 32 parameters" in ruled
    assert "with another learning rate: 1 tensors" in ruled


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
