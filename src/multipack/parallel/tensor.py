"""Tensor parallelism: ranks divide every matrix, and between matrices the tokens (sequence parallelism).

**One matrix.** `row` divides a matrix along the dimension it sums over. Each rank has a slice of x and the matching
rows of W, and the products add up: y = Σ xᵢWᵢ (W as in y = xW; a Linear stores its transpose).

    rank 0   x₀ ┃ W₀ ─▶ x₀W₀ ─┐
    rank 1   x₁ ┃ W₁ ─▶ x₁W₁ ─┼─ reduce-scatter ─▶ y = x₀W₀ + x₁W₁ + x₂W₂, a third of the tokens per rank
    rank 2   x₂ ┃ W₂ ─▶ x₂W₂ ─┘

`column` divides a matrix along its outputs: xW = [xW₀ xW₁ xW₂], without communication. A column matrix, an operation
on each output alone (a head's attention, gelu) and a row matrix need one exchange together (Megatron-LM: Shoeybi et
al. 2019, arXiv:1909.08053, section 3).

**Half a block.** Norms, residual sums and dropout work on T/n tokens per rank (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2); all tokens exist only between the two exchanges.

    x (T/n, d) ─ norm ─ all-gather ─▶ (T, d) ─ column ─▶ (T, f/n) ─ row ─▶ (T, d) ─ reduce-scatter ─▶ (T/n, d) + x
                        `gathers`                                          summands

The backward pass mirrors this. Parameters that are whole on every rank (norms, learned positions) see different tokens,
so their gradients are all-reduced. The bias of a row matrix is added on the first rank only; its gradient needs no
exchange, because every rank sees the gradients of all tokens. Per block: 2 all-gathers and 2 reduce-scatters in each
direction, and 1 all-reduce of a few numbers per norm.

`vocabulary` divides the embedding's rows: every rank looks up its own words for all tokens, and lookups add up as
above. Losses get the rank's rows of the output embedding and the group (ops/loss.py). For callers this means: the
results of `hidden` and of a pipeline stage have this rank's T/n tokens; T must be a multiple of n; ranks must draw
different random numbers, since each applies dropout to its own tokens.

Gradients have their parameters' layout and are complete after the backward pass, so optimizers, norms, checkpoints and
`fully_shard` over another mesh dimension work unchanged. torch's `parallelize_module` leaves the norms' gradients as
partial sums instead, and its collectives follow from dispatch; here they can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from multipack.ops.autocast import in_autocast_dtype
from multipack.ops.lora import ADAPTER, LoraLinear
from multipack.ops.loss import linear_cross_entropy, linear_log_probabilities
from multipack.ops.norm import JointRMSNorm, OffsetRMSNorm, RMSNorm, rms_norm
from multipack.ops.quantized import PARTS, Quantized
from multipack.parallel.collectives import Group, all_gather, all_reduce, identity, reduce_scatter
from multipack.parallel.state import local


def divide_tensors(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Divide the model's parameters among the ranks of a mesh, in place and without communication.

    Parameters become `DTensor`s on the mesh under the same names. Modules get a `forward` that exchanges divided
    activations; the loss gets all tokens, the rank's rows of the output embedding and `group=`.

    Args:
        model: a model on the meta device, or with equal values on all ranks.
        mesh: one-dimensional mesh of the ranks.
        plan: pattern of a module's name → its kind, a key of `_KINDS`; `*` matches one part of a name. The
            first match counts, and patterns may match nothing.

    Raises:
        ValueError: no pattern matches a module with parameters, or its type does not fit its kind; a kind is unknown;
            a dimension is not a multiple of the number of ranks; or the loss is not of ops/loss.py.
    """
    group = mesh.get_group()
    ranks = mesh.size()
    found = [
        (name, module, _divided_type(name, module, plan, ranks)) for name, module in model.named_modules()
    ]
    decoder: Any = model
    loss = _over_vocabulary(decoder.loss_function, group) if hasattr(model, "loss_function") else None
    for name, module, divided_type in found:
        if divided_type is not None:
            _divide(name, module, divided_type, mesh)
        elif _kind_of(name, plan) == "gathers":
            module.register_forward_pre_hook(lambda _, inputs: (_all_tokens(inputs[0], group), *inputs[1:]))
    if loss is not None:
        decoder.loss_function = loss


