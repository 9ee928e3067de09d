"""Data parallel: every rank holds the whole model and its own packs; gradients are summed once a step.

    rank 0   pack 0 ─ pack 2 ─┐
    rank 1   pack 1 ─ pack 3 ─┴─ one all-reduce ─ the same optimizer step everywhere

The loss is a sum over targets divided by the step's *global* denominator, which the plan knows: its number of
targets or, where each document's targets share a weight of 1, of documents. DDP averages gradients over ranks, so
each rank's loss is multiplied by their number: the result is the gradient that one process would compute, however
unevenly targets and documents are spread.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from multipack.parallel.world import World


@dataclass(frozen=True)
class StepResult:
    """What one rank saw in the forward and backward passes of a step.

    Attributes:
        losses: summed loss of each micro-batch of this rank.
        forward_seconds: time in forward passes, device synchronized.
        backward_seconds: time in backward passes, the gradient's synchronization included.
    """

    losses: list[float]
    forward_seconds: float
    backward_seconds: float


class ReplicatedEngine:
    """An engine whose ranks are replicas: plain training with one rank, DDP with several.

    Args:
        model: takes a batch, returns the summed loss over its targets. It is not changed.
        optimizer: over the model's own parameters.
        world: the ranks that are replicas of each other.
        dtype: bf16 and fp16 run forward passes under autocast; fp32 does not. fp16 also multiplies the loss by a
            scale that keeps small gradients above zero; a step in which they overflow is left out and the scale halved
            (Micikevicius et al. 2018, arXiv:1710.03740).
        clock: seconds; replaced in tests.

    Raises:
        RuntimeError: replicas differ after rank 0's state was broadcast.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        dtype: torch.dtype = torch.float32,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.dtype = dtype
        self.overflowed = self._unscaled = False
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
        self._clock = clock
        self._replica: nn.Module = model
        if world.size > 1:
            ids = [world.device] if world.device.type == "cuda" else None
            # DDP broadcasts rank 0's parameters and buffers here, and installs the gradient reduction.
            self._replica = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
            self.check_replicas()

    def check_replicas(self) -> str:
        """Compare a hash of parameters and optimizer state over ranks.

        Returns:
            The hash, equal on all ranks.

        Raises:
            RuntimeError: it is not equal; the ranks that differ from rank 0 are named.
        """
        digest = state_hash(self.state())
        digests = self.world.gather(digest)
        differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if differing:
            raise RuntimeError(
                f"ranks {differing} hold another state than rank 0; all must start from the same checkpoint"
            )
        return digest

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that forward passes run in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.dtype)

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        denominator: float,
        watch: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Accumulate the gradient of a step; ranks synchronize once, in the last backward pass.

        Args:
            micro_batches: this rank's packs, at least one; equally many on every rank.
            denominator: what the step's summed loss is divided by, over all ranks and micro-batches.
            watch: called with the number of each micro-batch but the last, when its gradient has been added: until
                then gradients are this rank's own, multiplied by the number of ranks (and by `loss_scale`).
        """
        scale = self.world.size / max(denominator, 1)
        losses, forward, backward = [], 0.0, 0.0
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            moved = batch.to(self.world.device, non_blocking=True)
            with nullcontext() if last else self._unsynchronized():
                began = self._time()
                with self.autocast():
                    loss = self._replica(moved)
                middle = self._time()
                self._scaler.scale(loss * scale).backward()
                ended = self._time()
            losses.append(float(loss.detach()))
            forward += middle - began
            backward += ended - middle
            if watch is not None and not last:
                watch(index)
        return StepResult(losses, forward, backward)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by until `clip`: 1 but in fp16."""
        return self._scaler.get_scale()

    def unscale(self) -> None:
        """Divide the whole gradient by `loss_scale`, once a step and before `clip`."""
        if self._scaler.is_enabled():
            self._scaler.unscale_(self.optimizer)
            self._unscaled = True

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to `max_norm` (0 = never) and return its global norm before that.

        In fp16 a norm that is not finite is an overflow, which `overflowed` tells until the next step.
        """
        limit = max_norm if max_norm > 0 else math.inf
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        self.overflowed = self._scaler.is_enabled() and not math.isfinite(norm)
        return norm

    def step(self, learning_rate: float) -> None:
        """Apply the optimizer and clear the gradient.

        Args:
            learning_rate: multiplied by the `lr_scale` of a parameter group, where it has one.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        self._scaler.step(self.optimizer)
        self._unscaled = True
        self.discard()

    def discard(self) -> None:
        """Clear the gradient without applying it; after an overflow the loss is scaled by less from here on."""
        if self._scaler.is_enabled() and self._unscaled:
            self._scaler.update()
        self.overflowed = self._unscaled = False
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The bare model in evaluation mode, without gradients, in the run's precision."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield self.model
        finally:
            self.model.train(training)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Named tensors: {"model": parameters, "optimizer": "<parameter>.<slot>" → tensor}; in fp16 "scaler" too."""
        slots: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                slots[f"{name}.{slot}"] = torch.as_tensor(value)
        state: dict[str, dict[str, Tensor]] = {
            "model": dict(self.model.named_parameters()),
            "optimizer": slots,
        }
        if self._scaler.is_enabled():
            saved = self._scaler.state_dict()
            state["scaler"] = {
                name: torch.tensor(float(saved[name])) for name in ("scale", "_growth_tracker")
            }
        return state

    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over what `state()` gave.

        Raises:
            ValueError: names or shapes differ from this model's; the first few are named.
        """
        parameters = dict(self.model.named_parameters())
        _check_names(parameters, state["model"])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["model"][name])
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for key, value in state["optimizer"].items():
            name, _, slot = key.rpartition(".")
            by_parameter.setdefault(name, {})[slot] = value
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        _check_slots(trained, by_parameter)
        # torch's own loader decides where counters and moments live (it differs for fused optimizers).
        named = {id(parameter): name for name, parameter in parameters.items()}
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        packed = self.optimizer.state_dict()
        packed["state"] = {
            index: by_parameter[named[id(parameter)]]
            for index, parameter in enumerate(ordered)
            if named[id(parameter)] in by_parameter
        }
        self.optimizer.load_state_dict(packed)
        if self._scaler.is_enabled() and "scaler" in state:
            saved = {name: float(value) for name, value in state["scaler"].items()}
            tracker = int(saved["_growth_tracker"])
            self._scaler.load_state_dict({**self._scaler.state_dict(), **saved, "_growth_tracker": tracker})
        if self.world.size > 1:
            self.check_replicas()

    def _unsynchronized(self) -> AbstractContextManager[Any]:
        if isinstance(self._replica, DistributedDataParallel):
            return self._replica.no_sync()
        return nullcontext()

    def _time(self) -> float:
        self.world.synchronize()
        return self._clock()


