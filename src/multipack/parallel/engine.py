"""`ModelEngine`: forward and backward passes, clipping, the optimizer's step and the state of a model on several ranks.

    forward_backward(packs, denominator) ─▶ clip(max_norm) ─▶ step(learning_rate)
                                                          └─▶ discard()

The training loop calls these methods and does not depend on the strategies, which build.py applies to the model. A
pipeline's engine (pipeline.py) runs micro-batches in another order and inherits everything else.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multipack.ops.autocast import drop_copies, keeping_copies
from multipack.parallel.fsdp import synchronizing
from multipack.parallel.mesh import Mesh
from multipack.parallel.state import (
    State,
    StateSource,
    create_optimizer_state,
    difference,
    local,
    optimizer_state,
    slot_difference,
    squared_norm,
)
from multipack.parallel.world import World

Share = Callable[[Any], Any]
"""A pack → this rank's part of it, under context parallelism."""
INITIAL_SCALE = 65536.0
GROWTH_STEPS = 2000
"""Steps without overflow after which the scale of fp16 losses doubles; both numbers are `GradScaler`'s."""


def whole_pack(batch: Any) -> Any:
    """The `Share` of a rank that computes whole packs."""
    return batch


class DeviceClock:
    """Measures time on a device without synchronizing it: by CUDA events on a GPU, by a clock of the host elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Record the current time: on a GPU as an event in its stream, because the host runs ahead of it."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds between two marks; waits for the second one."""
        if not self._is_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000.0


@dataclass(frozen=True)
class StepResult:
    """Result of the forward and backward passes of a step on one rank; reading a number of it waits for the device.

    Attributes:
        values: (micro-batches,) summed loss of each micro-batch, on the device. If several ranks compute the same loss,
            all but one of them have zeros, so that the sum over all ranks is the step's loss.
        forward, backward: (began, ended) marks of `clock` of all passes; backward passes include the synchronization
            of gradients.
        clock: the clock of the device.
    """

    values: Tensor
    forward: Sequence[tuple[Any, Any]]
    backward: Sequence[tuple[Any, Any]]
    clock: DeviceClock

    @property
    def losses(self) -> list[float]:
        """`values` on the host, in one transfer."""
        losses: list[float] = self.values.tolist()
        return losses

    @property
    def forward_seconds(self) -> float:
        """Time in forward passes."""
        return sum(self.clock.seconds(*marks) for marks in self.forward)

    @property
    def backward_seconds(self) -> float:
        """Time in backward passes."""
        return sum(self.clock.seconds(*marks) for marks in self.backward)

    @property
    def synchronizing_seconds(self) -> float:
        """Time of the last backward pass beyond the pace of the others; NaN with one micro-batch.

        The pace is the others' ratio of backward to forward time, times the last forward time. Where only the
        last pass synchronizes gradients, the rest is the communication that computing did not hide.
        """
        forward, backward = (
            [self.clock.seconds(*marks) for marks in passes] for passes in (self.forward, self.backward)
        )
        if len(forward) < 2 or not sum(forward[:-1]):
            return math.nan
        return max(backward[-1] - forward[-1] * sum(backward[:-1]) / sum(forward[:-1]), 0.0)


