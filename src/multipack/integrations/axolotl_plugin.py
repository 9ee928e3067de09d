"""Axolotl's plugin: this package's sampler wherever Axolotl makes one, in its step count, trainer and streams.

    plugins: [multipack.integrations.axolotl.MultipackPlugin]

Axolotl calls, in this order:

    register                    refuses settings that do not go together, and gives the modules of `PLACES` our sampler
    get_input_args              keys of the YAML
    add_callbacks_post_trainer  checks at the start that the trainer reads our sampler, and sets its epoch
    post_trainer_create         collators without targets that belong to another document; probes the model
    post_train_unload           the modules get Axolotl's sampler back

Written for Axolotl 0.19.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from axolotl.integrations.base import BasePlugin, PluginManager
from pydantic import BaseModel, Field
from torch.utils.data import RandomSampler
from transformers import DataCollatorWithFlattening, TrainerCallback

from multipack.data.views.documents import IGNORE
from multipack.integrations.axolotl_sampler import MultipackBatchSampler
from multipack.integrations.collator import PackedDataCollator, document_lengths
from multipack.integrations.host_sampler import Overlong
from multipack.models.probe import isolation_probe
from multipack.ops.attention.model_inputs import check_rotations
from multipack.planning.lengths import short
from multipack.planning.options import check_choice
from multipack.shapes import rotation_limit

LOG = logging.getLogger("axolotl.multipack")  # Axolotl shows information of its own loggers only

NAME = "MultipackBatchSampler"

REFUSED = {
    "sample_packing_eff_est": (True, "replaces the exact number of steps by an estimate"),
    "dataloader_drop_last": (True, "takes a step of each epoch off the count, though every batch is full"),
    "use_pose": (True, "leaves gaps in the positions of a document, at which attention divides it"),
    "accelerator_config.split_batches": (True, "divides batches of bins, which are whole"),
    "accelerator_config.dispatch_batches": (True, "joins batches of different sizes"),
    "accelerator_config.use_seedable_sampler": (False, "gives every rank another order of the documents"),
}
"""Setting that does not go with the plugin → whether it is refused on or off, and why."""


class MultipackArgs(BaseModel):
    """Keys of the plugin in Axolotl's YAML."""

    multipack: bool = Field(
        default=True, description="Use multipack's sampler; false keeps Axolotl's own, for comparison."
    )
    multipack_overlong: Overlong = Field(
        default="alone",
        description="Documents longer than a bin: a separate bin (`alone`), left out (`drop`), or an `error`.",
    )
    multipack_probe: bool = Field(
        default=True, description="Check once that no document of a row affects another one in this model."
    )


def check_settings(data: Mapping[str, Any]) -> None:
    """Check the keys of the plugin, and Axolotl's keys that have no effect or break the number of steps.

    Called before Axolotl validates the YAML, because its errors have many lines.
    """
    known = {*MultipackArgs.model_fields, "multipack_real_batches"}  # the last is a key of Axolotl
    for key in map(str, data):
        if key.startswith("multipack") and key not in known:
            near = difflib.get_close_matches(key, known, 1, cutoff=0) or [""]
            raise ValueError(f"{key} is not a key of the multipack plugin; did you mean {near[0]}?")
    for key in ("multipack", "multipack_probe"):
        if not isinstance(value := data.get(key), bool | None):
            raise ValueError(f"{key} must be true or false, got {short(value)}")
    if (overlong := data.get("multipack_overlong")) is not None:
        check_choice("multipack_overlong", overlong, Overlong)
    if _is_on(data):
        _check_host(data)


def _check_host(data: Mapping[str, Any]) -> None:
    """Raise a ValueError for settings of Axolotl that do not go with the plugin."""
    packing, flattening = data.get("sample_packing"), data.get("batch_flattening")
    if packing and flattening is True:
        raise ValueError(
            "batch_flattening: true joins the rows of a batch, and sample_packing: true fills them: remove"
            " batch_flattening"
        )
    if not packing and not flattening:
        raise ValueError(
            "the multipack plugin packs documents: set sample_packing: true (or batch_flattening: true, which joins the"
            " documents of a batch without filling it), or multipack: false"
        )
    accelerator = data.get("accelerator_config") or {}
    given = {**data, **{f"accelerator_config.{key}": value for key, value in accelerator.items()}}
    for key, (refused, reason) in REFUSED.items() if packing else ():
        if (value := given.get(key)) is not None and bool(value) is refused:
            raise ValueError(f"{key}={value} {reason}; remove it, or set multipack: false")


