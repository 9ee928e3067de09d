"""AdamW over groups of parameters, which follow from their dimensions and from rules on their names.

    'optimizer.rules=[embedding lr=0.5, *.bias lr=2 weight_decay=0, blocks.0 freeze]'

The first rule whose pattern matches a parameter's name, or the name of a module that holds it, decides; what it does
not say is as for parameters without a rule: learning rate × 1, weight decay where there are two dimensions or more.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

FUSED_DEVICES = {"cpu", "cuda", "xpu", "mps"}
"""Devices for which torch has AdamW as one kernel for all tensors of a group."""


@dataclass
class OptimizerConfig:
    """AdamW, its schedule and gradient clipping."""

    lr: float = 2e-3
    """Peak learning rate."""
    min_lr: float = -1.0
    """Learning rate at the end of the schedule; negative = a tenth of optimizer.lr."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How learning rates grow with the targets of a step: not at all, by their root, or by their number."""
    reference_tokens: int = 0
    """Targets of a step that optimizer.lr was found with; needed by optimizer.lr_scaling."""
    warmup_steps: int = 20
    """Steps in which the learning rate rises linearly to its peak."""
    decay_steps: int = 0
    """Step at which the schedule reaches min_lr; 0 = the last step of the run."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """What follows the warm-up: half a cosine or a line down to min_lr, the peak for ever, or until a decay."""
    decay_share: float = 0.2
    """Share of the steps, the last ones, over which schedule=wsd decays."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """How schedule=wsd decays: along a line, or along 1 - sqrt(progress), which falls fast at first."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of tensors with two or more dimensions."""
    rules: list[str] = field(default_factory=list)
    """Exceptions by (globs of) parameters' or modules' names: `*.bias lr=2 weight_decay=0`, `blocks.0 freeze`."""
    fused: Literal["auto", "true", "false"] = "auto"
    """One kernel for all tensors of a group: auto = where the device has it; false = several kernels (foreach)."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 = no clipping."""

    def __post_init__(self) -> None:
        """Refuse what would not train."""
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr={self.lr} must be positive")
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr} must not exceed optimizer.lr={self.lr}")
        if self.clip < 0 or self.weight_decay < 0 or self.warmup_steps < 0 or self.decay_steps < 0:
            raise ValueError(
                "optimizer.clip, weight_decay, warmup_steps and decay_steps must not be negative"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        if not 0 < self.decay_share <= 1:
            raise ValueError(f"optimizer.decay_share must be in (0, 1], got {self.decay_share}")
        if self.lr_scaling != "none" and self.reference_tokens < 1:
            raise ValueError(
                f"optimizer.lr_scaling={self.lr_scaling} needs optimizer.reference_tokens, the targets of a step"
                f" that optimizer.lr was found with, got {self.reference_tokens}"
            )
        for text in self.rules:
            read_rule(text)


@dataclass(frozen=True)
class Rule:
    """An exception for the parameters that a pattern names; None = as for those without a rule.

    Attributes:
        text: as the user wrote it.
        pattern: a glob on parameters' names, or on names of modules, which stand for all that they hold.
        lr_scale: factor of the learning rate.
        weight_decay: decoupled weight decay.
        freeze: keep the weights as they are.
    """

    text: str
    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None
    freeze: bool = False

    def matches(self, name: str) -> bool:
        """Whether the rule names this parameter, or a module that holds it."""
        return fnmatchcase(name, self.pattern) or fnmatchcase(name, f"{self.pattern}.*")


@dataclass(frozen=True)
class Treatment:
    """What the optimizer does with a parameter; parameters that are treated alike form a group."""

    lr_scale: float
    weight_decay: float
    frozen: bool = False


def read_rule(text: str) -> Rule:
    """A rule from its text.

    Raises:
        ValueError: it has no pattern, says nothing, or says what no rule can say.
    """
    pattern, *words = text.split() or [""]
    said: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word == "freeze":
            said["freeze"] = True
        elif key in ("lr", "weight_decay") and equals:
            said["lr_scale" if key == "lr" else key] = _number(text, key, value)
        else:
            raise ValueError(
                f"optimizer.rules: {word!r} of {text!r} is none of lr=FACTOR, weight_decay=VALUE and freeze"
            )
    if not said or "=" in pattern:
        raise ValueError(
            f"optimizer.rules: {text!r} must name parameters and say what is different for them:"
            " PATTERN [lr=FACTOR] [weight_decay=VALUE] [freeze]"
        )
    if "freeze" in said and len(said) > 1:
        raise ValueError(
            f"optimizer.rules: {text!r} freezes its parameters, so that nothing else can be said of them"
        )
    return Rule(text, pattern, **said)


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"optimizer.rules: {key}={value} of {text!r} must be a number that is not negative")
    return number


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
            raise ValueError(_useless(rule, rules[:number], list(parameters)))
    found = {}
    for name, parameter in parameters.items():
        rule = rules[deciding[name]] if name in deciding else Rule("", name)
        usual = config.weight_decay if parameter.dim() >= 2 else 0.0
        decay = usual if rule.weight_decay is None else rule.weight_decay
        frozen = rule.freeze or not parameter.requires_grad
        found[name] = Treatment(1.0, 0.0, True) if frozen else Treatment(rule.lr_scale, decay)
    return found


def _useless(rule: Rule, before: Sequence[Rule], names: Sequence[str]) -> str:
    taken = [name for name in names if rule.matches(name)]
    if taken:
        earlier = next(other for other in before if other.matches(taken[0]))
        return (
            f"optimizer.rules: {rule.text!r} decides nothing, because earlier rules match all that it names"
            f" ({earlier.text!r} matches {taken[0]}): put it before them"
        )
    parts = [name.split(".") for name in names]
    known = dict.fromkeys(".".join(part[:count]) for part in parts for count in range(1, len(part) + 1))
    near = difflib.get_close_matches(rule.pattern, known, 3, 0.5) or list(known)[:3]
    return f"optimizer.rules: {rule.text!r} matches no parameter; there are {', '.join(near)}, …"


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
