"""The keys of Axolotl's configuration, in tables: another name, a function, no effect, cannot be honored."""

from __future__ import annotations

from typing import Any

from multipack.imports import key_rules as rules
from multipack.imports import models
from multipack.imports.outcome import NOTHING, Honored, Rule, Tool, rules_of, sets
from multipack.training.other_names import ALIASES

DEFAULTS: dict[str, Any] = {
    "plan.capacity": 512,
    "data.overlong": "drop",
    "data.validation": 0.0,
    "train.eval_every": 0,
    "optimizer.weight_decay": 0.0,
    "optimizer.beta2": 0.999,
    "optimizer.min_lr": 0.0,
}
"""Setting → Axolotl's default, where it differs."""

_SHARED = """
    sequence_len num_epochs max_steps learning_rate max_grad_norm adam_beta1 adam_beta2 adam_epsilon warmup_ratio
    output_dir save_steps save_total_limit eval_steps logging_steps lora_r lora_alpha lora_dropout
"""
"""Axolotl's own among the names that tools share; the others would be another tool's."""

RENAMED: dict[str, str] = {
    **{name: ALIASES[name] for name in _SHARED.split()},
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "optimizer.warmup_steps",
    "label_smoothing_factor": "train.label_smoothing",
    "seed": "train.seed",
    "early_stopping_patience": "train.patience",
    "load_best_model_at_end": "train.keep_best",
    "peft_use_rslora": "adapter.rank_stabilized",
    "lora_modules_to_save": "adapter.train",
    "train_on_inputs": "data.train_on_prompt",
    "dataset_exact_deduplication": "data.dedup",
    "tensor_parallel_size": "parallel.tensor",
    "context_parallel_size sequence_parallel_degree": "parallel.context",
    "rl_beta dpo_beta orpo_alpha": "preference.beta",
    "simpo_gamma": "preference.margin",
    "rpo_alpha": "preference.sft",
    "kto_desirable_weight": "preference.desirable",
    "kto_undesirable_weight": "preference.undesirable",
    "dpo_label_smoothing": "preference.label_smoothing",
    "wandb_project mlflow_experiment_name trackio_project_name": "track.project",
    "wandb_name mlflow_run_name trackio_run_name": "track.name",
    "wandb_entity": "track.entity",
    "wandb_run_id": "track.run_id",
    "wandb_mode": "track.mode",
}
"""Keys → setting of the same meaning."""

TRACKERS = {
    "wandb_project": "wandb",
    "mlflow_experiment_name": "mlflow",
    "trackio_project_name": "trackio",
    "use_tensorboard": "tensorboard",
}
"""Key that turns on a tracker → `track.to`."""

FUNCTIONS: dict[str, Rule] = {
    "base_model": models.base_model,
    "datasets pretraining_dataset": rules.data,
    "val_set_size": rules.validation,
    "special_tokens": rules.special_tokens,
    "adapter": models.adapter,
    "load_in_8bit load_in_4bit": models.quantized_base,
    "lora_target_linear": sets({"adapter.targets": ["all-linear"]}),
    "lora_target_modules": models.targets,
    "peft": models.peft,
    "unfrozen_parameters": models.unfrozen,
    "model_quantization_config": models.quantized_files,
    "micro_batch_size": rules.packs,
    "gradient_accumulation_steps": rules.accumulation,
    "optimizer": rules.optimizer,
    "lr_scheduler": rules.schedule,
    "cosine_min_lr_ratio": lambda value, keys: Honored(
        {"optimizer.min_lr": float(value) * float(keys.get("learning_rate") or 0)}
    ),
    "bf16 bfloat16": lambda value, keys: Honored({"train.dtype": "auto" if value == "auto" else "bf16"}),
    "fp16 float16": sets({"train.dtype": "fp16"}),
    "float32": sets({"train.dtype": "fp32"}),
    "gradient_checkpointing": rules.recompute,
    "fsdp fsdp_config": rules.sharding,
    "dp_shard_size": lambda value, keys: rules.sharding(value, keys) if int(value) > 1 else NOTHING,
    "dp_replicate_size": rules.replicas,
    "deepspeed": rules.deepspeed,
    "plugins": rules.plugins,
    "rl": rules.preference,
    "reward_model": sets({"preference.loss": "reward"}),
    "num_labels": rules.num_labels,
    "torch_compile": rules.compiled,
    "pad_to_sequence_len": sets({"train.fixed_shape": "true"}),
    "excess_length_strategy": rules.overlong,
    "curriculum_sampling sample_packing_sequentially": sets({"plan.order": "given"}),
    "shuffle_merged_datasets": lambda value, keys: NOTHING if value else Honored({"plan.order": "given"}),
    "trust_remote_code": models.remote_code,
    "tokenizer_config": lambda value, keys: Honored(
        {"tokenizer.kind": "transformers", "tokenizer.path": str(value)}
    ),
    "tokenizer_use_mistral_common": models.mistral_tokenizer,
    "model_type": models.model_class,
}
"""Keys → function, which may read other keys too."""