def state_hash(state: dict[str, dict[str, Tensor]]) -> str:
    """sha256 over names and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for part in sorted(state):
        for name in sorted(state[part]):
            tensor = state[part][name].detach().cpu().contiguous()
            digest.update(f"{part}.{name}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_slots(parameters: dict[str, nn.Parameter], given: dict[str, dict[str, Tensor]]) -> None:
    """Moments for all parameters that are trained, or for none (before the first step); of their shapes."""
    if not given:
        return
    missing, extra = sorted(parameters.keys() - given.keys()), sorted(given.keys() - parameters.keys())
    shapes = [
        f"{name}.{slot}"
        for name, slots in given.items()
        for slot, value in slots.items()
        if name in parameters and value.dim() and value.shape != parameters[name].shape
    ]
    for problem, names in (("lacks", missing), ("has unknown", extra), ("has other shapes for", shapes)):
        if names:
            raise ValueError(
                f"the checkpoint's optimizer {problem} {', '.join(names[:3])} ({len(names)} in all)"
            )


def _check_names(parameters: dict[str, nn.Parameter], given: dict[str, Tensor]) -> None:
    missing = sorted(parameters.keys() - given.keys())
    extra = sorted(given.keys() - parameters.keys())
    shapes = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in given and given[name].shape != parameter.shape
    ]
    for problem, names in (("lacks", missing), ("has unknown", extra), ("has other shapes:", shapes)):
        if names:
            raise ValueError(f"the checkpoint {problem} {', '.join(names[:3])} ({len(names)} in all)")
