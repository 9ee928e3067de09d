"""Pipeline parallelism: ranks hold different layers, and several micro-batches are in progress at a time.

    1f1b: 3 ranks, 4 micro-batches; numbers are forward passes, letters their backward passes, dots wait

    rank 0   0 1 2 . . a 3 b . c . d                   embedding, first blocks        hidden (T, d) →
    rank 1     0 1 . a 2 b 3 c . d                     blocks                         ← its gradient
    rank 2       0 a 1 b 2 c 3 d                       last blocks, head, loss

    gpipe        all forward passes, then all backward passes: holds the activations of all M micro-batches
    1f1b         each backward pass as soon as possible: holds the activations of at most P micro-batches (P ranks)
    interleaved  1f1b with several smaller stages per rank (stage s on rank s mod P): waits less, sends more

A rank waits while the pipeline fills and drains (`stages.bubble`). The schedules are torch's (schedules.py). This
module adds:

- **Batches.** All ranks of a pipeline hold the same packs. The schedule carries a micro-batch's number to every stage,
  which looks up its own copy of the pack, so that document boundaries always match the hidden states.
- **Shapes.** All packs of a run have one number of slots. This is checked on the host before anything is sent, because
  a mismatch would hang all ranks. It also spares the schedules a real forward pass to infer shapes.
- **Receive buffers.** Under 1f1b one per pass that can be in flight; torch alone allocates one per micro-batch.
- **Shared parameters.** Gradients of a parameter that two stages hold (tied embeddings) are summed.

Stages may be sharded by FSDP2 or divided by tensor and context parallelism. Gradients of shards are reduced once a
step, after the last backward pass; until then a rank holds the whole gradients of its stages, and the parameters that
backward passes gathered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from multipack.parallel.engine import ModelEngine, StepResult
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import Schedule
from multipack.parallel.schedules import ScheduledRun
from multipack.parallel.stages import stages_of_rank
from multipack.parallel.state import local


class PipelineEngine(ModelEngine):
    """`ModelEngine` of a pipeline's ranks; the constructor and all methods are collective over these.

    Args:
        stages: modules of this rank's stages, in the order of `stages_of_rank`. The first stage of the pipeline is
            called with (batch), others with (batch, x). The last one returns the summed loss, others return x.
            Parameters have the names of the whole model; a stage sharded by FSDP2 is its root module itself.
        optimizer, mesh, dtype, **more: see `ModelEngine`.
        schedule: order of passes.
        micro_batches: M, the number of micro-batches of a training step; see `fit_micro_batches`.
        width: d, the width of the hidden states between stages. Where ranks divide their tokens (sequence parallelism),
            stages exchange tensors of shape (T / ranks, d).
        hidden_dtype: dtype of these hidden states: float32 under autocast, the parameters' own in FSDP2's mixed
            precision.
        clock: returns seconds; not used on GPUs.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        *,
        schedule: Schedule,
        micro_batches: int,
        width: int,
        hidden_dtype: torch.dtype = torch.float32,
        clock: Callable[[], float] = time.perf_counter,
        **more: Any,
    ) -> None:
        self._rank, ranks = mesh.coordinate("pp"), mesh.sizes["pp"]
        self._stages = dict(zip(stages_of_rank(self._rank, ranks, schedule), stages, strict=True))
        self._group = mesh.axis("pp").get_group()
        self._schedule: Schedule = schedule
        self._micro_batches = micro_batches
        self._width, self._hidden_dtype = width, hidden_dtype
        self._slots = 0  # of every pack, known after the first
        self._training: ScheduledRun | None = None
        self._holders = _shared_parameters(self._stages, ranks, self._group)
        duplicates = [name for name, holders in self._holders.items() if holders[0] != self._rank]
        super().__init__(stages, optimizer, mesh, dtype, duplicates=duplicates, clock=clock, **more)

    def _accumulate(
        self, micro_batches: Sequence[Any], scale: float, watch: Callable[[int], None] | None
    ) -> StepResult:
        """Run micro-batches by the schedule; `watch` is not called, because micro-batches overlap."""
        if len(micro_batches) != self._micro_batches:
            raise ValueError(
                f"this step has {len(micro_batches)} micro-batches, and the pipeline was built for"
                f" {self._micro_batches}: every step of a plan must have as many (plan.packs_per_step)"
            )
        self._slots = self._slots or micro_batches[0].num_slots
        batches = self._shares(micro_batches, self._slots)
        if self._training is None:
            self._training = self._scheduled(batches, trains=True)
        run = self._training
        losses = run.step(batches, self.autocast, scale)
        self._sum_shared_gradients()
        return StepResult(
            self._counted_once(losses),
            run.seconds("forward"),
            run.seconds("backward") + run.seconds("reduce"),
        )

    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """See `ModelEngine`; any number of packs with the same number of slots."""
        if not micro_batches:
            return []
        batches = self._shares(micro_batches, micro_batches[0].num_slots)
        with self.evaluating():
            # Built for each call: its buffers have this number and size, and are freed afterwards.
            losses = self._scheduled(batches, trains=False).step(batches, self.autocast, 1.0)
        return self._counted_once(losses)

    def _shares(self, micro_batches: Sequence[Any], slots: int) -> list[Any]:
        """This rank's shares of packs, on its device; packs with other slots would hang the ranks."""
        for number, batch in enumerate(micro_batches):
            if batch.num_slots != slots:
                raise ValueError(
                    f"micro-batch {number} has {batch.num_slots:,} slots, and one before it had {slots:,}: stages of a"
                    " pipeline exchange tensors of one shape, so set train.fixed_shape=true, which pads every pack to"
                    " plan.capacity"
                )
        return [self._share(batch).to(self.world.device, non_blocking=True) for batch in micro_batches]

    def _scheduled(self, batches: Sequence[Any], *, trains: bool) -> ScheduledRun:
        shape = (batches[0].num_slots // self.mesh.sizes["tp"], self._width)
        return ScheduledRun(
            self._stages,
            self._group,
            self._schedule,
            (shape, self._hidden_dtype),
            len(batches),
            device=self.world.device,
            clock=self._clock,
            trains=trains,
        )

    @torch.no_grad()
    def _sum_shared_gradients(self) -> None:
        """Sum the gradients of shared parameters in the same order on all ranks, so that copies stay bitwise equal."""
        for name, ranks in self._holders.items():
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            if not gradient.numel():  # an uneven shard
                continue
            own = gradient.to(self.world.device).contiguous()
            pieces = {rank: own if rank == self._rank else torch.empty_like(own) for rank in ranks}
            operations = []
            for rank, piece in pieces.items():
                if rank != self._rank:
                    operations.append(dist.P2POp(dist.isend, own, group=self._group, group_peer=rank))
                    operations.append(dist.P2POp(dist.irecv, piece, group=self._group, group_peer=rank))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            gradient.copy_(torch.stack(list(pieces.values())).sum(0))


def _shared_parameters(
    stages: Mapping[int, nn.Module], ranks: int, group: dist.ProcessGroup
) -> dict[str, list[int]]:
    """Name → ranks of the trained parameters that this rank shares with others; the first rank counts them."""
    own = [
        (number, name)
        for number, module in stages.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    found: list[list[tuple[int, str]]] = [[] for _ in range(ranks)]
    dist.all_gather_object(found, own, group=group)
    holders: dict[str, list[int]] = {}
    for number, name in sorted(pair for pairs in found for pair in pairs):
        holders.setdefault(name, []).append(number % ranks)
    names = {name for _, name in own}
    return {name: held for name, held in holders.items() if name in names and len(held) > 1}
