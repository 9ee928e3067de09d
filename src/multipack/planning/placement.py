"""Placement of a pack's tokens on the ranks of context parallelism, by exact cost.

    documents   AAAAAAAAAAAA BBBB CCC DDD EE       4 ranks of 6 slots

    rank 0      A · · · · · · · · · · A  BBBB      the outermost tokens of A, and B whole
    rank 1      · A A · · · · · · A A ·  EE        each rank's share of A costs the same a token
    rank 2      · · · A A A A A A · · ·
    rank 3                               CCC DDD   short documents stay whole, and are sent nowhere

A query at position t (from 1) sees t keys. So tokens t and l + 1 − t of a document of l tokens cost together as much
as any other such pair, and a share with equal parts of head and tail costs in proportion to its tokens: a document
can be divided over any ranks in any proportions.

`place` tries budgets for the load of a part, from the largest document's down to a quarter of a rank's mean. A document
of l tokens and load c is divided into max(⌈l / slots⌉, ⌈c / budget⌉) equal parts; parts and whole documents are placed
longest processing time first (Graham 1969) and exchanged between pairs of ranks (kernels/balancing.py); what fits
nowhere whole is poured into the slots left. That always suffices: ranks · slots hold the pack, and any part can be cut.
The result is the placement whose slowest rank takes least: its cost and the price of the keys that it sends or
receives. The chunks of ring attention (`head_tail`) are among the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from multipack.planning.cost import CostModel
from multipack.planning.kernels import balancing
from multipack.planning.kernels.order import longest_first
from multipack.planning.kernels.placing import spread, sums
from multipack.planning.lengths import Integers, check_integer, check_integers, offsets_of
from multipack.planning.matrix_flops import FLOPS_PER_BYTE
from multipack.shapes import ModelShape

CLOSE = 500
"""Gains of less than 1/500 are not worth a division of documents, nor is a balance worth improving within it.

Packs of 65,536 for 8 ranks, with 2 % of documents of 8,192 tokens or more: the slowest rank takes 1.032 of the mean and
sends 25,300 tokens; 1.041 and 23,600 at 1/50; 1.031 and 26,100, in 1.6 times the time, at 1/5000.
"""
PERCENTS = (130, 120, 110, 105, 102, 100, 75, 66, 50, 40, 33, 25)
"""Budgets that are tried in addition, in percent of a rank's mean load; with three of them 2 % more is sent."""
# Of exchanges between ranks: see `balancing.Exchanges`; attempts for each rank. Smaller ones lose 2e-4.
_HALF, _ATTEMPTS, _FAILURES = 4, 4, 16


@dataclass(frozen=True)
class Prices:
    """Costs of sending and receiving for a rank, in the unit of `CostModel.cost`."""

    key: int = 0  # of a token's keys and values and, in the backward pass, keys, values and gradients again
    # of each token of a rank if ranks exchange heads for tokens (Ulysses); None = they cannot
    token: int | None = None

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        ranks: int,
        tensor: int = 1,
        flops_per_byte: float = FLOPS_PER_BYTE,
        size: int = 2,
    ) -> Prices:
        """The prices for a decoder.

        A unit of cost is 6·H·e FLOPs a layer (`CostModel`). Keys and values are sent forward, and in the backward pass
        again and as gradients.

        Args:
            shape: the decoder, of H query heads of width e.
            ranks: context ranks.
            tensor: ranks that divide the heads before.
            flops_per_byte: FLOPs of a device while it sends a byte.
            size: bytes of an element.
        """
        byte = flops_per_byte * tensor / (6 * shape.heads * shape.head_width * shape.layers)
        token = token_bytes(shape, ranks, tensor, size) * byte
        is_divided = shape.heads // tensor % ranks == 0
        return cls(round(3 * key_bytes(shape, tensor, size) * byte), round(token) if is_divided else None)


