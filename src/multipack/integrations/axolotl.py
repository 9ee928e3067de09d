"""Drop-in for Axolotl's `MultipackBatchSampler` and its documented packing functions.

    - from axolotl.utils.samplers.multipack import MultipackBatchSampler
    + from multipack.integrations.axolotl import MultipackBatchSampler

In a running Axolotl, set it where the trainer looks it up: `axolotl.core.trainers.base.MultipackBatchSampler` and
`axolotl.utils.trainer.MultipackBatchSampler`.

    sampler   7 2 9 4 0 …                      any sampler of document numbers
    batches   [[7, 2], [9]] [[4, 0, 3], [8]]   `batch_size` bins each, equal in cost; a bin is a list of documents

The host (Axolotl) assigns batch b to rank b % ranks. So `ranks · batch_size` bins are planned as one step: batches that
run at the same time are equal in cost, their number is a multiple of the ranks, and no rank's last batch is lost.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from multipack.integrations.full_steps import (
    check_state,
    dropped_message,
    fitting_documents,
    full_steps,
    reduced,
    world_size,
)
from multipack.integrations.packing_functions import (
    allocate_sequentially,
    ffd_check,
    pack_group,
    pack_parallel,
)
from multipack.planning.lengths import check_integer
from multipack.planning.options import PlanOptions
from multipack.planning.packing import Packs, pack

__all__ = ["MultipackBatchSampler", "allocate_sequentially", "ffd_check", "pack_group", "pack_parallel"]

LOG = logging.getLogger(__name__)

Integers = NDArray[np.int64]
Bins = list[list[int]]

MOST_BINS = 256
"""Maximum number of bins planned together: with more, bins are hardly fuller and planning time grows superlinearly."""


class MultipackBatchSampler(BatchSampler):
    """Axolotl's sampler of batches of bins, where the bins of a batch are equal in cost.

    The inner sampler is read once per epoch. `len` is the exact number of batches of the first epoch on the rank with
    the fewest, and the same in all epochs; its first call is a collective, iteration is not. If a later epoch has more
    documents than fit, they are listed in `left_out`, with a warning; if it has fewer, its bins are less full.

    Each further iterator reads the inner sampler again, so that epochs differ even if the host never calls `set_epoch`.
    The state holds the order of the inner sampler (8 bytes per document), so that resuming is exact with any sampler.

    Args:
        sampler: any sampler or iterable of document numbers. `set_epoch` is passed on to it if it has that method.
        batch_size: number of bins of a batch.
        batch_max_len: maximum number of tokens of a bin.
        lengths: (documents,) number of tokens of every document that the sampler may yield, by document number.
        packing_efficiency_estimate: kept as an attribute, for hosts that read it.
        drop_last: full batches only. In a single process, documents that best fit packs into fewer than `batch_size`
            bins are left out, unless there is no full batch without them.
        num_count_samples: has no effect: `len` is exact.
        sequential: keep the sampler's order: bins are filled one after another.
        group_size: documents that are planned together, at most `MOST_BINS` bins. Larger groups fill bins better.
        bin_size: maximum documents of a bin; None or 0 for no limit.
        num_processes, safe_mode, mp_start_method: have no effect: packing starts no processes and skips no document.
        overlong: documents longer than `batch_max_len` raise an `error`, or are `drop`ped: listed in
            `overlong_documents`, with a warning.
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
        self.lengths, self._fits = fitting_documents(lengths, self.batch_max_len, overlong, "batch_max_len")
        self.overlong_documents = np.flatnonzero(~self._fits)
        self.packing_efficiency_estimate = packing_efficiency_estimate or 1.0
        self.sequential = bool(sequential)
        self.group_size = check_integer("group_size", group_size)
        self.bin_size = check_integer("bin_size", bin_size) if bin_size else None
        self.num_count_samples, self.num_processes = num_count_samples, num_processes
        self.safe_mode, self.mp_start_method = safe_mode, mp_start_method
        self.epoch = 0
        self.len_across_ranks: int | None = None
        self.total_tokens_used = self.total_token_slots = 0
        self._epoch: _Epoch | None = None
        self._position = 0  # batches of this epoch that were yielded
        self._resume = 0  # first batch of the next iterator
        if message := dropped_message(self.lengths, self._fits, "batch_max_len", self.batch_max_len):
            LOG.warning(message)
        if ranks := sorted({"rank", "num_replicas", "world_size"} & kwargs.keys()):
            raise ValueError(
                f"{', '.join(ranks)}: this sampler yields the batches of all ranks, and the host assigns batch b to"
                " rank b % ranks; leave them out, or give the ranks to a DistributedSampler below it"
            )
        if kwargs:
            LOG.warning("these settings have no effect here: %s", ", ".join(sorted(kwargs)))
        if sequential and not isinstance(sampler, SequentialSampler):
            LOG.warning(
                "sequential packing keeps the order of a sampler that is not a SequentialSampler (%s); did you mean to"
                " set curriculum_sampling too?",
                type(sampler).__name__,
            )

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on all ranks and in all epochs. The first call is a collective.

        Raises:
            ValueError: a rank has no batch.
        """
        if self.len_across_ranks is None:
            least = self.gather_len_batches(len(self._current().batches))
            if least == 0:
                raise ValueError(
                    f"on one rank or more, documents are too few for a batch of batch_size={self.batch_size} bins;"
                    " use a smaller batch_size, or drop_last=False (for evaluation: eval_sample_packing: False)"
                )
            self.len_across_ranks = least
        return self.len_across_ranks

    def __iter__(self) -> Iterator[Bins]:  # type: ignore[override]
        """The batches of the epoch: lists of bins, which are lists of document numbers."""
        if self._epoch is not None and self._epoch.is_iterated:
            self._epoch = None
        epoch, batches = self._current(), self.generate_batches(set_stats=True)
        if not batches:
            len(self)
        epoch.is_iterated = True
        if len(left := self.left_out):
            LOG.warning(
                "epoch %d: %d documents (%d tokens) are in none of the %d batches (drop_last, or another rank or epoch"
                " has fewer); left_out lists them",
                *(self.epoch, len(left), int(self.lengths[left].sum()), len(batches)),
            )
        start, self._resume = self._resume, 0
        self._position = start
        for number in range(start, len(batches)):
            if self._epoch is epoch:
                self._position = number + 1
            yield batches[number]

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
        """(documents,) int64 numbers of the documents of this epoch that are in no batch."""
        epoch = self._current()
        return epoch.order[epoch.left]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, also of the inner sampler; no effect if it is already the current one."""
        epoch = check_integer("epoch", epoch, 0)
        if epoch == self.epoch:
            return
        self.epoch, self._position, self._resume, self._epoch = epoch, 0, 0, None
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def generate_batches(self, set_stats: bool = False) -> list[Bins]:
        """All batches of the epoch; `set_stats` adds their tokens and slots to the totals, once per epoch."""
        epoch = self._current()
        if set_stats and not epoch.is_counted:
            bins = [positions for batch in epoch.batches for positions in batch]
            self.total_tokens_used += sum(int(self.lengths[epoch.order[held]].sum()) for held in bins)
            self.total_token_slots += len(bins) * self.batch_max_len
            epoch.is_counted = True
        return [[epoch.order[positions].tolist() for positions in batch] for batch in epoch.batches]

    def num_batches(self) -> int:
        """Number of batches of an epoch, equal to `len`."""
        return len(self)

    def efficiency(self) -> float:
        """Tokens divided by slots, over all epochs counted so far; of the current epoch before the first."""
        if self.total_token_slots == 0:
            self.generate_batches(set_stats=True)
        return self.total_tokens_used / self.total_token_slots if self.total_token_slots else 0.0

    def gather_efficiency(self) -> float:
        """99.7 % of the highest efficiency of a rank, rounded down to 0.5 %, as in Axolotl. A collective."""
        return math.floor(0.997 * reduced(self.efficiency(), "max") * 200) / 200

    def gather_len_batches(self, num: float) -> int:
        """Minimum of `num` over all ranks, rounded down. A collective."""
        return math.floor(reduced(num, "min"))

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank after the last batch that was yielded."""
        return self.state_at(self._position)

    def state_at(self, batch: int) -> dict[str, Any]:
        """The state before a batch of the epoch, for loaders that prefetch."""
        epoch = self._current()
        return self._identity() | {
            "epoch": self.epoch,
            "batch": int(batch),
            "length": self.len_across_ranks or len(epoch.batches),
            "ranks": epoch.ranks,
            "order": torch.from_numpy(epoch.order),
            "sampler": epoch.inner,
            "plan": epoch.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, in the next iterator, with the same batches and the same `len`.

        Raises:
            ValueError: the state belongs to other documents or options, or its batches cannot be made again.
        """
        more = ("epoch", "batch", "length", "ranks", "order", "sampler", "plan")
        check_state(dict(state), self._identity(), more)
        number, batch, length, ranks = (
            check_integer(f"the saved sampler state's {name}", state[name], least)
            for name, least in (("epoch", 0), ("batch", 0), ("length", 1), ("ranks", 1))
        )
        if batch > length:
            raise ValueError(f"the saved sampler state is at batch {batch} of {length}")
        order = self._checked_order(torch.as_tensor(state["order"]).numpy(), "the saved sampler state")
        epoch = _Epoch(self, order, None, state["sampler"], length, ranks)
        check_state(dict(state), {"plan": epoch.fingerprint}, ())
        self.epoch, self._position, self._resume = number, batch, batch
        self.len_across_ranks, self._epoch = length, epoch
        _restore(self.sampler, state["sampler"])

    def _identity(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "batch_max_len": self.batch_max_len,
            "drop_last": self.drop_last,
            "sequential": self.sequential,
            "group_size": self.group_size,
            "bin_size": self.bin_size,
        }

    def _current(self) -> _Epoch:
        """The current epoch. The inner sampler is read once, and again if the host has replaced it."""
        known = self._epoch
        if known is not None and known.source in (None, self.sampler):
            if self.len_across_ranks not in (None, len(known.batches)):
                self._epoch = _Epoch(
                    self, known.order, known.source, known.inner, self.len_across_ranks, known.ranks
                )
            return self._epoch  # type: ignore[return-value]
        yielded = np.array([int(number) for number in self.sampler], dtype=np.int64)
        order = self._checked_order(yielded, "the sampler")
        self._epoch = _Epoch(
            self, order, self.sampler, _state_of(self.sampler), self.len_across_ranks, world_size()
        )
        return self._epoch

    def _checked_order(self, order: Integers, whose: str) -> Integers:
        """Check document numbers and remove those of documents that are too long.

        Raises:
            ValueError: `order` is empty, or has an entry that is not a document number.
        """
        if order.ndim != 1 or order.dtype.kind not in "iu" or len(order) == 0:
            raise ValueError(f"{whose} yields no document numbers")
        if order.min() < 0 or order.max() >= len(self.lengths):
            raise ValueError(
                f"{whose} yields document {order.max() if order.min() >= 0 else order.min()}, but lengths has"
                f" {len(self.lengths):,} documents; give the length of every document of the data set"
            )
        return order[self._fits[order]]


