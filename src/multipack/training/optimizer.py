"""Optimizers and learning-rate schedules: what the settings `optimizer.*` mean.

    'optimizer.rules=[embedding lr=0.5, *.bias lr=2 weight_decay=0, blocks.0 freeze]'

AdamW, its kinds with compact moments, or Muon for matrices of blocks; rules group parameters. The first rule whose
pattern matches a parameter's name, or the name of a module that holds it, applies. Without a rule the learning rate is
scaled by 1, and tensors with two or more dimensions decay. parallel/optimizers.py has the table of optimizers.

    cosine   ╱‾‾╲        constant   ╱‾‾‾‾‾      wsd   ╱‾‾‾‾╲         linear   ╱╲
            ╱     ╲___             ╱                 ╱      ╲___             ╱   ╲___

Schedules are pure functions of the step: a resumed run needs no scheduler state. The warm-up rises linearly to the
peak; the decay ends at `optimizer.min_lr` in step `optimizer.decay_steps`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from multipack.parallel.optimizers import OPTIMIZERS
from multipack.training.settings import OptimizerConfig, Rule, read_rule

Groups = Sequence[dict[str, Any]]
"""Groups of parameters, with `lr` and `weight_decay`; and `names`, in the order of `params`."""
Builder = Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]
FUSED_DEVICES = {"cpu", "cuda", "xpu", "mps"}
"""Devices for which torch has AdamW as one kernel for all tensors of a group."""


@dataclass(frozen=True)
class ParameterOptions:
    """Options of a parameter; parameters with equal options form a group of the optimizer.

    `is_matrix` marks matrices of blocks for optimizers that treat these apart, such as Muon; False under AdamW.
    """

    lr_scale: float
    weight_decay: float
    frozen: bool = False
    is_matrix: bool = False


def parameter_options(
    parameters: Mapping[str, Tensor], config: OptimizerConfig
) -> dict[str, ParameterOptions]:
    """The options of each parameter, by name; parameters without requires_grad are frozen.

    Raises:
        ValueError: a rule applies to no parameter; the message has the nearest names.
    """
    rules, used = [read_rule(text) for text in config.rules], set[Rule]()
    for_matrices = OPTIMIZERS[config.name].for_matrices
    found = {}
    for name, parameter in parameters.items():
        rule = next((rule for rule in rules if rule.matches(name)), None)
        decay = config.weight_decay if parameter.dim() >= 2 else 0.0
        scale, frozen = 1.0, not parameter.requires_grad
        if rule is not None:
            used.add(rule)
            scale, frozen = rule.lr_scale, frozen or rule.freeze
            decay = decay if rule.weight_decay is None else rule.weight_decay
        matrix = for_matrices and parameter.dim() == 2 and name.startswith("blocks.")
        found[name] = (
            ParameterOptions(1.0, 0.0, True) if frozen else ParameterOptions(scale, decay, False, matrix)
        )
    for number, rule in enumerate(rules):
        if rule not in used or rule in rules[:number]:
            raise ValueError(_unused_message(rule, rules[:number], list(parameters)))
    return found


def _unused_message(rule: Rule, before: Sequence[Rule], names: Sequence[str]) -> str:
    """The error message for a rule that applies to none of the parameters `names` after the rules `before`."""
    matched = [name for name in names if rule.matches(name)]
    if matched:
        earlier = next(other for other in before if other.matches(matched[0]))
        return f"optimizer.rules: {rule.text!r} has no effect after {earlier.text!r}: put it before that"
    near = difflib.get_close_matches(rule.pattern, names, 3, 0.3) or names[:3]
    return f"optimizer.rules: {rule.text!r} matches no parameter; there are {', '.join(near)}, …"


def meta_parameters(
    shapes: Mapping[str, tuple[int, ...]], trained: Collection[str] | None = None
) -> dict[str, nn.Parameter]:
    """Parameters on the meta device, for functions that need only names and shapes of a whole model.

    Parameters whose names are not in `trained` are frozen; None = all are trained.
    """
    return {
        name: nn.Parameter(torch.empty(shape, device="meta"), trained is None or name in trained)
        for name, shape in shapes.items()
    }


def freeze(
    parameters: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    whole: Mapping[str, Tensor] | None = None,
) -> dict[str, ParameterOptions]:
    """Set requires_grad=False on frozen parameters of this rank, and return the options of all of its parameters.

    Call it before DDP or FSDP, which read requires_grad once. `whole` are all parameters of the model, to match rules
    with; None = `parameters`.

    Raises:
        ValueError: see `parameter_options`; or every parameter is frozen.
    """
    found = parameter_options(whole or parameters, config)
    if all(treatment.frozen for treatment in found.values()):
        raise ValueError(f"optimizer.rules={config.rules} freeze every parameter: nothing is left to train")
    for name, parameter in parameters.items():
        parameter.requires_grad_(parameter.requires_grad and not found[name].frozen)
    return {name: found[name] for name in parameters}


def build_optimizer(
    model: nn.Module | Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    whole: Mapping[str, Tensor] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `optimizer.name` over groups of parameters; frozen ones are left out, see `freeze`.

    Each group has `lr_scale` beside torch's settings; schedules multiply learning rates by it. `model` may be this
    rank's parameters by name; `whole` and errors as in `freeze`.
    """
    named = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)
    config = replace(config, lr=max(config.lr, 0.0))  # the engine sets the rate of each step
    groups: dict[ParameterOptions, list[str]] = {}
    for name, treatment in freeze(named, config, whole).items():
        if named[name].requires_grad:
            groups.setdefault(treatment, []).append(name)
    described = [
        {
            "params": [named[name] for name in names],
            "names": names,
            "weight_decay": treatment.weight_decay,
            "lr": config.lr * treatment.lr_scale,
            "lr_scale": treatment.lr_scale,
            "is_matrix": treatment.is_matrix,
        }
        for treatment, names in groups.items()
    ]
    module = OPTIMIZERS[config.name].module
    build: Builder = resolve_name(f"multipack.training.{module}:{config.name}")
    return build(described, config)


def adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) of torch, which refuses `optimizer.fused=true` by device."""
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = config.fused == "true" or (config.fused == "auto" and devices <= FUSED_DEVICES)
    return torch.optim.AdamW(
        list(groups) or [{"params": []}], **config.adam_options, fused=fused, foreach=not fused
    )


def muon(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Muon (Jordan 2024) for matrices of blocks, AdamW for embeddings, norms, biases and the head.

    Updates are scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that one learning rate
    serves both.
    """
    matrices = [group for group in groups if group["is_matrix"]]
    others = [group for group in groups if not group["is_matrix"]]
    if not matrices:  # a pipeline stage without blocks
        return adamw(others, config)
    of_matrices = torch.optim.Muon(
        matrices, lr=config.lr, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return CombinedOptimizer([of_matrices, adamw(others, config)])


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters as one; `param_groups` and `state` cover all parameters."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all optimizers."""
        for part in self.parts:
            part.step()


def optimizer_text(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> str:
    """One line for the run header: tensors and parameters that decay, do not decay, and are frozen."""
    found, row = parameter_options(parameters, config), OPTIMIZERS[config.name]
    kinds = {
        "decayed": [n for n, t in found.items() if t.weight_decay and not t.frozen],
        "not decayed": [n for n, t in found.items() if not t.weight_decay and not t.frozen],
        "frozen": [n for n, t in found.items() if t.frozen],
        "with another learning rate": [n for n, t in found.items() if t.lr_scale != 1.0],
        f"by {row.title}": [n for n, t in found.items() if t.is_matrix],
    }
    counted = [
        f"{kind}: {len(names)} tensors, {sum(parameters[name].numel() for name in names):,} parameters"
        for kind, names in kinds.items()
        if names or kind in ("decayed", "not decayed")
    ]
    name = f"{row.title} and AdamW" if row.for_matrices else row.title
    return f"{name}; " + "; ".join(counted)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of step `step`, counted from 1, in a run of `steps` steps.

    `wsd` (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395) stays at its peak and decays linearly over
    the last `decay_share` of the steps: a run can be extended from any checkpoint before the decay.
    """
    if step <= (warmup := warmup_steps(steps, config)):
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    begin, last = _decay(steps, config)
    progress = min(max((step - begin) / max(last - begin, 1), 0.0), 1.0)
    floor = config.min_lr if config.min_lr >= 0 else config.lr / 10
    if config.schedule == "cosine":
        return floor + 0.5 * (config.lr - floor) * (1 + math.cos(math.pi * progress))
    return floor + (config.lr - floor) * (1 - progress)


def warmup_steps(steps: int, config: OptimizerConfig) -> int:
    """Steps of the warm-up in a run of `steps` steps: `optimizer.warmup_steps`, or a share of the schedule."""
    if config.warmup_steps >= 1:
        return int(config.warmup_steps)
    return math.ceil(config.warmup_steps * (config.decay_steps or steps)) if config.decay_steps != 1 else 0


def schedule_text(config: OptimizerConfig, steps: int) -> str:
    """One line for the run header: the schedule, and the rates at its turning points."""
    decay = () if config.schedule == "constant" else _decay(steps, config)
    turns = sorted({min(max(step, 1), steps) for step in (warmup_steps(steps, config), *decay)})
    rates = (f"{learning_rate(step, steps, config):g} at step {step}" for step in turns)
    return f"{config.schedule}; {', '.join(rates)}"


def _decay(steps: int, config: OptimizerConfig) -> tuple[int, int]:
    """The step after which the decay begins, and the step in which it ends, unless the warm-up ends later."""
    warmup, last = warmup_steps(steps, config), config.decay_steps or steps
    if config.schedule != "wsd":
        return warmup, last
    return max(warmup, last - max(round(config.decay_share * last), 1)), last
