"""Low-rank adapters of linear layers: y = W x + b becomes y = (W + s·B·A) x + b, where only A and B are trained.

    x (T, in) ─┬─ W frozen ────────────────────── + ─ · g ─ + b ─▶ (T, out)
               └─ dropout ─ A (r, in) ─ B (out, r) · s ─┘

LoRA (Hu et al. 2021, arXiv:2106.09685): s = α / r, g = 1. Rank-stabilized (Kalajdzievski 2023, arXiv:2312.03732):
s = α / √r. DoRA (Liu et al. 2024, arXiv:2402.09353) also trains the length m of each row: g = m / |W + s·B·A|, whose
denominator is treated as a constant in the backward pass (section 4.3). B is 0 and m = |W| at first, so that the
adapted model begins as the original one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multipack.ops.autocast import at_least_float32
from multipack.shapes.adapter import AdapterConfig

ADAPTER = ("lora_a", "lora_b", "magnitude")
"""Names of the parameters that an adapter adds to a linear layer."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; `add_adapters` makes it of a layer that exists.

    Attributes:
        lora_a: (r, in).
        lora_b: (out, r).
        magnitude: (out,) of DoRA, else None.
        scale: s, the factor of the update.
        dropout: share of the adapter's inputs that is dropped in training.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter | None
    scale: float
    dropout: float

    def forward(self, x: Tensor) -> Tensor:
        """(T, in) → (T, out)."""
        return self.adapted(x, self.weight, self.bias, self.lora_a, self.lora_b, self.magnitude)

    def adapted(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        magnitude: Tensor | None,
        total: Callable[[Tensor], Tensor] = lambda squares: squares,
    ) -> Tensor:
        """`forward` with these tensors, which may be a rank's parts; `total` sums squares of rows over ranks."""
        update = F.linear(F.linear(F.dropout(x, self.dropout, self.training), a), b)
        if magnitude is None:
            return torch.add(F.linear(x, weight, bias), update, alpha=self.scale)
        lengths = total(row_squares(weight, a, b, self.scale)).sqrt()
        factor = magnitude / lengths.to(magnitude.dtype)
        out = torch.add(F.linear(x, weight), update, alpha=self.scale)
        out = out * factor.to(out.dtype)
        return out if bias is None else out + bias.to(out.dtype)


@torch.no_grad()
def row_squares(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """(out,) squared lengths of the rows of W + s·B·A, in float32 or float64."""
    with torch.autocast(weight.device.type, enabled=False):
        dtype = at_least_float32(weight.dtype)
        found: Tensor = merged(weight.to(dtype), a.to(dtype), b.to(dtype), None, scale).square().sum(1)
        return found


def merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float) -> Tensor:
    """(out, in) the matrix that a linear layer with this adapter computes."""
    found = torch.addmm(weight, b, a, alpha=scale)
    lengths: Tensor = torch.linalg.vector_norm(found, dim=1) if magnitude is not None else found
    return found if magnitude is None else found * (magnitude / lengths)[:, None]


def add_adapters(model: nn.Module, config: AdapterConfig) -> None:
    """Add adapters to the matrices of a model's blocks, in place, and freeze all other parameters.

    Names of parameters stay; new ones are those of `ADAPTER`, on the device of their matrix, without values. Call it
    before tensors are divided and parameters are sharded.

    Args:
        model: has `blocks`; it may be a part of a pipeline.
        config: which matrices; `none` leaves the model unchanged.
    """
    if config.name == "none":
        return
    for name, module in model.named_modules():
        whole = config.trains(name)
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(whole)
    for name in matrices(model):
        if config.adapts(name):
            _adapt(cast(nn.Linear, model.get_submodule(name)), config)


def check_adapters(model: nn.Module, config: AdapterConfig) -> None:
    """Check that every name in `adapter.targets` and `adapter.train` is one of this whole model.

    Raises:
        ValueError: one is not; or a matrix is to be adapted and trained whole.
    """
    if config.name == "none":
        return
    found = matrices(model)
    modules = [name for name, each in model.named_modules() if list(each.parameters(recurse=False))]
    config.check(found, modules)
    if both := [name for name in found if config.adapts(name) and config.trains(name)]:
        raise ValueError(
            f"adapter.train trains {both[0]} whole, which adapter.targets adapts: leave it out of one of them"
        )


def matrices(model: nn.Module) -> list[str]:
    """Names of the linear layers of a model's blocks."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    ]


def initial_adapter(name: str, shape: tuple[int, ...], seed: int, weight: Callable[[], Tensor]) -> Tensor:
    """The first value of a parameter of an adapter, on the CPU; it depends on the seed and the name only.

    Args:
        name: of the parameter.
        shape: of the parameter.
        seed: of the run.
        weight: reads the layer's matrix, of which `magnitude` is the length of each row.
    """
    kind = name.rpartition(".")[2]
    if kind == "lora_b":
        return torch.zeros(shape)
    if kind == "magnitude":
        lengths: Tensor = torch.linalg.vector_norm(weight().float(), dim=1)
        return lengths
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    bound = shape[1] ** -0.5  # that of nn.Linear, as in peft
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return name.rpartition(".")[2] in ADAPTER


def _adapt(module: nn.Linear, config: AdapterConfig) -> None:
    """Make a linear layer a `LoraLinear`."""
    weight = module.weight
    module.__class__ = LoraLinear
    made = cast(LoraLinear, module)
    made.scale, made.dropout = config.scale, config.dropout
    made.lora_a = nn.Parameter(weight.new_empty(config.rank, weight.shape[1]))
    made.lora_b = nn.Parameter(weight.new_empty(weight.shape[0], config.rank))
    made.magnitude = nn.Parameter(weight.new_empty(weight.shape[0])) if config.name == "dora" else None
