"""Drop-in samplers for imoneoi's multipack_sampler V2: the same names and methods, this planner inside.

    - from multipack_sampler import MultipackDistributedBatchSampler
    + from multipack.integrations.multipack_v2 import MultipackDistributedBatchSampler

    sampler = MultipackDistributedBatchSampler(batch_max_length=16 * 2048, lengths=lengths, seed=0)
    loader = DataLoader(data, batch_sampler=sampler)

Every rank plans the same steps alone and takes its own batch of each: one batch a rank and step, as many on every
rank and in every epoch. The samplers know their rank, so a loader that uses them is not sharded again
(`accelerator.prepare` would drop documents).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from multipack.integrations.arrange import Steps, arrange, fitting
from multipack.integrations.ranks import place
from multipack.integrations.states import check_identity, digest
from multipack.planning.lengths import check_integer
from multipack.planning.plan import Balance

__all__ = [
    "InterleavedSampler",
    "MultipackDistributedBatchSampler",
    "MultipackDistributedBatchSampler_LinearAttention",
]

Integers = NDArray[np.int64]


class _DistributedBatchSampler(Sampler[Integers]):
    """What both samplers share: everything but the shuffle and what is balanced.

    The attributes that the original has are here too: `batch_max_length`, `lengths`, `num_replicas`, `rank`, `seed`,
    `epoch`, `eff_total_used` and `eff_total_slots` (tokens and slots of all ranks, summed over iterations).
    """

    _balance: Balance

    def __init__(
        self,
        batch_max_length: int,
        lengths: ArrayLike,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        *,
        drop_last: bool = False,
        overlong: Literal["error", "drop"] = "error",
        window: int = 4,
    ) -> None:
        self.batch_max_length = check_integer("batch_max_length", batch_max_length)
        self.lengths, fits = fitting(lengths, self.batch_max_length, overlong, "batch_max_length")
        self.num_replicas, self.rank = place(num_replicas, rank)
        self.seed = check_integer("seed", seed, 0)
        self.drop_last, self.overlong = bool(drop_last), overlong
        self.window = check_integer("window", window)
        self.overlong_documents = np.flatnonzero(~fits)
        if len(self.overlong_documents):
            warnings.warn(
                f"{len(self.overlong_documents):,} of {len(fits):,} documents"
                f" ({int(self.lengths[~fits].sum()):,} tokens) are longer than batch_max_length="
                f"{self.batch_max_length:,} and are left out, as overlong='drop' asks",
                stacklevel=3,
            )
        self._fits = fits
        self.eff_total_used = 0
        self.eff_total_slots = 0
        self.epoch = 0
        self._segments: list[tuple[int, int]] = []  # (replicas, batches) of this epoch before they changed
        self._position = 0  # batches of this segment that were yielded
        self._resume = 0  # where the next iterator starts
        self._made: tuple[Any, Steps | None, Integers] | None = None
        self._whole: dict[int, int] = {}
        self._length = self._steps_of_an_epoch(self.num_replicas)

    def __len__(self) -> int:
        """Batches of a whole epoch: as many on every rank and in every epoch."""
        return self._length

    def __iter__(self) -> Iterator[Integers]:
        """This rank's batches of the epoch, as arrays of document numbers."""
        epoch, (steps, order) = self.epoch, self._current()
        start, self._resume = self._resume, 0
        self._position = start
        if steps is None:
            return
        self._count(steps)
        for step in range(start, len(steps)):
            if self.epoch == epoch:
                self._position = step + 1
            yield order[steps[step][self.rank]]

    @property
    def sampler(self) -> _DistributedBatchSampler:
        """This sampler: Lightning and accelerate call `batch_sampler.sampler.set_epoch`."""
        return self

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """Hosts assign here when they wrap a sampler; there is nothing to replace."""

    @property
    def dropped(self) -> Integers:
        """(documents,) numbers of those that fill no step of this epoch; empty unless `drop_last`."""
        steps, order = self._current()
        return order if steps is None else order[steps.left]

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; the current epoch keeps its position."""
        epoch = check_integer("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._segments, self._position, self._resume = epoch, [], 0, 0

    def generate_batches(self, set_stats: bool = False) -> list[Integers]:
        """This rank's batches of the epoch as a list; `set_stats` adds them to the statistics."""
        steps, order = self._current()
        if steps is None:
            return []
        if set_stats:
            self._count(steps)
        return [order[packs[self.rank]] for packs in steps]

    def num_batches(self) -> int:
        """Batches of the epoch; where the number of ranks changed inside it, those after the change."""
        steps, _ = self._current()
        return 0 if steps is None else len(steps)

    def efficiency(self) -> float:
        """Tokens over slots of all that was iterated; before the first iteration, of the current epoch."""
        if self.eff_total_slots:
            return self.eff_total_used / self.eff_total_slots
        steps, _ = self._current()
        return 0.0 if steps is None else steps.tokens / self._slots(steps)

    def state_dict(self) -> dict[str, Any]:
        """Where iteration stands, as plain values: after the last batch that was yielded."""
        return self.state_at(self._position)

    def state_at(self, batch: int) -> dict[str, Any]:
        """The state before a batch of the epoch, for loaders that are ahead of what was trained on."""
        steps, _ = self._current()
        segments = [*self._segments, (self.num_replicas, int(batch))]
        return self._identity() | {
            "epoch": self.epoch,
            "segments": [list(segment) for segment in segments],
            "plan": "" if steps is None else steps.plan.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, in the next iterator.

        Between two batches every rank has finished the same steps, so `num_replicas` may differ: the documents that
        were not trained on yet are then planned anew for the ranks that are there.

        Raises:
            ValueError: the state is of other documents or options, or what is left cannot be shared.
        """
        check_identity(state, self._identity(), ("epoch", "segments", "plan"))
        epoch = check_integer("the saved sampler state's epoch", state["epoch"], 0)
        segments = _checked_segments(state["segments"])
        steps, _ = self._arranged(epoch, segments[:-1], segments[-1][0])
        if state["plan"] != ("" if steps is None else steps.plan.fingerprint):
            raise ValueError(
                "the saved sampler state is of other steps although documents and options agree: the version of"
                " multipack or of numpy changed since; go on with the versions that it was saved with"
            )
        batch = segments[-1][1]
        if batch > (0 if steps is None else len(steps)):
            raise ValueError(f"the saved sampler state is at batch {batch}, which the epoch does not have")
        if segments[-1][0] != self.num_replicas:
            before = segments if batch else segments[:-1]
            self._arranged(epoch, before, self.num_replicas)  # refuses before anything is changed
            self._segments, batch = before, 0
        else:
            self._segments = segments[:-1]
        self.epoch, self._position, self._resume, self._made = epoch, batch, batch, None

    def _shuffle(self, epoch: int) -> Integers:
        """Document numbers in the original's order."""
        raise TypeError("use MultipackDistributedBatchSampler or its LinearAttention variant")

    def _identity(self) -> dict[str, Any]:
        """What a state must agree in."""
        return {
            "sampler": type(self)._balance,
            "lengths": digest([self.lengths]),
            "batch_max_length": self.batch_max_length,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "overlong": self.overlong,
            "window": self.window,
        }

    def _count(self, steps: Steps) -> None:
        self.eff_total_used += steps.tokens
        self.eff_total_slots += self._slots(steps)

    def _slots(self, steps: Steps) -> int:
        return len(steps) * self.num_replicas * self.batch_max_length

    def _order(self, epoch: int) -> Integers:
        order = self._shuffle(epoch)
        return order[self._fits[order]]

    def _steps_of_an_epoch(self, replicas: int) -> int:
        """Steps that every epoch is given: those that epoch 0 takes, which suffice in every order."""
        if replicas not in self._whole:
            self._whole[replicas] = len(self._steps(self._order(0), replicas))
        return self._whole[replicas]

    def _steps(self, order: Integers, replicas: int, number: int | None = None) -> Steps:
        """Steps of these documents, with a pack for every rank.

        Raises:
            ValueError: there are too few documents for that.
        """
        steps = arrange(
            self.lengths[order],
            capacity=self.batch_max_length,
            packs=replicas,
            window=self.window,
            balance=type(self)._balance,
            drop_last=self.drop_last,
            steps=number,
        )
        if not steps.full:
            advice = "use" if self.drop_last or len(order) < replicas else "set drop_last=True, or use"
            raise ValueError(
                f"{len(order):,} documents cannot give each of num_replicas={replicas} ranks a batch in each of"
                f" {len(steps):,} steps, and a rank without one would wait for ever; {advice} fewer ranks"
            )
        return steps

    def _current(self) -> tuple[Steps | None, Integers]:
        """Steps of the epoch (after the last change of ranks), and the documents in order that they index."""
        key = (self.epoch, tuple(self._segments), self.num_replicas)
        if self._made is None or self._made[0] != key:
            self._made = (key, *self._arranged(self.epoch, self._segments, self.num_replicas))
        return self._made[1], self._made[2]

    def _arranged(
        self, epoch: int, segments: list[tuple[int, int]], replicas: int
    ) -> tuple[Steps | None, Integers]:
        """The steps after some segments of an epoch: what these did not train on, planned for so many ranks."""
        order = self._order(epoch)
        for index, (ranks, batches) in enumerate(segments):
            whole = self._steps_of_an_epoch(ranks) if index == 0 else None
            steps = self._steps(order, ranks, whole)
            if batches > len(steps):
                raise ValueError(f"the saved sampler state is at batch {batches} of {len(steps)}")
            order = np.delete(order, steps.positions(0, batches))
            if len(order) == 0 or (self.drop_last and len(order) < replicas):
                return None, order
        whole = None if segments else self._steps_of_an_epoch(replicas)
        return self._steps(order, replicas, whole), order


class MultipackDistributedBatchSampler(_DistributedBatchSampler):
    """Batches for models with quadratic attention: packs of a step agree in tokens and in squares of lengths.

    The shuffle is the original's, numpy's Generator(Philox(seed + epoch)). A step holds the documents of
    a stretch of it. Where the original ended an epoch when fewer documents than ranks were left, these are
    trained on too.

    Args:
        batch_max_length: most tokens of a batch of one rank.
        lengths: (documents,) tokens of each document, a list or an array.
        num_replicas: ranks that share a step; None = those of torch.distributed, or 1 outside of it.
        rank: of this process; None = that of torch.distributed, or 0 outside of it.
        seed: of the shuffle, not negative.
        drop_last: full steps only; `dropped` names the documents that are left.
        overlong: documents longer than `batch_max_length` are an `error`, or `drop`ped: counted in
            `overlong_documents` and warned about.
        window: steps planned together; 1 stays closest to the shuffle, more balance better.

    Raises:
        ValueError: documents that are too long or too few, a rank that is not known or outside `num_replicas`.
    """

    _balance = "joint"

    def _shuffle(self, epoch: int) -> Integers:
        return np.random.Generator(np.random.Philox(seed=self.seed + epoch)).permutation(len(self.lengths))


class MultipackDistributedBatchSampler_LinearAttention(_DistributedBatchSampler):  # noqa: N801
    """Batches for models with linear attention: packs of a step agree in tokens alone.

    The shuffle is the original's, numpy's default_rng(seed + epoch). The original drops steps that it cannot fill;
    here every document is kept unless `drop_last` asks for full steps.

    Args:
        batch_max_length: most tokens of a batch of one rank.
        lengths: (documents,) tokens of each document, a list or an array.
        num_replicas: ranks that share a step; None = those of torch.distributed, or 1 outside of it.
        rank: of this process; None = that of torch.distributed, or 0 outside of it.
        seed: of the shuffle, not negative.
        drop_last: full steps only; `dropped` names the documents that are left.
        overlong: documents longer than `batch_max_length` are an `error`, or `drop`ped: counted in
            `overlong_documents` and warned about.
        window: steps planned together; 1 stays closest to the shuffle, more balance better.

    Raises:
        ValueError: documents that are too long or too few, a rank that is not known or outside `num_replicas`.
    """

    _balance = "tokens"

    def _shuffle(self, epoch: int) -> Integers:
        return np.random.default_rng(seed=self.seed + epoch).permutation(len(self.lengths))


class InterleavedSampler(Sampler[Integers]):
    """The baseline of multipack's benchmark: a fixed number of documents a batch, without packing.

    Each `batch_size · num_replicas` documents of the shuffle are sorted by length and dealt like cards. The original
    fails where these do not divide the documents; here the last step is smaller, and fewer documents than
    ranks at the end are left out and named in `dropped`.

    Args:
        lengths: (documents,) tokens of each document.
        batch_size: documents of a batch of one rank.
        num_replicas: ranks.
        rank: of this process.
        seed: of the shuffle, default_rng(seed + epoch).
    """

    def __init__(
        self, lengths: ArrayLike, batch_size: int, num_replicas: int, rank: int, seed: int = 0
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_size = check_integer("batch_size", batch_size)
        self.num_replicas, self.rank = place(num_replicas, rank)
        self.seed = check_integer("seed", seed, 0)
        self.epoch = 0
        together = self.batch_size * self.num_replicas
        rest = len(self.lengths) % together
        self._batches = len(self.lengths) // together + (rest >= self.num_replicas)

    def __len__(self) -> int:
        """Batches of every epoch, as many on every rank."""
        return self._batches

    def num_batches(self) -> int:
        """Batches of every epoch, as many on every rank."""
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the shuffle."""
        self.epoch = check_integer("epoch", epoch, 0)

    @property
    def dropped(self) -> Integers:
        """(documents,) numbers of those at the epoch's end that are fewer than ranks."""
        return self._order()[self._batches * self.batch_size * self.num_replicas :]

    def __iter__(self) -> Iterator[Integers]:
        order, together = self._order(), self.batch_size * self.num_replicas
        for first in range(0, self._batches * together, together):
            documents = order[first : first + together]
            by_length = documents[np.argsort(self.lengths[documents], kind="stable")]
            yield by_length[self.rank :: self.num_replicas]

    def _order(self) -> Integers:
        return np.random.default_rng(seed=self.seed + self.epoch).permutation(len(self.lengths))


def _checked_segments(segments: Any) -> list[tuple[int, int]]:
    """Segments of a saved state: (ranks, batches) each."""
    pairs = [tuple(pair) for pair in segments] if isinstance(segments, list | tuple) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"the saved sampler state's segments are no (ranks, batches) pairs: {segments!r}")
    name = "the saved sampler state's"
    return [
        (check_integer(f"{name} ranks", ranks), check_integer(f"{name} batches", batches, 0))
        for ranks, batches in pairs
    ]