def pieces(
    model: nn.Module, plan: Mapping[str, str], ranks: int
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter, tuple[int, ...]]]:
    """The parameters of a model that `divide_tensors` would divide among this number of ranks; nothing is divided.

    Yields:
        Name of a module, the module, the name of its own parameter, the parameter, and the shape of a rank's piece.
    """
    for name, module in model.named_modules():
        is_divided = ranks > 1 and _kind_of(name, plan) is not None
        divided_type = _divided_type(name, module, plan, ranks) if is_divided else None
        for own, parameter in module.named_parameters(recurse=False):
            size = list(parameter.shape)
            placement = None if divided_type is None else _placement(divided_type, own)
            if isinstance(placement, Shard):
                size[placement.dim] //= ranks
            yield name, module, own, parameter, tuple(size)


class _TensorParallel(nn.Module):
    """A module whose parameters are divided among the ranks of `group`."""

    placements: ClassVar[dict[str, Shard | Replicate]]
    group: Group


class _ColumnLinear(_TensorParallel, LoraLinear):
    """Every rank has its rows of W; of an adapter the whole A and its rows of B."""

    placements: ClassVar = {
        "weight": Shard(0),
        "bias": Shard(0),
        "lora_a": Replicate(),
        "lora_b": Shard(0),
        "magnitude": Shard(0),
    }

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, f / ranks)."""
        weight, bias, a, b, magnitude = _pieces(self)
        return self.adapted(x, weight, bias, _shared(a, self.group), b, magnitude)


class _SharedHeadLinear(_TensorParallel, LoraLinear):
    """Fewer heads than ranks: every rank has the whole matrices and computes one head, its queries'."""

    placements: ClassVar = dict.fromkeys(("weight", "bias", "lora_a", "lora_b", "magnitude"), Replicate())
    heads: int

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, D), of D elements in a head."""
        own, (weight, bias, a, b, magnitude) = _head_rows(self), _pieces(self)
        a, bias, b, magnitude = (_shared(each, self.group) for each in (a, bias, b, magnitude))
        bias, b, magnitude = (None if each is None else each[own] for each in (bias, b, magnitude))
        if isinstance(weight, Tensor):
            weight = identity(weight, self.group)
        return self.adapted(x, weight[own], bias, a, b, magnitude)


class _RowLinear(_TensorParallel, LoraLinear):
    """Every rank has the columns of W, and of A, for its part of the inputs; the whole B."""

    placements: ClassVar = {
        "weight": Shard(1),
        "bias": Replicate(),
        "lora_a": Shard(1),
        "lora_b": Replicate(),
        "magnitude": Replicate(),
    }

    def forward(self, x: Tensor) -> Tensor:
        """(T, f / ranks) → (T / ranks, d)."""
        weight, bias, a, b, magnitude = _pieces(self)
        b, magnitude = _shared(b, self.group), _shared(magnitude, self.group)
        total = partial(all_reduce, group=self.group)
        out = self.adapted(x, weight, _on_first(bias, self.group), a, b, magnitude, total)
        return reduce_scatter(out, group=self.group)


class _VocabularyEmbedding(_TensorParallel, nn.Embedding):
    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, words: Tensor) -> Tensor:
        """(T,) → (T / ranks, d)."""
        weight = local(self.weight)
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        _check_tokens(len(words), ranks)
        rows = words - rank * weight.shape[0]
        absent = (rows < 0) | (rows >= weight.shape[0])
        summands = F.embedding(rows.masked_fill(absent, 0), weight).masked_fill(absent[:, None], 0.0)
        return reduce_scatter(summands, group=self.group)


class _PositionEmbedding(_TensorParallel, nn.Embedding):
    placements: ClassVar = {"weight": Replicate()}

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) → (T / ranks, d)."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        _check_tokens(len(positions), ranks)
        return F.embedding(positions.chunk(ranks)[rank], identity(local(self.weight), self.group))


class _TokenLayerNorm(_TensorParallel, nn.LayerNorm):
    placements: ClassVar = {"weight": Replicate(), "bias": Replicate()}

    def forward(self, x: Tensor) -> Tensor:
        """(T / ranks, d) → (T / ranks, d)."""
        parameters = [local(parameter) for parameter in self.parameters(recurse=False)]
        if parameters:  # one all-reduce for the gradients of weight and bias
            parameters = list(identity(torch.stack(parameters), self.group).unbind())
        weight, bias = (*parameters, None, None)[:2]
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class _TokenRMSNorm(_TensorParallel, RMSNorm):
    placements: ClassVar = {"weight": Replicate()}

    def forward(self, x: Tensor) -> Tensor:
        """(T / ranks, d) → (T / ranks, d)."""
        return rms_norm(x, identity(local(self.weight), self.group), self.eps)


class _TokenOffsetRMSNorm(_TensorParallel, OffsetRMSNorm):
    placements: ClassVar = {"weight": Replicate()}

    def forward(self, x: Tensor) -> Tensor:
        """(T / ranks, d) → (T / ranks, d)."""
        return rms_norm(x, identity(local(self.weight), self.group) + 1.0, self.eps)


class _DividedRMSNorm(_TensorParallel, JointRMSNorm):
    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, x: Tensor) -> Tensor:
        """(T, d / ranks) → (T, d / ranks), normalized by the mean square over all ranks' elements."""
        weight, ranks = local(self.weight), dist.get_world_size(self.group)
        squares = all_reduce(x.square().mean(-1, keepdim=True), self.group) / ranks
        return x * torch.rsqrt(squares + cast(float, self.eps)) * weight


