"""One training step under a parallel method, counted on every rank: bytes held, and bytes sent."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.launch.memory_model import Workload
from multipack.launch.traffic import Traffic, communication
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.world import World
from multipack.shapes import ModelShape
from parallel_tables.held import Saved, bytes_held
from parallel_tables.ranks import Ranks
from parallel_tables.setups import blueprint_of, engine_of, filling, pack_of

SHAPE = ModelShape(layers=4, heads=4, d_model=64, d_ff=128, context=512, vocabulary_size=512, tied=False)
SLOTS, MICRO_BATCHES = 128, 4
INSTANTS = ("before the step", "after a forward pass", "after the backward passes", "after the optimizer")
HELD = ("parameters", "gradients", "optimizer", "saved")
"""What a rank holds; `saved`: the most bytes at a time that autograd saves for backward passes, of the whole step."""


@dataclass
class Step:
    """What one rank held and sent in a step.

    Attributes:
        held: instant → bytes of parameters, gradients and optimizer state.
        saved: the most bytes at a time that autograd saved for backward passes.
        calls: collective → number of calls.
        sent: collective → bytes.
    """

    held: dict[str, dict[str, int]] = field(default_factory=dict)
    saved: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)


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


def _ranks_of(arguments: Any) -> int:
    """Number of ranks that take part: the size of the process group among the arguments."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(each).size())
            except RuntimeError:  # another of torch's objects
                continue
    raise ValueError("a collective without a process group cannot be counted")


def parameters() -> int:
    """Number of parameters of the decoder."""
    return sum(math.prod(shape) for shape in blueprint_of(SHAPE).shapes.values())


def measure(config: ParallelConfig, ranks: Ranks, lengths: list[int] | None = None) -> list[Step]:
    """The third step of each rank: DDP arranges its buckets in the first two. `lengths` are those of each pack."""
    return ranks.run(third_step, config, lengths or filling(SLOTS, 20))


def formula(config: ParallelConfig, ranks: int) -> Counter[str]:
    """Collective → bytes that the rank that sends most is predicted to send."""
    found: Counter[str] = Counter()
    work = Workload(SHAPE, config, ranks, SLOTS, "fp32", micro_batches=MICRO_BATCHES)
    for each in communication(work):
        found[each.kind] += each.sent
    return found


def third_step(world: World, config: ParallelConfig, lengths: list[int]) -> Step:
    """See `measure`; of this rank."""
    engine = engine_of(world, SHAPE, config, MICRO_BATCHES)
    packs = [pack_of(lengths, SLOTS, SHAPE.vocabulary_size, seed) for seed in range(MICRO_BATCHES)]
    found, watching = Step(), [False]
    look = partial(bytes_held, engine.modules, engine.optimizer)

    def after_forward(*_: Any) -> None:
        if watching[0]:
            found.held.setdefault(INSTANTS[1], look())

    engine.modules[0].register_forward_hook(after_forward)
    for number in range(3):
        watching[0] = number == 2
        dist.barrier()
        found.held = {INSTANTS[0]: look()}
        saved = Saved(engine.modules, engine.optimizer)
        with Counting() as counting, saved_tensors_hooks(saved.keep, lambda kept: kept.tensor):
            engine.forward_backward(packs, world.size * sum(pack.num_target_tokens for pack in packs))
            found.held[INSTANTS[2]] = look()
            engine.clip(1.0)
            engine.step(1e-3)
        found.held[INSTANTS[3]] = look()
    found.held = {instant: found.held[instant] for instant in INSTANTS}
    found.saved, found.calls, found.sent = saved.most, counting.calls, counting.sent
    return found
