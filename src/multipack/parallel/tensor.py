"""Tensor parallelism: every rank has a piece of every matrix, and between matrices a piece of the tokens.

**One matrix.** `row` divides a matrix along what it sums over. Each rank has a part of x and the rows of W that go
with it, and the products add up: y = Σ xᵢWᵢ (W as in y = xW; a Linear stores its transpose).

    rank 0   x₀ ┃ W₀ ─▶ x₀W₀ ─┐
    rank 1   x₁ ┃ W₁ ─▶ x₁W₁ ─┼─ reduce-scatter ─▶ y = x₀W₀ + x₁W₁ + x₂W₂, each rank a third of its tokens
    rank 2   x₂ ┃ W₂ ─▶ x₂W₂ ─┘

`column` divides it along what it makes: xW = [xW₀ xW₁ xW₂], every rank some columns, with nothing to exchange. A column
matrix, what is done to each of its outputs alone (a head's attention, gelu), and a row matrix need one exchange
together (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053, section 3).

**Half a block.** Norms, residual sums and dropout work on T/n tokens a rank (sequence parallelism: Korthikanti et al.
2022, arXiv:2205.05198, section 4.2.2): all tokens exist between the two exchanges only.

    x (T/n, d) ─ norm ─ all-gather ─▶ (T, d) ─ column ─▶ (T, f/n) ─ row ─▶ (T, d) ─ reduce-scatter ─▶ (T/n, d) + x
                        `gathers`                                          summands

The backward pass mirrors it: an all-gather where there was a reduce-scatter, and the other way round. Parameters that
every rank has whole (norms, learned positions) meet different tokens, and their gradients are all-reduced at once. A
bias behind a row matrix is added on the first rank only, and its gradient needs no exchange: all tokens' gradients are
there. Counted for one block: 2 all-gathers and 2 reduce-scatters forward, as many backward, and 1 all-reduce of a few
numbers for each norm.

`vocabulary` divides the embedding's rows, so that every rank looks up its own words for all tokens and the lookups add
up as above; the output embedding goes with vocabulary.py. Consequences for callers: what a divided model calls
`hidden`, and what a part of a pipeline gives to the next, are T/n tokens of this rank; T must be a multiple of n; and
ranks must draw different random numbers, since each drops out of its own tokens.

Gradients have the layout of their parameters and are complete after the backward pass, so that optimizers, norms,
checkpoints and `fully_shard` over another dimension of the mesh need to know nothing of this. That is why torch's own
`parallelize_module` is not used: it leaves the norms' gradients as open sums over ranks, for whoever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from multipack.parallel.collectives import all_gather, broadcast, identity, reduce_scatter, scatter
from multipack.parallel.rollcall import Group, place_in
from multipack.parallel.state import local
from multipack.parallel.vocabulary import vocabulary_cross_entropy, vocabulary_log_probabilities

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "linear_cross_entropy": vocabulary_cross_entropy,
    "linear_log_probabilities": vocabulary_log_probabilities,
}
"""The form of each loss in which ranks divide the vocabulary, by the name of the function that needs all of it."""


def divide_tensors(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Divide the model's tensors among the ranks of a mesh, in place; collective unless they are on the meta device.

    Parameters become `DTensor`s on the mesh; names stay. Values are those of the mesh's first rank. Modules keep their
    types, and get the `forward` of theirs that exchanges what is divided.

    Args:
        model: its parameters are real, on the mesh's kind of device, or on the meta device. `loss_function`,
            `training_loss` and `log_probabilities`, where it has them, are given their vocabulary-parallel forms, with
            the keywords that a `functools.partial` there has.
        mesh: of one dimension.
        plan: pattern of a module's name → `column`, `row`, `vocabulary`, `positions`, `norm` or `gathers`;
            `*` stands for one part of a name. Patterns may match nothing.

    Raises:
        ValueError: a module with parameters that no pattern matches, or whose type its kind does not take; an unknown
            kind; a tensor whose size is no multiple of the number of ranks; a loss without a vocabulary-parallel form;
            a model that is divided already.
    """
    if mesh.ndim != 1:
        raise ValueError(f"divide_tensors takes a mesh of one dimension, got {mesh.ndim}: {mesh}")
    group = mesh.get_group()
    found = [(name, module, _divided_type(name, module, plan)) for name, module in model.named_modules()]
    losses = {
        name: _over_vocabulary(name, getattr(model, name), group)
        for name in ("loss_function", "training_loss", "log_probabilities")
        if getattr(model, name, None) is not None
    }
    for name, module, divided_type in found:
        if divided_type is not None:
            _divide(name, module, divided_type, mesh, group)
        elif _kind_of(name, plan) == "gathers":
            module.register_forward_pre_hook(_gathering(group))
    for name, loss in losses.items():
        setattr(model, name, loss)


