"""Bytes that ranks exchange in a step: counted as they are handed to collectives, against launch/traffic.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Case(NamedTuple):
    """Processes, fields of `ParallelConfig`, and whether one document fills a pack.

    For such documents the formula of planned holds; for others it is an upper bound.
    """

    ranks: int
    words: dict[str, Any]
    long: bool = False

    @property
    def is_planned(self) -> bool:
        """Whether documents decide how much is sent."""
        return self.words.get("context_method") == "planned"


CASES = [
    *(Case(2, {"data": data}) for data in ("ddp", "zero1", "zero2", "zero3")),
    Case(2, {"tensor": 2}),
    Case(2, {"context": 2, "context_method": "ulysses"}),
    Case(2, {"context": 2, "context_method": "planned"}, long=True),
    Case(2, {"pipeline": 2, "schedule": "gpipe"}),
    Case(2, {"pipeline": 2}),
    Case(2, {"pipeline": 2, "schedule": "interleaved"}),
    *(Case(4, {"data": data}) for data in ("ddp", "zero1", "zero2", "zero3", "hsdp")),
    Case(4, {"tensor": 4}),
    Case(4, {"context": 4, "context_method": "ulysses"}),
    Case(4, {"context": 4, "context_method": "planned"}, long=True),
    Case(4, {"context": 4, "context_method": "planned"}),
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


class Counting(TorchDispatchMode):
    """Counts all collectives of this process, also those of DDP and FSDP, and their bytes as `Traffic.sent` does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace == "c10d":
            self.count(function._opname.strip("_").removesuffix("_base"), arguments)
        return function(*arguments, **(options or {}))

    def count(self, name: str, arguments: Any) -> None:
        """Add one collective, named as torch names it."""
        if name in ("recv", "barrier", "recv_any_source"):
            return
        if name not in KINDS:
            raise ValueError(f"torch's collective {name} is not counted: add it to KINDS")
        kind = KINDS[name]
        whole = arguments[1] if kind in ("reduce_scatter", "all_to_all") else arguments[0]
        payload = sum(each.nbytes for each in tree_leaves(whole))
        if kind == "all_to_all" and any(isinstance(each, list) and each for each in arguments[2:]):
            kind = "send"  # with sizes of their own: a rank keeps nothing
        self.calls[kind] += 1
        self.sent[kind] += Traffic("", kind, _ranks_of(arguments), 0, payload).sent


def table(quick: bool) -> Table:
    """Counted bytes over those of the formula, for every method."""
    made = Table(
        "traffic",
        f"bytes sent in a step by the rank that sends most: {SHAPE.layers} layers, width {SHAPE.d_model},"
        f" {MICRO_BATCHES} packs of {SLOTS} slots for each data-parallel rank, fp32",
        dict.fromkeys(("parallel.…", "ranks", "calls"), "")
        | {"counted": ",", "formula": ",", "counted / formula": ".3f", "worst collective": ".3f"},
    )
    worst = 0.0
    for size in (2,) if quick else (2, 4):
        with Ranks(size) as ranks:
            for case in (each for each in CASES if each.ranks == size):
                calls, sent = max(ranks.run(count, case), key=lambda each: each[1].total())
                row = compared(case, calls, sent)
                made.row(*row)
                if case.long or not case.is_planned:
                    worst = max(worst, abs(row[5] - 1), abs(row[6] - 1))
    made.at_most("traffic: counted bytes off the formula, worst method and kind", worst, CLOSE, ".1%")
    made.notes += [
        "counted: the payload of all collectives of a step, including norms for clipping. calls: of the collectives in"
        " the formula",
        "planned: only documents that ranks divide are sent. The formula is exact for one document per pack, and an"
        " upper bound otherwise",
    ]
    return made


def expected_of(case: Case) -> list[Traffic]:
    """The formulas' traffic of a case."""
    config = ParallelConfig(**case.words)
    return communication(Workload(SHAPE, config, case.ranks, SLOTS, "fp32", micro_batches=MICRO_BATCHES))


def compared(case: Case, calls: Counter[str], sent: Counter[str]) -> list[Any]:
    """A row: counted calls and bytes beside the formula."""
    formula: Counter[str] = Counter()
    for each in expected_of(case):
        formula[each.kind] += each.sent
    ratios = [sent[kind] / formula[kind] for kind in formula]
    named = ", ".join(f"{calls[kind]} {kind.replace('_', '-')}" for kind in formula)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    total = sent.total()
    title = " ".join(f"{name}={value}" for name, value in case.words.items())
    title += case.is_planned * f", {'one document per pack' if case.long else 'short documents'}"
    return [title, case.ranks, named, total, formula.total(), total / formula.total(), worst]


def count(world: World, kept: Mapping[str, Any], case: Case) -> tuple[Counter[str], Counter[str]]:
    """Calls and bytes of the third step on this rank: DDP arranges its buckets in the first two."""
    engine = engine_of(world, SHAPE, ParallelConfig(**case.words), MICRO_BATCHES)
    lengths = [SLOTS] if case.long else filling(SLOTS, 20)
    packs = [pack_of(lengths, SLOTS, SHAPE.vocabulary_size, seed) for seed in range(MICRO_BATCHES)]
    for _ in range(2):
        train_step(engine, packs, world.size)
    dist.barrier()
    with Counting() as counting:
        train_step(engine, packs, world.size)
    return counting.calls, counting.sent


def _ranks_of(arguments: Any) -> int:
    """Number of ranks that take part: the size of the process group among the arguments."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(each).size())
            except RuntimeError:  # another of torch's objects
                continue
    raise ValueError("a collective without a process group cannot be counted")
