"""Names of settings in other tools: wordplay, transformers, TRL and Axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from multipack.words import ConfigError

Value = TypeVar("Value")


def by_name(rows: Mapping[str, Value]) -> dict[str, Value]:
    """A table whose rows may have several names, separated by spaces → name → value."""
    return {name: value for names, value in rows.items() for name in names.split()}


ALIASES = by_name(
    {
        "data.out_dir output_dir": "out",
        "model.block_size": "data.block_size",
        "model.n_layer": "model.layers",
        "model.n_head": "model.heads",
        "model.vocab_size": "model.vocabulary_size",
        "capacity max_length max_seq_length sequence_len": "plan.capacity",
        "optimizer.gas gradient_accumulation_steps": "plan.micro_batches",
        "train.backend": "parallel.data",
        "model_name_or_path base_model": "train.init_from",
        "train.max_iters max_steps": "train.steps",
        "num_epochs num_train_epochs": "train.epochs",
        "train.eval_interval eval_steps": "train.eval_every",
        "train.eval_iters": "train.eval_packs",
        "save_steps": "train.checkpoint_every",
        "save_total_limit": "train.keep_checkpoints",
        "optimizer.learning_rate learning_rate": "optimizer.lr",
        "lr_scheduler_type": "optimizer.schedule",
        "train.warmup_iters warmup_ratio": "optimizer.warmup_steps",
        "optimizer.lr_decay_iters": "optimizer.decay_steps",
        "optimizer.grad_clip max_grad_norm": "optimizer.clip",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "adam_epsilon": "optimizer.eps",
        "lora_r lora.r": "adapter.rank",
        "lora_alpha lora.alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "target_modules lora_target_modules": "adapter.targets",
        "modules_to_save": "adapter.train",
        "use_rslora": "adapter.rank_stabilized",
        "train.log_interval logging_steps": "log.every",
        "report_to": "track.to",
        "train.wandb_project": "track.project",
    }
)
"""Name elsewhere → setting: wordplay's with a group; of transformers, TRL, peft and Axolotl, which stand alone, in the
group of the setting here, or in one of `OTHER_GROUPS`."""

OTHER_GROUPS = ("axolotl", "lora", "peft", "transformers", "trl")
"""Groups in which a setting has its name elsewhere."""

VALUE_ALIASES: dict[tuple[str, str], str] = {
    ("train.dtype", "bfloat16"): "bf16",
    ("train.dtype", "float32"): "fp32",
    ("data", "shakespeare"): "shakespeare_char",
    ("parallel.data", "DDP"): "ddp",
    ("optimizer.name", "AdamW"): "adamw",
    ("preference.loss", "dpo"): "sigmoid",
}
"""(setting here, value elsewhere) → value here."""

HINTS = by_name(
    {
        "model.batch_size": "plan.capacity counts tokens: set it to batch_size × block_size",
        "model.n_embd": "set model.d_model and model.d_ff (wordplay's d_ff is 4 × n_embd)",
        "train.framework": "leave it out, PyTorch is the only one",
        "train.use_wandb": "set track.to=[wandb]",
        "train.ngpus": "`multipack launch -n N -- train` starts N processes",
        "train.port": "`multipack launch --port PORT` sets it",
        "train.ds_config_path": "set parallel.data=zero1, zero2 or zero3",
        "train.precision": "set train.dtype",
        "train.always_save_checkpoint": "set train.checkpoint_every",
        "data.root_path": "set data.path",
        "optimizer.decay_lr": "set optimizer.schedule=cosine or constant",
        "data.workers": "leave it out, the tokenizer has threads of its own",
        "eval_only": "`multipack evaluate RUN` evaluates a run",
        "eval_dataset": "set data.validation_path=FILE",
        "batch_size per_device_train_batch_size micro_batch_size": "plan.capacity is the tokens of a pack,"
        " plan.micro_batches the packs of a rank, plan.packs_per_step of a step",
        "gradient_checkpointing gradient_checkpointing_kwargs": "set train.recompute=full or selective",
        "bf16 fp16": "set train.dtype=bf16 or fp16",
        "packing sample_packing": "leave it out, documents are always packed",
        "lora load_in_4bit": "set adapter=lora or qlora",
        "dataset": "set data=jsonl data.path=FILE, or data=huggingface data.path=NAME",
        "type": "optimizers are chosen by optimizer.name, sources by data.source",
        "wd": "set optimizer.weight_decay",
    }
)
"""Setting elsewhere without one that takes the same values → what to set instead."""


def translate(key: str, value: Any) -> tuple[str, Any]:
    """Translate another tool's name and value of a setting to multipack's; others are returned unchanged.

    Values of YAML files are not always text.

    Raises:
        ConfigError: multipack has no equivalent of the setting; the message has what to set instead.
    """
    group, _, leaf = key.rpartition(".")
    if hint := HINTS.get(key) or HINTS.get(leaf):
        raise ConfigError(f"{key} has no equivalent here: {hint}")
    name = ALIASES.get(key) or ALIASES.get(leaf, key)
    if key not in ALIASES and key != name and group not in ("", name.rpartition(".")[0], *OTHER_GROUPS):
        raise ConfigError(f"there is no setting {key}; did you mean {leaf}, which is {name} here?")
    key = name
    if key == "train.init_from" and value in ("scratch", "resume"):  # all other values are paths
        key, value = "train.resume", str(value == "resume").lower()
    return key, VALUE_ALIASES.get((key, str(value)), value)
