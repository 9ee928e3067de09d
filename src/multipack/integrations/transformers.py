"""`PackedTrainer`: transformers' Trainer on planned packs; `PackedTrainerMixin` does the same for its subclasses.

    - trainer = Trainer(model, args, train_dataset=dataset, data_collator=padding_collator)
    + trainer = PackedTrainer(model, args, train_dataset=dataset, capacity=2048)

    micro-batch   one row of up to capacity · per_device_train_batch_size tokens, in place of as many padded rows
    step          gradient_accumulation_steps micro-batches on each rank; the host counts its targets

Every rank plans the epoch alone and reads its own rows. The loader is not prepared by accelerate, which would divide it
again: Trainer moves the tensors, and an interrupted epoch continues with its own order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.integrations.collator import COLUMNS, PackedDataCollator, document_lengths
from multipack.integrations.neftune import document_noise
from multipack.integrations.trainer_checks import (
    CheckedTokens,
    check_host,
    check_options,
    check_targets_of,
    makes_masks,
    whole_checkpoint,
)
from multipack.machine import import_extra
from multipack.models.probe import isolation_probe
from multipack.ops.attention.foreign_attention import register
from multipack.ops.attention.model_inputs import check_rotations
from multipack.planning.lengths import check_integer, name_documents
from multipack.planning.options import check_fingerprint
from multipack.shapes import rotation_limit

LOG = logging.getLogger(__name__)

_transformers: Any = import_extra("transformers", "PackedTrainer", "hf")
_HOST: Any = object  # the mixin's other base, for type checkers
_STATE = "multipack"
"""Key of the plan's identity in the `trainer_state.json` of a checkpoint."""


class RankLoader(DataLoader[Any]):
    """A loader of one rank's packs. Trainer calls `set_epoch` at the beginning of each epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch of the sampler."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class PlanCheck(_transformers.TrainerCallback):  # type: ignore[misc]
    """Saves the plan's identity with checkpoints, and refuses to resume with another plan."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **host: Any) -> None:
        """Compare the plan's identity with the loaded state's, if Trainer has loaded one."""
        sampler = host["train_dataloader"].batch_sampler
        plan = sampler.plan
        mine = {"fingerprint": plan.fingerprint, "options": plan.key, "seed": sampler.state_at(0)["seed"]}
        saved = state.stateful_callbacks.get(_STATE)
        if saved is not None:
            check_fingerprint(saved, mine["fingerprint"], mine["options"])
            if saved["seed"] != mine["seed"]:
                raise ValueError(
                    f"the checkpoint was trained in the order of data_seed={saved['seed']}, now {mine['seed']}: use the"
                    " saved one to continue"
                )
        state.stateful_callbacks[_STATE] = mine
        # Before transformers 5.17, the loader of an interrupted epoch does not pass its number on.
        sampler.set_epoch(state.global_step // sampler.steps_per_epoch)


class PackedLoaders(_HOST):  # type: ignore[misc]
    """Loaders of one rank's packs in place of a host's: every rank plans the epoch alone, and reads its own rows."""

    data_collator: Any
    capacity: int
    plan_options: dict[str, Any]
    # (data set, its lengths) of each data set that was read.
    _known_lengths: tuple[tuple[Any, NDArray[np.int64]], ...] = ()

    def get_train_dataloader(self) -> RankLoader:
        """This rank's packs, epoch after epoch."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset: give PackedTrainer(train_dataset=…)")
        args, options = self.args, dict(self.plan_options)
        if args.dataloader_drop_last:
            options.setdefault("tail", "drop")
        lengths = self._lengths_of(self.train_dataset)
        sampler = self._sampler(
            lengths,
            "per_device_train_batch_size",
            self._train_batch_size,
            packs_per_step=args.world_size * args.gradient_accumulation_steps,
            **options,
        )
        check_targets_of(self.train_dataset, lengths)
        return self._loader(self.train_dataset, sampler, args.dataloader_persistent_workers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> RankLoader:
        """This rank's packs of the evaluation set, in its order."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):  # Trainer names the data sets of a mapping
            if not isinstance(self.eval_dataset, Mapping) or chosen not in self.eval_dataset:
                raise ValueError(
                    f"there is no eval_dataset {chosen!r}: give the trainer a mapping with that name"
                )
            chosen = self.eval_dataset[chosen]
        if chosen is None:
            raise ValueError("evaluation needs an eval_dataset: give it to the trainer, or to evaluate()")
        options = self.plan_options | {"order": "given", "tail": "keep"}
        size, ranks = self.args.eval_batch_size, self.args.world_size
        lengths = self._lengths_of(chosen)
        sampler = self._sampler(lengths, "per_device_eval_batch_size", size, packs_per_step=ranks, **options)
        return self._loader(chosen, sampler, False)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The host's own loader, of padded rows."""
        packed = self.data_collator
        self.data_collator = PackedDataCollator("padded", packed.pad_id)
        try:
            return super().get_test_dataloader(test_dataset)
        finally:
            self.data_collator = packed

    def _lengths_of(self, dataset: Any) -> NDArray[np.int64]:
        """Lengths of the documents, read once per data set."""
        for known, lengths in self._known_lengths:
            if known is dataset and len(dataset) == len(lengths):
                return lengths
        lengths = document_lengths(dataset)
        others = (known for known in self._known_lengths if known[0] is not dataset)
        self._known_lengths = (*others, (dataset, lengths))
        return lengths

    def _sampler(
        self, lengths: NDArray[np.int64], setting: str, size: int, **options: Any
    ) -> PackedBatchSampler:
        args, row = self.args, self.capacity * size
        if (long := lengths > row).any():
            raise ValueError(
                f"{name_documents(lengths, long)}, but a row has capacity={self.capacity:,} × {setting}={size} tokens;"
                f" use capacity={-(-int(lengths.max()) // size):,}, or truncate or filter these documents"
            )
        check_rotations(rotation_limit(getattr(self.model, "config", None)), lengths, type(self).__name__)
        return PackedBatchSampler(
            lengths,
            rank=args.process_index,
            world_size=args.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            capacity=row,
            **options,
        )

    def _loader(self, dataset: Any, sampler: PackedBatchSampler, persistent: bool) -> RankLoader:
        args = self.args
        if hasattr(dataset, "select_columns") and dataset.format["type"] != "custom":  # datasets.Dataset
            names = [name for name in COLUMNS if name in dataset.column_names]
            dataset = dataset.select_columns(names).with_format("numpy")
        embedding = getattr(self.model, "get_input_embeddings", lambda: None)()
        size = getattr(embedding, "num_embeddings", None)
        return RankLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator if size is None else CheckedTokens(self.data_collator, size),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=persistent,
            prefetch_factor=args.dataloader_prefetch_factor,
        )