class LossScaler:
    """Factor of losses in fp16, so that small gradients stay nonzero while they are computed; 1 unless `enabled`.

    A step whose gradient overflows is skipped and the scale halved; after `GROWTH_STEPS` without overflow it
    doubles (Micikevicius et al. 2018, arXiv:1710.03740). It is the same on every rank, because overflow is
    decided by the global gradient norm.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL_SCALE if enabled else 1.0
        self.steps = 0  # since the scale last changed

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self.enabled and (held := [local(gradient) for gradient in gradients]):
            torch._foreach_mul_(held, 1.0 / self.scale)

    def update(self, overflowed: bool) -> None:
        """Adjust the scale at the end of a step."""
        if not self.enabled:
            return
        self.steps = 0 if overflowed else self.steps + 1
        if overflowed:
            self.scale /= 2
        elif self.steps == GROWTH_STEPS:
            self.scale, self.steps = self.scale * 2, 0

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint, with the names of torch's `GradScaler`."""
        return {"scale": torch.tensor(self.scale), "_growth_tracker": torch.tensor(float(self.steps))}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load what `state()` returned."""
        self.scale, self.steps = float(state["scale"]), int(state["_growth_tracker"])


class Engine(Protocol):
    """The interface between training and a model on several ranks; `ModelEngine` documents its members.

    Another engine may clip inside `step`, and hold its state in other tensors, if `state` has the names of parameters
    and pieces that any mesh can read.
    """

    mesh: Mesh
    dtype: torch.dtype
    clock: DeviceClock
    parameters: dict[str, nn.Parameter]
    shapes: dict[str, tuple[int, ...]]
    saved: frozenset[str] | None
    is_whole: bool
    overflowed: bool

    @property
    def world(self) -> World:
        """All ranks."""

    @property
    def model(self) -> nn.Module:
        """This rank's only module."""

    @property
    def loss_scale(self) -> float:
        """Factor of losses and gradients in fp16, until the last backward pass; 1 in other precisions."""

    def forward_backward(
        self, micro_batches: Sequence[Any], denominator: float, watch: Callable[[int], None] | None = None
    ) -> StepResult:
        """Compute the gradient of a step's summed loss over `denominator`."""

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, by name."""

    def clip(self, max_norm: float) -> float:
        """`clip_on_device`, read on the host; sets `overflowed`."""

    def clip_on_device(self, max_norm: float) -> Tensor:
        """The global norm of the gradient, which is clipped to `max_norm` (0 = not); collective."""

    def step(self, learning_rate: float) -> None:
        """Apply the optimizer, and clear the gradient."""

    def discard(self) -> None:
        """Clear the gradient."""

    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """Summed losses of packs, without gradients."""

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """Context of this rank's first module, in evaluation mode."""

    def state(self) -> State:
        """This rank's tensors, for a checkpoint."""

    def load_state(self, source: StateSource) -> None:
        """Load a state that was saved from any mesh; collective."""

    def nonfinite_parameters(self) -> list[str]:
        """Names of parameters with values that are not finite, of all ranks; collective."""


