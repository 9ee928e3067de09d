"""Names of settings in other tools: wordplay, transformers, TRL and Axolotl."""

from __future__ import annotations

from typing import Any

from multipack.names_elsewhere import HUGGING_FACE
from multipack.words import ConfigError

ALIASES: dict[str, str] = {
    # wordplay
    "train.max_iters": "train.steps",
    "train.eval_interval": "train.eval_every",
    "train.log_interval": "log.every",
    "train.eval_iters": "train.eval_packs",
    "train.backend": "parallel.data",
    "train.warmup_iters": "optimizer.warmup_steps",
    "train.wandb_project": "track.project",
    "data.out_dir": "out",
    "model.n_layer": "model.layers",
    "model.n_head": "model.heads",
    "model.block_size": "data.block_size",
    "model.vocab_size": "model.vocabulary_size",
    "optimizer.gas": "plan.micro_batches",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.grad_clip": "optimizer.clip",
    "optimizer.lr_decay_iters": "optimizer.decay_steps",
    # transformers, TRL, peft, Axolotl: alone, in the group of the setting here, or in one of `OTHER_GROUPS`
    **{name: setting for name, (setting, _) in HUGGING_FACE.items()},
    "lr_scheduler_type": "optimizer.schedule",
    "num_train_epochs": "train.epochs",
    "report_to": "track.to",
    "capacity": "plan.capacity",
    "max_length": "plan.capacity",
    "max_seq_length": "plan.capacity",
    "gradient_accumulation_steps": "plan.micro_batches",
    "model_name_or_path": "train.init_from",
    "base_model": "train.init_from",
    "lora.r": "adapter.rank",
    "lora.alpha": "adapter.alpha",
    "target_modules": "adapter.targets",
    "lora_target_modules": "adapter.targets",
    "modules_to_save": "adapter.train",
    "use_rslora": "adapter.rank_stabilized",
}
"""Name of a setting elsewhere → name here."""

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

HINTS: dict[str, str] = {
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
    "batch_size": "plan.capacity is the tokens of a pack, plan.packs_per_step the packs of a step",
    "per_device_train_batch_size": "plan.capacity is the tokens of a pack, plan.micro_batches the packs of a rank",
    "micro_batch_size": "plan.capacity is the tokens of a pack, plan.micro_batches the packs of a rank",
    "gradient_checkpointing": "set train.recompute=full or selective",
    "bf16": "set train.dtype=bf16",
    "fp16": "set train.dtype=fp16",
    "packing": "leave it out, documents are always packed",
    "sample_packing": "leave it out, documents are always packed",
    "lora": "set adapter=lora",
    "load_in_4bit": "set adapter=qlora",
    "gradient_checkpointing_kwargs": "set train.recompute=full or selective",
    "dataset": "set data=jsonl data.path=FILE, or data=huggingface data.path=NAME",
    "plan.effort": "leave it out, a step is always dealt with the same effort",
    "optimizer.lr_scaling": "set optimizer.lr to the rate for the targets of a step",
    "optimizer.reference_tokens": "set optimizer.lr to the rate for the targets of a step",
    "plan.cost": "leave it out, documents cost the FLOPs of the model",
    "type": "optimizers are chosen by optimizer.name, sources by data.source",
    "wd": "set optimizer.weight_decay",
}
"""Settings elsewhere, or of earlier versions, without one that takes the same values → what to set instead."""


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
