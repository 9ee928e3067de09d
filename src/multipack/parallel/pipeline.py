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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from multipack.parallel.engine import ModelEngine, Share, StepResult
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import ParallelConfig, Schedule
from multipack.parallel.schedules import Autocast, Pass, ScheduledRun
from multipack.parallel.stages import check_micro_batches, stages_of_rank
from multipack.parallel.state import local


class PipelineEngine(ModelEngine):
    """`ModelEngine` of a pipeline's ranks.

    Args:
        pipeline: this rank's stages and their schedule.
        optimizer, mesh, dtype, **more: see `ModelEngine`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> None:
        self.pipeline = pipeline
        stages = list(pipeline.stages.values())
        super().__init__(stages, optimizer, mesh, dtype, duplicates=pipeline.duplicates, **more)

    def _accumulate(
        self, micro_batches: Sequence[Any], scale: float, watch: Callable[[int], None] | None
    ) -> StepResult:
        """Run micro-batches by the schedule; `watch` is not called, because micro-batches overlap."""
        losses = self.pipeline.forward_backward(micro_batches, scale, self._share, self.autocast)
        seconds = self.pipeline.seconds
        return StepResult(
            self._counted_once(losses), seconds("forward"), seconds("backward") + seconds("reduce")
        )

    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """See `ModelEngine`."""
        return self._counted_once(self.pipeline.evaluate(micro_batches, self._share, self.autocast))


class Pipeline:
    """This rank's stages and the schedule that all ranks of its pipeline follow.

    The constructor and all methods are collective over the pipeline's ranks.

    Args:
        stages: modules of this rank's stages, in the order of `stages_of_rank`. The first stage of the pipeline is
            called with (batch), others with (batch, x). The last one returns the summed loss, others return x.
            Parameters have the names of the whole model; a stage sharded by FSDP2 is its root module itself.
        mesh: one-dimensional mesh of this pipeline's ranks.
        schedule: order of passes.
        micro_batches: M, the number of micro-batches of a training step.
        width: d, the width of the hidden states between stages.
        dtype: dtype of these hidden states: float32 under autocast, the parameters' own in FSDP2's mixed precision.
        tensor_ranks: ranks that divide the tokens of hidden states (sequence parallelism): stages exchange tensors of
            shape (T / tensor_ranks, d), where T is the number of slots that `share` leaves.
        device: device of the stages.
        clock: returns seconds; not used on GPUs.

    Attributes:
        parameters: parameters of all stages of this rank, by name.
        duplicates: names of this rank's parameters that an earlier stage on another rank also holds.
        passes: passes of the last training step on this rank, in the order in which they ran.

    Raises:
        ValueError: the schedule does not have this number of stages or of micro-batches.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: DeviceMesh,
        schedule: Schedule,
        micro_batches: int,
        *,
        width: int,
        dtype: torch.dtype = torch.float32,
        tensor_ranks: int = 1,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        check_micro_batches(ParallelConfig(pipeline=self.ranks, schedule=schedule), micro_batches)
        numbers = stages_of_rank(self.rank, self.ranks, schedule)
        if len(stages) != len(numbers):
            raise ValueError(
                f"parallel.schedule={schedule} has {len(numbers)} stages on every rank, got {len(stages)}"
            )
        self.stages = dict(zip(numbers, stages, strict=True))
        self.group = mesh.get_group()
        self.schedule, self.micro_batches = schedule, micro_batches
        self.width, self.dtype, self.tensor_ranks = width, dtype, tensor_ranks
        self.device = torch.device(device)
        self.passes: list[Pass] = []
        self.parameters: dict[str, nn.Parameter] = {}
        for module in stages:
            held = dict(module.named_parameters())
            shared = sorted(held.keys() & self.parameters.keys())
            if shared:
                raise ValueError(f"two stages of one rank hold {shared[0]}: they must not share parameters")
            self.parameters.update(held)
        self._holders = self._find_shared()
        self.duplicates = frozenset(name for name, ranks in self._holders.items() if ranks[0] != self.rank)
        self._clock = clock
        self._slots = 0  # of every pack, known after the first
        self._training: ScheduledRun | None = None

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        scale: float,
        share: Share = lambda batch: batch,
        autocast: Autocast = nullcontext,
    ) -> list[float]:
        """Compute the gradient of scale × Σ losses; parameters must have no gradients before.

        Args:
            micro_batches: M packs with the same number of slots, the same packs on every rank of the pipeline.
            scale: factor of losses before their backward passes.
            share: a pack → this rank's part of it, under context parallelism.
            autocast: returns the context of forward passes.

        Returns:
            Summed losses by micro-batch (not scaled) on the rank of the last stage; zeros elsewhere.

        Raises:
            ValueError: the number of micro-batches differs from the constructor's, or the number of slots from that of
                the first step; or a stage raised it.
            RuntimeError: a shared parameter already has a gradient, which would be summed twice.
        """
        self._check(micro_batches)
        left = [name for name in self._holders if self.parameters[name].grad is not None]
        if left:
            raise RuntimeError(
                f"{left[0]} has a gradient left from another step: clear gradients before each one"
            )
        batches = [share(batch).to(self.device, non_blocking=True) for batch in micro_batches]
        if self._training is None:
            self._training = self._scheduled(batches[0].num_slots, self.micro_batches, trains=True)
            self._slots = micro_batches[0].num_slots
        losses = self._training.step(batches, autocast, scale)
        self.passes = self._training.passes()
        self._sum_shared_gradients()
        return losses

    @torch.no_grad()
    def evaluate(
        self,
        micro_batches: Sequence[Any],
        share: Share = lambda batch: batch,
        autocast: Autocast = nullcontext,
    ) -> list[float]:
        """Compute the losses of any number of packs in evaluation mode, without gradients; see `forward_backward`.

        Raises:
            ValueError: packs have different numbers of slots; or a stage raised it.
        """
        if not micro_batches:
            return []
        _check_slots(micro_batches, micro_batches[0].num_slots, "the first of them")
        batches = [share(batch).to(self.device, non_blocking=True) for batch in micro_batches]
        before = [(each, each.training) for module in self.stages.values() for each in module.modules()]
        for module in self.stages.values():
            module.eval()
        try:
            # Built for each call: its buffers have this number and size, and are freed afterwards.
            run = self._scheduled(batches[0].num_slots, len(batches), trains=False)
            return run.step(batches, autocast, 1.0)
        finally:
            for each, training in before:
                each.training = training

    def seconds(self, kind: Literal["forward", "backward", "reduce"]) -> float:
        """Seconds in passes of a kind in the last training step on this rank."""
        return sum(each.ended - each.began for each in self.passes if each.kind == kind)

    def _scheduled(self, slots: int, micro_batches: int, *, trains: bool) -> ScheduledRun:
        if slots % self.tensor_ranks:
            raise ValueError(
                f"a pack's {slots:,} slots cannot be divided among parallel.tensor={self.tensor_ranks} ranks: make"
                " plan.capacity a multiple of it"
            )
        return ScheduledRun(
            self.stages,
            self.group,
            self.schedule,
            ((slots // self.tensor_ranks, self.width), self.dtype),
            micro_batches,
            device=self.device,
            clock=self._clock,
            trains=trains,
        )

    def _check(self, micro_batches: Sequence[Any]) -> None:
        """Check the number and size of packs before anything is sent: a mismatch would hang the ranks."""
        if len(micro_batches) != self.micro_batches:
            raise ValueError(
                f"this step has {len(micro_batches)} micro-batches, and the pipeline was built for"
                f" {self.micro_batches}: every step of a plan must have as many (plan.packs_per_step)"
            )
        if self._slots:
            _check_slots(micro_batches, self._slots, "those of the first step")
        else:
            _check_slots(micro_batches, micro_batches[0].num_slots, "the first of them")

    def _find_shared(self) -> dict[str, list[int]]:
        """Name → ranks of the trained parameters that this rank shares with others; the first rank counts them."""
        own = [
            (number, name)
            for number, module in self.stages.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        found: list[list[tuple[int, str]]] = [[] for _ in range(self.ranks)]
        dist.all_gather_object(found, own, group=self.group)
        holders: dict[str, list[int]] = {}
        for number, name in sorted(pair for pairs in found for pair in pairs):
            holders.setdefault(name, []).append(number % self.ranks)
        names = {name for _, name in own}
        return {name: ranks for name, ranks in holders.items() if name in names and len(ranks) > 1}

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
            own = gradient.to(self.device).contiguous()
            pieces = {rank: own if rank == self.rank else torch.empty_like(own) for rank in ranks}
            operations = []
            for rank, piece in pieces.items():
                if rank != self.rank:
                    operations.append(dist.P2POp(dist.isend, own, group=self.group, group_peer=rank))
                    operations.append(dist.P2POp(dist.irecv, piece, group=self.group, group_peer=rank))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            gradient.copy_(torch.stack(list(pieces.values())).sum(0))


def _check_slots(micro_batches: Sequence[Any], wanted: int, whose: str) -> None:
    for number, batch in enumerate(micro_batches):
        if batch.num_slots != wanted:
            raise ValueError(
                f"micro-batch {number} has {batch.num_slots:,} slots, and {whose} had {wanted:,}: stages of a pipeline"
                " exchange tensors of one shape, so set train.fixed_shape=true, which pads every pack to plan.capacity"
            )