class ModelEngine:
    """Trains this rank's part of a model: the whole model, a shard of it, or stages of a pipeline.

    Args:
        modules: modules of this rank; without a pipeline one module, which takes a batch and returns the summed loss
            over its targets. Parameters have their names in the whole model.
        optimizer: optimizer of their parameters.
        mesh: the ranks of the run.
        dtype: precision of forward passes; bf16 and fp16 use autocast, and fp16 also scales the loss.
        call: module that is called in training instead of `modules[0]` (DDP's wrapper).
        share: a pack → this rank's part of it; `divide_context` returns it.
        keep_gathered: keep gathered parameters until the last backward pass of a step; see `synchronizing`.
        shapes: names and shapes of the whole model's parameters, in one order on every rank; None = each rank holds and
            computes the whole model.
        duplicates: names of this rank's parameters that another stage of its pipeline also holds and counts.
        saved: names of the parameters that `state` has; None = all. Others are frozen, and read from elsewhere.

    Attributes:
        parameters: this rank's parameters, by name.
        is_whole: whether each rank holds the whole model and computes it alone, as for samples of text.
        clock: the clock of this rank's device.
        overflowed: whether the gradient of this step exceeded fp16's range, so that the step must be discarded.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        *,
        call: nn.Module | None = None,
        share: Share = whole_pack,
        keep_gathered: bool = False,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        duplicates: Collection[str] = (),
        saved: frozenset[str] | None = None,
    ) -> None:
        self.modules = list(modules)
        self.optimizer = optimizer
        self.mesh, self.dtype = mesh, dtype
        self.parameters = {name: each for module in self.modules for name, each in module.named_parameters()}
        self.shapes = dict(shapes or {name: tuple(each.shape) for name, each in self.parameters.items()})
        self.duplicates, self.saved = frozenset(duplicates), saved
        self.is_whole = shapes is None
        self.overflowed = False
        self._call = call or self.modules[0]
        self._share = share
        self._synchronizing = synchronizing(self._call, keep=keep_gathered)
        self._scaler = LossScaler(dtype == torch.float16)
        self.clock = DeviceClock(mesh.world.device)
        self.check_replicas()

    @property
    def world(self) -> World:
        """All ranks."""
        return self.mesh.world

    @property
    def model(self) -> nn.Module:
        """This rank's only module."""
        (module,) = self.modules
        return module

    @property
    def loss_scale(self) -> float:
        """Factor of losses and gradients in fp16, removed after the last backward pass; 1 in other precisions."""
        return self._scaler.scale

    def scale(self, denominator: float) -> float:
        """Factor of a micro-batch's summed loss before its backward pass. This is where the loss is divided.

        The step's loss is a sum over the targets of all ranks and micro-batches, divided by one denominator for all of
        them. The plan knows it (the step's number of targets, or of documents), so that no collective is needed. DDP
        and FSDP average gradients over `mesh.gradient_size` ranks, hence the factor: the result is the gradient that
        one process would compute, however unevenly targets are distributed over ranks.
        """
        return self.mesh.gradient_size / (denominator or 1) * self.loss_scale

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        denominator: float,
        watch: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Compute the gradient of a step's summed loss divided by `denominator`. Call it once per step.

        Args:
            micro_batches: this rank's packs, at least one; the same number on every rank.
            denominator: divisor of the summed loss over all ranks and micro-batches of the step.
            watch: called with the index of each micro-batch except the last, after its backward pass, when gradients
                are not yet synchronized and are scaled by `mesh.gradient_size` and `loss_scale`.
        """
        self.world.watch.at_stage("forward and backward passes")
        result = self._accumulate(micro_batches, self.scale(denominator), watch)
        self.world.watch.at_stage("after its backward passes")
        self._scaler.unscale(self.gradients().values())
        return result

    def _accumulate(
        self, micro_batches: Sequence[Any], scale: float, watch: Callable[[int], None] | None
    ) -> StepResult:
        """Run micro-batches sequentially; ranks synchronize gradients in the last backward pass."""
        losses, forward, backward = [], [], []
        device = self.world.device.type
        with keeping_copies(self.world.device), self.autocast():
            for index, batch in enumerate(micro_batches):
                is_last = index == len(micro_batches) - 1
                self.world.watch.at_stage(f"forward pass of micro-batch {index + 1}")
                moved = self._moved(batch)
                if is_last and self.mesh.gradient_size > 1:
                    # Autograd computes gradients of copies from earlier passes last: DDP could not send any before.
                    drop_copies()
                with self._synchronizing(is_last):
                    began = self.clock.mark()
                    loss = self._call(moved)
                    middle = self.clock.mark()
                    self.world.watch.at_stage(f"backward pass of micro-batch {index + 1}")
                    with torch.autocast(device, enabled=False):
                        (loss * scale).backward()
                    forward.append((began, middle))
                    backward.append((middle, self.clock.mark()))
                losses.append(loss.detach())
                if watch is not None and not is_last:
                    with torch.autocast(device, enabled=False):
                        watch(index)
        return StepResult(self._counted_once(torch.stack(losses)), forward, backward, self.clock)

    def _moved(self, batch: Any) -> Any:
        """This rank's share of a pack, on its device; from pageable memory a copy would wait for the device."""
        own = self._share(batch)
        if self.world.device.type == "cuda":
            own = own.pin_memory()
        return own.to(self.world.device, non_blocking=True)

    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """Summed losses in evaluation mode, without gradients; see `StepResult.values`."""
        if not micro_batches:
            return []
        with self.evaluating() as model:
            losses = [model(self._moved(batch)) for batch in micro_batches]
        found: list[float] = self._counted_once(torch.stack(losses)).tolist()
        return found

    def _counted_once(self, losses: Tensor) -> Tensor:
        """Losses on the first of the tensor-parallel ranks, which all compute the same loss; zeros on the others."""
        return losses if self.mesh.coordinate("tp") == 0 else torch.zeros_like(losses)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of forward passes in the run's precision."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.dtype)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's parameters, by name; parameters without a gradient are omitted."""
        return {name: each.grad for name, each in self.parameters.items() if each.grad is not None}

    def clip(self, max_norm: float) -> float:
        """`clip_on_device`, read on the host. In fp16 a norm that is not finite sets `overflowed` for this step."""
        norm = float(self.clip_on_device(max_norm))
        self.overflowed = self._scaler.enabled and not math.isfinite(norm)
        return norm

    @torch.no_grad()
    def clip_on_device(self, max_norm: float) -> Tensor:
        """Clip the gradient to a global norm, without a wait for the device; collective.

        Args:
            max_norm: maximum norm; 0 = do not clip.

        Returns:
            The norm before clipping, 0-d float64. If it is not finite, the gradient is not finite either.
        """
        gradients = self.gradients()
        norm = squared_norm(gradients, self.mesh, self.duplicates).sqrt()
        if gradients and max_norm > 0:
            held = [local(each) for each in gradients.values()]
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(held, factor.to(held[0].device, held[0].dtype))
        return norm

    def step(self, learning_rate: float) -> None:
        """Apply the optimizer, with a parameter group's `lr_scale` as a factor of the rate, and clear the gradient."""
        self.world.watch.at_stage("optimizer step")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Clear the gradient and adjust the loss scale; without `step` before it, the gradient is not applied."""
        self._scaler.update(self.overflowed)
        self.overflowed = False
        gradients = list(self.gradients().values())
        if self._call is self.modules[0]:
            for parameter in self.parameters.values():
                parameter.grad = None
        elif gradients:
            # Gradients are views of DDP's buckets: if they were None, the next micro-batch would allocate them anew.
            torch._foreach_zero_(gradients)
        self.world.watch.at_stage("after the optimizer step")

    def state(self) -> State:
        """This rank's tensors, not copied; shards are `DTensor`s.

        Returns:
            Groups "model" (the parameters in `saved`), "optimizer" ("<parameter>.<slot>"), and in fp16 "scaler".
        """
        slots = optimizer_state(self.optimizer, self.parameters)
        state: State = {"model": self._kept(self.parameters), "optimizer": slots}
        return state | ({"scaler": self._scaler.state()} if self._scaler.enabled else {})

    def load_state(self, source: StateSource) -> None:
        """Load a state saved from any mesh; collective.

        Raises:
            ValueError: names or shapes differ from this model's; the message lists the first few.
        """
        saved, own = source.shapes("model"), self._kept(self.shapes)
        if problem := difference(own, saved, saved.keys() - own.keys()):
            raise ValueError(f"the checkpoint {problem}")
        if saved := source.shapes("optimizer"):
            create_optimizer_state(self.optimizer)
            slots = optimizer_state(self.optimizer, self.parameters)
            frozen = {name for name, each in self.parameters.items() if not each.requires_grad}
            # Pipeline stages hold different parameters: if one of them differs, all ranks raise.
            for problem in self.world.gather(slot_difference(slots, saved, self.shapes.keys() - frozen)):
                if problem:
                    raise ValueError(f"the checkpoint's optimizer {problem}")
            source.fill("optimizer", slots)
        source.fill("model", self._kept(self.parameters))
        if self._scaler.enabled and source.shapes("scaler"):
            scaler = self._scaler.state()
            source.fill("scaler", scaler)
            self._scaler.load_state(scaler)
        self.check_replicas()

    def check_replicas(self) -> str:
        """Check that replicas of a tensor are equal on all ranks that hold it; collective.

        Returns:
            A hash of the tensors of all ranks, the same on every rank; empty for one rank.

        Raises:
            RuntimeError: replicas differ; the message names the ranks.
        """
        if self.world.size == 1:
            return ""
        state = self.state() | {"model": self.parameters}
        tensors = {f"{group}.{name}": each for group in state for name, each in state[group].items()}
        from multipack.parallel.materialize import check_equal

        return check_equal(tensors, self.world)

    def _kept(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of the parameters that `state` has."""
        return {name: value for name, value in named.items() if self.saved is None or name in self.saved}

    def nonfinite_parameters(self) -> list[str]:
        """Names of the model's parameters with NaN or infinite values; equal on every rank; collective."""
        own = [name for name, each in self.parameters.items() if not bool(local(each).isfinite().all())]
        return sorted({name for text in self.world.gather(json.dumps(own)) for name in json.loads(text)})

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Context of this rank's first module; all are in evaluation mode, without gradients, in the run's dtype."""
        before = [(each, each.training) for module in self.modules for each in module.modules()]
        for module in self.modules:
            module.eval()
        try:
            with torch.no_grad(), keeping_copies(self.world.device), self.autocast():
                yield self.modules[0]
        finally:
            for each, training in before:
                each.training = training
