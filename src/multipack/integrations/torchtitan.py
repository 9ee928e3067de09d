"""`packed`: torchtitan's Trainer on planned packs, through its protocol of data loaders.

    config = llama3_8b()                                  a Trainer.Config
    config = packed(config, documents=my_documents)       a function tokenizer -> data set of token lists

    batch   {"input": (B, L), "positions": (B, L)}, labels (B, L)    B = local_batch_size, L = seq_len; a row is a pack
            input      a a a a a b b c c c 0 0
            positions  0 1 2 3 4 0 1 0 1 2 0 1      torchtitan makes the masks of documents from them
            labels     a a a a − b − c c − − −      shifted already; − is −100: no document predicts the next one

That is torchtitan 0.3. Later versions give `max_context_length` and `num_tokens_per_batch` in place of L and B: a batch
is one pack of `num_tokens_per_batch` tokens, its tensors have one dimension, and no document exceeds
`max_context_length`.

Every rank plans the epoch alone and reads its own rows, the same number on all ranks. Epoch follows epoch until
`training.steps`; `len(trainer.dataloader)` is the number of batches of an epoch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from typing import Any, get_origin

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import IGNORE
from multipack.integrations.collator import PackedDataCollator, document_lengths
from multipack.machine import import_extra
from multipack.planning.lengths import name_documents

import_extra("torchtitan", "PackedDataLoader", "torchtitan")
try:
    _Base: Any = import_module("torchtitan.components.dataloader").BaseDataLoader
    _BATCH: Any = tuple
except ModuleNotFoundError:  # after 0.3
    _Base = import_module("torchtitan.components.data.loader").BaseDataLoader
    _BATCH = get_origin(import_module("torchtitan.components.data.collators").TrainerBatch)


class _Inputs(dict[str, Any]):
    """The model's inputs of a batch, and their number of targets as an entry that only `pop` knows.

    Some versions after 0.3 pop `num_valid_tokens` before the inputs reach the model, others leave every entry there.
    """

    def pop(self, key: str, *default: Any) -> Any:
        """Remove and return an entry; the number of targets, if it is asked for."""
        return self.num_valid_tokens if key == "num_valid_tokens" else super().pop(key, *default)

    def __init__(self, entries: Mapping[str, Tensor], targets: int) -> None:
        super().__init__(entries)
        self.num_valid_tokens = targets


class PackedDataLoader(_Base):  # type: ignore[misc]
    """One rank's batches, epoch after epoch. `packed` puts it into a configuration.

    Args:
        config: settings of the loader.
        dp_world_size: number of data-parallel ranks.
        dp_rank: data-parallel rank of this process.
        tokenizer: argument of `config.documents`.
        seq_len: tokens of a row, and longest document; torchtitan 0.3.
        local_batch_size: rows of a batch; torchtitan 0.3.
        max_context_length: longest document; later versions.
        num_tokens_per_batch: tokens of a batch; later versions.
        **host: other arguments of the host, which are not needed.

    Raises:
        ValueError: a document is longer than a row or the context; or see `multipack.plan`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):  # type: ignore[misc]
        """Settings of the loader."""

        documents: Callable[[Any], Any] | None = None
        """Function of the tokenizer that returns a map-style data set with `input_ids`, and `labels` (not shifted)."""

        seed: int = 0
        """Seed of the order."""

        epochs: int = 0
        """Epochs after which the data ends; 0 = no end."""

        plan_options: Mapping[str, Any] = field(default_factory=dict)
        """Options of the plan: `window`, `balance`, `cost`."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int = 0,
        local_batch_size: int = 0,
        max_context_length: int = 0,
        num_tokens_per_batch: int = 0,
        **host: Any,
    ) -> None:
        if config.documents is None:
            raise ValueError("dataloader.documents is missing: use packed(config, documents=function)")
        self._flat = bool(num_tokens_per_batch)
        row, rows = (num_tokens_per_batch, 1) if self._flat else (seq_len, local_batch_size)
        name, most = ("max_context_length", max_context_length) if self._flat else ("seq_len", seq_len)
        self._documents = config.documents(tokenizer)
        lengths = document_lengths(self._documents)
        if (long := lengths > min(most, row)).any():
            raise ValueError(
                f"{name_documents(lengths, long)}, but training.{name}={most:,} in rows of {row:,} tokens; use"
                f" training.{name}={int(lengths.max()):,}, or truncate or filter these documents"
            )
        self._row_tokens, self._rows, self._longest, self._epochs = row, rows, most, config.epochs
        self._collate = PackedDataCollator()
        self.sampler = PackedBatchSampler(
            lengths,
            rank=dp_rank,
            world_size=dp_world_size,
            seed=config.seed,
            capacity=row,
            packs_per_step=dp_world_size * rows,
            **config.plan_options,
        )

    def __len__(self) -> int:
        """Batches of an epoch, the same number on all ranks and in all epochs."""
        return len(self.sampler) // self._rows

    def __iter__(self) -> Iterator[Any]:
        while not self._epochs or self.sampler.epoch < self._epochs:
            packs = iter(self.sampler)
            while batch := [self._row(pack) for pack in islice(packs, self._rows)]:
                inputs, positions, labels = map(torch.stack, zip(*batch, strict=True))
                yield self._batch({"input": inputs, "positions": positions, "labels": labels})
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def _batch(self, tensors: dict[str, Tensor]) -> Any:
        """A batch in the form of the installed version: inputs and labels, or one dictionary of both."""
        targets = int((tensors["labels"] != IGNORE).sum())
        inputs = _Inputs({key: value[0] if self._flat else value for key, value in tensors.items()}, targets)
        return {**inputs, "num_valid_tokens": targets} if _BATCH is dict else (inputs, inputs.pop("labels"))

    def close(self) -> None:
        """Nothing is open: no process, thread or file."""

    def _row(self, pack: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and shifted labels of a pack. Padding is a document without labels."""
        row = self._collate([self._documents[number] for number in pack])
        tokens, labels = row["input_ids"][0], row["labels"][0]
        padding = self._row_tokens - len(tokens)
        positions = torch.cat([row["position_ids"][0], torch.arange(padding) % self._longest])
        return F.pad(tokens, (0, padding)), positions, F.pad(labels[1:], (0, padding + 1), value=IGNORE)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch, the same on all ranks."""
        # As text: a checkpoint loads nested values only into the same structure, which a new loader does not have.
        return {"multipack": json.dumps(self.sampler.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was taken; an empty one is the beginning.

        Raises:
            ValueError: the state belongs to other documents, options, seed or ranks.
        """
        if state_dict:
            self.sampler.load_state_dict(json.loads(state_dict["multipack"]))


def packed(config: Any, documents: Callable[[Any], Any], **settings: Any) -> Any:
    """Train on planned packs of documents.

    Args:
        config: torchtitan's `Trainer.Config`; its data loader is replaced.
        documents: function of the tokenizer that returns a map-style data set of documents: `input_ids`, and `labels`
            (not shifted, −100 where nothing is learned) if not all tokens are targets.
        **settings: of `PackedDataLoader.Config`.

    Returns:
        The configuration.

    Raises:
        ValueError: the model's attention reads no masks of documents.
    """
    attention = import_module("torchtitan.models.common.attention")
    masked = attention.FlexAttention.Config, attention.VarlenAttention.Config
    inner = getattr(getattr(config.model_spec.model, "first_attention", None), "inner_attention", None)
    if not isinstance(inner, masked):
        raise ValueError(
            f"{config.model_spec.name} has {type(inner).__qualname__}, for which torchtitan makes no masks, so that the"
            " documents of a row see each other: build the model with attn_backend='flex' or 'varlen'"
        )
    config.dataloader = PackedDataLoader.Config(documents=documents, **settings)
    return config