_KINDS: dict[str, tuple[type[_TensorParallel], ...]] = {
    "column": (_ColumnLinear,),
    "heads": (_ColumnLinear,),
    "row": (_RowLinear,),
    "vocabulary": (_VocabularyEmbedding, _ColumnLinear),
    "positions": (_PositionEmbedding,),
    "norm": (_TokenLayerNorm, _TokenOffsetRMSNorm, _DividedRMSNorm, _TokenRMSNorm),
    "gathers": (),
}
"""Kind → divided types. A module gets the first type that takes its class, see `_undivided`.

`heads` is `column` for keys and values; with fewer heads than ranks it gets `_SharedHeadLinear`."""


def _undivided(divided_type: type[_TensorParallel]) -> tuple[Any, ...]:
    """Classes that a type takes, unless `forward` is overridden: its base, for LoraLinear also Linear."""
    base = divided_type.__bases__[1]
    return (base, nn.Linear) if base is LoraLinear else (base,)


def _kind_of(name: str, plan: Mapping[str, str]) -> str | None:
    """The kind of the first pattern that matches a module's name; None = no pattern does."""
    parts = name.split(".")
    for pattern, kind in plan.items():
        wanted = pattern.split(".")
        if len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted)):
            if kind not in _KINDS:
                raise ValueError(f"the plan calls {pattern} {kind!r}, which is none of {', '.join(_KINDS)}")
            return kind
    return None


def _divided_type(
    name: str, module: nn.Module, plan: Mapping[str, str], ranks: int
) -> type[_TensorParallel] | None:
    """The divided type of a module; None = nothing to divide."""
    kind = _kind_of(name, plan)
    if kind == "heads" and (heads := getattr(module, "heads", ranks)) < ranks and ranks % heads == 0:
        return _SharedHeadLinear
    if kind is not None and kind != "gathers":
        for divided_type in _KINDS[kind]:
            bases = [each for each in _undivided(divided_type) if isinstance(module, each)]
            if any(type(module).forward is base.forward for base in bases):
                return divided_type
        types = " or ".join(_undivided(each)[-1].__name__ for each in _KINDS[kind])
        raise ValueError(f"the plan calls {name} {kind!r}, which takes {types}, got {type(module).__name__}")
    own = [parameter for parameter, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"the plan for tensor parallelism does not say how to divide {name} ({type(module).__name__} with"
            f" {', '.join(own)}): add a pattern for it, of {', '.join(_KINDS)}"
        )
    return None


def _placement(divided_type: type[_TensorParallel], own: str) -> Shard | Replicate:
    """How ranks divide a module's parameter. Parts of a quantized matrix divide like it, but its steps stay whole."""
    if own == "weight_steps":
        return Replicate()
    return divided_type.placements["weight" if own in PARTS else own]