class TrainerSampler(MultipackBatchSampler):
    """The sampler with Axolotl's settings: training has whole optimizer steps, evaluation whole rounds of ranks."""

    def __init__(self, sampler: Any, *args: Any, **kwargs: Any) -> None:
        cfg = PluginManager.get_instance().cfg or {}
        if size := cfg.get("batch_size"):
            multiple = size // cfg["micro_batch_size"]  # accumulation steps x ranks with different documents
            # Evaluation reads documents in order and accumulates nothing; a curriculum is in order, too.
            if not isinstance(sampler, RandomSampler) and not cfg.get("curriculum_sampling"):
                multiple //= cfg["gradient_accumulation_steps"]
            kwargs["multiple_of"] = multiple
        kwargs["overlong"] = cfg.get("multipack_overlong") or "alone"
        super().__init__(sampler, *args, **kwargs)


StreamSampler = partial(MultipackBatchSampler, multiple_of=1)
"""The sampler of a buffer of streamed documents, which is read by one process."""

MASK_DROPPED = ("gemma3", "gemma4", "gemma4_unified")
"""Models for which Axolotl's trainer removes the mask of packed rows."""

PLACES = {
    "axolotl.core.trainers.base": TrainerSampler,
    "axolotl.utils.trainer": TrainerSampler,
    "axolotl.utils.data.streaming": StreamSampler,
}
"""Module in which Axolotl makes samplers by the name `MultipackBatchSampler` → the sampler that it gets."""


class MultipackPlugin(BasePlugin):  # type: ignore[misc]
    """Replaces Axolotl's sampler; see the module."""

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Replace the sampler in `PLACES`, or put Axolotl's own back; errors of `check_settings`."""
        check_settings(cfg)
        _replace(_is_on(cfg))

    def post_train_unload(self, cfg: Mapping[str, Any]) -> None:
        """Put Axolotl's sampler back."""
        _replace(False)

    on_config_validation_error = post_train_unload

    def get_input_args(self) -> str:
        """The class of the plugin's keys."""
        return f"{__name__}.MultipackArgs"

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: Any) -> None:
        """Remove the targets at the borders of documents; then check that the model keeps documents apart."""
        if not _is_on(cfg) or _streams(cfg):
            return
        if not cfg.get("sample_packing") and not isinstance(
            trainer.data_collator, DataCollatorWithFlattening
        ):
            raise ValueError(
                f"batch_flattening={cfg.get('batch_flattening')} flattens nothing here (attn_implementation="
                f"{cfg.get('attn_implementation')}, micro_batch_size={cfg.get('micro_batch_size')}): set"
                " sample_packing: true, or multipack: false"
            )
        limit = rotation_limit(getattr(trainer.model, "config", None))
        for name in ("train_dataset", "eval_dataset") if limit is not None else ():
            if (data := getattr(trainer, name, None)) is not None:
                check_rotations(limit, document_lengths(data), name)
        for name in ("data_collator", "train_data_collator", "eval_data_collator"):
            collate = getattr(trainer, name, None)
            if isinstance(collate, DataCollatorWithFlattening):
                setattr(trainer, name, PackedDataCollator())
            elif collate is not None:
                setattr(trainer, name, WithinDocuments(collate))
        if cfg.get("multipack_probe") is not False:
            _probe(trainer)

    def add_callbacks_post_trainer(self, cfg: Mapping[str, Any], trainer: Any) -> list[TrainerCallback]:
        """The callback that checks the trainer's sampler, unless documents are streamed or not packed."""
        has_sampler = _is_on(cfg) and cfg.get("sample_packing") and not _streams(cfg)
        return [SamplerCheck(bool(cfg.get("max_steps")))] if has_sampler else []