class _Divided(nn.Module):
    """A module whose parameters are divided; `group` are the ranks that have the other pieces."""

    placements: ClassVar[dict[str, Shard | Replicate]]
    group: Group


class _Column(_Divided, nn.Linear):
    placements: ClassVar = {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, f / ranks)."""
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class _Row(_Divided, nn.Linear):
    placements: ClassVar = {"weight": Shard(1), "bias": Replicate()}

    def forward(self, x: Tensor) -> Tensor:
        """(T, f / ranks) → (T / ranks, d)."""
        bias = None if self.bias is None else local(self.bias)
        if bias is not None and place_in(self.group)[0] != 0:
            bias = bias - bias.detach()  # 0, with the gradient of the first rank's
        return reduce_scatter(F.linear(x, local(self.weight), bias), group=self.group)


class _Vocabulary(_Divided, nn.Embedding):
    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, words: Tensor) -> Tensor:
        """(T,) → (T / ranks, d)."""
        weight = local(self.weight)
        rank, ranks = place_in(self.group)
        _check_tokens(len(words), ranks)
        rows = words - rank * weight.shape[0]
        absent = (rows < 0) | (rows >= weight.shape[0])
        summands = F.embedding(rows.masked_fill(absent, 0), weight).masked_fill(absent[:, None], 0.0)
        return reduce_scatter(summands, group=self.group)


class _Positions(_Divided, nn.Embedding):
    placements: ClassVar = {"weight": Replicate()}

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) → (T / ranks, d)."""
        rank, ranks = place_in(self.group)
        _check_tokens(len(positions), ranks)
        return F.embedding(positions.chunk(ranks)[rank], identity(local(self.weight), self.group))


class _LayerNorm(_Divided, nn.LayerNorm):
    placements: ClassVar = {"weight": Replicate(), "bias": Replicate()}

    def forward(self, x: Tensor) -> Tensor:
        """(T / ranks, d) → (T / ranks, d)."""
        held = [local(parameter) for parameter in self.parameters(recurse=False)]
        if held:  # weight and bias have one exchange
            held = list(identity(torch.stack(held), self.group).unbind())
        weight, bias = (*held, None, None)[:2]
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class _RMSNorm(_Divided, nn.RMSNorm):
    placements: ClassVar = {"weight": Replicate()}

    def forward(self, x: Tensor) -> Tensor:
        """(T / ranks, d) → (T / ranks, d)."""
        weight = None if self.weight is None else identity(local(self.weight), self.group)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


_KINDS: dict[str, tuple[type[_Divided], ...]] = {
    "column": (_Column,),
    "row": (_Row,),
    "vocabulary": (_Vocabulary, _Column),
    "positions": (_Positions,),
    "norm": (_LayerNorm, _RMSNorm),
    "gathers": (),
}
"""What a module of each kind becomes: the one that is made from its own type."""


def _kind_of(name: str, plan: Mapping[str, str]) -> str | None:
    parts = name.split(".")
    for pattern, kind in plan.items():
        wanted = pattern.split(".")
        if len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted)):
            if kind not in _KINDS:
                raise ValueError(f"the plan calls {pattern} {kind!r}, which is none of {', '.join(_KINDS)}")
            return kind
    return None


