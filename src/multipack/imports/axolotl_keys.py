"""The keys of Axolotl's configuration, in tables: another name, a function, no effect, cannot be honored."""

from __future__ import annotations

from functools import partial
from typing import Any

from multipack.imports import key_rules as rules
from multipack.imports import models
from multipack.imports.outcome import NOTHING, Honored, Rule, Tool, rules_of
from multipack.names_elsewhere import HUGGING_FACE

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

RENAMED: dict[str, tuple[str, type]] = {
    **HUGGING_FACE,
    "weight_decay": ("optimizer.weight_decay", float),
    "warmup_steps": ("optimizer.warmup_steps", float),
    "label_smoothing_factor": ("train.label_smoothing", float),
    "seed": ("train.seed", int),
    "early_stopping_patience": ("train.patience", int),
    "load_best_model_at_end": ("train.keep_best", bool),
    "peft_use_rslora": ("adapter.rank_stabilized", bool),
    "train_on_inputs": ("data.train_on_prompt", bool),
    "dataset_exact_deduplication": ("data.dedup", bool),
    "tensor_parallel_size": ("parallel.tensor", int),
    "context_parallel_size": ("parallel.context", int),
    "sequence_parallel_degree": ("parallel.context", int),
    "rl_beta": ("preference.beta", float),
    "dpo_beta": ("preference.beta", float),
    "orpo_alpha": ("preference.beta", float),
    "simpo_gamma": ("preference.margin", float),
    "rpo_alpha": ("preference.sft", float),
    "kto_desirable_weight": ("preference.desirable", float),
    "kto_undesirable_weight": ("preference.undesirable", float),
    "dpo_label_smoothing": ("preference.label_smoothing", float),
    "wandb_project": ("track.project", str),
    "wandb_entity": ("track.entity", str),
    "wandb_name": ("track.name", str),
    "wandb_run_id": ("track.run_id", str),
    "mlflow_experiment_name": ("track.project", str),
    "mlflow_run_name": ("track.name", str),
    "trackio_project_name": ("track.project", str),
    "trackio_run_name": ("track.name", str),
    "wandb_mode": ("track.mode", str),
    "lora_modules_to_save": ("adapter.train", list),
}
"""Key → setting of the same meaning, and the type of its value."""

TRACKERS = {
    "wandb_project": "wandb",
    "mlflow_experiment_name": "mlflow",
    "trackio_project_name": "trackio",
    "use_tensorboard": "tensorboard",
}
"""Key that turns on a tracker → `track.to`."""

FUNCTIONS: dict[str, Rule] = {
    "base_model": models.base_model,
    "datasets": rules.data,
    "pretraining_dataset": rules.data,
    "val_set_size": rules.validation,
    "special_tokens": rules.special_tokens,
    "adapter": models.adapter,
    "load_in_8bit": models.quantized_base,
    "load_in_4bit": models.quantized_base,
    "lora_target_linear": lambda value, keys: Honored({"adapter.targets": ["all-linear"]}),
    "lora_target_modules": models.targets,
    "loraplus_lr_ratio": partial(rules.rate_of, "*.lora_b", relative=True),
    "embedding_lr_scale": partial(rules.rate_of, "embedding", relative=True),
    "embedding_lr": partial(rules.rate_of, "embedding", relative=False),
    "peft": models.peft,
    "unfrozen_parameters": models.unfrozen,
    "model_quantization_config": models.quantized_files,
    "micro_batch_size": rules.packs,
    "gradient_accumulation_steps": rules.accumulation,
    "loss_watchdog_threshold": rules.watchdog,
    "loss_watchdog_patience": rules.watchdog,
    "optimizer": rules.optimizer,
    "lr_scheduler": rules.schedule,
    "cosine_min_lr_ratio": lambda value, keys: Honored(
        {"optimizer.min_lr": float(value) * float(keys.get("learning_rate") or 0)}
    ),
    **dict.fromkeys(
        ("bf16", "bfloat16"),
        lambda value, keys: Honored({"train.dtype": "auto" if value == "auto" else "bf16"}),
    ),
    "fp16": lambda value, keys: Honored({"train.dtype": "fp16"}),
    "float16": lambda value, keys: Honored({"train.dtype": "fp16"}),
    "float32": lambda value, keys: Honored({"train.dtype": "fp32"}),
    "gradient_checkpointing": rules.recompute,
    "fsdp": rules.sharding,
    "fsdp_config": rules.sharding,
    "dp_shard_size": lambda value, keys: rules.sharding(value, keys) if int(value) > 1 else NOTHING,
    "dp_replicate_size": rules.replicas,
    "deepspeed": rules.deepspeed,
    "plugins": rules.plugins,
    "rl": rules.preference,
    "reward_model": lambda value, keys: Honored({"preference.loss": "reward"}),
    "num_labels": rules.num_labels,
    "torch_compile": rules.compiled,
    "pad_to_sequence_len": lambda value, keys: Honored({"train.fixed_shape": "true"}),
    "excess_length_strategy": rules.overlong,
    "curriculum_sampling": lambda value, keys: Honored({"plan.order": "given"}),
    "sample_packing_sequentially": lambda value, keys: Honored({"plan.order": "given"}),
    "shuffle_merged_datasets": lambda value, keys: NOTHING if value else Honored({"plan.order": "given"}),
    "trust_remote_code": models.remote_code,
    "tokenizer_config": lambda value, keys: Honored(
        {"tokenizer.kind": "transformers", "tokenizer.path": str(value)}
    ),
    "tokenizer_use_mistral_common": models.mistral_tokenizer,
    "model_type": models.model_class,
    "quantize_moe_experts": lambda value, keys: (
        NOTHING if value else Honored(note="adapter.quantize quantizes experts too")
    ),
}
"""Key → function, which may read other keys too."""

