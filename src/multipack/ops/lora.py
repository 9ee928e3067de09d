"""Low-rank adapters of linear layers: y = (W + s·B·A) x + b instead of y = W x + b, where only A and B are trained.

    x (T, in) ─┬─ W frozen ────────────────────── + ─ · g ─ + b ─▶ (T, out)
               └─ dropout ─ A (r, in) ─ B (out, r) · s ─┘

LoRA (Hu et al. 2021, arXiv:2106.09685): s = α / r, g = 1. Rank-stabilized (Kalajdzievski 2023, arXiv:2312.03732):
s = α / √r. DoRA (Liu et al. 2024, arXiv:2402.09353) also trains the length m of each row: g = m / |W + s·B·A|, whose
denominator is treated as a constant in the backward pass (section 4.3). B is 0 and m = |W| at first, so that the
adapted model at first computes what the original one does.

Frozen matrices of blocks may be quantized (QLoRA; shapes/formats.py), with or without an adapter; m is then the
length of the rows of the dequantized matrix. Otherwise frozen linear layers and experts are held in the dtype of matrix
products: autocast would cast them to it in every step, and the products are the same bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multipack.ops.autocast import at_least_float32
from multipack.ops.experts import expert_matrices, quantized_experts
from multipack.ops.quantized import Quantized, held_parts, linear, part_names
from multipack.shapes.adapter import AdapterConfig

ADAPTER = ("lora_a", "lora_b", "magnitude")
"""Names of the parameters that an adapter adds to a linear layer."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter, or with a quantized matrix, or both; `add_adapters` turns a linear layer into it.

    Attributes:
        lora_a: (r, in); None = no adapter.
        lora_b: (out, r).
        magnitude: (out,) of DoRA, else None.
        scale: s, the factor of the update.
        dropout: share of the adapter's inputs that is dropped in training.
        weight_codes, weight_scales, weight_steps: the parts of a quantized matrix, see `Quantized`; then `weight` is
            None.
        format: of a quantized matrix.
    """

    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None
    magnitude: nn.Parameter | None
    scale: float
    dropout: float
    format: type[Quantized]

    @property
    def matrix(self) -> Tensor | Quantized:
        """(out, in) the frozen matrix."""
        if cast(Tensor | None, self.weight) is not None:
            return self.weight
        return held_parts(self, "weight", self.format, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """(T, in) → (T, out)."""
        return self.adapted(x, self.matrix, self.bias, self.lora_a, self.lora_b, self.magnitude)

    def adapted(
        self,
        x: Tensor,
        weight: Tensor | Quantized,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        magnitude: Tensor | None,
        total: Callable[[Tensor], Tensor] = lambda squares: squares,
    ) -> Tensor:
        """`forward` with these tensors, which may be a rank's parts; `total` sums squares of rows over ranks."""
        if a is None or b is None:
            return linear(x, weight, bias)
        # Not torch.add(…, alpha=): torch's compiler joins the two products in one kernel and drops the factor.
        update = F.linear(F.linear(F.dropout(x, self.dropout, self.training), a) * self.scale, b)
        if magnitude is None:
            return linear(x, weight, bias) + update
        lengths = total(row_squares(weight, a, b, self.scale)).sqrt()
        factor = magnitude / lengths.to(magnitude.dtype)
        out = linear(x, weight) + update
        out = out * factor.to(out.dtype)
        return out if bias is None else out + bias.to(out.dtype)


@torch.no_grad()
def row_squares(weight: Tensor | Quantized, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """(out,) squared lengths of the rows of W + s·B·A, in float32 or float64."""
    with torch.autocast(weight.device.type, enabled=False):
        dtype = at_least_float32(weight.dtype if isinstance(weight, Tensor) else torch.float32)
        found: Tensor = merged(weight.to(dtype), a.to(dtype), b.to(dtype), None, scale).square().sum(1)
        return found


def merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float) -> Tensor:
    """(out, in) the matrix with the adapter merged into it."""
    adapted = torch.addmm(weight, b, a, alpha=scale)
    if magnitude is None:
        return adapted
    lengths: Tensor = torch.linalg.vector_norm(adapted, dim=1)
    return adapted * (magnitude / lengths)[:, None]