NOTED: dict[str, str] = {
    "eval_strategy evals_per_epoch": "steps of an epoch are known when the documents are read: set train.eval_every",
    "save_strategy saves_per_epoch": "steps of an epoch are known when the documents are read: set"
    " train.checkpoint_every (a run is always saved at its end)",
    "resume_from_checkpoint auto_resume_from_checkpoints": "train.resume=auto continues a run of this trainer",
    "test_datasets": "data.validation_path=FILE takes validation documents of the same form as the training documents",
    "expert_parallel_size": "experts are divided as other weights are, by parallel.data=zero3",
    "activation_offloading": "saves memory only: activations are recomputed (train.recompute=full)",
    "loss_watchdog_threshold loss_watchdog_patience": "train.spike=stop ends a run whose loss or gradient norm jumps,"
    " by standard deviations",
    "tiled_mlp": "saves memory only: train.tiles=4 divides the feed-forwards",
    "fp8 fp8_config fp8_enable_fsdp_float8_all_gather": "products are computed in train.dtype: slower, less rounding",
    "quantization": "is of the export, after training",
    "torch_dtype": "weights that are trained are held in fp32, and computed with in train.dtype",
    "reinit_weights": "weights are drawn with standard deviation 1/√d_model",
    "hub_model_id hub_strategy push_to_hub": "export, and upload the folder",
    "profiler_steps": "train.profile=true traces three steps",
    "do_causal_lm_eval eval_causal_lm_metrics eval_table_size eval_max_new_tokens": (
        "evaluations compute the validation loss, and samples (train.sample_tokens)"
    ),
    "use_otel_metrics otel_* use_swanlab swanlab_* use_comet comet_*": (
        "there are tensorboard, wandb, mlflow and trackio"
    ),
    "max_memory gpu_memory_limit device_map": "`multipack advise` says what fits",
}
"""Names or patterns of keys → a difference that does not change what is trained."""

_FASTER = """
    sample_packing eval_sample_packing sample_packing_group_size sample_packing_bin_size sample_packing_eff_est
    multipack_real_batches multipack_probe streaming_multipack_buffer_size pretrain_multipack_buffer_size
    pretrain_multipack_attn attn_implementation fused_attn_kernel flash_attention flash_attn_cross_entropy
    flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum flex_attention flex_attn_compile_kwargs
    liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_glu_activation liger_swiglu
    liger_cross_entropy liger_fused_linear_cross_entropy liger_use_token_scaling unsloth_cross_entropy_loss
    unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope xformers_attention sdp_attention
    eager_attention cut_cross_entropy chunked_cross_entropy gemma4_hybrid_attn_impl use_glm_dsa_kernels use_kernels
    use_scattermoe use_sonicmoe experts_implementation quantize_moe_experts llama4_linearized_experts
    lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel tf32 low_cpu_mem_usage
    gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode heads_k_stride ring_attn_func ddp
    ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters accelerator_config
    fsdp_version fsdp_final_state_dict_type qlora_sharded_model_loading experimental_skip_move_to_device
    lora_on_cpu expert_parallel_num_nvl_bytes expert_parallel_token_capacity gc_steps use_ray ray_num_workers
    ray_run_name resources_per_worker nvfp4_merge_aware peft_autocast_adapter_dtype eval_batch_size
    model_quantization_config_kwargs
"""
"""Keys about how the same numbers are computed."""
_FILES = """
    dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset
    remove_unused_columns push_dataset_to_hub hf_use_auth_token dataloader_pin_memory
    dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last wandb_watch wandb_log_model wandb_tags
    mlflow_tracking_uri trackio_space_id
    include_tokens_per_second include_tkps save_only_model save_safetensors metric_for_best_model
    greater_is_better strict debug base_model_ignore_patterns tokenizer_type tokenizer_use_fast
    tokenizer_legacy tokenizer_save_jinja_files is_falcon_derived_model
    is_llama_derived_model is_mistral_derived_model is_qwen_derived_model eot_tokens roles_to_train train_on_eos
    pretraining_sample_concatenation resize_token_embeddings_to_32x mean_resizing_embeddings
    embeddings_skip_upcast eta_min
"""
"""Keys about files, logs and the order of work, in the same form. Axolotl itself reads no eta_min."""
NO_EFFECT = frozenset((_FASTER + _FILES).split())
"""Names of keys that do not change what is trained."""