def key_bytes(shape: ModelShape, tensor: int = 1, size: int = 2) -> int:
    """Bytes of the keys and values of a token in all layers, on a tensor rank."""
    return 2 * max(1, shape.kv_heads // tensor) * shape.head_width * shape.layers * size


def token_bytes(shape: ModelShape, ranks: int, tensor: int = 1, size: int = 2) -> float:
    """Bytes that a rank sends for each of its tokens with Ulysses, in all layers, forward and backward.

    Each way these are a query and a result for each head, and a key and a value for each key head after repetition.
    """
    heads, key_heads = shape.heads // tensor, max(1, shape.kv_heads // tensor)
    elements = 4 * (heads + math.lcm(key_heads, ranks)) * shape.head_width * shape.layers
    return elements * size * (ranks - 1) / ranks


@dataclass(frozen=True, eq=False)
class Placement:
    """Pieces of documents on ranks. Each token of each document is in exactly one piece.

    Attributes:
        lengths: (documents,) int64 tokens.
        ranks: number of ranks.
        document, rank, start, stop: (pieces,) int64, in the order of documents and, inside one, of tokens: the piece
            holds tokens start … stop − 1 of the document.
    """

    lengths: Integers
    ranks: int
    document: Integers
    rank: Integers
    start: Integers
    stop: Integers

    @cached_property
    def sizes(self) -> Integers:
        """(pieces,) tokens of each piece."""
        return self.stop - self.start

    @cached_property
    def tokens(self) -> Integers:
        """(ranks,) tokens of each rank."""
        return sums(self.rank, self.sizes, self.ranks)

    def costs(self, cost: CostModel, slots: int = 0) -> Integers:
        """(ranks,) cost of each rank; see `loads`. Exact for models without sliding windows.

        Args:
            cost: the cost of documents.
            slots: slots that every rank computes, filled or not; 0 = the slots of its tokens.
        """
        linear = np.full(self.ranks, slots) if slots else self.tokens
        return linear * cost.linear + cost.quadratic * self.attention

    @cached_property
    def attention(self) -> Integers:
        """(ranks,) Σ 2·t over the positions t, counted from 1, of each rank's tokens."""
        pairs = self.stop * (self.stop + 1) - self.start * (self.start + 1)
        return sums(self.rank, pairs, self.ranks)

    @cached_property
    def _exchanged(self) -> tuple[Integers, Integers]:
        """(ranks,) tokens whose keys a rank sends, counted for each receiver; and tokens whose keys it receives."""
        if not len(self.document):
            return np.zeros(self.ranks, dtype=np.int64), np.zeros(self.ranks, dtype=np.int64)
        group = self.document * self.ranks + self.rank
        order = np.lexsort((self.start, group))
        last = np.flatnonzero(np.diff(group[order], append=-1))  # of each document on each rank
        first = np.append(0, last[:-1] + 1)
        held = np.add.reduceat(self.sizes[order], first) - self.sizes[order][last]
        asking = order[last]
        received = sums(self.rank[asking], self.start[asking] - held, self.ranks)
        # A piece is sent to each rank whose last piece of the document lies behind it.
        stride = int(self.lengths.max(initial=0)) + 1
        behind = np.sort(self.document[asking] * stride + self.start[asking])
        ends = np.searchsorted(behind, (self.document + 1) * stride)
        readers = ends - np.searchsorted(behind, self.document * stride + self.start, side="right")
        own = np.empty_like(self.start)
        own[order] = np.repeat(self.start[asking], np.diff(np.append(first, len(order))))
        sent = sums(self.rank, self.sizes * (readers - (own > self.start)), self.ranks)
        return sent, received

    @property
    def sent(self) -> Integers:
        """(ranks,) tokens whose keys and values a rank sends, counted once for each receiver."""
        return self._exchanged[0]

    @property
    def received(self) -> Integers:
        """(ranks,) tokens whose keys and values a rank receives."""
        return self._exchanged[1]

    def slowest(self, cost: CostModel, prices: Prices, slots: int = 0) -> int:
        """The largest cost of a rank, with the price of the keys that it sends or receives, whichever are more."""
        return int((self.costs(cost, slots) + prices.key * np.maximum(self.sent, self.received)).max())


def place(
    lengths: ArrayLike,
    cost: CostModel,
    ranks: int,
    slots: int,
    prices: Prices | None = None,
) -> Placement:
    """Place the documents of a pack on ranks: a pure function, with the same result on every rank.

    Args:
        lengths: (documents,) tokens of each document, in the order of the pack; may be empty.
        cost: the cost of documents, of a model without sliding windows.
        ranks: number of ranks.
        slots: slots that every rank computes, filled or not.
        prices: what exchange costs; None = nothing.

    Raises:
        ValueError: the documents have more tokens than all ranks have slots, or the model has sliding windows.
    """
    checked, prices = check_integers("lengths", lengths), prices or Prices()
    ranks, slots = check_integer("ranks", ranks), check_integer("slots", slots, 0)
    if cost.sliding:
        raise ValueError(
            f"a placement by cost needs full attention, and model.window={cost.window} limits it: use"
            " parallel.context_method=ulysses"
        )
    if (total := int(checked.sum())) > ranks * slots:
        raise ValueError(
            f"{total:,} tokens do not fit into {ranks} ranks of {slots:,} slots: use at least {-(-total // ranks):,}"
        )
    rates = cost.quadratic * (checked + 1)  # of a token, on average
    best, least, tried = None, -1, b"none"
    for budget in _budgets(checked, rates, ranks):
        limit = np.clip(budget // np.maximum(rates, 1), 1, max(slots, 1))
        parts = np.minimum(-(-checked // limit), max(ranks, 1))
        if parts.tobytes() == tried:
            continue
        found, tried = _placed(checked, rates, parts, ranks, slots), parts.tobytes()
        reached = found.slowest(cost, prices, slots)
        if best is None or _lower(reached, least):
            best, least = found, reached
        costs = found.costs(cost, slots)
        if not _lower(int(costs.sum()) // ranks, int(costs.max())):
            break  # balanced: smaller parts only send more
    assert best is not None  # there is at least one budget
    if prices.key:
        ring = head_tail(checked, ranks, slots)
        return ring if _lower(ring.slowest(cost, prices, slots), least) else best
    return best


@dataclass(frozen=True)
class Placing:
    """How a run places packs. Slots of a pack are a multiple of `ranks` · `multiple`."""

    cost: CostModel  # the cost of documents
    ranks: int  # number of context ranks
    prices: Prices  # what exchange costs
    multiple: int = 1  # number that divides the slots of every rank (tensor ranks)

    def __call__(self, lengths: ArrayLike, slots: int) -> Placement | None:
        """The placement of a pack of this many slots; None = Ulysses."""
        return self.cheaper(self.planned(lengths, slots), slots)

    def planned(self, lengths: ArrayLike, slots: int) -> Placement:
        """The placement by cost of a pack of this many slots."""
        return place(lengths, self.cost, self.ranks, slots // self.ranks, self.prices)

    def cheaper(self, planned: Placement, slots: int) -> Placement | None:
        """`planned`, or None if an exchange of heads for tokens (Ulysses), which balances every pack, is cheaper."""
        if self.prices.token is None or not planned.sent.any():
            return planned
        each = slots // self.ranks
        even = int(planned.costs(self.cost, each).sum()) // self.ranks + self.prices.token * each
        return None if _lower(even, planned.slowest(self.cost, self.prices, each)) else planned


def head_tail(lengths: ArrayLike, ranks: int, slots: int) -> Placement:
    """The placement of ring attention: of a pack's 2 · ranks chunks rank r holds r and 2 · ranks − 1 − r.

    It balances a document that fills the pack, and other packs by chance.
    """
    checked = check_integers("lengths", lengths)
    ends = np.cumsum(checked)
    edges = offsets_of(np.repeat([slots // 2, slots - slots // 2], ranks))
    cuts = np.unique(np.concatenate([[0], ends, edges[edges < checked.sum()]]))
    start, stop = cuts[:-1], cuts[1:]
    document = np.searchsorted(ends, start, side="right")
    chunk = np.searchsorted(edges, start, side="right") - 1
    first = (ends - checked)[document]
    return _joined(
        checked, ranks, document, np.minimum(chunk, 2 * ranks - 1 - chunk), start - first, stop - first
    )


def _budgets(lengths: Integers, rates: Integers, ranks: int) -> Iterator[int]:
    """Budgets for the load of a part, from the largest document's down to a quarter of a rank's mean load."""
    loads = lengths * rates
    most, mean = int(loads.max(initial=1)), max(int(loads.sum()) // ranks, 1)
    yield most
    factor = 1.25 ** math.ceil(math.log(max(most / mean, 1), 1.25))
    while factor > 1.3:
        yield int(factor * mean)
        factor /= 1.25
    yield from (max(percent * mean // 100, 1) for percent in PERCENTS)


def _lower(value: int, other: int) -> bool:
    """Whether a cost is so much lower that another division of documents is worth it."""
    return value * (CLOSE + 1) < other * CLOSE


def _placed(lengths: Integers, rates: Integers, parts: Integers, ranks: int, slots: int) -> Placement:
    """The placement of documents that are divided into these numbers of equal parts."""
    document = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    of = lengths[document]
    widths = of * (number + 1) // parts[document] - of * number // parts[document]
    order = longest_first(widths)  # as the kernels expect
    document, widths = document[order], widths[order]
    loads = widths * rates[document]
    visit = np.lexsort((-widths, -loads))
    rank = spread(widths, loads, visit, ranks, slots, len(widths) + 1)
    if ranks > 1 and len(widths):
        both = np.stack([loads, np.zeros_like(loads)])
        limits = balancing.PackLimits(slots, len(widths) + 1, ranks, 1)
        search = balancing.Exchanges(_HALF, _ATTEMPTS * ranks, _FAILURES, int(loads.sum()) // ranks // 1000)
        balancing.even_out(rank, widths, both, limits, search)
    left, inside = rank < 0, rank >= 0
    room = slots - sums(rank, widths, ranks)
    poured, into, amounts = _poured(document[left], widths[left], room)
    document, rank = np.append(document[inside], poured), np.append(rank[inside], into)
    return _cut(lengths, ranks, document, rank, np.append(widths[inside], amounts))


def _poured(document: Integers, widths: Integers, room: Integers) -> tuple[Integers, Integers, Integers]:
    """(document, rank, tokens): parts divided among ranks with room, the emptiest first; the room must suffice."""
    ranks = np.argsort(-room, kind="stable")
    sources, sinks = np.cumsum(widths), np.cumsum(room[ranks])
    total = int(widths.sum())
    cuts = np.unique(np.concatenate([[0], sources, sinks[sinks < total]]))
    start = cuts[:-1]
    of, into = np.searchsorted(sources, start, side="right"), np.searchsorted(sinks, start, side="right")
    return document[of], ranks[into], np.diff(cuts)


def _cut(lengths: Integers, ranks: int, document: Integers, rank: Integers, widths: Integers) -> Placement:
    """Cut documents into shares, one a rank, each with equal parts of the document's head and tail."""
    shares, inverse = np.unique(document * ranks + rank, return_inverse=True)
    width = sums(inverse, widths, len(shares))
    document, rank = np.divmod(shares, ranks)
    head = width // 2
    ahead, behind = _before(document, head), _before(document, width - head)
    end = lengths[document] - behind
    starts = np.concatenate([ahead, end - (width - head)])
    stops = np.concatenate([ahead + head, end])
    return _joined(lengths, ranks, np.tile(document, 2), np.tile(rank, 2), starts, stops)


def _before(document: Integers, values: Integers) -> Integers:
    """Sums of the values before each one with the same document; documents are in rising order."""
    total = np.cumsum(values) - values
    first = np.searchsorted(document, document)
    return total - total[first] if len(total) else total


def _joined(
    lengths: Integers, ranks: int, document: Integers, rank: Integers, start: Integers, stop: Integers
) -> Placement:
    """The placement of these pieces: empty ones left out, neighbors on one rank joined."""
    order = np.lexsort((start, document))
    order = order[(stop > start)[order]]
    document, rank, start, stop = (each[order] for each in (document, rank, start, stop))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (document[1:] != document[:-1]) | (rank[1:] != rank[:-1])
    stop = stop[np.append(begins[1:], True)] if len(order) else stop
    return Placement(lengths, ranks, document[begins], rank[begins], start[begins], stop)
