"""Drop-in samplers for imoneoi's multipack_sampler V2: the same names and methods.

    - from multipack_sampler import MultipackDistributedBatchSampler
    + from multipack.integrations.multipack_v2 import MultipackDistributedBatchSampler

    sampler = MultipackDistributedBatchSampler(batch_max_length=16 * 2048, lengths=lengths, seed=0)
    loader = DataLoader(data, batch_sampler=sampler)

Each rank computes the same plan and takes its own batch of each step, without communication: one batch per rank and
step, the same number on every rank and in every epoch. Samplers know their rank: a loader that is divided among ranks
again, by `accelerator.prepare` for example, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from multipack.data.packs.sampler import OwnSampler, refuse_restart, refuse_second_division
from multipack.integrations.host_sampler import (
    HostSampler,
    Overlong,
    full_steps,
    replicas_and_rank,
    saved_integer,
)
from multipack.planning.lengths import check_integer, check_lengths
from multipack.planning.options import Balance, PlanOptions, check_fingerprint, opened
from multipack.planning.plan import Plan

Integers = NDArray[np.int64]


class MultipackDistributedBatchSampler(OwnSampler, HostSampler, Sampler[Integers]):
    """Batches for models with quadratic attention: the packs of a step are equal in tokens and in squares of lengths.

    `eff_total_used` and `eff_total_slots` count tokens and slots of all ranks, summed over iterations.

    Args:
        batch_max_length: maximum number of tokens of a batch of one rank.
        lengths: (documents,) number of tokens of each document.
        num_replicas: number of data-parallel ranks; None = the number in torch.distributed, or 1 without it.
        rank: rank of this process; None = its rank in torch.distributed, or 0 without it.
        seed: seed of the order, not negative.
        drop_last: full steps only; the other documents are listed in `dropped`.
        overlong: documents longer than `batch_max_length` raise an `error`, are `drop`ped, or have separate batches
            (`alone`); the last two with a warning. `overlong_documents` lists them.
        window: number of steps planned together: larger windows balance better, smaller ones keep documents closer to
            the shuffled order.

    Raises:
        ValueError: documents are too long or too few, or the rank is unknown or out of range.
    """

    _balance: Balance = "joint"

    def __init__(
        self,
        batch_max_length: int,
        lengths: ArrayLike,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        *,
        drop_last: bool = False,
        overlong: Overlong = "error",
        window: int = 4,
    ) -> None:
        self.batch_max_length = check_integer("batch_max_length", batch_max_length)
        super().__init__(lengths, self.batch_max_length, overlong, "batch_max_length")
        self.num_replicas, self.rank = replicas_and_rank(num_replicas, rank)
        self.seed = check_integer("seed", seed, 0)
        self.drop_last, self.window = bool(drop_last), check_integer("window", window)
        self._documents = np.flatnonzero(self.fits)
        self.eff_total_used = self.eff_total_slots = 0
        self._plan: Plan | None = None
        self._length: int | None = None
        self._length = self._current().num_steps

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on all ranks and in all epochs."""
        refuse_second_division(self, self.num_replicas)
        assert self._length is not None
        return self._length

    def __iter__(self) -> Iterator[Integers]:
        """This rank's batches of the epoch, as arrays of document numbers."""
        length, plan = len(self), self._current()
        self._count(plan)
        yield from self._walk(lambda step: self._batch(plan, step), length)

    @property
    def dropped(self) -> Integers:
        """(documents,) int64 numbers of the documents in no step of this epoch; empty unless `drop_last`."""
        return self._documents[self._current().dropped]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; no effect if it is already the current one."""
        refuse_restart(self, check_integer("epoch", epoch, 0))
        if epoch != self.epoch:
            self._go_to(int(epoch))

    def generate_batches(self, set_stats: bool = False) -> list[Integers]:
        """This rank's batches of the epoch as a list; `set_stats` adds them to the statistics."""
        plan = self._current()
        if set_stats:
            self._count(plan)
        return [self._batch(plan, step) for step in range(plan.num_steps)]

    def efficiency(self) -> float:
        """Tokens divided by slots of all iterations; of the current epoch before the first iteration."""
        if self.eff_total_slots:
            return self.eff_total_used / self.eff_total_slots
        plan = self._current()
        return int(plan.lengths[plan.order].sum()) / self._slots()

    def state_at(self, batch: int) -> dict[str, Any]:
        """The state before a batch of the epoch, for loaders that prefetch."""
        return self._saved() | {"epoch": self.epoch, "batch": int(batch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, in the next iterator.

        Raises:
            ValueError: the state belongs to other documents or options, or another number of ranks.
        """
        with opened(state, "the saved sampler state", "fingerprint", "epoch", "batch"):
            saved = self._saved()
            check_fingerprint(state, saved["fingerprint"], saved["options"])
            self._go_to(saved_integer(state, "epoch"), saved_integer(state, "batch", most=len(self)))

    def _saved(self) -> dict[str, Any]:
        names = ("batch_max_length", "num_replicas", "seed", "drop_last", "window", "_balance")
        return self._identity(self.lengths[self._documents], names)

    def _batch(self, plan: Plan, step: int) -> Integers:
        """This rank's pack of a step."""
        return self._documents[plan.deal(step, self.num_replicas)[self.rank]]

    def _count(self, plan: Plan) -> None:
        self.eff_total_used += int(plan.lengths[plan.order].sum())
        self.eff_total_slots += self._slots()

    def _slots(self) -> int:
        return len(self) * self.num_replicas * self.batch_max_length

    def _current(self) -> Plan:
        """The plan of the epoch; `ValueError` if documents are too few for a batch on every rank in every step."""
        if self._plan is None or self._plan.epoch != self.epoch:
            options = PlanOptions(
                capacity=self.batch_max_length,
                packs_per_step=self.num_replicas,
                window=self.window,
                balance=self._balance,
            )
            lengths = self.lengths[self._documents]
            how: dict[str, Any] = {"drop_last": self.drop_last, "steps": self._length}
            plan = full_steps(lengths, options, **how, seed=self.seed, epoch=self.epoch)
            if plan.num_documents < plan.num_steps * self.num_replicas:
                few = self.drop_last or len(lengths) < self.num_replicas
                raise ValueError(
                    f"{len(lengths):,} documents cannot give each of num_replicas={self.num_replicas} ranks a batch in"
                    f" each of {plan.num_steps:,} steps; {'use' if few else 'set drop_last=True, or use'} fewer ranks"
                )
            self._plan = plan
        return self._plan


class MultipackDistributedBatchSampler_LinearAttention(MultipackDistributedBatchSampler):  # noqa: N801
    """Batches for models with linear attention: the packs of a step are equal in tokens.

    Arguments as in `MultipackDistributedBatchSampler`. The original drops steps that it cannot fill; here every
    document is kept unless `drop_last=True`.
    """

    _balance = "tokens"


class InterleavedSampler(OwnSampler, Sampler[Integers]):
    """The baseline of multipack_sampler's benchmark: a fixed number of documents per batch, without packing.

    Groups of `batch_size · num_replicas` documents of the shuffled order are sorted by length and assigned to ranks in
    turn. The last documents, fewer than a group, are left out and listed in `dropped`; the original fails.

    Args:
        lengths: (documents,) number of tokens of each document.
        batch_size: number of documents of a batch of one rank.
        num_replicas: number of ranks.
        rank: rank of this process.
        seed: seed of the order, which is drawn by `default_rng(seed + epoch)`.
    """

    def __init__(
        self, lengths: ArrayLike, batch_size: int, num_replicas: int, rank: int, seed: int = 0
    ) -> None:
        self.lengths = check_lengths(lengths)
        self.batch_size = check_integer("batch_size", batch_size)
        self.num_replicas, self.rank = replicas_and_rank(num_replicas, rank)
        self.seed, self.epoch = check_integer("seed", seed, 0), 0
        if len(self.lengths) < (together := self.batch_size * self.num_replicas):
            raise ValueError(
                f"{len(self.lengths):,} documents are too few for a batch of batch_size={self.batch_size} on each of"
                f" num_replicas={self.num_replicas} ranks, which takes {together:,}; use a smaller batch_size"
            )

    def __len__(self) -> int:
        """Number of batches of every epoch, the same on all ranks."""
        refuse_second_division(self, self.num_replicas)
        return len(self.lengths) // (self.batch_size * self.num_replicas)

    def num_batches(self) -> int:
        """Number of batches of every epoch, equal to `len`."""
        return len(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order."""
        refuse_restart(self, check_integer("epoch", epoch, 0))
        self.epoch = int(epoch)

    @property
    def dropped(self) -> Integers:
        """(documents,) numbers of the documents left out at the end of the epoch."""
        return self._order()[len(self) * self.batch_size * self.num_replicas :]

    def __iter__(self) -> Iterator[Integers]:
        together, length = self.batch_size * self.num_replicas, len(self)
        for documents in self._order()[: length * together].reshape(-1, together):
            by_length = documents[np.argsort(self.lengths[documents], kind="stable")]
            yield by_length[self.rank :: self.num_replicas]

    def _order(self) -> Integers:
        return np.random.default_rng(seed=self.seed + self.epoch).permutation(len(self.lengths))