@torch.no_grad()
def _divide(name: str, module: nn.Module, divided_type: type[_TensorParallel], mesh: DeviceMesh) -> None:
    """Replace a module's parameters by this rank's pieces, and its class by `divided_type`."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for own, parameter in list(module.named_parameters(recurse=False)):
        placement = _placement(divided_type, own)
        piece = parameter.detach()
        if isinstance(placement, Shard):
            size = parameter.shape[placement.dim]
            if size % ranks:
                raise ValueError(
                    f"{name}.{own} {tuple(parameter.shape)} cannot be divided evenly among parallel.tensor={ranks}"
                    f" ranks: {size} is no multiple of {ranks}"
                )
            piece = piece.chunk(ranks, placement.dim)[rank].clone(memory_format=torch.contiguous_format)
        divided = DTensor.from_local(piece, mesh, (placement,), run_check=False)
        module.register_parameter(own, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    if isinstance(module, nn.Linear):
        vars(module).update({own: None for own in ADAPTER if not hasattr(module, own)})  # without an adapter
    module.__class__ = divided_type
    cast(_TensorParallel, module).group = mesh.get_group()


def _pieces(
    module: LoraLinear,
) -> tuple[Tensor | Quantized, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """This rank's parts of W, b, A, B and m."""
    tensors = (module.bias, module.lora_a, module.lora_b, module.magnitude)
    bias, a, b, magnitude = (None if each is None else local(each) for each in tensors)
    return _matrix_piece(module), bias, a, b, magnitude


def _matrix_piece(module: LoraLinear) -> Tensor | Quantized:
    """This rank's part of W."""
    whole = module.matrix
    if isinstance(whole, Tensor):
        return local(whole)
    codes, rank = local(whole.codes), dist.get_rank(cast(_TensorParallel, module).group)
    # Row and column of W at which this rank's part begins: one of the two is divided, or neither.
    rows, columns = codes.shape[0], whole.facts.per_byte * codes.shape[1]
    first = (
        rank * rows if rows < module.out_features else 0,
        rank * columns if columns < module.in_features else 0,
    )
    scales, steps = (None if each is None else local(each) for each in (whole.scales, whole.steps))
    return type(whole)(codes, scales, steps, whole.columns, first)


def _shared(tensor: Tensor | None, group: Group) -> Tensor | None:
    """A tensor that all ranks hold whole, whose gradients are summed over them."""
    return None if tensor is None else identity(tensor, group)


def _head_rows(module: _SharedHeadLinear) -> slice:
    """Rows of the key (or value) head of this rank's queries."""
    rank, ranks = dist.get_rank(module.group), dist.get_world_size(module.group)
    width = module.out_features // module.heads
    first = rank * module.heads // ranks * width
    return slice(first, first + width)


def _on_first(bias: Tensor | None, group: Group) -> Tensor | None:
    """`bias` on the first rank of a group, 0 on the others; the gradient is the same on all."""
    return bias if bias is None or dist.get_rank(group) == 0 else bias - bias.detach()


def _all_tokens(x: Tensor, group: Group) -> Tensor:
    """(T / ranks, d) → (T, d), in autocast's dtype if enabled, which halves the bytes sent."""
    return all_gather(in_autocast_dtype(x), group=group)


def _over_vocabulary(loss: Callable[..., Tensor], group: Group) -> Callable[..., Tensor]:
    """Wrap a loss function for hidden states of T / ranks tokens and a vocabulary that the group divides."""
    if loss not in (linear_cross_entropy, linear_log_probabilities):
        raise ValueError(
            f"the model's loss_function is {getattr(loss, '__name__', loss)}, which needs the whole vocabulary, which"
            " tensor parallelism divides: use multipack.linear_cross_entropy, or parallel.tensor=1"
        )

    def divided(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return loss(_all_tokens(hidden, group), local(weight), targets, **{**options, "group": group})

    return divided


def _check_tokens(tokens: int, ranks: int) -> None:
    """Raise a ValueError, on all ranks, if they cannot divide the tokens of a pack evenly."""
    if tokens % ranks:
        raise ValueError(
            f"parallel.tensor={ranks} divides the slots of every pack, and this one has {tokens}, which is no multiple:"
            f" pad packs to {-(-tokens // ranks) * ranks} (train.fixed_shape=true pads all to plan.capacity, and"
            f" PackedCollator takes pad_to)"
        )