NOTED: dict[str, str] = {
    "eval_strategy evals_per_epoch": "steps of an epoch are known when the documents are read: set train.eval_every",
    "save_strategy saves_per_epoch": "steps of an epoch are known when the documents are read: set"
    " train.checkpoint_every (a run is always saved at its end)",
    "resume_from_checkpoint auto_resume_from_checkpoints": "train.resume=auto continues a run of this trainer",
    "test_datasets": "data.validation_path=FILE takes validation documents of the same form as the training documents",
    "expert_parallel_size": "experts are divided as other weights are, by parallel.data=zero3",
    "activation_offloading": "saves memory only: activations are recomputed (train.recompute=full)",
    "tiled_mlp": "saves memory only: train.tiles=4 divides the feed-forwards",
    "fp8 fp8_config fp8_enable_fsdp_float8_all_gather": "products are computed in train.dtype: slower, less rounding",
    "quantization": "is of the export, after training",
    "torch_dtype": "weights that are trained are held in fp32, and computed with in train.dtype",
    "reinit_weights": "weights are drawn with standard deviation 1/√d_model",
    "hub_model_id hub_strategy push_to_hub": "export, and upload the folder",
    "profiler_steps": "train.profile=true traces three steps",
    "do_causal_lm_eval eval_causal_lm_metrics eval_table_size eval_max_new_tokens do_bench_eval bench_dataset": (
        "evaluations compute the validation loss, and samples (train.sample_tokens)"
    ),
    "use_otel_metrics otel_metrics_host otel_metrics_port use_swanlab swanlab_project swanlab_experiment_name"
    " swanlab_description swanlab_mode swanlab_log_completions swanlab_completion_log_interval"
    " swanlab_completion_max_buffer comet_project_name use_comet": "there are tensorboard, wandb, mlflow and trackio",
    "max_memory gpu_memory_limit device_map": "`multipack advise` says what fits",
}
"""Keys → a difference that does not change what is trained."""

_FASTER = """
    model_quantization_config_kwargs
    sample_packing eval_sample_packing attn_implementation flash_attention xformers_attention
    sdp_attention flex_attention eager_attention flex_attn_compile_kwargs flash_attn_cross_entropy
    flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum fused_attn_kernel
    gemma4_hybrid_attn_impl use_glm_dsa_kernels cut_cross_entropy liger_rope liger_rms_norm liger_layer_norm
    liger_glu_activation liger_swiglu liger_cross_entropy liger_fused_linear_cross_entropy
    liger_rms_norm_gated liger_use_token_scaling unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv
    unsloth_lora_o unsloth_rms_norm unsloth_rope lora_mlp_kernel lora_qkv_kernel lora_o_kernel
    lora_embedding_kernel use_kernels use_scattermoe use_sonicmoe experts_implementation
    llama4_linearized_experts chunked_cross_entropy tf32 low_cpu_mem_usage gradient_checkpointing_kwargs
    torch_compile_backend torch_compile_mode heads_k_stride ring_attn_func ddp ddp_timeout ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_find_unused_parameters accelerator_config fsdp_version
    fsdp_final_state_dict_type qlora_sharded_model_loading experimental_skip_move_to_device lora_on_cpu
    expert_parallel_num_nvl_bytes expert_parallel_token_capacity gc_steps torchdistx_path world_size
    local_rank device use_ray ray_num_workers ray_run_name resources_per_worker nvfp4_merge_aware merge_lora
    merge_method lora_model_dir_merge peft_autocast_adapter_dtype eval_batch_size
"""
"""Keys about how the same numbers are computed."""
_FILES = """
    dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory dataset_shard_num
    skip_prepare_dataset remove_unused_columns push_dataset_to_hub hf_use_auth_token dataloader_pin_memory
    dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last wandb_watch wandb_log_model wandb_tags
    mlflow_tracking_uri trackio_space_id include_tokens_per_second include_tkps save_only_model
    save_safetensors metric_for_best_model greater_is_better strict debug base_model_config base_model_ignore_patterns
    tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files is_falcon_derived_model
    is_llama_derived_model is_mistral_derived_model is_qwen_derived_model eot_tokens
    roles_to_train train_on_eos sample_packing_group_size sample_packing_bin_size sample_packing_eff_est
    multipack_real_batches streaming_multipack_buffer_size pretrain_multipack_buffer_size
    pretrain_multipack_attn pretraining_sample_concatenation total_num_tokens total_supervised_tokens
    axolotl_config_path gptq_groupsize gptq_model_v1 resize_token_embeddings_to_32x mean_resizing_embeddings
    shrink_embeddings embeddings_skip_upcast is_preprocess preprocess_iterable eta_min multipack_probe
"""
"""Keys about files, logs and the order of work, in the same form. Axolotl itself reads no eta_min."""
NO_EFFECT = frozenset((_FASTER + _FILES).split())
"""Keys that do not change what is trained."""