class PackedLoss(_HOST):  # type: ignore[misc]
    """The number of targets of a step, and the loss of an evaluation as the mean over all of its targets."""

    _noise: float | None  # the host's neftune_noise_alpha
    _evaluated: torch.Tensor  # (2,) summed loss and number of targets of this rank's evaluation

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *device: Any) -> Any:
        """The rows of a step and their number of targets, as the host counts them.

        Rows are on the host's device, as a loader prepared by accelerate has them: before transformers 5, hosts gather
        the number where the labels are, and 4.46 gathers it after the last step of an epoch, too.
        """
        rows = [self._prepare_inputs(row) for row in islice(epoch_iterator, num_batches)]
        return super().get_batch_samples(iter(rows), len(rows), *device) if rows else (rows, None)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The host's loss; in evaluation the mean over this rank's targets, whose number is added up."""
        if self.model.training:
            with document_noise(self.model, self._noise, inputs.get("position_ids")):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        targets = int((inputs["labels"][..., 1:] != -100).sum())
        averaged, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:  # transformers 4.46 multiplies the loss of an evaluation by the number of ranks
            found = super().compute_loss(model, inputs, return_outputs, None)
        finally:
            self.args.average_tokens_across_devices = averaged
        if targets:
            loss = (found[0] if return_outputs else found).detach().to(self._evaluated)
            self._evaluated += torch.stack([loss * targets, torch.full_like(loss, targets)])
        return found

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """The host's loop; the loss is the mean over all targets instead of the mean over batches."""
        precision = torch.float32 if self.args.device.type == "mps" else torch.float64
        self._evaluated = torch.zeros(2, dtype=precision, device=self.args.device)
        result = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if isinstance(dataloader, RankLoader) and f"{metric_key_prefix}_loss" in result.metrics:
            total, targets = self.accelerator.reduce(self._evaluated, "sum").tolist()
            result.metrics[f"{metric_key_prefix}_loss"] = total / targets if targets else float("nan")
        return result


