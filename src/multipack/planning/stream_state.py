"""Where a stream stands: plain values that go into a checkpoint, and come back checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.lengths import check_integer
from multipack.planning.options import short
from multipack.planning.plan import Plan
from multipack.planning.readers import as_objects
from multipack.planning.source import Dropped, Flight, plain_items

Integers = NDArray[np.int64]

_COUNTS = ("epoch", "step", "block", "position", "waiting", "old", "short_steps")
_SWITCHES = ("ended", "finished")


@dataclass(frozen=True, eq=False)
class Block:
    """Steps that were planned together, and where they leave the stream. Nothing in it changes.

    Attributes:
        plan: the steps; document n of it is the n-th of `flight`.
        flight: their documents, pack after pack.
        queue: documents that were read and have no step, in the order in which they came.
        waiting: so many of the queue, the first, were passed over by a block.
        old: so many of these by two blocks or more.
        number: blocks made so far.
        position: documents of the source that were looked at.
        dropped: those of them that were too long.
        short_steps: steps so far that were not full, because no more documents may be held.
        ended: the source has no more, and no block follows.
        source: the state of the source itself, where the state holds documents and the source has one.
    """

    plan: Plan
    flight: Flight
    queue: Flight
    waiting: int = 0
    old: int = 0
    number: int = 0
    position: int = 0
    dropped: Dropped = field(default_factory=Dropped)
    short_steps: int = 0
    ended: bool = False
    source: Any = None


@dataclass(frozen=True, eq=False)
class Place:
    """A place in a stream, between two steps.

    Attributes:
        options: what the stream was made with, as plain values.
        epoch: of the steps.
        step: steps that were handed out.
        block: where the next one comes from.
        taken: steps of the block that were handed out.
        agreed: steps for which the ranks still go on; who comes back asks again, so that it is no part of the state.
        finished: no step follows.
    """

    options: dict[str, Any]
    epoch: int
    step: int
    block: Block
    taken: int = 0
    agreed: int = 0
    finished: bool = False

    def planned(self) -> Flight:
        """Documents whose step was not handed out."""
        return self.block.flight[self._first() :]

    def _first(self) -> int:
        plan = self.block.plan
        return int(plan.pack_offsets[plan.step_offsets[self.taken]])

    def state(self) -> dict[str, Any]:
        """Plain values from which a stream goes on here.

        Raises:
            ValueError: documents that the state must hold are no plain data.
        """
        block, plan = self.block, self.block.plan
        with_items = self.options["resume"] == "items"
        state: dict[str, Any] = {
            "options": self.options,
            "epoch": self.epoch,
            "step": self.step,
            "finished": self.finished,
            "block": block.number,
            "position": block.position,
            "ended": block.ended,
            "short_steps": block.short_steps,
            "dropped": [block.dropped.documents, block.dropped.tokens, list(block.dropped.first)],
            "waiting": block.waiting,
            "old": block.old,
            "linear": plan.balanced.linear if plan.options.balance == "joint" else None,
            "steps": np.diff(plan.step_offsets[self.taken :]).tolist(),
            "packs": np.diff(plan.pack_offsets[plan.step_offsets[self.taken] :]).tolist(),
            "planned": _documents(self.planned(), with_items),
            "queue": _documents(block.queue, with_items),
        }
        if block.source is not None:
            state["source"] = block.source
        return state


def _documents(flight: Flight, with_items: bool) -> dict[str, Any]:
    documents: dict[str, Any] = {"positions": flight.positions.tolist(), "lengths": flight.lengths.tolist()}
    if flight.targets is not None:
        documents["targets"] = flight.targets.tolist()
    if with_items and flight.items is not None:
        documents["items"] = plain_items(flight.items.tolist(), flight.positions)
    return documents


@dataclass(frozen=True, eq=False)
class Saved:
    """A checked state, before the stream makes it its own.

    Attributes:
        counts: whole numbers and switches by name.
        dropped: as in `Block`.
        linear: of the cost that the planned steps agree in, where it depends on them.
        step_sizes: packs of each planned step.
        pack_sizes: documents of each planned pack.
        planned: documents of the planned steps.
        queue: documents that have no step.
        source: the source's own state, or None.
    """

    counts: dict[str, int]
    dropped: Dropped
    linear: int | None
    step_sizes: Integers
    pack_sizes: Integers
    planned: Flight
    queue: Flight
    source: Any


def saved(state: dict[str, Any], options: dict[str, Any], targets: bool) -> Saved:
    """Check a state that comes from a file.

    Args:
        state: what `Place.state` made, also when it went through JSON.
        options: of the stream that shall go on with it.
        targets: whether it counts targets by a function.

    Raises:
        ValueError: a stream with these options cannot have been there; the message says what differs.
    """
    needed = (*_COUNTS, *_SWITCHES, "options", "dropped", "linear", "steps", "packs", "planned", "queue")
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(f"the saved stream state lacks {', '.join(missing)}")
    _check_options(state["options"], options)
    counts = {key: check_integer(f"the saved stream state's {key}", state[key], 0) for key in _COUNTS}
    for key in _SWITCHES:
        if not isinstance(state[key], bool):
            raise ValueError(f"the saved stream state's {key} must be true or false, got {short(state[key])}")
        counts[key] = state[key]
    with_items = options["resume"] == "items"
    planned = _flight("planned", state["planned"], targets, with_items, counts["position"])
    queue = _flight("queue", state["queue"], targets, with_items, counts["position"])
    step_sizes, pack_sizes = _numbers("steps", state["steps"], 1), _numbers("packs", state["packs"], 1)
    fit = len(planned) == pack_sizes.sum() and len(pack_sizes) == step_sizes.sum()
    if fit and len(planned):
        slots = -(-planned.lengths // options["align"]) * options["align"]
        packs = np.add.reduceat(slots, np.cumsum(pack_sizes) - pack_sizes)
        fit = packs.max() <= options["capacity"] and step_sizes.max() <= options["packs_per_step"]
    if not fit or not counts["old"] <= counts["waiting"] <= len(queue):
        raise ValueError(
            "the saved stream state contradicts itself: its steps, packs and documents do not fit"
        )
    linear = state["linear"]
    if options["balance"] == "joint":
        linear = check_integer("the saved stream state's linear", linear, 0)
    documents, tokens, first = state["dropped"]
    dropped = Dropped(
        check_integer("the saved stream state's dropped documents", documents, 0),
        check_integer("the saved stream state's dropped tokens", tokens, 0),
        tuple(_numbers("dropped", first, 0).tolist()),
    )
    return Saved(counts, dropped, linear, step_sizes, pack_sizes, planned, queue, state.get("source"))


def _check_options(theirs: Any, ours: dict[str, Any]) -> None:
    """Refuse a state of a stream with other options, naming them."""
    if not isinstance(theirs, dict):
        raise ValueError(f"the saved stream state's options must be a dictionary, got {short(theirs)}")
    own = json.loads(json.dumps(ours))
    changed = [key for key in own if key not in theirs or json.loads(json.dumps(theirs[key])) != own[key]]
    if changed == ["shard"]:
        raise ValueError(
            f"the saved stream state is of shard={theirs.get('shard')}, but this reader has shard={own['shard']}:"
            " documents in flight belong to their shard, so each goes on with its own state in as many shards; only"
            " where one reader feeds all ranks may their number change"
        )
    if changed:
        named = ", ".join(f"{key} was {short(theirs.get(key))} and is {short(own[key])}" for key in changed)
        raise ValueError(
            f"the saved stream state belongs to another stream: {named}; go on with what it was saved with, or start"
            " a new stream"
        )


def _numbers(name: str, value: Any, least: int, most: int | None = None) -> Integers:
    array = np.asarray(value)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    legal = array.ndim == 1 and array.dtype.kind in "iu"
    if not legal or array.min() < least or (most is not None and array.max() > most):
        raise ValueError(f"the saved stream state's {name} must be whole numbers of at least {least}")
    return array.astype(np.int64)


def _flight(name: str, documents: Any, targets: bool, with_items: bool, position: int) -> Flight:
    wanted = ["positions", "lengths", *(["targets"] if targets else []), *(["items"] if with_items else [])]
    if not isinstance(documents, dict) or any(key not in documents for key in wanted):
        raise ValueError(f"the saved stream state's {name} needs {', '.join(wanted)}")
    if len({len(documents[key]) for key in wanted}) != 1:
        raise ValueError(f"the saved stream state's {name} has lists of different lengths")
    return Flight(
        _numbers(f"{name} positions", documents["positions"], 0, position - 1),
        _numbers(f"{name} lengths", documents["lengths"], 1),
        _numbers(f"{name} targets", documents["targets"], 0) if targets else None,
        as_objects(documents["items"]) if with_items else None,
    )
