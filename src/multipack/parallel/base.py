"""What all engines share: the optimizer, the gradient's norm, the state, and the whole model gathered to one rank."""

from __future__ import annotations

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multipack.parallel.materialize import check_equal
from multipack.parallel.mesh import Mesh
from multipack.parallel.norms import squared_norms
from multipack.parallel.scaling import LossScaler
from multipack.parallel.state import (
    Source,
    State,
    Whole,
    check_model_shapes,
    create_optimizer_state,
    local,
    optimizer_state,
    slot_difference,
    whole,
)
from multipack.parallel.world import World


@dataclass(frozen=True)
class StepResult:
    """What one rank saw in the forward and backward passes of a step.

    Attributes:
        losses: summed loss of each micro-batch of this rank: its share, where several ranks hold one model, so that the
            sum over all ranks is that of the whole step.
        forward_seconds: time in forward passes, device synchronized.
        backward_seconds: time in backward passes, the gradient's synchronization included.
    """

    losses: list[float]
    forward_seconds: float
    backward_seconds: float


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Free gradients: the next backward pass makes them anew."""
    for parameter in parameters:
        parameter.grad = None


class ModelEngine(ABC):
    """An engine without its forward and backward passes.

    Args:
        modules: what this rank holds of the model: all of it, a shard, or stages of a pipeline. Names of their
            parameters are those of the whole model.
        optimizer: over the parameters.
        mesh: the ranks.
        dtype: bf16 and fp16 run forward passes under autocast; fp32 does not. fp16 also scales the loss.
        shapes: names and shapes of the whole model's parameters, in one order on every rank; None = `modules` are all.
        duplicates: names of parameters that this rank holds, and another stage counts.
        whole: makes an empty whole model, for `gathered`; None = `modules` are it.
        clear: clears gradients.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        duplicates: Collection[str] = (),
        whole: Callable[[], nn.Module] | None = None,
        clear: Callable[[Iterable[nn.Parameter]], None] = forget,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.modules = list(modules)
        self.optimizer = optimizer
        self.mesh, self.dtype = mesh, dtype
        self.duplicates = frozenset(duplicates)
        self.parameters: dict[str, nn.Parameter] = {}
        for module in self.modules:
            self.parameters.update(module.named_parameters())
        self.shapes = dict(shapes or {name: tuple(each.shape) for name, each in self.parameters.items()})
        self.overflowed = False
        self._scaler = LossScaler(dtype == torch.float16)
        self._unscaled = False
        self._whole = whole
        self._clear = clear
        self._clock = clock
        self.check_replicas()

    @property
    def world(self) -> World:
        """All ranks."""
        return self.mesh.world

    @property
    def model(self) -> nn.Module:
        """What this rank holds of the model, where that is one module."""
        (module,) = self.modules
        return module

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by until `unscale`: 1 but in fp16."""
        return self._scaler.scale

    @abstractmethod
    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        denominator: float,
        watch: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Accumulate the gradient of the summed loss of a step divided by `denominator`.

        Args:
            micro_batches: this rank's packs, at least one; equally many on every rank.
            denominator: what the step's summed loss is divided by, over all ranks and micro-batches.
            watch: called with the number of each micro-batch but the last, when its gradient has been added, where
                ranks then hold gradients of their own: multiplied by their number and by `loss_scale`.
        """

    @abstractmethod
    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """This rank's shares of the summed losses in evaluation mode, without gradients; see `StepResult`."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that forward passes run in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.dtype)

    def unscale(self) -> None:
        """Divide the whole gradient by `loss_scale`, once a step and before `clip`."""
        self._scaler.unscale(self.gradients().values())
        self._unscaled = True

    def gradients(self) -> dict[str, Tensor]:
        """What this rank holds of the gradient, by name."""
        return {name: each.grad for name, each in self.parameters.items() if each.grad is not None}

    def squared_norms(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """The squared norm of each of the model's tensors, of which `tensors` are those that this rank holds."""
        return squared_norms(tensors, list(self.shapes), self.mesh, self.duplicates)

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to `max_norm` (0 = never) and return its global norm before that.

        In fp16 a norm that is not finite is an overflow, which `overflowed` tells until the next step.
        """
        gradients = self.gradients()
        norm = math.sqrt(sum(self.squared_norms(gradients).values()))
        self.overflowed = self._scaler.enabled and not math.isfinite(norm)
        if gradients and 0 < max_norm < norm:
            torch._foreach_mul_([local(each) for each in gradients.values()], max_norm / (norm + 1e-6))
        return norm

    def step(self, learning_rate: float) -> None:
        """Apply the optimizer and clear the gradient.

        Args:
            learning_rate: multiplied by the `lr_scale` of a parameter group, where it has one.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        self.optimizer.step()
        self._unscaled = True
        self.discard()

    def discard(self) -> None:
        """Clear the gradient without applying it; after an overflow the loss is scaled by less from here on."""
        if self._unscaled:
            self._scaler.update(self.overflowed)
        self.overflowed = self._unscaled = False
        self._clear(self.parameters.values())

    def state(self) -> State:
        """Named live tensors: "model" parameters, "optimizer" as "<parameter>.<slot>", in fp16 "scaler" too.

        What this rank holds: pieces are `DTensor`s.
        """
        slots = optimizer_state(self.optimizer, self.parameters)
        state: State = {"model": dict(self.parameters), "optimizer": slots}
        if self._scaler.enabled:
            state["scaler"] = self._scaler.state()
        return state

    def load_state(self, state: Source | Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what `state()` gave, on any mesh; collective.

        Args:
            state: where saved tensors can be read, or whole tensors in memory.

        Raises:
            ValueError: names or shapes differ from this model's; the first few are named.
        """
        source: Source = Whole(state) if isinstance(state, Mapping) else state
        check_model_shapes(self.shapes, source.shapes("model"))
        if saved := source.shapes("optimizer"):
            create_optimizer_state(self.optimizer)
            slots = optimizer_state(self.optimizer, self.parameters)
            frozen = {name for name, each in self.parameters.items() if not each.requires_grad}
            # Pipeline stages hold different parameters: if one of them finds a difference, all ranks raise.
            for problem in self.world.gather(slot_difference(slots, saved, self.shapes.keys() - frozen)):
                if problem:
                    raise ValueError(f"the checkpoint's optimizer {problem}")
            source.fill("optimizer", slots)
        source.fill("model", self.parameters)
        if self._scaler.enabled and source.shapes("scaler"):
            saved = self._scaler.state()
            source.fill("scaler", saved)
            self._scaler.load_state(saved)
        self.check_replicas()

    def check_replicas(self) -> str:
        """Make sure that ranks which should hold the same hold the same.

        Returns:
            A hash of all that they hold, the same on every rank; empty where there is one rank.

        Raises:
            RuntimeError: they do not; ranks that differ are named.
        """
        if self.world.size == 1:
            return ""
        state = self.state()
        held = {f"{group}.{name}": each for group in state for name, each in state[group].items()}
        return check_equal(held, self.world)

    @torch.no_grad()
    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole values of all parameters, one after the other; collective, and the same on every rank."""
        for name, shape in self.shapes.items():
            own = self.parameters.get(name)
            if own is not None and name not in self.duplicates:
                value = whole(own.detach().to(self.world.device))  # which can send it, if it is offloaded
            else:
                value = torch.empty(shape, device=self.world.device)
            if self.mesh.sizes["pp"] > 1:
                value = self._from_its_stage(
                    value.contiguous(), own is not None and name not in self.duplicates
                )
            yield name, value

    def _from_its_stage(self, value: Tensor, holds: bool) -> Tensor:
        """What the stage that holds a tensor has, on all stages: the others add zeros."""
        if not holds:
            value.zero_()
        total = value.clone()
        dist.all_reduce(total, group=self.mesh.axis("pp").get_group())
        return total

    @contextmanager
    def gathered(self) -> Iterator[nn.Module | None]:
        """The whole model on rank 0, in evaluation mode, without gradients, in the run's precision; None elsewhere.

        Collective. For work that is not worth dividing, such as a sample of text.
        """
        if self._whole is None:
            with self.evaluating() as own:
                yield own if self.world.is_main else None
            return
        values = {name: value for name, value in self.whole_parameters() if self.world.is_main}
        if not self.world.is_main:
            yield None
            return
        with torch.device("meta"):  # where nothing is drawn: the run's random numbers stay as they are
            model = self._whole()
        model.load_state_dict(values, assign=True)
        model.eval()
        with torch.no_grad(), self.autocast():
            yield model

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """What this rank holds of the model in evaluation mode, without gradients, in the run's precision."""
        before = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield self.modules[0]
        finally:
            for module, training in zip(self.modules, before, strict=True):
                module.train(training)

    def _told(self, losses: Sequence[float]) -> list[float]:
        """This rank's shares: ranks that divide tensors compute one and the same loss, and the first tells it."""
        return [loss if self.mesh.coordinate("tp") == 0 else 0.0 for loss in losses]

    def _time(self) -> float:
        self.world.synchronize()
        return self._clock()


def weights_hash(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Sha256 over names and bytes of whole parameters, as `Engine.whole_parameters` gives them, in their order."""
    digest = hashlib.sha256()
    for name, value in parameters:
        _add(digest, f"model.{name}", value)
    return digest.hexdigest()


def state_hash(state: Mapping[str, Mapping[str, Tensor]]) -> str:
    """sha256 over names and bytes of all tensors, in the order of their groups and names."""
    digest = hashlib.sha256()
    for part in sorted(state):
        for name in sorted(state[part]):
            _add(digest, f"{part}.{name}", state[part][name])
    return digest.hexdigest()


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(name.encode())
    digest.update(local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
