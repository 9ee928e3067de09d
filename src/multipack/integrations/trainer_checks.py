"""Checks of a host's trainer: settings, models and data with which packed documents would not train as alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.packs.batch import check_tokens
from multipack.data.views.documents import IGNORE
from multipack.integrations.collator import COLUMNS, PackedDataCollator, read_document, windows_of
from multipack.planning.lengths import nothing_learned, short

LOG = logging.getLogger(__name__)

DECIDED = {"capacity", "packs_per_step", "lengths", "rank", "world_size", "seed", "options"}
"""Arguments of a sampler that a trainer sets, not the user."""
OTHER_LOSSES = ("ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")
"""Values of a model's `loss_type` whose labels are not the next tokens."""


def check_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of the plan, checked to contain none that the host's arguments decide."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"plan_options must be a mapping, for example {{'window': 8}}, got {short(given)}")
    if others := sorted(DECIDED & set(given or ())):
        raise ValueError(
            f"plan_options has {', '.join(others)}, which the arguments of the trainer decide: leave it out"
        )
    return dict(given or {})


def check_host(trainer: Any) -> None:
    """Refuse settings of the host under which documents in a pack would not train as alone."""
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
        raise ValueError(
            f"packs are planned: leave out train_sampling_strategy={strategy} (or group_by_length);"
            " plan_options={'order': 'given'} keeps the order of the data set"
        )
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
    """Check that a mask has the model's windows, which the model does not add to a 4-D mask."""
    if collator.window != (needed := windows_of(config)):
        raise ValueError(
            f"a 4-D mask replaces the windows of {config.model_type}: give PackedDataCollator(window={needed!r}),"
            " as windows_of(model.config) returns, or use returns='flattened'"
        )


def makes_masks(trainer: Any) -> bool:
    """Whether the trainer's model is a text model of transformers whose attention makes a T × T mask for a row."""
    config = getattr(trainer.model, "config", None)
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    eager = trainer.data_collator.returns == "flattened" and not trainer.args.torch_compile
    return eager and config is not None and config.get_text_config() is config


def check_targets_of(dataset: Any, lengths: NDArray[np.int64]) -> None:
    """Check that a document of a data set has a target; documents are read until one has."""
    if not any(_have_targets(dataset, lengths)):
        raise nothing_learned(
            f"the {len(lengths):,} documents of the data set",
            "look at the labels (-100 is no target, nor is the first token), completion_mask or assistant_masks",
        )


def _have_targets(dataset: Any, lengths: NDArray[np.int64]) -> Iterator[bool]:
    """Whether each document has a target; True for one that cannot be read, which the collator describes."""
    names = getattr(dataset, "column_names", None)
    if names is not None and not set(COLUMNS[1:]) & set(names):
        yield from lengths > 1
        return
    for number, row in enumerate(_documents(dataset, names)):
        try:
            _, labels = read_document(number, row)
        except ValueError:
            yield True
        else:
            yield bool((labels[1:] != IGNORE).any())


def _documents(dataset: Any, names: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    """The documents of a map-style data set; from Arrow in blocks."""
    if names is None or dataset.format["type"] == "custom":
        yield from (dataset[number] for number in range(len(dataset)))
        return
    kept = [name for name in COLUMNS if name in names]
    for page in dataset.select_columns(kept).with_format("numpy").iter(batch_size=256):
        yield from ({name: page[name][row] for name in kept} for row in range(len(page[kept[0]])))


@dataclass(frozen=True)
class CheckedTokens:
    """A collator that raises a ValueError for a token outside the vocabulary, and names its document."""

    collate: Any
    vocabulary_size: int

    def __call__(self, features: Any) -> Any:
        """The batch of the collator."""
        batch = self.collate(features)
        try:
            check_tokens(batch["input_ids"], self.vocabulary_size)
        except ValueError as error:
            ids = (np.asarray(each["input_ids"]) for each in features)
            size = self.vocabulary_size
            wrong = (number for number, each in enumerate(ids) if each.max() >= size or each.min() < 0)
            raise ValueError(f"document {next(wrong, 0)} of the batch: {error}") from None
        return batch


def whole_checkpoint(given: Any, folder: str) -> Any:
    """`resume_from_checkpoint`; for True the last checkpoint of `output_dir` whose state was written to its end.

    Trainer writes a checkpoint in place, its state at the end: a killed process leaves the last one incomplete.
    `ValueError` if the named checkpoint, or every one, is.
    """
    if given is not True and not isinstance(given, str | Path):
        return given
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    if given is not True:
        found = [Path(given)] if (Path(given) / "trainer_state.json").exists() else []
    newest = sorted(found, key=lambda path: path.name.partition("-")[2].zfill(20), reverse=True)
    whole = [path for path in newest if _is_whole(path)]
    if newest and not whole:
        raise ValueError(
            f"{newest[0]} has an incomplete trainer_state.json, as after a kill: resume from another checkpoint, or"
            " start without resuming"
        )
    if newest and whole[0] != newest[0]:
        LOG.warning("%s is incomplete, as after a kill: resuming from %s", newest[0], whole[0])
    return str(whole[0]) if whole else given


def _is_whole(checkpoint: Path) -> bool:
    try:
        return "global_step" in json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError, TypeError):
        return False
