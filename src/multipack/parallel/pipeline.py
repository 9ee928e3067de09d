"""Pipeline parallelism: ranks hold different layers, and several micro-batches are in progress at a time.

    1f1b: 3 ranks, 4 micro-batches; numbers are forward passes, letters their backward passes, dots are idle

    rank 0   0 1 2 . . a 3 b . c . d                   embedding, first blocks        hidden (T, d) →
    rank 1     0 1 . a 2 b 3 c . d                     blocks                         ← its gradient
    rank 2       0 a 1 b 2 c 3 d                       last blocks, head, loss

    gpipe        all forward passes, then all backward passes: holds the activations of all M micro-batches
    1f1b         each backward pass as soon as possible: holds the activations of at most P micro-batches (P ranks)
    interleaved  1f1b with several smaller stages per rank (stage s on rank s mod P): waits less, sends more

A rank waits while the pipeline fills and drains (`stages.bubble`). The schedules are torch's, whose interface is partly
private; no other module uses it. This module adds:

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

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from multipack.ops.autocast import keeping_copies
from multipack.parallel.collectives import gather_bytes
from multipack.parallel.engine import ModelEngine, StepResult
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import Schedule
from multipack.parallel.stages import stages_of_rank
from multipack.parallel.state import local

Kind = Literal["forward", "backward", "reduce"]
"""A kind of pass of a stage."""
_SCHEDULES: dict[Schedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


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
        **more: Any,
    ) -> None:
        self._rank, ranks = mesh.coordinate("pp"), mesh.sizes["pp"]
        self.stages = dict(zip(stages_of_rank(self._rank, ranks, schedule), stages, strict=True))
        self.group = mesh.axis("pp").get_group()
        self.schedule: Schedule = schedule
        self.width, self.hidden_dtype = width, hidden_dtype
        self._micro_batches = micro_batches
        self._slots = 0  # of every pack before ranks divide its tokens; known after the first step
        self._training: ScheduleRunner | None = None
        self._holders = _shared_parameters(self.stages, ranks, self.group)
        duplicates = [name for name, holders in self._holders.items() if holders[0] != self._rank]
        super().__init__(stages, optimizer, mesh, dtype, duplicates=duplicates, **more)

    def _accumulate(
        self, micro_batches: Sequence[Any], scale: float, watch: Callable[[int], None] | None
    ) -> StepResult:
        """Run micro-batches by the schedule; `watch` is not called, because micro-batches overlap.

        The passes are one stage of the step, because stages of the pipeline compute them in different orders.
        """
        if len(micro_batches) != self._micro_batches:
            raise ValueError(
                f"this step has {len(micro_batches)} micro-batches, and the pipeline was built for"
                f" {self._micro_batches}: every step of a plan must have as many (plan.packs_per_step)"
            )
        self._slots = self._slots or micro_batches[0].num_slots
        batches = self._shares(micro_batches, self._slots)
        self._training = self._training or ScheduleRunner(self, batches, trains=True)
        with keeping_copies(self.world.device):
            losses = self._training.step(batches, scale)
        self._sum_shared_gradients()
        forward, backward = self._training.marks("forward"), self._training.marks("backward", "reduce")
        return StepResult(self._counted_once(losses), forward, backward, self.clock)

    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """See `ModelEngine`; any number of packs with the same number of slots."""
        if not micro_batches:
            return []
        batches = self._shares(micro_batches, micro_batches[0].num_slots)
        with self.evaluating():
            # Built for each call: its buffers have this number and size, and are freed afterwards.
            losses = ScheduleRunner(self, batches, trains=False).step(batches)
        found: list[float] = self._counted_once(losses).tolist()
        return found

    def _shares(self, micro_batches: Sequence[Any], slots: int) -> list[Any]:
        """This rank's shares of packs, on its device; packs with other slots would hang the ranks."""
        for number, batch in enumerate(micro_batches):
            if batch.num_slots != slots:
                raise ValueError(
                    f"micro-batch {number} has {batch.num_slots:,} slots, and one before it had {slots:,}: stages of a"
                    " pipeline exchange tensors of one shape, so set train.fixed_shape=true, which pads every pack to"
                    " plan.capacity"
                )
        return [self._moved(batch) for batch in micro_batches]

    @torch.no_grad()
    def _sum_shared_gradients(self) -> None:
        """Add up gradients of parameters that two ranks share; as a + b is b + a, copies stay bitwise equal."""
        for name, ranks in self._holders.items():
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            if not gradient.numel():  # an uneven shard
                continue
            own = gradient.to(self.world.device).contiguous()
            received = torch.empty_like(own)
            (other,) = set(ranks) - {self._rank}  # first and last stage: of tied embeddings
            send = dist.P2POp(dist.isend, own, group=self.group, group_peer=other)
            receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=other)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            gradient.copy_(own + received)