class PackedTrainerMixin(PackedLoaders, PackedLoss):
    """Packed training and evaluation for a subclass of Trainer: `class Mine(PackedTrainerMixin, TheirTrainer)`.

    Ranks, gradient accumulation, seed and workers are the host's. `eval_loss` is the mean over all targets of the
    evaluation set, as of every document alone. `predict` reads padded rows, so that a prediction is a document.

    Args:
        model: see the host, as for `args` and all other arguments.
        data_collator: a `PackedDataCollator`; None = one with its defaults.
        capacity: tokens of a pack. A micro-batch is one row of at most capacity · per_device_train_batch_size tokens
            (per_device_eval_batch_size in evaluation), which also limits the length of a document.
        plan_options: options of the plan that the host's arguments do not decide: `window`, `balance`, `cost`.
        probe: whether to check once, by a dozen small forward passes, that documents of a row do not mix.
        packed_attention: whether the model computes attention inside documents by this package's function instead of
            masks of T² elements (`attention_interface.register`). None = on a CPU with transformers ≥ 5.2, where the
            model's is sdpa or eager and the probe passes with ours.

    Raises:
        ValueError: documents affect each other, or a setting of the host would train on something else; the message
            names it.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: PackedDataCollator | None = None,
        *positional: Any,
        capacity: int,
        plan_options: Mapping[str, Any] | None = None,
        probe: bool = True,
        packed_attention: bool | None = None,
        **named: Any,
    ) -> None:
        self.capacity, self.plan_options = check_integer("capacity", capacity), check_options(plan_options)
        if data_collator is not None and not isinstance(data_collator, PackedDataCollator):
            raise ValueError(
                f"data_collator={type(data_collator).__name__} does not make packed rows: leave it out, or give a"
                " PackedDataCollator"
            )
        if {"ref_model", "reward_funcs"} & set(signature(super().__init__).parameters):
            raise ValueError(
                f"{type(self).__name__} trains on pairs or rollouts, and packs are made of single documents: use"
                " PackedSFTTrainer; preference pairs are packed by multipack train"
            )
        self._evaluated = torch.zeros(2)
        super().__init__(model, args, data_collator or PackedDataCollator(), *positional, **named)
        check_host(self)
        # The host's own noise has the size of a row: `compute_loss` adds each document's.
        self._noise, self.neftune_noise_alpha = getattr(self, "neftune_noise_alpha", None), None
        if packed_attention:
            register(self.model)
        if probe and self.place_model_on_device:
            with self.accelerator.autocast():
                self._probe(packed_attention)
        elif probe:
            LOG.warning(
                "the model is sharded or placed by the host, so its isolation is not probed: multipack probe"
            )
        self.add_callback(PlanCheck())

    def train(self, resume_from_checkpoint: Any = None, *positional: Any, **named: Any) -> Any:
        """Train as the host; `resume_from_checkpoint=True` takes the last checkpoint that was written to its end.

        Raises:
            ValueError: the given checkpoint is incomplete.
        """
        found = whole_checkpoint(resume_from_checkpoint, self.args.output_dir)
        return super().train(found, *positional, **named)

    def _probe(self, packed_attention: bool | None) -> None:
        """Check that documents are isolated; on a CPU with this package's attention, which is kept if they are."""
        if packed_attention is None and self.args.device.type == "cpu" and makes_masks(self):
            kept = self.model.config._attn_implementation
            try:
                register(self.model)
                is_isolated = isolation_probe(self.model, self._probed).ok
            except (ImportError, ValueError):  # the model has attention of its own
                is_isolated = False
            if is_isolated:
                if self.is_world_process_zero():
                    LOG.warning(
                        "attention is computed inside documents, without %s's mask of all pairs of tokens"
                        " (packed_attention=False keeps it)",
                        kept,
                    )
                return
            if self.model.config._attn_implementation != kept:
                self.model.set_attn_implementation(kept)
        isolation_probe(self.model, self._probed).check()

    def _probed(self, documents: Sequence[Sequence[int]]) -> Any:
        return self.data_collator([{"input_ids": tokens} for tokens in documents])


class PackedTrainer(PackedTrainerMixin, _transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer on planned packs. Arguments: `PackedTrainerMixin`."""