READ_WITH: dict[str, tuple[str, ...]] = {
    "revision_of_model": ("train.init_from", "model"),
    "peft_use_dora": ("adapter.name",),
    "bnb_config_kwargs": ("adapter.double_quantize",),
    "lr_scheduler_kwargs": ("optimizer.min_lr",),
    "dpo_loss_type": ("preference.loss",),
    "chat_template": ("data.chat_template",),
    "chat_template_jinja": ("data.chat_template",),
    "streaming": ("data.stream",),
    "use_tensorboard": ("track.to",),
}
"""Key that the function of another key reads → settings that it changes, if that function sets them."""

CANNOT: dict[str, str] = {
    "lisa_n_layers lisa_step_interval lisa_layers_attribute": "training some layers at a time (LISA)",
    "lora_target_parameters": "adapters of experts, whose matrices are in one parameter",
    "lora_model_dir": "continuing adapters: give train.init_from=FOLDER of the adapters instead of base_model",
    "peft_layers_to_transform peft_layers_pattern peft_layer_replication": "adapters of some layers: name them in"
    " adapter.targets, such as blocks.0.attention.query",
    "peft_init_lora_weights": "adapters begin as zero updates, the other values are drawn",
    "peft_trainable_token_indices": "training some rows of the embedding",
    "lora_fan_in_fan_out": "matrices stored with inputs first",
    "relora relora_steps relora_prune_ratio jagged_restart_steps": "restarting adapters (ReLoRA)",
    "neftune_noise_alpha noisy_embedding_alpha": "noise on embeddings (NEFTune)",
    "qat": "quantization-aware training",
    "use_onebitllms": "training weights of 1.58 bits",
    "gptq hqq": "weights quantized by this method",
    "diffusion": "masked diffusion",
    "model_config overrides_of_model_config": "values that differ from the model's config.json",
    "tokens added_tokens_overrides": "new tokens: add them to the tokenizer's files",
    "default_system_message": "a system message for all chats: write it into the records",
    "fix_untrained_tokens": "changing the rows of tokens that were never trained",
    "processor_type image_size image_resize_algorithm": "images and sound",
    "min_sample_len": "leaving out short documents: do it before",
    "group_by_length": "steps of equally long documents",
    "lr_groups": "groups of learning rates: name them in optimizer.rules=[PATTERN lr=FACTOR, …]",
    "optim_target_modules optim_args": "options of this optimizer",
    "cosine_constant_lr_ratio lr_quadratic_warmup": "this shape of the schedule",
    "freeze_mm_modules full_finetune": "images and sound",
    "max_packed_sequence_len": "packs without boundaries: remove it, and set sample_packing",
    "center_rewards_coefficient": "rewards with a mean near 0",
    "dsv4_fp4_grouped_mode": "FP4 products",
    "batch_size": "the batch of all devices: give micro_batch_size and gradient_accumulation_steps",
    "process_reward_model": "classifiers of steps",
    "cpo_alpha dpo_use_weighting dpo_norm_loss": "this loss of preferences",
    "trl vllm ebft gdpo": "training on the model's own samples",
    "kd_trainer kd_alpha kd_ce_alpha kd_temperature": "distillation",
    "s2_attention use_pose rope_scaling rope_theta": "attention or positions other than the model's",
    "torchao_weights auto_find_batch_size": "this",
    "max_prompt_len": "cutting prompts",
}
"""Keys → the feature without an equivalent."""

TOOL = Tool(
    name="Axolotl",
    is_own=lambda keys: keys.get("base_model") and (keys.get("datasets") or keys.get("pretraining_dataset")),
    needs="base_model and datasets",
    rules=rules_of(RENAMED, FUNCTIONS, NOTED, CANNOT, (*NO_EFFECT, *READ_WITH)),
    defaults=DEFAULTS,
    false=frozenset({"shuffle_merged_datasets"}),
    trackers=TRACKERS,
    read_with=READ_WITH,
)