READ_WITH: dict[str, tuple[str, ...]] = {
    "revision_of_model": ("train.init_from", "model"),
    "peft_use_dora": ("adapter.name",),
    "bnb_config_kwargs": ("adapter.double_quantize",),
    "dpo_loss_type": ("preference.loss",),
    "chat_template": ("data.chat_template",),
    "chat_template_jinja": ("data.chat_template",),
    "streaming": ("data.stream",),
    "use_tensorboard": ("track.to",),
}
"""Key that the function of another key reads → settings that it changes, if that function sets them."""

CANNOT: dict[str, str] = {
    "lora_target_parameters": "adapters of experts, whose matrices are in one parameter",
    "lora_model_dir": "continuing adapters: give train.init_from=FOLDER of the adapters instead of base_model",
    "peft_layers_* peft_layer_*": "adapters of some layers: name them in adapter.targets, such as"
    " blocks.0.attention.query",
    "lora_fan_in_fan_out": "matrices stored with inputs first",
    "neftune_noise_alpha noisy_embedding_alpha": "noise on embeddings (NEFTune)",
    "model_config overrides_of_model_config rope_*": "values that differ from the model's config.json",
    "tokens added_tokens_overrides": "new tokens: add them to the tokenizer's files",
    "default_system_message": "a system message for all chats: write it into the records",
    "processor_type image_* freeze_mm_modules full_finetune": "images and sound",
    "min_sample_len": "leaving out short documents: do it before",
    "lr_groups loraplus_lr_ratio embedding_lr embedding_lr_scale": "learning rates of some parameters: name them in"
    " optimizer.rules=[PATTERN lr=FACTOR, …]",
    "lr_scheduler_kwargs cosine_constant_lr_ratio lr_quadratic_warmup": "this shape of the schedule: there are"
    " optimizer.min_lr, optimizer.warmup_steps and optimizer.decay_steps",
    "max_packed_sequence_len": "packs without boundaries: remove it, and set sample_packing",
    "multipack_overlong": "the plugin's choice for long documents: set data.overlong",
    "batch_size": "the batch of all devices: give micro_batch_size and gradient_accumulation_steps",
    "trl vllm ebft gdpo": "training on the model's own samples",
    "lisa_*": "training some layers at a time (LISA)",
    "qat": "quantization-aware training",
    "use_onebitllms dsv4_fp4_grouped_mode": "products in so few bits",
    "diffusion": "masked diffusion",
    "center_rewards_coefficient process_reward_model": "this reward model",
}
"""Names or patterns of keys → the feature without an equivalent, and the way to have it."""

TOOL = Tool(
    name="Axolotl",
    recognizes=lambda keys: (
        keys.get("base_model") and (keys.get("datasets") or keys.get("pretraining_dataset"))
    ),
    needs="base_model and datasets",
    rules=rules_of(RENAMED, FUNCTIONS, NOTED, CANNOT, (*NO_EFFECT, *READ_WITH)),
    defaults=DEFAULTS,
    false=frozenset({"shuffle_merged_datasets"}),
    trackers=TRACKERS,
    read_with=READ_WITH,
)