def _probe(trainer: Any) -> None:
    """Raise a ValueError if documents affect each other in a batch that the trainer's own collator makes."""
    if not trainer.place_model_on_device:
        LOG.warning(
            "multipack: the model is sharded or placed by the host; check its isolation: multipack probe"
        )
        return
    inner = getattr(trainer.data_collator, "collate", trainer.data_collator)
    if getattr(inner, "pad_to_multiple_of", None):
        inner = replace(inner, pad_to_multiple_of=8)  # a few slots of padding in place of a whole row
    args, columns = trainer.args, set(getattr(trainer.train_dataset, "column_names", None) or ())
    if args.sample_packing_drop_attention_mask and "position_ids" in columns:
        columns.discard("attention_mask")
    has_rows = args.sample_packing and args.multipack_real_batches and args.per_device_train_batch_size > 1

    def batch(documents: Sequence[Sequence[int]]) -> dict[str, Any]:
        features = [
            {
                "input_ids": list(tokens),
                "labels": list(tokens),
                "attention_mask": [1] * len(tokens),
                "position_ids": list(range(len(tokens))),
            }
            for tokens in documents
        ]
        features = [{name: row[name] for name in row if name in columns} for row in features]
        made = WithinDocuments(inner)([features[:1], features[1:]] if has_rows and features[1:] else features)
        if trainer.model.config.model_type in MASK_DROPPED:
            made.pop("attention_mask", None)
        return dict(made)

    with trainer.accelerator.autocast():
        isolation_probe(trainer.model, batch).check()


def _replace(is_on: bool) -> None:
    """Give the modules of `PLACES` our samplers, or Axolotl's."""
    modules = {place: importlib.import_module(place) for place in PLACES}
    if missing := [place for place, module in modules.items() if not hasattr(module, NAME)]:
        raise RuntimeError(
            f"{', '.join(missing)} has no {NAME}: this version of Axolotl is not supported; install axolotl==0.19.0,"
            " or remove the multipack plugin"
        )
    own = getattr(importlib.import_module("axolotl.utils.samplers"), NAME)
    for place, module in modules.items():
        setattr(module, NAME, PLACES[place] if is_on else own)


def _is_on(cfg: Mapping[str, Any]) -> bool:
    return cfg.get("multipack") is not False


def _streams(cfg: Mapping[str, Any]) -> bool:
    """Whether packs are made inside the data set, so that the trainer's own sampler has nothing to pack."""
    return bool(cfg.get("streaming") or cfg.get("pretraining_dataset"))


class WithinDocuments:
    """A collator that removes the first token of each document from the targets.

    It would be predicted from the last token of another document. Axolotl's collators keep this target where prompts
    are trained on.
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The batch, with labels -100 at the beginnings of documents."""
        batch = self.collate(*args, **kwargs)
        labels, positions = batch.get("labels"), batch.get("position_ids")
        if labels is not None and positions is not None and labels.shape == positions.shape:
            labels[positions == 0] = IGNORE
        return batch


class SamplerCheck(TrainerCallback):
    """Checks that the trainer reads this package's sampler, and begins its epochs.

    The check reads the order of epoch 0; `on_epoch_begin` keeps a run that resumes in a later epoch from repeating it.

    Args:
        cut: whether `max_steps` ends the run, so that Axolotl's number of steps is not compared.
    """

    def __init__(self, cut: bool) -> None:
        self.cut = cut
        self.sampler: MultipackBatchSampler | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the sampler, and compare its number of steps with the one that Axolotl counted."""
        loader = kwargs["train_dataloader"]
        sampler = loader.batch_sampler
        while not isinstance(sampler, MultipackBatchSampler):
            if (sampler := getattr(sampler, "batch_sampler", None)) is None:
                raise RuntimeError(
                    f"the trainer reads {type(loader.batch_sampler).__name__} instead of multipack's sampler: another"
                    " plugin or trainer_cls has replaced it; remove that, or set multipack: false"
                )
        self.sampler = sampler
        steps = math.ceil(len(loader) / args.gradient_accumulation_steps)
        promised = math.floor(steps * args.num_train_epochs)
        if not self.cut and state.max_steps != promised:
            raise RuntimeError(
                f"Axolotl counted {state.max_steps} steps, but {args.num_train_epochs:g} epochs of its trainer have"
                f" {promised}: some documents would be left out; report this with the YAML, or set multipack: false"
            )
        if state.is_world_process_zero:
            batches = sampler.generate_batches()
            documents = sum(len(held) for batch in batches for held in batch)
            LOG.info(
                "multipack: %d steps an epoch, %d of %d documents in %d batches, %.2f %% of their slots filled",
                *(steps, documents, len(sampler.lengths), len(batches), 100 * sampler.efficiency()),
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the epoch, in a resumed run too."""
        if self.sampler is not None:
            self.sampler.set_epoch(int(state.epoch or 0))
