"""Documents drawn at random by each rank for itself: the other way to give ranks data, to compare a plan with.

    partition     rank 0 │ a c f        every document once an epoch: what `PackedBatchSampler` does
                  rank 1 │ b d e
    random draws  rank 0 │ c a c        each rank draws with a seed of its own; none knows what another drew:
                  rank 1 │ a f d        a and c are repeated, b and e missed

Nothing has to be agreed on, and there is no epoch to come to the end of. The price is exact. Of n documents and m draws
with replacement a document is missed with probability (1 − 1/n)^m, which for one epoch, m = n, is 1/e = 36.8 %, however
many ranks there are; and 1 − 2/e = 26.4 % are repeated. Where each of W ranks shuffles all documents and takes as many
as its share, that is (1 − 1/W)^W: nothing for one rank, a quarter for two, and soon 1/e again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from multipack.planning.options import LossWeighting
from multipack.planning.packing import Packs, check_integer, check_lengths, pack

Integers = NDArray[np.int64]


class RandomDraws(Sampler[list[int]]):
    """Packs of one rank, of documents that it draws by itself; a sampler for `PackedLoader` and torch's `DataLoader`.

    The draws of a rank follow from `SeedSequence([seed, epoch, rank])`: distinct streams for distinct ranks and epochs,
    and, as `rank` is the data-parallel one, the same for ranks that hold one model together. Draws fill packs in their
    order (next fit). An epoch is over when every rank has drawn its share, ⌈n / ranks⌉ documents: all ranks have as
    many packs, and those whose share took fewer draw on.

    `PackedCollator.of(sampler)` is its collator. What a step's loss is divided by, its targets over all ranks, must be
    summed by a collective: there is no plan that knows it.

    Args:
        lengths: (documents,) tokens of each document.
        capacity: most tokens of a pack.
        rank: of this process among the data-parallel ranks.
        world_size: data-parallel ranks.
        seed: of the draws.
        replacement: whether a rank may draw a document again before it has drawn all others.

    Attributes:
        share: documents that a rank draws, at least, in an epoch.
        most_documents: documents that no pack exceeds.
        longest: tokens of the longest document.

    Raises:
        ValueError: lengths that do not fit into a pack; a rank outside the world.
    """

    align = 1
    loss_weighting: LossWeighting = "token"

    def __init__(
        self,
        lengths: ArrayLike,
        capacity: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        replacement: bool = True,
    ) -> None:
        self.capacity = check_integer("capacity", capacity)
        self._lengths = check_lengths(lengths, self.capacity)
        self.world_size = check_integer("world_size", world_size)
        self.rank = check_integer("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(f"rank={rank} is outside world_size={world_size}: ranks count from 0")
        self.seed = check_integer("seed", seed, 0)
        self.replacement = replacement
        self.share = -(-len(self._lengths) // self.world_size)
        self.longest = int(self._lengths.max())
        self.most_documents = self.capacity // int(self._lengths.min())
        self._epoch = self._position = self._resume = 0
        self._packs: tuple[int, Packs] | None = None  # of an epoch

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch

    def __len__(self) -> int:
        """Packs of a rank in the current epoch: as many on every rank."""
        return len(self._own())

    def __iter__(self) -> Iterator[list[int]]:
        start, self._resume = self._resume, 0
        epoch, packs = self._epoch, self._own()
        for position in range(start, len(packs)):
            self._position = position + 1
            yield packs[position].tolist()
            if self._epoch != epoch:
                return

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; the current epoch keeps its position."""
        epoch = check_integer("epoch", epoch, 0)
        if epoch != self._epoch:
            self._epoch, self._position, self._resume = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last pack that was yielded, and what draws follow from."""
        return {**self._origin(), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that pack, in the next iterator.

        Raises:
            ValueError: the state belongs to other draws, or is outside the epoch.
        """
        for name, value in self._origin().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the saved state of random draws has {name}={state.get(name)!r}, and this sampler has"
                    f" {name}={value!r}: draws depend on it; go on with the saved one"
                )
        epoch, position = (
            check_integer(f"the saved {key}", state.get(key, -1), 0) for key in ("epoch", "position")
        )
        self._epoch, self._position, self._resume = epoch, position, position
        if position > len(self):
            raise ValueError(f"the saved position {position} is outside an epoch of {len(self)} packs")

    def _origin(self) -> dict[str, Any]:
        """What the draws of all ranks depend on."""
        return {
            "seed": self.seed,
            "world_size": self.world_size,
            "capacity": self.capacity,
            "replacement": self.replacement,
            "documents": len(self._lengths),
            "tokens": int(self._lengths.sum()),
        }

    def draws(self, rank: int) -> Iterator[Integers]:
        """A rank's draws of this epoch without end, a share at a time."""
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, self._epoch, rank]))
        count = len(self._lengths)
        rest = np.empty(0, dtype=np.int64)
        while True:
            if self.replacement:
                yield generator.integers(0, count, self.share)
                continue
            if len(rest) < self.share:
                rest = np.concatenate([rest, generator.permutation(count)])
            drawn, rest = rest[: self.share], rest[self.share :]
            yield drawn

    def _own(self) -> Packs:
        """This rank's packs of the current epoch; what every rank needs for its share says how many."""
        if self._packs is not None and self._packs[0] == self._epoch:
            return self._packs[1]
        needed = max(len(self._packed(next(self.draws(rank)))) for rank in range(self.world_size))
        stream = self.draws(self.rank)
        drawn = next(stream)
        packs = self._packed(drawn)
        while len(packs) < needed:
            drawn = np.concatenate([drawn, next(stream)])
            packs = self._packed(drawn)
        offsets = packs.offsets[: needed + 1]
        own = Packs(drawn[packs.order[: offsets[-1]]], offsets)
        self._packs = (self._epoch, own)
        return own

    def _packed(self, drawn: Integers) -> Packs:
        return pack(self._lengths[drawn], self.capacity, "next_fit")


def coverage(seen: ArrayLike, documents: int) -> tuple[float, float]:
    """Shares of the documents that an epoch missed, and that it showed more than once.

    Args:
        seen: numbers of the documents that all ranks together were given.
        documents: how many there are.
    """
    times = np.bincount(np.asarray(seen, dtype=np.int64), minlength=documents)
    return float((times == 0).mean()), float((times > 1).mean())


def expected_coverage(
    draws: int, documents: int, world_size: int = 1, replacement: bool = True
) -> tuple[float, float]:
    """The same in expectation: the binomial law of how many times a document is drawn.

    With replacement it is drawn in each of `draws` trials with probability 1/n. Without, each of `world_size` ranks
    draws it at most once, with probability draws / (ranks · n).

    Args:
        draws: of all ranks together; without replacement at most n a rank.
        documents: n.
        world_size: data-parallel ranks.
        replacement: see `RandomDraws`.
    """
    trials, chance = (draws, 1 / documents) if replacement else (world_size, draws / (world_size * documents))
    missed = (1 - chance) ** trials
    once = trials * chance * (1 - chance) ** (trials - 1)
    return missed, 1 - missed - once