def _shared_parameters(
    stages: Mapping[int, nn.Module], ranks: int, group: dist.ProcessGroup
) -> dict[str, list[int]]:
    """Name of each trained parameter that this rank shares with others → ranks that hold it; the first counts it."""
    own = [
        (number, name)
        for number, module in stages.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    found = [json.loads(pairs) for pairs in gather_bytes(json.dumps(own).encode(), group)]
    holders: dict[str, list[int]] = {}
    for number, name in sorted(pair for pairs in found for pair in pairs):
        holders.setdefault(name, []).append(number % ranks)
    names = {name for _, name in own}
    return {name: held for name, held in holders.items() if name in names and len(held) > 1}


class Pass(NamedTuple):
    """A pass of a step: its stage, its micro-batch, and when it began and ended, without the wait for its input."""

    stage: int
    micro_batch: int
    """−1 = the reduction of gradients, once a step."""
    kind: Kind
    began: Any
    ended: Any


class ScheduleRunner:
    """The schedule of an engine's stages, for one number and one size of micro-batches.

    Training and evaluation have one each: torch's buffers differ in whether they require gradients.

    Args:
        engine: the rank's stages, and the precision and order of their passes.
        batches: this rank's shares of the packs of a step; others have as many, of the same size.
        trains: whether there are backward passes.

    Attributes:
        hidden: shape and dtype of the hidden states between stages.
        passes: passes of the last step, in order.
    """

    def __init__(self, engine: PipelineEngine, batches: Sequence[Any], *, trains: bool) -> None:
        self.engine, self.count, self.scale = engine, len(batches), 1.0
        self.hidden = (batches[0].num_slots // engine.mesh.sizes["tp"], engine.width), engine.hidden_dtype
        self.batches: list[Any] = []
        self.losses: dict[int, Tensor] = {}
        self.passes: list[Pass] = []
        own = [Stage(self, number, trains) for number in engine.stages]
        kind = _SCHEDULES[engine.schedule]
        if not trains:  # these schedules take any number of micro-batches
            kind = ScheduleGPipe if len(own) == 1 else ScheduleLoopedBFS
        loss = self._scaled if trains else None  # without a loss torch's schedules run forward only
        stage_or_stages: Any = own[0] if len(own) == 1 else own
        self._schedule = kind(stage_or_stages, self.count, loss_fn=loss, scale_grads=False)

    def step(self, batches: list[Any], scale: float = 1.0) -> Tensor:
        """Run all passes; losses are multiplied by `scale` before their backward passes.

        Returns:
            (micro-batches,) summed losses (not scaled) on the rank of the last stage; zeros elsewhere.
        """
        self.batches, self.scale = batches, scale
        self.losses, self.passes = {}, []
        # The schedule splits this into its elements: a stage gets the number of the micro-batch beside its input.
        numbers = torch.arange(self.count)
        try:
            self._schedule.step(number=numbers, target=numbers)
        except RuntimeError as error:  # torch wraps what a stage raises
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise
        finally:
            self.batches = []
        none = torch.zeros((), device=self.engine.world.device)
        return torch.stack([self.losses.get(number, none) for number in range(self.count)])

    def record(self, stage: int, micro_batch: int, kind: Kind, began: Any) -> None:
        """Record a pass that has just ended."""
        self.passes.append(Pass(stage, micro_batch, kind, began, self.engine.clock.mark()))

    def marks(self, *kinds: Kind) -> list[tuple[Any, Any]]:
        """(began, ended) of the last step's passes of these kinds."""
        return [(each.began, each.ended) for each in self.passes if each.kind in kinds]

    def _scaled(self, loss: Tensor, _: Tensor) -> Tensor:
        return (loss * self.scale).sum()


class Stage(PipelineStage):
    """torch's stage, which takes its batch from the runner and declares the shapes it sends and receives."""

    def __init__(self, runner: ScheduleRunner, number: int, trains: bool) -> None:
        engine, (shape, dtype) = runner.engine, runner.hidden
        total = engine.mesh.sizes["pp"] * len(engine.stages)
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        loss = torch.empty(1, dtype=exact, device="meta", requires_grad=trains)
        super().__init__(
            engine.stages[number],
            number,
            total,
            engine.world.device,
            input_args=() if number == 0 else (hidden,),
            output_args=(loss,) if number == total - 1 else (hidden,),
            group=engine.group,
        )
        self._runner: ScheduleRunner = weakref.proxy(runner)  # no cycle: buffers are freed with the runner
        # Buffers of a stage; micro-batch i receives into buffer i mod their number. Under 1f1b stage s has at most
        # `total − s` forward passes whose backward pass is still to come.
        bounded = trains and engine.schedule == "1f1b"
        self._receives = total - number if bounded else runner.count
        self._receives_gradients = 2 if bounded else runner.count

    def forward_maybe_with_nosync(self, *args: Tensor, number: Tensor) -> Tensor:
        """Call the stage's module with the pack of this number."""
        index = int(number)
        began = self._runner.engine.clock.mark()
        with self._runner.engine.autocast():
            output: Tensor = super().forward_maybe_with_nosync(self._runner.batches[index], *args)  # type: ignore[no-untyped-call]
        if self.is_last:
            self._runner.losses[index] = output.detach()
            output = torch.stack([output])  # torch's schedules need a batch dimension that is not a view
        elif (tuple(output.shape), output.dtype) != self._runner.hidden:
            raise ValueError(
                f"stage {self.stage_index} of the pipeline gave {tuple(output.shape)} of {output.dtype}, and the next"
                f" one expects {self._runner.hidden[0]} of {self._runner.hidden[1]}"
            )
        else:
            output = output.contiguous()
        self._runner.record(self.stage_index, index, "forward", began)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Time torch's backward pass of a micro-batch."""
        began = self._runner.engine.clock.mark()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._runner.record(self.stage_index, bwd_chunk_id, "backward", began)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Time torch's reduction of gradients; forward-only schedules call it too."""
        if self.has_backward:
            began = self._runner.engine.clock.mark()
            super().perform_reduce_grad(grad_scale_factor)
            self._runner.record(self.stage_index, -1, "reduce", began)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        made = min(num_microbatches, self._receives)
        result = super()._prepare_forward_infra(made, *args, **kwargs)
        for number in range(made, num_microbatches):
            self.args_recv_info[number] = self.args_recv_info[number % made]
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        made = min(num_microbatches, self._receives_gradients)
        result = super()._prepare_backward_infra(made, *args, **kwargs)
        for number in range(made, num_microbatches):
            self.grad_recv_info[number] = self.grad_recv_info[number % made]
        self.chunks = num_microbatches  # torch has set `made`
        return result
