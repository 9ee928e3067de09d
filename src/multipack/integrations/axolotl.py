"""Drop-in for Axolotl's `MultipackBatchSampler` and its packing functions, with this planner inside.

    - from axolotl.utils.samplers.multipack import MultipackBatchSampler
    + from multipack.integrations.axolotl import MultipackBatchSampler

In a running Axolotl, put it where the trainer looks it up: `axolotl.core.trainers.base.MultipackBatchSampler` and
`axolotl.utils.trainer.MultipackBatchSampler`.

    sampler   7 2 9 4 0 …                      any sampler of document numbers
    batches   [[7, 2], [9]] [[4, 0, 3], [8]]   `batch_size` bins each, alike in cost; a bin is a list of documents
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from multipack.integrations.arrange import arrange, fitting, in_order, side_by_side
from multipack.integrations.axolotl_packing import (
    allocate,
    allocate_sequentially,
    ffd_check,
    ffd_with_result,
    pack_group,
    pack_parallel,
)
from multipack.integrations.ranks import reduced, world_size
from multipack.integrations.states import check_identity, digest, restore, state_of
from multipack.planning.lengths import check_integer
from multipack.planning.packing import pack

__all__ = [
    "MultipackBatchSampler",
    "allocate",
    "allocate_sequentially",
    "ffd_check",
    "ffd_with_result",
    "pack_group",
    "pack_parallel",
]

LOG = logging.getLogger(__name__)

Integers = NDArray[np.int64]

MOST_BINS = 256
"""Bins that are planned together at most: more fill hardly better, and time would grow faster than documents."""


@dataclass
class _Epoch:
    """What the sampler yielded for an epoch, and the batches made of it.

    Attributes:
        order: (documents,) document numbers as the sampler yielded them.
        source: the sampler that yielded them; None for an order that a state holds.
        inner: the sampler's own state after that.
        ranks: batches that run side by side.
        batches: positions in `order`, one array a bin; None until they are made.
        left: positions that no batch holds.
        started: whether an iterator has begun with them.
        used, slots: tokens and slots that the statistics have counted.
    """

    order: Integers
    source: Any
    inner: dict[str, Any]
    ranks: int
    batches: list[list[Integers]] | None = None
    left: Integers | None = None
    started: bool = False
    used: int = 0
    slots: int = 0


class MultipackBatchSampler(BatchSampler):
    """Batches of bins: Axolotl's sampler, with bins of a batch that are alike in cost.

    The sampler below is read once an epoch, and what `len` promised is what is iterated. `len` is the same on all
    ranks and in all epochs: that of the first epoch, on the rank that has fewest batches, gathered once (when `len` is
    first asked for, or iteration begins; so every rank has to do one of them). Where a rank or a later
    epoch has documents for more, these are in `left_out`, and a warning counts them; where it has fewer, its
    bins are less full. With torch.distributed, batches that ranks run side by side (batch number // ranks is the
    same) are alike in cost too.

    An iterator after the first reads the sampler again, so that epochs differ although the host never calls
    `set_epoch`. The state holds the order that the sampler yielded (8 bytes a document), so resuming is exact with any
    sampler, and draws nothing from a random generator.

    Args:
        sampler: any sampler or iterable of document numbers. If it has `set_epoch`, it is told the epoch.
        batch_size: bins of a batch.
        batch_max_len: most tokens of a bin.
        lengths: (documents,) tokens of every document that the sampler may yield, by its number.
        packing_efficiency_estimate: kept as an attribute, for hosts that read it.
        drop_last: full batches only: what best fit packs into fewer than `batch_size` bins is left out. Where there
            is not even one full batch, documents are spread over its bins. False spreads all documents
            over one batch more; only the last can have fewer bins, and only for want of documents.
        num_count_samples: no longer needed: what is counted is what is iterated.
        sequential: keep the sampler's order: bins are filled one after another.
        group_size: documents that are planned together, at most `MOST_BINS` bins of them. Larger groups fill
            bins better.
        bin_size: most documents of a bin; None or 0 for no limit.
        num_processes, safe_mode, mp_start_method: no longer needed: packing takes no other process and
            skips nothing.
        overlong: documents longer than `batch_max_len` are an `error`, or `drop`ped: counted in
            `overlong_documents`, with a warning.
        **kwargs: names of other versions; they have no effect, which a warning says.

    Raises:
        ValueError: documents that are too long, or too few for one batch.
    """

    sampler: Sampler[int] | Iterable[int]

    def __init__(
        self,
        sampler: Sampler[int] | Iterable[int],
        batch_size: int,
        batch_max_len: int,
        lengths: ArrayLike,
        packing_efficiency_estimate: float = 1.0,
        drop_last: bool = True,
        num_count_samples: int = 4,
        sequential: bool = False,
        group_size: int = 100_000,
        bin_size: int | None = 200,
        num_processes: int | None = None,
        safe_mode: bool = True,
        mp_start_method: str | None = "fork",
        overlong: Literal["error", "drop"] = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.batch_max_len = check_integer("batch_max_len", batch_max_len)
        self.lengths, fits = fitting(lengths, self.batch_max_len, overlong, "batch_max_len")
        self.packing_efficiency_estimate = packing_efficiency_estimate or 1.0
        self.sequential = sequential
        self.group_size = check_integer("group_size", group_size)
        self.bin_size = check_integer("bin_size", bin_size) if bin_size else None
        self.num_count_samples, self.num_processes = num_count_samples, num_processes
        self.safe_mode, self.mp_start_method = safe_mode, mp_start_method
        self.overlong, self._fits = overlong, fits
        self.overlong_documents = np.flatnonzero(~fits)
        self.epoch = 0
        self.len_across_ranks: int | None = None
        self._drawn: _Epoch | None = None
        self._past_used = self._past_slots = 0  # of epochs before the current one
        self._position = 0  # batches of this epoch that were yielded
        self._resume = 0  # where the next iterator starts
        if len(self.overlong_documents):
            LOG.warning(
                "%d of %d documents (%d tokens) are longer than batch_max_len=%d and are left out, as overlong='drop'"
                " asks",
                *(
                    len(self.overlong_documents),
                    len(fits),
                    int(self.lengths[~fits].sum()),
                    self.batch_max_len,
                ),
            )
        if kwargs:
            LOG.warning("these settings have no effect here: %s", ", ".join(sorted(kwargs)))
        if sequential and not isinstance(sampler, SequentialSampler):
            LOG.warning(
                "sequential packing keeps the order of a sampler that is no SequentialSampler (%s); did you mean to set"
                " curriculum_sampling too?",
                type(sampler).__name__,
            )

    def __len__(self) -> int:
        """Batches of an epoch: the same on all ranks and in all epochs. The first call is a collective.

        Raises:
            ValueError: a rank has no batch.
        """
        if self.len_across_ranks is None:
            least = self.gather_len_batches(len(self._batches_of(self._epoch_drawn(), None)))
            if least == 0:
                raise ValueError(
                    f"on one rank or more, documents are too few for a batch of batch_size={self.batch_size} bins;"
                    " use a smaller batch_size, or drop_last=False"
                )
            self.len_across_ranks = least
        return self.len_across_ranks

    def __iter__(self) -> Iterator[list[list[int]]]:  # type: ignore[override]
        """The batches of the epoch, `len` of them: lists of bins, which are lists of document numbers."""
        if self._drawn is not None and self._drawn.started:
            self._forget()
        length, drawn = len(self), self._epoch_drawn()
        batches = self.generate_batches(set_stats=True)
        drawn.started = True
        self._warn_of_left_out()
        start, self._resume = self._resume, 0
        self._position = start
        for number in range(start, length):
            if self._drawn is drawn:
                self._position = number + 1
            yield batches[number]

    @property
    def total_tokens_used(self) -> int:
        """Tokens in the batches of all epochs so far."""
        return self._past_used + (self._drawn.used if self._drawn else 0)

    @property
    def total_token_slots(self) -> int:
        """Slots of the bins of all epochs so far."""
        return self._past_slots + (self._drawn.slots if self._drawn else 0)

    @property
    def eff_total_used(self) -> int:
        """The older name of `total_tokens_used`."""
        return self.total_tokens_used

    @property
    def eff_total_slots(self) -> int:
        """The older name of `total_token_slots`."""
        return self.total_token_slots

    @property
    def left_out(self) -> Integers:
        """(documents,) numbers of this epoch's documents that no batch holds."""
        drawn = self._epoch_drawn()
        self._batches_of(drawn, self.len_across_ranks)
        assert drawn.left is not None
        return drawn.order[drawn.left]

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch and tell the sampler; the current epoch keeps order and position."""
        epoch = check_integer("epoch", epoch, 0)
        if epoch == self.epoch:
            return
        self.epoch, self._position, self._resume = epoch, 0, 0
        self._forget()
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def generate_batches(self, set_stats: bool = False) -> list[list[list[int]]]:
        """The batches of the epoch: `len` of them where that is known, else what this rank's documents fill.

        Args:
            set_stats: count their tokens and slots, once an epoch.

        Returns:
            Batches of bins of document numbers.
        """
        drawn = self._epoch_drawn()
        batches = self._batches_of(drawn, self.len_across_ranks)
        if set_stats:
            held = [position for batch in batches for position in batch]
            drawn.used = int(self.lengths[drawn.order[np.concatenate(held)]].sum()) if held else 0
            drawn.slots = len(held) * self.batch_max_len
        return [[drawn.order[positions].tolist() for positions in batch] for batch in batches]

    def num_batches(self) -> int:
        """Batches of an epoch, as `len`."""
        return len(self)

    def efficiency(self) -> float:
        """Tokens over slots of all epochs so far; the current epoch is counted if none was."""
        if self.total_token_slots == 0:
            self.generate_batches(set_stats=True)
        return self.total_tokens_used / self.total_token_slots if self.total_token_slots else 0.0

    def gather_efficiency(self) -> float:
        """A cautious estimate for all ranks: 99.7 % of the best rank's efficiency, cut to steps of 0.5 %."""
        return math.floor(0.997 * reduced(self.efficiency(), "max") * 200) / 200

    def gather_len_batches(self, num: float) -> int:
        """The fewest batches of any rank; every rank has to call it."""
        return math.floor(reduced(num, "min"))

    def state_dict(self) -> dict[str, Any]:
        """Where iteration stands: after the last batch that was yielded. For this rank."""
        return self.state_at(self._position)

    def state_at(self, batch: int) -> dict[str, Any]:
        """The state before a batch of the epoch, for loaders that are ahead of what was trained on."""
        length, drawn = len(self), self._epoch_drawn()
        return self._identity() | {
            "epoch": self.epoch,
            "batch": int(batch),
            "length": length,
            "ranks": drawn.ranks,
            "order": torch.from_numpy(drawn.order),
            "sampler": drawn.inner,
            "batches": _digest(self._batches_of(drawn, length)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, in the next iterator, with the same batches and the same `len`.

        Raises:
            ValueError: the state is of other documents or options, or its batches cannot be made again.
        """
        check_identity(
            state, self._identity(), ("epoch", "batch", "length", "ranks", "order", "sampler", "batches")
        )
        epoch, batch, length, ranks = (
            check_integer(f"the saved sampler state's {name}", state[name], least)
            for name, least in (("epoch", 0), ("batch", 0), ("length", 1), ("ranks", 1))
        )
        if batch > length:
            raise ValueError(f"the saved sampler state is at batch {batch} of {length}")
        order = self._checked_order(torch.as_tensor(state["order"]).numpy(), "the saved sampler state")
        drawn = _Epoch(order, None, state["sampler"], ranks)
        if _digest(self._batches_of(drawn, length)) != state["batches"]:
            raise ValueError(
                "the saved sampler state is of other batches although documents and options agree: the version of"
                " multipack changed since; go on with the one that it was saved with"
            )
        self._forget()
        self.epoch, self._position, self._resume = epoch, batch, batch
        self.len_across_ranks, self._drawn = length, drawn
        restore(self.sampler, state["sampler"])

    def _identity(self) -> dict[str, Any]:
        """What a state must agree in."""
        return {
            "lengths": digest([self.lengths]),
            "batch_size": self.batch_size,
            "batch_max_len": self.batch_max_len,
            "drop_last": self.drop_last,
            "sequential": bool(self.sequential),
            "group_size": self.group_size,
            "bin_size": self.bin_size,
            "overlong": self.overlong,
        }

    def _forget(self) -> None:
        """Let the current epoch's batches go, and remember what they counted."""
        if self._drawn is not None:
            self._past_used += self._drawn.used
            self._past_slots += self._drawn.slots
            self._drawn = None

    def _epoch_drawn(self) -> _Epoch:
        """The epoch's order, read from the sampler once; again if a host has replaced the sampler."""
        if (
            self._drawn is not None
            and self._drawn.source is not None
            and self._drawn.source is not self.sampler
        ):
            self._forget()
        if self._drawn is None:
            yielded = np.array([int(number) for number in self.sampler], dtype=np.int64)
            order = self._checked_order(yielded, "the sampler")
            self._drawn = _Epoch(order, self.sampler, state_of(self.sampler), world_size())
        return self._drawn

    def _checked_order(self, order: Integers, whose: str) -> Integers:
        """Document numbers without those that are too long.

        Raises:
            ValueError: numbers that are no documents.
        """
        if order.ndim != 1 or order.dtype.kind not in "iu" or len(order) == 0:
            raise ValueError(f"{whose} yields no document numbers")
        if order.min() < 0 or order.max() >= len(self.lengths):
            raise ValueError(
                f"{whose} yields document {order.max() if order.min() >= 0 else order.min()}, but lengths has"
                f" {len(self.lengths):,} documents; give the length of every document of the data set"
            )
        return order[self._fits[order]]

    def _batches_of(self, drawn: _Epoch, number: int | None) -> list[list[Integers]]:
        """Batches of positions in the epoch's order; those at hand if they are as many."""
        if drawn.batches is None or number not in (None, len(drawn.batches)):
            lengths = self.lengths[drawn.order]
            least = self.batch_size * (number or 1) if self.drop_last else number or 1
            if len(lengths) < least and number is None:
                drawn.batches, drawn.left = [], np.arange(len(lengths))
            elif len(lengths) < least:
                raise ValueError(
                    f"the sampler yields {len(lengths):,} documents in epoch {self.epoch}, too few for {number:,}"
                    f" batches of {self.batch_size} bins, which the first epoch had and len promised; use a"
                    " sampler that yields as many documents in every epoch"
                )
            elif self.sequential:
                drawn.batches, drawn.left = self._in_order(lengths, number)
            else:
                drawn.batches, drawn.left = self._planned(lengths, drawn.ranks, number)
        return drawn.batches

    def _in_order(self, lengths: Integers, number: int | None) -> tuple[list[list[Integers]], Integers]:
        """Batches of bins that keep the order, and what is left."""
        bins = in_order(lengths, self.batch_max_len, self.bin_size)
        full, rest = divmod(len(bins), self.batch_size)
        wanted = number or (max(full, 1) if self.drop_last or not rest else full + 1)
        most = wanted * self.batch_size
        if len(bins) > most or self.drop_last:
            bins = in_order(lengths, self.batch_max_len, self.bin_size, most)
        elif len(bins) <= most - self.batch_size:
            bins = in_order(lengths, self.batch_max_len, self.bin_size, min(most, len(lengths)))
        held = list(bins)
        batches = [held[first : first + self.batch_size] for first in range(0, len(held), self.batch_size)]
        return batches, np.arange(bins.offsets[-1], len(lengths))

    def _planned(
        self, lengths: Integers, ranks: int, number: int | None
    ) -> tuple[list[list[Integers]], Integers]:
        """Batches of bins that are alike in cost, and what is left."""
        bins = len(pack(lengths, self.batch_max_len, "best_fit", self.bin_size))
        together = min(self.group_size * bins // len(lengths), MOST_BINS)
        window = max(1, together // self.batch_size)
        steps = arrange(
            lengths,
            capacity=self.batch_max_len,
            packs=self.batch_size,
            window=window,
            balance="cost",
            drop_last=self.drop_last,
            steps=number,
            max_documents=self.bin_size,
        )
        batches = list(steps)
        costs = np.array([int(steps.plan.costs(np.concatenate(batch)).sum()) for batch in batches])
        return [batches[index] for index in side_by_side(costs, ranks, window, steps.full)], steps.left

    def _warn_of_left_out(self) -> None:
        left = self.left_out
        if len(left):
            LOG.warning(
                "epoch %d: %d documents (%d tokens) are in none of the %d batches (drop_last, or another rank or epoch"
                " has fewer); left_out names them",
                *(self.epoch, len(left), int(self.lengths[left].sum()), len(self)),
            )


def _digest(batches: list[list[Integers]]) -> str:
    """Says which positions are in which bin, and which bins in which batch."""
    bins = [positions for batch in batches for positions in batch]
    return digest([np.array([len(batch) for batch in batches], dtype=np.int64), *bins])
