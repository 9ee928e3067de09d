"""Bytes that ranks exchange in a step: counted as they are handed to collectives, against launch/traffic.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.launch.memory_model import Workload
from multipack.launch.traffic import Traffic, communication
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.world import World
from multipack.shapes import ModelShape
from parallel_tables.ranks import Ranks
from parallel_tables.setups import engine_of, filling, pack_of, train_step
from planning_tables.table import Table

SHAPE = ModelShape(layers=4, heads=4, d_model=64, d_ff=128, context=512, vocabulary_size=512, tied=False)
SLOTS, MICRO_BATCHES = 128, 4
CLOSE = 0.05

Words = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Settings, and what is said of them.

    Attributes:
        ranks: processes.
        words: fields of `ParallelConfig`.
        long: one document fills a pack, which is what a ring's formula speaks of.
    """

    ranks: int
    words: Words
    long: bool = False

    @property
    def title(self) -> str:
        """The settings as they are written, and what is unlike elsewhere."""
        told = " ".join(f"{name}={value}" for name, value in self.words.items())
        if self.words.get("context_method") != "ring":
            return told
        return f"{told}, {'a document a pack' if self.long else 'short documents'}"

    @property
    def bounded(self) -> bool:
        """Whether the formula says how much it is at most."""
        return self.words.get("context_method") == "ring" and not self.long


CASES = [
    *(Case(2, {"data": data}) for data in ("ddp", "zero1", "zero2", "zero3")),
    Case(2, {"tensor": 2}),
    Case(2, {"context": 2}),
    Case(2, {"context": 2, "context_method": "ring"}, long=True),
    Case(2, {"pipeline": 2, "schedule": "gpipe"}),
    Case(2, {"pipeline": 2}),
    Case(2, {"pipeline": 2, "schedule": "interleaved"}),
    *(Case(4, {"data": data}) for data in ("ddp", "zero1", "zero2", "zero3", "hsdp")),
    Case(4, {"tensor": 4}),
    Case(4, {"context": 4}),
    Case(4, {"context": 4, "context_method": "ring"}, long=True),
    Case(4, {"context": 4, "context_method": "ring"}),
    Case(4, {"pipeline": 4}),
    Case(4, {"data": "zero3", "tensor": 2}),
    Case(4, {"data": "zero3", "pipeline": 2}),
]

KINDS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "send": "send",
}
"""torch's names → those of the formulas."""


@dataclass
class Counted:
    """What one rank handed to collectives in a step.

    Attributes:
        calls: by kind.
        sent: bytes by kind, as `Traffic.sent` counts them: what a rank sends at best.
        written: bytes that its process wrote to sockets, headers included; None where the system does not say.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    written: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sent.values())


class Counting(TorchDispatchMode):
    """Sees every collective of this process, those of DDP's and FSDP's own code too, with the tensors it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace == "c10d":
            self._count(function._opname.strip("_").removesuffix("_base"), arguments)
        return function(*arguments, **(options or {}))

    def _count(self, name: str, arguments: Any) -> None:
        if name in ("recv", "barrier", "recv_any_source"):
            return
        if name not in KINDS:
            raise ValueError(f"torch's collective {name} is not counted: add it to KINDS")
        kind = KINDS[name]
        whole = arguments[1] if kind in ("reduce_scatter", "all_to_all") else arguments[0]
        self.counted.calls[kind] += 1
        payload = sum(each.nbytes for each in _tensors(whole))
        self.counted.sent[kind] += Traffic("", kind, _ranks_of(arguments), 0, payload).sent


def table(quick: bool) -> Table:
    """Counted bytes over those of the formula, for every method."""
    made = Table(
        "traffic",
        f"bytes that the rank which sends most sends in a step: {SHAPE.layers} layers, width {SHAPE.d_model},"
        f" {MICRO_BATCHES} packs of {SLOTS} slots for each data-parallel rank, fp32",
        {
            "parallel.…": "",
            "ranks": "",
            "calls": "",
            "counted": ",",
            "formula": ",",
            "counted / formula": ".3f",
            "worst kind": ".3f",
            "written / formula": ".3f",
        },
    )
    worst = 0.0
    for size in (2,) if quick else (2, 4):
        with Ranks(size) as ranks:
            for case in (each for each in CASES if each.ranks == size):
                found = max(ranks.run(count, case), key=lambda each: each.total)
                expected = expected_of(case)
                row = compared(case, found, expected)
                made.row(*row)
                if not case.bounded:
                    worst = max(worst, abs(row[5] - 1), abs(row[6] - 1))
    made.at_most("traffic: counted bytes off the formula, worst method and kind", worst, CLOSE, ".1%")
    made.notes += [
        "counted: all that a step hands to collectives, norms for clipping included; `calls` are those of the kinds"
        " that the formula has",
        "written: what the process wrote to its sockets, as the system counts it. gloo scatters what it reduces by an"
        " all-reduce, which sends twice as much as the best algorithm; otherwise it sends what the formula says",
        "a ring sends what documents that cross borders of ranks need: the formula is for one that fills the pack, and"
        " an upper bound otherwise",
    ]
    return made


def expected_of(case: Case) -> list[Traffic]:
    """The formulas' traffic of a case."""
    config = ParallelConfig(**case.words)
    return communication(Workload(SHAPE, config, case.ranks, SLOTS, "fp32", micro_batches=MICRO_BATCHES))


def compared(case: Case, found: Counted, expected: list[Traffic]) -> list[Any]:
    """A row: what was counted beside the formula."""
    formula: Counter[str] = Counter()
    for each in expected:
        formula[each.kind] += each.sent
    total = sum(formula.values())
    ratios = [found.sent[kind] / formula[kind] for kind in formula]
    calls = ", ".join(f"{found.calls[kind]} {kind.replace('_', '-')}" for kind in formula)
    written = None if found.written is None else found.written / total
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return [case.title, case.ranks, calls, found.total, total, found.total / total, worst, written]


def count(world: World, kept: Mapping[str, Any], case: Case) -> Counted:
    """The collectives of the third step on this rank: DDP arranges its buckets in the first two."""
    engine = engine_of(world, SHAPE, ParallelConfig(**case.words), MICRO_BATCHES)
    lengths = [SLOTS] if case.long else filling(SLOTS, 20)
    packs = [pack_of(lengths, SLOTS, SHAPE.vocabulary_size, seed) for seed in range(MICRO_BATCHES)]
    for _ in range(2):
        train_step(engine, packs, world.size)
    dist.barrier()
    before = written()
    with Counting() as counting:
        train_step(engine, packs, world.size)
    after = written()
    if before is not None and after is not None:
        counting.counted.written = after - before
    return counting.counted


def written() -> int | None:
    """Bytes that this process has written so far, to sockets for the most part; None but on Linux."""
    path = Path("/proc/self/io")
    if not path.exists():
        return None
    return int(dict(line.split(": ") for line in path.read_text().splitlines())["wchar"])


def _tensors(value: Any) -> list[Tensor]:
    """Tensors, however deep in lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)]


def _ranks_of(arguments: Any) -> int:
    """How many ranks take part: the size of the process group among the arguments."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(each).size())
            except RuntimeError:  # another of torch's objects
                continue
    raise ValueError("a collective without a process group cannot be counted")
