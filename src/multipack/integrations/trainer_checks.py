"""Settings, models and data under which a host's trainer would train on something else than every document alone."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from multipack.integrations.collator import PackedDataCollator, windows_of
from multipack.planning.lengths import short

DECIDED = {"capacity", "packs_per_step", "lengths", "rank", "world_size", "seed", "options"}
"""Arguments of a sampler that are not the user's in a trainer."""
OTHER_LOSSES = ("ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")
"""Values of a model's `loss_type` whose labels are not the next tokens."""


def check_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of the plan, without those that the host's arguments decide."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"plan_options must be a mapping, for example {{'window': 8}}, got {short(given)}")
    if others := sorted(DECIDED & set(given or ())):
        raise ValueError(
            f"plan_options has {', '.join(others)}, which the arguments of the trainer decide: leave it out"
        )
    return dict(given or {})


def check_host(trainer: Any) -> None:
    """Refuse settings of the host under which packed training is not training on every document alone."""
    check_model(trainer.model)
    args, collator = trainer.args, trainer.data_collator
    if collator.returns == "padded":
        raise ValueError("returns='padded' makes padded rows, not packs: use 'flattened' or '4d_mask'")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process with {args.n_gpu} GPUs divides a row among them: start one process per GPU, with"
            f" torchrun --nproc-per-node {args.n_gpu}"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False weighs ranks equally, whatever their targets: set it to True"
        )
    if getattr(args, "use_cache", False):
        raise ValueError("use_cache=True makes models ignore document boundaries: set it to False")
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        raise ValueError(
            f"{type(trainer.model).__name__} takes no num_items_in_batch, so that its loss is a mean over each"
            " micro-batch: give compute_loss_func, which divides by num_items_in_batch"
        )
    smoother = trainer.label_smoother if trainer.compute_loss_func is None else None
    if smoother is not None and "num_items_in_batch" not in signature(smoother).parameters:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} gives the mean over each micro-batch before"
            " transformers 5.15: update transformers, or set it to 0"
        )
    if args.ignore_data_skip:
        raise ValueError(
            "ignore_data_skip=True trains on the first documents of an interrupted epoch again: leave it out (packs"
            " that are skipped are not read)"
        )
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random" or getattr(args, "group_by_length", False):
        raise ValueError("packs are planned: leave out train_sampling_strategy (group_by_length)")
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and parallel.non_data_parallel_size > 1:
        raise ValueError(
            f"{parallel.non_data_parallel_size} ranks share a batch (tensor, context or sequence parallelism), and"
            " packs are dealt to data-parallel ranks alone: use data parallelism"
        )
    if collator.returns == "4d_mask":
        check_mask(trainer.model.config, collator)


def check_model(model: Any) -> None:
    """Refuse adapters that put tokens before a row, and models whose labels are not the next tokens."""
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"{type(adapter).__name__} puts virtual tokens before a row, where only its first document could see"
            " them: use LoRA, or another adapter without them"
        )
    model = model.get_base_model() if adapter is not None else model
    if getattr(model, "loss_type", None) in OTHER_LOSSES:
        raise ValueError(
            f"{type(model).__name__} does not predict the next token, and packs have no other labels: use a causal"
            " language model, or the host's own trainer"
        )


def check_mask(config: Any, collator: PackedDataCollator) -> None:
    """A model applies neither windows nor a conversion to a mask that it is given."""
    if collator.window != (needed := windows_of(config)):
        raise ValueError(
            f"a 4-D mask replaces the windows of {config.model_type}: give PackedDataCollator(window={needed!r}),"
            " as windows_of(model.config) returns, or use returns='flattened'"
        )
    if collator.mask == "boolean" and config._attn_implementation != "sdpa":
        raise ValueError(
            f"attn_implementation={config._attn_implementation} adds the mask to its scores: use mask='additive'"
        )


def makes_masks(trainer: Any) -> bool:
    """Whether a trainer's is a text model of transformers whose attention makes a mask of T² elements for a row."""
    config = getattr(trainer.model, "config", None)
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    eager = trainer.data_collator.returns == "flattened" and not trainer.args.torch_compile
    return eager and config is not None and config.get_text_config() is config
