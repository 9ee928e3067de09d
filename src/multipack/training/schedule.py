"""Learning-rate schedules as pure functions of the step: a resumed run needs no scheduler state.

    cosine   ╱‾‾╲        constant   ╱‾‾‾‾‾      wsd   ╱‾‾‾‾╲         linear   ╱╲
            ╱     ╲___             ╱                 ╱      ╲___             ╱   ╲___

The warm-up rises linearly to the peak; the decay ends at `optimizer.min_lr` in step `optimizer.decay_steps`.
"""

from __future__ import annotations

import math

from multipack.training.settings import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of step `step`, counted from 1, in a run of `steps` steps.

    `wsd` (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395) stays at its peak and decays over the last
    `decay_share` of the steps, linearly or as 1 − √progress (Hägele et al. 2024, arXiv:2405.18392): a run can be
    extended from any checkpoint before the decay.
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
    if config.schedule == "wsd" and config.decay_shape == "sqrt":
        progress = math.sqrt(progress)
    return floor + (config.lr - floor) * (1 - progress)


def warmup_steps(steps: int, config: OptimizerConfig) -> int:
    """Steps of the warm-up in a run of `steps` steps: `optimizer.warmup_steps`, or a share of the schedule."""
    if config.warmup_steps >= 1:
        return int(config.warmup_steps)
    return math.ceil(config.warmup_steps * (config.decay_steps or steps)) if config.decay_steps != 1 else 0


def rate_factor(config: OptimizerConfig, targets_per_step: float) -> float:
    """Factor of all learning rates of a run, from the mean number of target tokens in its steps.

    With κ times `optimizer.reference_tokens` targets in a step the factor is κ (`linear`: Goyal et al. 2017,
    arXiv:1706.02677, for SGD) or √κ (`sqrt`: Malladi et al. 2022, arXiv:2205.10287, for Adam). Adam's betas and epsilon
    are not scaled.
    """
    if config.lr_scaling == "none":
        return 1.0
    if targets_per_step <= 0:
        raise ValueError(
            f"optimizer.lr_scaling={config.lr_scaling} needs steps with targets, got {targets_per_step} a step"
        )
    kappa = targets_per_step / config.reference_tokens
    return kappa if config.lr_scaling == "linear" else math.sqrt(kappa)


def schedule_text(config: OptimizerConfig, steps: int, targets_per_step: float) -> str:
    """One line for the run header: the schedule, its turning points, and the scaling of the rate."""
    factor = rate_factor(config, targets_per_step)
    warmup, (begin, last) = warmup_steps(steps, config), _decay(steps, config)

    def at(step: int) -> str:
        return f"{factor * learning_rate(step, steps, config):g} at step {step}"

    parts = [config.schedule, f"warm-up to {at(warmup)}" if warmup else at(1)]
    decays = config.schedule != "constant" and last > max(begin, 1)
    if decays and config.schedule == "wsd":
        shape = "1 - sqrt" if config.decay_shape == "sqrt" else "linear"
        parts.append(f"{shape} decay from step {max(begin, 1)} to {at(last)}")
    elif decays:
        parts.append(at(last))
    if steps < (last if decays else warmup):
        parts.append(f"the run ends before, with {at(steps)}")
    if config.lr_scaling != "none":
        parts.append(
            f"lr {config.lr:g} x {factor:.3g} ({config.lr_scaling} in"
            f" {targets_per_step:,.0f} targets a step over {config.reference_tokens:,})"
        )
    return "; ".join(parts)


def _decay(steps: int, config: OptimizerConfig) -> tuple[int, int]:
    """The step after which the decay begins, and the step in which it ends, unless the warm-up ends later."""
    warmup, last = warmup_steps(steps, config), config.decay_steps or steps
    if config.schedule != "wsd":
        return warmup, last
    return max(warmup, last - max(round(config.decay_share * last), 1)), last