def _divided_type(name: str, module: nn.Module, plan: Mapping[str, str]) -> type[_Divided] | None:
    """What a module becomes; None = it has nothing to divide.

    Raises:
        ValueError: it has, and the plan does not say how, or what cannot be.
    """
    if isinstance(module, _Divided):
        raise ValueError(f"{name} is divided already: divide a model once")
    kind = _kind_of(name, plan)
    if kind is not None and kind != "gathers":
        for divided_type in _KINDS[kind]:
            if divided_type.__bases__[1] is type(module):
                return divided_type
        types = " or ".join(each.__bases__[1].__name__ for each in _KINDS[kind])
        raise ValueError(f"the plan calls {name} {kind!r}, which takes {types}, got {type(module).__name__}")
    own = [parameter for parameter, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"the plan for tensor parallelism does not say how to divide {name} ({type(module).__name__} with"
            f" {', '.join(own)}): add a pattern for it, of {', '.join(_KINDS)}"
        )
    return None


def _divide(
    name: str, module: nn.Module, divided_type: type[_Divided], mesh: DeviceMesh, group: Group
) -> None:
    for own, parameter in list(module.named_parameters(recurse=False)):
        placement = divided_type.placements[own]
        module.register_parameter(own, _divided(f"{name}.{own}", parameter, placement, mesh, group))
    module.__class__ = divided_type
    cast(_Divided, module).group = group


@torch.no_grad()
def _divided(
    name: str, parameter: nn.Parameter, placement: Shard | Replicate, mesh: DeviceMesh, group: Group
) -> nn.Parameter:
    """This rank's piece of the first rank's values."""
    rank, ranks = place_in(group)
    if isinstance(placement, Replicate):
        own = parameter.detach() if parameter.is_meta else broadcast(parameter.detach(), group=group)
    else:
        dim = placement.dim
        if parameter.shape[dim] % ranks:
            raise ValueError(
                f"{name} {tuple(parameter.shape)} cannot be divided evenly among parallel.tensor={ranks} ranks:"
                f" {parameter.shape[dim]} is no multiple of {ranks}"
            )
        if parameter.is_meta:
            own = torch.empty_like(parameter.chunk(ranks, dim)[rank], memory_format=torch.contiguous_format)
        else:
            own = scatter(parameter.detach(), dim=dim, group=group)
    divided = DTensor.from_local(own, mesh, (placement,), run_check=False)
    return nn.Parameter(divided, requires_grad=parameter.requires_grad)


def _gathering(group: Group) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A hook that gives a module all tokens of its first argument: once, whatever reads them."""

    def gather_tokens(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = arguments
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))  # what matrices take: half of what else would be sent
        return all_gather(x, group=group), *others

    return gather_tokens


def _over_vocabulary(attribute: str, loss: Callable[..., Tensor], group: Group) -> Callable[..., Tensor]:
    """The same loss over a divided vocabulary."""
    function: Any = loss
    keywords: dict[str, Any] = {}
    if isinstance(loss, partial) and not loss.args:
        function, keywords = loss.func, loss.keywords
    name = getattr(function, "__name__", repr(function))
    if name not in _LOSSES:
        raise ValueError(
            f"the model's {attribute} is {name}, which needs all of the vocabulary, and tensor parallelism divides it:"
            f" use {' or '.join(_LOSSES)}, or parallel.tensor=1"
        )
    strange = [keyword for keyword in keywords if keyword not in signature(_LOSSES[name]).parameters]
    if strange:
        raise ValueError(
            f"the model's {attribute} has {strange[0]}={keywords[strange[0]]}, and there is no such thing where tensor"
            " parallelism divides the vocabulary: leave it out, or use parallel.tensor=1"
        )
    return partial(_LOSSES[name], **keywords, group=group)


def _check_tokens(tokens: int, ranks: int) -> None:
    """Refuse, on all ranks alike, packs that they cannot share."""
    if tokens % ranks:
        raise ValueError(
            f"parallel.tensor={ranks} divides the slots of every pack, and this one has {tokens}, which is no multiple:"
            f" pad packs to {-(-tokens // ranks) * ranks} (train.fixed_shape=true pads all to plan.capacity, and"
            f" PackedCollator takes pad_to)"
        )