def add_adapters(model: nn.Module, config: AdapterConfig, dtype: torch.dtype = torch.float32) -> None:
    """Add adapters to the matrices of a model's blocks, in place; freeze all other parameters; quantize matrices.

    Parameters keep their names, except quantized matrices (`PARTS`). New parameters (`ADAPTER`) are on the device of
    their matrix, without values. Call it before tensors are divided and parameters are sharded.

    Args:
        model: has `blocks`; it may be a part of a pipeline, or on the meta device.
        config: which matrices, and how frozen ones are held; `none` leaves the model unchanged.
        dtype: of matrix products, and so of frozen linear layers and experts that are not quantized.
    """
    if config.name == "none":
        return
    for name, module in model.named_modules():
        whole = config.trains(name)
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(whole)
        for own in _of_products(module) if not whole else []:
            parameter = module.get_parameter(own)
            parameter.data = parameter.data.to(dtype)
    quantized = quantizable(model, config)
    for name in filter(config.adapts, matrices(model)):
        _adapt(cast(nn.Linear, model.get_submodule(name)), config)
    for name in quantized:
        _quantize(model, name, config)


def check_adapters(model: nn.Module, config: AdapterConfig) -> None:
    """Check that every entry of `adapter.targets` and `adapter.train` names a part of this whole model.

    Raises:
        ValueError: one does not; a matrix is to be adapted and trained whole; or there is nothing to quantize.
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
    if config.format is not None and not quantizable(model, config):
        block = config.format.block
        rows = f" with rows of a multiple of {block} numbers" if block > 1 else ""
        raise ValueError(
            f"adapter.quantize={config.quantize}: the blocks of this model have no frozen linear layers{rows}; use"
            " adapter.quantize=none"
        )


def matrices(model: nn.Module) -> list[str]:
    """Names of the linear layers of a model's blocks; not of layers that compute in another way."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and name.startswith("blocks.")
    ]


def quantizable(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Names of the parameters that `add_adapters` quantizes.

    They are the frozen matrices of linear layers and experts of blocks, with rows that the format takes.
    """
    if config.format is None:
        return []
    block, linear_layers = config.format.block, set(matrices(model))
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if name.startswith("blocks.") and not config.trains(name)
        for own in (["weight"] if name in linear_layers else expert_matrices(module))
        if module.get_parameter(own).shape[-1] % block == 0
    ]


def quantize(weight: Tensor, config: AdapterConfig) -> Quantized:
    """A matrix, or the rows of several, in the format of `adapter.quantize`."""
    assert config.format is not None
    kind: type[Quantized] = resolve_name(config.format.matrix)
    return kind.quantize(weight.flatten(0, -2), config.double_quantize)


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
    bound = shape[1] ** -0.5  # the bound of nn.Linear, as in peft
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return name.rpartition(".")[2] in ADAPTER


def _adapt(module: nn.Linear, config: AdapterConfig) -> None:
    """Turn a linear layer into a `LoraLinear` with an adapter."""
    weight, made = module.weight, _frozen(module)
    options: dict[str, Any] = {"device": weight.device, "dtype": at_least_float32(weight.dtype)}
    made.scale, made.dropout = config.scale, config.dropout
    made.lora_a = nn.Parameter(torch.empty(config.rank, weight.shape[1], **options))
    made.lora_b = nn.Parameter(torch.empty(weight.shape[0], config.rank, **options))
    made.magnitude = nn.Parameter(torch.empty(weight.shape[0], **options)) if config.name == "dora" else None


def _quantize(model: nn.Module, name: str, config: AdapterConfig) -> None:
    """Turn a linear layer into a `LoraLinear`, or experts into `QuantizedExperts`, with this parameter quantized."""
    module, own = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    weight = module.get_parameter(own)
    found = quantize(weight, config)
    module.register_parameter(own, None)
    for part in part_names(own):
        value = cast(Tensor | None, found.part(part))
        made = None if value is None else nn.Parameter(value, requires_grad=False)
        module.register_parameter(part, made)
    if isinstance(module, nn.Linear):
        _frozen(module).format = type(found)
    else:
        quantized_experts(module).formats[own] = (type(found), weight.shape)


def _of_products(module: nn.Module) -> list[str]:
    """Names of a module's own parameters that are in matrix products only."""
    return ["weight"] if isinstance(module, nn.Linear) else expert_matrices(module)


def _frozen(module: nn.Linear) -> LoraLinear:
    """The linear layer as a `LoraLinear`, at first without an adapter."""
    made = cast(LoraLinear, module)
    if not isinstance(module, LoraLinear):
        module.__class__ = LoraLinear
        made.lora_a = made.lora_b = made.magnitude = None
    return made
