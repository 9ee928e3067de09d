"""Bytes of parameters, gradients and optimizer state on a rank: the formulas of ZeRO's stages, and what is really held.

Ψ parameters on N data-parallel ranks, of which S = N / groups hold shards that make a whole. With float32 shards and
AdamW, a parameter takes 4 bytes, its gradient 4 and its two moments 8:

    ┌──────────────┬─────────────────────┬──────────────────────────┬─────────────────────────┬───────────────┐
    │              │ rest                │ forward                  │ backward, step          │ paper, mixed  │
    ├──────────────┼─────────────────────┼──────────────────────────┼─────────────────────────┼───────────────┤
    │ ddp          │ 4Ψ + 4Ψ + 8Ψ        │ as at rest               │ as at rest              │ (2 + 2 + 12)Ψ │
    │ zero1        │ 4Ψ + 4Ψ + 8Ψ/N      │ as at rest               │ as at rest              │ 4Ψ + 12Ψ/N    │
    │ zero2        │ (4     + 8)Ψ/S      │ 4Ψ/S + cΨ + 8Ψ/S         │ (4   + 4    + 8)Ψ/S     │ 2Ψ + 14Ψ/N    │
    │ zero3, hsdp  │ (4     + 8)Ψ/S      │ 4Ψ/S + cΩ + 8Ψ/S         │ (4   + 4    + 8)Ψ/S     │ 16Ψ/N         │
    └──────────────┴─────────────────────┴──────────────────────────┴─────────────────────────┴───────────────┘

DDP's buckets are its gradients, there from its first backward pass on. c is 4 or, where bfloat16 is gathered, 2; Ω are
the parameters outside of blocks. The paper's are those of Rajbhandari et al. 2020 (arXiv:1910.02054, figure 1): 2 bytes
for parameters and gradients, 12 for the optimizer with its float32 copy of the parameters. Here shards are that copy.
Nothing of this needs torch until something is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from multipack.parallel.parallel_config import Data

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Instant = Literal["rest", "forward", "backward", "step"]
"""Between steps; between forward and backward pass of a step's first micro-batch; after its last backward pass; after
the optimizer's step, before gradients are cleared."""


def zero_bytes(
    data: Data,
    parameters: int,
    ranks: int,
    instant: Instant = "backward",
    *,
    replicate: int = 2,
    outside: int = 0,
    parameter_bytes: float = 4,
    gradient_bytes: float = 4,
    optimizer_bytes: float = 8,
    compute_bytes: float = 4,
) -> dict[str, float]:
    """Bytes that a rank holds, with shards that are even.

    Args:
        data: what data-parallel ranks divide.
        parameters: Ψ, of the whole model or, beside tensor and pipeline parallelism, of this rank's part of it.
        ranks: N, those that take part in data parallelism.
        instant: when.
        replicate: groups that hold the same shards, for hsdp.
        outside: Ω, parameters outside of blocks, which zero3 keeps whole between forward and backward pass.
        parameter_bytes: of a parameter as the optimizer steps it.
        gradient_bytes: of its reduced gradient.
        optimizer_bytes: of its state: two float32 moments for AdamW.
        compute_bytes: of a gathered parameter: 2 in bfloat16. Where nothing is gathered it does not count.

    Returns:
        "parameters", "gradients" and "optimizer".

    Raises:
        ValueError: an unknown kind, or groups that do not divide the ranks.
    """
    groups = replicate if data == "hsdp" else 1
    if groups < 1 or ranks % groups:
        raise ValueError(f"parallel.replicate={groups} groups do not divide {ranks} data-parallel ranks")
    shards = {"ddp": 1, "zero1": 1, "zero2": ranks, "zero3": ranks, "hsdp": ranks // groups}.get(data)
    if shards is None:
        raise ValueError(f"parallel.data={data} is none of ddp, zero1, zero2, zero3 and hsdp")
    held = parameters / shards * parameter_bytes
    if instant == "forward" and data not in ("ddp", "zero1"):
        held += (parameters if data == "zero2" else outside) * compute_bytes
    bucketed = data in ("ddp", "zero1") and ranks > 1
    gradients = parameters / shards * gradient_bytes if bucketed or instant in ("backward", "step") else 0.0
    stepped = parameters / (ranks if data == "zero1" else shards)
    return {"parameters": held, "gradients": gradients, "optimizer": stepped * optimizer_bytes}


def count_bytes(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this rank holds: of storages, each counted once, however many tensors are views of it.

    Shards and what is gathered of them both count, while they exist. DDP's buckets count from its first backward pass
    on, after which gradients are views of them.

    Args:
        modules: what this rank holds of the model.
        optimizer: over its parameters: those are the shards, also while modules have gathered ones in their place.

    Returns:
        "parameters", "gradients" and "optimizer".
    """
    parameters = [each for module in modules for each in module.parameters()]
    parameters += [each for group in optimizer.param_groups for each in group["params"]]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(each.grad for each in parameters if each.grad is not None),
        "optimizer": _bytes(_tensors(optimizer)),
    }


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    import torch

    for slots in optimizer.state.values():
        yield from (value for value in slots.values() if isinstance(value, torch.Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    from multipack.parallel.state import local

    storages = {}
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
