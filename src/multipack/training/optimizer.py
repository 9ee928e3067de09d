"""AdamW with decay groups, and the learning rate of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass
class OptimizerConfig:
    """AdamW, its schedule and gradient clipping."""

    lr: float = 2e-3
    """Peak learning rate."""
    min_lr: float = -1.0
    """Learning rate at the end of the schedule; negative = a tenth of optimizer.lr."""
    warmup_steps: int = 20
    """Steps in which the learning rate rises linearly to its peak."""
    decay_steps: int = 0
    """Step at which the schedule reaches min_lr; 0 = the last step of the run."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up: half a cosine down to min_lr, or the peak for ever."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of tensors with two or more dimensions."""
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


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable tensors with two or more dimensions, which are decayed, and the others, which are not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (fused: one kernel for all tensors of a group) over the model's decay groups."""
    decayed, other = decay_groups(model)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": other, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of a step, a pure function, so that a resumed run needs no scheduler state.

    Args:
        step: the step about to be taken, from 1.
        steps: the last step of the run.
        config: peak, floor, warm-up and schedule.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    last = config.decay_steps or steps
    progress = min(max((step - config.warmup_steps) / max(last - config.warmup_steps, 1), 0.0), 1.0)
    floor = config.min_lr if config.min_lr >= 0 else config.lr / 10
    return floor + 0.5 * (config.lr - floor) * (1 + math.cos(math.pi * progress))
