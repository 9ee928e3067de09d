"""Names of settings that the tools around transformers share: words of `multipack train`, and keys of their files."""

from __future__ import annotations

HUGGING_FACE: dict[str, tuple[str, type]] = {
    "sequence_len": ("plan.capacity", int),
    "num_epochs": ("train.epochs", float),
    "max_steps": ("train.steps", int),
    "learning_rate": ("optimizer.lr", float),
    "max_grad_norm": ("optimizer.clip", float),
    "adam_beta1": ("optimizer.beta1", float),
    "adam_beta2": ("optimizer.beta2", float),
    "adam_epsilon": ("optimizer.eps", float),
    "warmup_ratio": ("optimizer.warmup_steps", float),
    "output_dir": ("out", str),
    "save_steps": ("train.checkpoint_every", int),
    "save_total_limit": ("train.keep_checkpoints", int),
    "eval_steps": ("train.eval_every", int),
    "logging_steps": ("log.every", int),
    "lora_r": ("adapter.rank", int),
    "lora_alpha": ("adapter.alpha", float),
    "lora_dropout": ("adapter.dropout", float),
}
"""Name in transformers, TRL, peft and Axolotl → setting of the same meaning here, and the type of its value."""
