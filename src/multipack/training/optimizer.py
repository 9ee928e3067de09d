"""AdamW over groups of parameters, which follow from their dimensions and from rules on their names.

    'optimizer.rules=[embedding lr=0.5, *.bias lr=2 weight_decay=0, blocks.0 freeze]'

The first rule whose pattern matches a parameter's name, or the name of a module that holds it, decides; what it does
not say is as for parameters without a rule: learning rate × 1, weight decay where there are two dimensions or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from multipack.training.rules import Rule, read_rule, useless
from multipack.training.settings import OptimizerConfig

FUSED_DEVICES = {"cpu", "cuda", "xpu", "mps"}
"""Devices for which torch has AdamW as one kernel for all tensors of a group."""


@dataclass(frozen=True)
class Treatment:
    """What the optimizer does with a parameter; parameters that are treated alike form a group."""

    lr_scale: float
    weight_decay: float
    frozen: bool = False


def treatments(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> dict[str, Treatment]:
    """What becomes of every parameter, by its name.

    Args:
        parameters: by name; those that need no gradient already stay frozen.
        config: weight decay and rules.

    Raises:
        ValueError: a rule decides about no parameter; names that are near are named.
    """
    rules = [read_rule(text) for text in config.rules]
    deciding: dict[str, int] = {}
    for name in parameters:
        number = next((number for number, rule in enumerate(rules) if rule.matches(name)), None)
        if number is not None:
            deciding[name] = number
    for number, rule in enumerate(rules):
        if number not in deciding.values():
            raise ValueError(useless(rule, rules[:number], list(parameters)))
    found = {}
    for name, parameter in parameters.items():
        rule = rules[deciding[name]] if name in deciding else Rule("", name)
        usual = config.weight_decay if parameter.dim() >= 2 else 0.0
        decay = usual if rule.weight_decay is None else rule.weight_decay
        frozen = rule.freeze or not parameter.requires_grad
        found[name] = Treatment(1.0, 0.0, True) if frozen else Treatment(rule.lr_scale, decay)
    return found


def described(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, nn.Parameter]:
    """Parameters without values, for what depends on names and shapes of a whole model only."""
    return {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}


def freeze(
    parameters: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    whole: Mapping[str, Tensor] | None = None,
) -> dict[str, Treatment]:
    """Let the parameters that a rule freezes need no gradient from here on; returns what becomes of the others.

    To be called before the model is wrapped: DDP and FSDP ask once which parameters have a gradient.

    Args:
        parameters: of this rank, by name.
        config: the rules.
        whole: all the model's parameters, which rules speak of; None = the same.

    Raises:
        ValueError: see `treatments`; nothing is left to train.
    """
    found = treatments(whole if whole is not None else parameters, config)
    if all(treatment.frozen for treatment in found.values()):
        raise ValueError(f"optimizer.rules={config.rules} freeze every parameter: nothing is left to train")
    for name, parameter in parameters.items():
        parameter.requires_grad_(parameter.requires_grad and not found[name].frozen)
    return {name: found[name] for name in parameters}


def build_optimizer(
    model: nn.Module | Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    whole: Mapping[str, Tensor] | None = None,
) -> torch.optim.AdamW:
    """AdamW over the model's groups; parameters that a rule freezes are left out, see `freeze`.

    Every group has `lr_scale` beside torch's own settings: whoever sets a group's learning rate multiplies by it.

    Args:
        model: or its parameters by name; where ranks hold parts, this rank's.
        config: settings and rules.
        whole: all the model's parameters, which rules speak of; None = the same.

    Raises:
        ValueError: see `freeze`; `optimizer.fused=true` where the device has no such kernel.
    """
    named = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)
    groups: dict[Treatment, list[nn.Parameter]] = {}
    for name, treatment in freeze(named, config, whole).items():
        if named[name].requires_grad:
            groups.setdefault(treatment, []).append(named[name])
    described_groups = [
        {
            "params": parameters,
            "weight_decay": treatment.weight_decay,
            "lr": config.lr * treatment.lr_scale,
            "lr_scale": treatment.lr_scale,
        }
        for treatment, parameters in groups.items()
    ]
    fused = _fused(config, {parameter.device.type for group in groups.values() for parameter in group})
    return torch.optim.AdamW(
        described_groups or [{"params": []}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=not fused,
    )


def _fused(config: OptimizerConfig, devices: set[str]) -> bool:
    lacking = sorted(devices - FUSED_DEVICES)
    if config.fused == "true" and lacking:
        raise ValueError(
            f"optimizer.fused=true has no kernel for parameters on {', '.join(lacking)} (there is one for"
            f" {', '.join(sorted(FUSED_DEVICES))}); use auto or false"
        )
    return config.fused == "true" or (config.fused == "auto" and not lacking)


def optimizer_text(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> str:
    """One line for the run header: how many tensors and parameters are decayed, are not, and are frozen.

    Args:
        parameters: the model's, by name.
        config: as `build_optimizer` took it.
    """
    found = treatments(parameters, config)
    kinds = {
        "decayed": [n for n, t in found.items() if t.weight_decay and not t.frozen],
        "not decayed": [n for n, t in found.items() if not t.weight_decay and not t.frozen],
        "frozen": [n for n, t in found.items() if t.frozen],
        "with another learning rate": [n for n, t in found.items() if t.lr_scale != 1.0],
    }
    counted = [
        f"{kind}: {len(names)} tensors, {sum(parameters[name].numel() for name in names):,} parameters"
        for kind, names in kinds.items()
        if names or kind in ("decayed", "not decayed")
    ]
    return f"AdamW, lr {config.lr:g}; " + "; ".join(counted)