class _Epoch:
    """The order that the inner sampler yielded for an epoch, and the batches made of it.

    Attributes:
        order: (documents,) document numbers.
        source: the inner sampler; None for an order from a saved state.
        inner: the inner sampler's own state after it was read.
        ranks: number of batches that run side by side.
        batches: positions in `order`, one array per bin.
        left: (documents,) positions that are in no batch.
        fingerprint: of the plan, or of the lengths in their order if `sequential`.
        is_iterated, is_counted: whether an iterator has begun, and whether the statistics include it.
    """

    def __init__(
        self,
        host: MultipackBatchSampler,
        order: Integers,
        source: Any,
        inner: Mapping[str, Any],
        number: int | None,
        ranks: int,
    ) -> None:
        self.order, self.source, self.inner, self.ranks = order, source, inner, ranks
        self.is_iterated = self.is_counted = False
        self.fingerprint = ""
        lengths, size = host.lengths[order], host.batch_size
        least = size * (number or 1) if host.drop_last else number or 1
        self.batches: list[list[Integers]] = []
        self.left = np.arange(len(lengths))
        if len(lengths) < least and number is not None:
            raise ValueError(
                f"the sampler yields {len(lengths):,} documents in epoch {host.epoch}, too few for {number:,} batches"
                f" of {size} bins, the length of the first epoch; use a sampler that yields as many documents in every"
                " epoch"
            )
        if len(lengths) < least:
            return
        if host.sequential:
            bins = _bins_in_order(lengths, host.batch_max_len, host.bin_size, size, host.drop_last, number)
            self.batches = [list(bins)[first : first + size] for first in range(0, len(bins), size)]
            self.left = np.arange(bins.offsets[-1], len(lengths))
            self.fingerprint = hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16]
            return
        together = max(1, math.ceil(lengths.sum() / host.batch_max_len))
        bins_planned = min(host.group_size * together // len(lengths), MOST_BINS)
        side_by_side = ranks if len(lengths) >= ranks * size and not (number or 0) % ranks else 1
        options = PlanOptions(
            capacity=host.batch_max_len,
            packs_per_step=size * side_by_side,
            order="given",
            window=max(1, bins_planned // (size * side_by_side)),
            balance="joint",
            max_documents=host.bin_size or 0,
        )
        drop_last = host.drop_last and side_by_side == 1
        steps = full_steps(lengths, options, drop_last=drop_last, steps=number and number // side_by_side)
        for step in range(len(steps)):
            packs = steps[step]
            self.batches += [packs[rank::side_by_side] for rank in range(min(side_by_side, len(packs)))]
        self.left, self.fingerprint = steps.left, steps.plan.fingerprint


def _bins_in_order(
    lengths: Integers, capacity: int, bin_size: int | None, size: int, drop_last: bool, number: int | None
) -> Packs:
    """Fill bins in order (next fit); then drop or split bins until they form whole batches.

    Args:
        lengths: (documents,) tokens in the order of the sampler.
        capacity: maximum tokens of a bin.
        bin_size: maximum documents of a bin; None = no limit.
        size: bins of a batch.
        drop_last: make full batches only.
        number: number of batches; None = determined by the documents.
    """
    bins = pack(lengths, capacity, "next_fit", bin_size)
    full, rest = divmod(len(bins), size)
    batches = number or (max(full, 1) if drop_last or not rest else full + 1)
    wanted = batches * size
    if len(bins) > wanted:
        return Packs(bins.order[: bins.offsets[wanted]], bins.offsets[: wanted + 1])
    if not drop_last and len(bins) > wanted - size:
        return bins
    starts = bins.offsets[:-1].tolist()
    sizes = np.diff(bins.offsets).tolist()
    for _ in range(min(wanted, len(lengths)) - len(bins)):
        largest = int(np.argmax(sizes))
        half = sizes[largest] // 2
        starts.append(starts[largest] + half)
        sizes.append(sizes[largest] - half)
        sizes[largest] = half
    return Packs(bins.order, np.array([*sorted(starts), len(lengths)], dtype=np.int64))


def _state_of(sampler: Any) -> dict[str, Any]:
    """State of the inner sampler that determines its next epoch: its `state_dict`, or its generator and epoch."""
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return {"state_dict": sampler.state_dict()}
    state: dict[str, Any] = {}
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        state["generator"] = sampler.generator.get_state()
    if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
        state["epoch"] = sampler.epoch
    return state


def _restore(sampler: Any, state: Mapping[str, Any]) -> None:
    """Restore a state of `_state_of`; entries that the sampler does not support are ignored."""
    if "state_dict" in state and hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(state["state_dict"])
    if "generator" in state and isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.set_state(state["generator"])
    if "epoch" in state and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(state["epoch"])
