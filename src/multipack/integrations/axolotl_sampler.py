"""Axolotl's `MultipackBatchSampler`, where the bins of a batch are equal in cost.

    sampler   7 2 9 4 0 …                      any sampler of document numbers
    batches   [[7, 2], [9]] [[4, 0, 3], [8]]   `batch_size` bins each, equal in cost; a bin is a list of documents

The host (Axolotl) assigns batch b to rank b % ranks. So `ranks · batch_size` bins are planned as one step: batches that
run at the same time are equal in cost, their number is rounded up to a multiple of the ranks, and no batch is lost.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler, Sampler

from multipack.integrations.host_sampler import (
    HostSampler,
    Overlong,
    full_steps,
    least_of_ranks,
    saved_integer,
    world_size,
)
from multipack.planning.lengths import check_integer, short
from multipack.planning.options import PlanOptions, check_fingerprint, opened
from multipack.planning.packing import Packs, pack

LOG = logging.getLogger(__name__)

Integers = NDArray[np.int64]
Bins = list[list[int]]
"""Bins of document numbers."""

STATE = ("epoch", "batch", "length", "ranks", "order", "sampler")
"""Keys of a saved state, in addition to its identity."""

MOST_BINS = 256
"""Most bins planned together: with more, bins are hardly fuller, and planning time grows superlinearly."""


class MultipackBatchSampler(HostSampler, BatchSampler):
    """Axolotl's sampler of batches of bins, where the bins of a batch are equal in cost.

    The inner sampler is read once per epoch. `len` is the exact number of batches of the first epoch on the rank with
    the fewest, and the same in all epochs; its first call is a collective (`list(sampler)` calls it, too), iteration is
    not. If a later epoch has more documents than fit, they are listed in `left_out`, with a warning; if it has fewer,
    its bins are less full.

    Each further iterator reads the inner sampler again, so that epochs differ even if the host never calls `set_epoch`.
    The state holds the order of the inner sampler (8 bytes per document), so that resuming is exact with any sampler.

    Args:
        sampler: any sampler or iterable of document numbers. `set_epoch` is passed on to it if it has that method.
        batch_size: number of bins of a batch.
        batch_max_len: maximum number of tokens of a bin.
        lengths: (documents,) number of tokens of every document that the sampler may yield, by document number.
        bin_size: maximum documents of a bin; None or 0 for no limit. The fifth argument, as in Axolotl since December
            2025; before, it was `packing_efficiency_estimate`.
        packing_efficiency_estimate: kept as an attribute, for hosts that read it.
        drop_last: full batches only. In a single process, the documents of a batch of fewer than `batch_size` bins are
            left out, unless it is the only batch; with several ranks, the documents of the last round of batches are,
            if they are fewer than its bins.
        sequential: keep the sampler's order: bins are filled one after another.
        group_size: documents that are planned together, at most `MOST_BINS` bins. Larger groups fill bins better.
        num_count_samples: no effect, as `len` is exact.
        num_processes: no effect, as packing starts no processes.
        safe_mode: no effect, as packing skips no document.
        mp_start_method: no effect, as `num_processes`.
        multiple_of: the number of batches is rounded up to a multiple of it, and no document is left out. Ranks times
            accumulation steps make every optimizer step whole. None: the number of ranks, and `drop_last` as above.
        overlong: documents longer than `batch_max_len` have separate bins (`alone`), as in Axolotl, or are
            `drop`ped, both with a warning; or they raise an `error`. `overlong_documents` lists them.
        **kwargs: arguments of other versions, which are ignored with a warning.

    Raises:
        ValueError: a document is too long, or `rank`, `num_replicas` or `world_size` is among the arguments.
    """

    sampler: Sampler[int] | Iterable[int]

    def __init__(
        self,
        sampler: Sampler[int] | Iterable[int],
        batch_size: int,
        batch_max_len: int,
        lengths: ArrayLike,
        bin_size: int | None = 200,
        packing_efficiency_estimate: float = 1.0,
        drop_last: bool = True,
        num_count_samples: int = 4,
        sequential: bool = False,
        group_size: int = 100_000,
        num_processes: int | None = None,
        safe_mode: bool = True,
        mp_start_method: str | None = "fork",
        overlong: Overlong = "alone",
        multiple_of: int | None = None,
        **kwargs: Any,
    ) -> None:
        BatchSampler.__init__(self, sampler, batch_size, drop_last)
        self.batch_max_len = check_integer("batch_max_len", batch_max_len)
        super().__init__(lengths, self.batch_max_len, overlong, "batch_max_len")
        self.packing_efficiency_estimate = packing_efficiency_estimate or 1.0
        self.sequential = bool(sequential)
        self.group_size = check_integer("group_size", group_size)
        self.bin_size = check_integer("bin_size", bin_size) if bin_size else None
        self.multiple_of = None if multiple_of is None else check_integer("multiple_of", multiple_of)
        self.len_across_ranks: int | None = None  # the length of every epoch, known from the first one
        self.total_tokens_used = self.total_token_slots = 0
        self._epoch: _Epoch | None = None
        if ranks := sorted({"rank", "num_replicas", "world_size"} & kwargs.keys()):
            raise ValueError(
                f"{', '.join(ranks)}: this sampler yields the batches of all ranks, and the host assigns batch b to"
                " rank b % ranks; leave them out, or give the ranks to a DistributedSampler below it"
            )
        if kwargs:
            LOG.warning("these settings have no effect here: %s", ", ".join(sorted(kwargs)))

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on all ranks and in all epochs. The first call is a collective."""
        if self.len_across_ranks is None:
            epoch = self._current()
            (least,) = least_of_ranks(len(epoch.batches))
            # The host divides the batches among `ranks`: each needs one.
            self._check_number(0 if least < epoch.ranks else least)
            self.len_across_ranks = least
        return self.len_across_ranks

    def _check_number(self, batches: int) -> None:
        if batches == 0:
            raise ValueError(
                f"documents are too few for a batch of batch_size={self.batch_size} bins on each of {world_size()}"
                " ranks; use a smaller batch_size, fewer ranks, or no packing (for evaluation: eval_sample_packing:"
                " False)"
            )

    def __iter__(self) -> Iterator[Bins]:  # type: ignore[override]
        """The batches of the epoch: lists of bins, which are lists of document numbers."""
        if self._epoch is not None and self._epoch.is_iterated:
            self._epoch = None
        batches = self.generate_batches(set_stats=True)
        self._check_number(len(batches))
        self._current().is_iterated = True
        if len(left := self.left_out):
            LOG.warning(
                "epoch %d: %d documents (%d tokens) are in none of the %d batches (drop_last, or another rank or epoch"
                " has fewer); left_out lists them",
                *(self.epoch, len(left), int(self.lengths[left].sum()), len(batches)),
            )
        yield from self._walk(batches.__getitem__, len(batches))

    @property
    def left_out(self) -> Integers:
        """(documents,) int64 numbers of the documents of this epoch that are in no batch."""
        return self._current().left

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch here and in the inner sampler; no effect if it is already the current one."""
        if check_integer("epoch", epoch, 0) == self.epoch:
            return
        self._go_to(int(epoch))
        self._epoch = None
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(int(epoch))

    def generate_batches(self, set_stats: bool = False) -> list[Bins]:
        """All batches of the epoch; `set_stats` adds their tokens and slots to the totals."""
        batches = self._current().batches
        if set_stats:
            bins = [held for batch in batches for held in batch]
            self.total_tokens_used += sum(int(self.lengths[held].sum()) for held in bins)
            self.total_token_slots += len(bins) * self.batch_max_len
        return batches

    def efficiency(self) -> float:
        """Tokens divided by slots of all epochs that were iterated; of the current epoch before the first."""
        if self.total_token_slots == 0:
            self.generate_batches(set_stats=True)
        return self.total_tokens_used / self.total_token_slots if self.total_token_slots else 0.0

    def gather_efficiency(self) -> float:
        """99.7 % of the highest efficiency of a rank, rounded down to 0.5 %, as in Axolotl. A collective."""
        return -least_of_ranks(-math.floor(0.997 * self.efficiency() * 200))[0] / 200

    def gather_len_batches(self, num: float) -> int:
        """Minimum of `num` over all ranks, rounded down. A collective."""
        return least_of_ranks(math.floor(num))[0]

    def state_at(self, batch: int) -> dict[str, Any]:
        """The state before a batch of the epoch, for loaders that prefetch."""
        epoch = self._current()
        return self._saved(epoch.order) | {
            "epoch": self.epoch,
            "batch": int(batch),
            "length": self.len_across_ranks or len(epoch.batches),
            "ranks": epoch.ranks,
            "order": torch.from_numpy(epoch.order),
            "sampler": epoch.inner,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, in the next iterator, with the same batches and the same `len`.

        Raises:
            ValueError: the state belongs to other documents or options, or its batches cannot be made again.
        """
        with opened(state, "the saved sampler state", "fingerprint", *STATE):
            order = self._checked_order(torch.as_tensor(state["order"]).numpy(), "the saved sampler state")
            saved = self._saved(order)
            check_fingerprint(state, saved["fingerprint"], saved["options"])
            number, ranks = saved_integer(state, "epoch"), saved_integer(state, "ranks", 1)
            length = saved_integer(state, "length", 1)
            batch = saved_integer(state, "batch", most=length)
            epoch = _Epoch(order, ranks, state["sampler"], *self._divided(order, ranks, length))
            _restore(self.sampler, epoch.inner)
        self._go_to(number, batch)
        self.len_across_ranks, self._epoch = length, epoch
        if length % world_size():
            LOG.warning(
                "the saved epoch has %d batches, and a host that divides them among %d ranks leaves out the last %d",
                *(length, world_size(), length % world_size()),
            )

    def _saved(self, order: Integers) -> dict[str, Any]:
        names = ("batch_size", "batch_max_len", "drop_last", "sequential", "group_size", "bin_size")
        return self._identity(self.lengths[order], names)

    def _current(self) -> _Epoch:
        """The current epoch. The inner sampler is read once, and again if the host has replaced it."""
        known, length = self._epoch, self.len_across_ranks
        if known is None or known.source not in (None, self.sampler):
            order = self._checked_order(_read(self.sampler), "the sampler")
            ranks = 1 if getattr(self.sampler, "num_replicas", 1) > 1 else world_size()
            if self.multiple_of and len(order) >= self.multiple_of * self.batch_size:
                ranks = self.multiple_of
            known = _Epoch(
                order, ranks, _state_of(self.sampler), *self._divided(order, ranks, length), self.sampler
            )
        elif length not in (None, len(known.batches)):
            known.batches, known.left = self._divided(known.order, known.ranks, length)
        self._epoch = known
        return known

    def _checked_order(self, order: Integers, whose: str) -> Integers:
        """Check document numbers and remove dropped documents; `whose` names them in messages."""
        if order.ndim != 1 or order.dtype.kind not in "iu" or len(order) == 0:
            raise ValueError(f"{whose} yields no document numbers")
        if order.min() < 0 or order.max() >= len(self.lengths):
            raise ValueError(
                f"{whose} yields document {order.max() if order.min() >= 0 else order.min()}, but lengths has"
                f" {len(self.lengths):,} documents; give the length of every document of the data set"
            )
        return order[self.fits[order]]

    def _divided(self, order: Integers, ranks: int, number: int | None) -> tuple[list[Bins], Integers]:
        """`number` batches of the documents of an order, None = as many as they fill; and documents in none of them.

        Batches are planned `ranks` at a time. Too few documents for a batch: no batches.

        Raises:
            ValueError: there are too few documents for `number` batches.
        """
        lengths, size = self.lengths[order], self.batch_size
        if len(lengths) < (number or 1) * (size if self.drop_last else 1):
            if number is None:
                return [], order
            raise ValueError(
                f"the sampler yields {len(lengths):,} documents in epoch {self.epoch}, too few for {number:,} batches"
                f" of {size} bins, the length of the first epoch; use a sampler that yields as many documents in every"
                " epoch"
            )
        together = ranks if len(lengths) >= ranks * size and not (number or 0) % ranks else 1
        if self.sequential:
            bins = list(self._bins_in_order(lengths, together, number))
            batches = [bins[first : first + size] for first in range(0, len(bins), size)]
        else:
            batches = list(self._balanced(lengths, together, number))
        if self.drop_last:  # hosts leave out a last round that is not full
            del batches[sum(len(batch) == size for batch in batches) // together * together :]
        used = np.concatenate([order[:0], *(held for batch in batches for held in batch)])
        return [[order[held].tolist() for held in batch] for batch in batches], np.delete(order, used)

    def _leaves_out(self, together: int) -> bool:
        """Whether documents that fill no batch are left out; otherwise all bins are emptier."""
        return self.drop_last and together == 1 and self.multiple_of is None

    def _balanced(self, lengths: Integers, together: int, number: int | None) -> Iterator[list[Integers]]:
        """Batches of documents; the bins of `together` consecutive batches are planned as a step and equal in cost."""
        packs = self.batch_size * together
        needed_bins = max(1, math.ceil(lengths.sum() / self.batch_max_len))
        bins_planned = min(self.group_size * needed_bins // len(lengths), MOST_BINS)
        options = PlanOptions(
            capacity=self.batch_max_len,
            packs_per_step=packs,
            order="given",
            window=max(1, bins_planned // packs),
            balance="joint",
            max_documents=self.bin_size or 0,
        )
        drop_last = self._leaves_out(together)
        plan = full_steps(lengths, options, drop_last=drop_last, steps=number and number // together)
        for step in range(plan.num_steps):
            bins = [held for held in plan.deal(step, packs) if len(held)]
            yield from (bins[rank::together] for rank in range(min(together, len(bins))))

    def _bins_in_order(self, lengths: Integers, together: int, number: int | None) -> Packs:
        """Fill bins in order (next fit); then drop or halve bins until batches are whole, `together` at a time."""
        group, drop_last = self.batch_size * together, self._leaves_out(together)
        bins = pack(lengths, self.batch_max_len, "next_fit", self.bin_size)
        full, rest = divmod(len(bins), group)
        rounds = max(full, 1) if drop_last or not rest else full + 1
        wanted = self.batch_size * (number or rounds * together)
        if len(bins) > wanted:
            return Packs(bins.order[: bins.offsets[wanted]], bins.offsets[: wanted + 1])
        offsets = bins.offsets
        if self.drop_last or together > 1 or len(bins) <= wanted - group:
            while len(offsets) <= min(wanted, len(lengths)):
                largest = int(np.argmax(np.diff(offsets)))
                middle = (offsets[largest] + offsets[largest + 1]) // 2
                offsets = np.insert(offsets, largest + 1, middle)
        return Packs(bins.order, offsets)


@dataclass
class _Epoch:
    """The order that the inner sampler yielded for an epoch, and the batches made of it.

    Attributes:
        order: (documents,) document numbers.
        ranks: number of batches that are planned together: one of each rank, or `multiple_of`.
        inner: the inner sampler's own state after it was read.
        batches: lists of bins, which are lists of document numbers.
        left: (documents,) document numbers that are in no batch.
        source: the inner sampler; None for an order from a saved state.
        is_iterated: whether an iterator has begun.
    """

    order: Integers
    ranks: int
    inner: Mapping[str, Any]
    batches: list[Bins]
    left: Integers
    source: Any = None
    is_iterated: bool = False


def _read(sampler: Any) -> Integers:
    """The document numbers that a sampler yields; `ValueError` if it yields something else."""
    if not hasattr(sampler, "__iter__") and not hasattr(sampler, "__getitem__"):
        raise ValueError(f"sampler={short(sampler)} must be a sampler, which yields document numbers")
    try:
        return np.array([operator.index(number) for number in sampler], dtype=np.int64)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the sampler yields something else than document numbers: {error}") from error


def _state_of(sampler: Any) -> dict[str, Any]:
    """State of the inner sampler that determines its next epoch: its `state_dict`, or its generator and epoch."""
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return {"state_dict": sampler.state_dict()}
    generator, epoch = getattr(sampler, "generator", None), getattr(sampler, "epoch", None)
    state = {"generator": generator.get_state()} if isinstance(generator, torch.Generator) else {}
    return state | ({"epoch": epoch} if hasattr(sampler, "set_epoch") and isinstance(epoch, int) else {})


def _restore(sampler: Any, state: Mapping[str, Any]) -> None:
    """Restore a state of `_state_of`; entries that the sampler does not support are ignored."""
    if "state_dict" in state and hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(state["state_dict"])
    if "generator" in state and isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.set_state(state["generator"])
    if "epoch" in state and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(state["epoch"])
