"""Collectives: what the ranks of a group do together, each as one function of a tensor.

    all_reduce      everybody gets the sum              identity        nothing moves; its gradient is summed
    reduce          one rank gets the sum               broadcast       everybody gets one rank's tensor
    all_gather      everybody gets all pieces           reduce_scatter  everybody gets one piece of the sum
    gather          one rank gets all pieces            scatter         everybody gets one piece of one rank's tensor
    all_to_all      everybody sends everybody a piece

Every function returns a new contiguous tensor and leaves its argument as it was. All ranks of the group must call it,
with tensors of one shape, dtype and device type; `group=None` means all ranks of the run, and a process on its own is
a group of one. `source` and `destination` are ranks within the group. A rank that receives nothing gets an empty tensor
of shape (0,). Sizes that the ranks cannot share evenly are refused: pad them.

**Gradients.** A collective is a linear map from what all ranks hold to what all ranks get, and its backward pass is the
transposed map, itself a collective (beside each other above). So every rank must run it backward, also one that got
an empty tensor: add its sum, 0, to the loss. What different ranks hold are different values and the loss is the sum
of the losses of all ranks, with one exception, that of tensor parallelism: the result of `all_reduce`, and the argument
of `identity`, is *one* value that all ranks hold, what is computed from it is the same everywhere, and its loss counts
once. (Megatron-LM's f and g; Shoeybi et al. 2019, arXiv:1909.08053, section 3.) Where ranks go on unlike each other,
`identity(all_reduce(x))` has the sum of their gradients.

**Mistakes.** Ranks that call unlike collectives, or with unlike shapes, may hang or get garbage from any backend. With
`check=True` the ranks first tell each other what they are about to do, by `rollcall.agree`: if it differs, every rank
raises the same ValueError; if a rank does not come, a TimeoutError names it. Without it, a collective that fails after
the group's timeout (gloo; nccl's watchdog ends the process instead) is followed by such a roll call for the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.parallel.rollcall import Group, agree, place_in, roll_call

Reduction = Literal["sum", "mean", "max", "min", "product"]
"""How values of several ranks become one. `mean` divides before it sums, so that fp16 does not overflow."""

GRACE_SECONDS = 5.0
"""How long ranks whose collective failed wait for each other, to say who is missing."""

# Names since torch 2.13, where the older ones warn.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, op: Reduction = "sum", group: Group = None, check: bool = False) -> Tensor:
    """Reduce over ranks; everybody gets the result.

        rank 0   x₀ ─┐         ┌─▶ x'
        rank 1   x₁ ─┤  x' =   ├─▶ x'
        rank 2   x₂ ─┤  Σ xᵣ   ├─▶ x'
        rank 3   x₃ ─┘         └─▶ x'

    Args:
        tensor: of any shape, the same on all ranks.
        op: only `sum` and `mean` have a gradient: the identity, because the result is one value (see above).
        group: the ranks that take part.
        check: first make sure that all ranks are about to do the same.

    Returns:
        Like `tensor`.
    """
    _, size = _meet("all_reduce", tensor, group, check, op=op)
    summand = _summand(tensor, op, size)

    def move(own: Tensor) -> Tensor:
        result = _own_copy(own)
        _run("all_reduce", dist.all_reduce, group, result, op=_reduce_op(op))
        return result

    return _apply(summand, size, move, lambda gradient: gradient)


def identity(tensor: Tensor, group: Group = None, check: bool = False) -> Tensor:
    """Give one value that all ranks hold to work that differs from rank to rank: forward nothing moves.

                      ┌─▶ rank 0   x ─▶ y₀            dy₀ ─┐
        x  (everywhere│   rank 1   x ─▶ y₁    and     dy₁ ─┼─ dx = Σ dyᵣ  everywhere
           the same) ─┴─▶ rank 2   x ─▶ y₂  backward  dy₂ ─┘

    Args:
        tensor: the same value on all ranks, which is not checked.
        group: the ranks that go on with it, each in its own way.
        check: first make sure that all ranks are about to do the same.

    Returns:
        `tensor`; its gradient is the all-reduced sum of the ranks' gradients.
    """
    _, size = _meet("identity", tensor, group, check)
    return _apply(
        tensor, size, lambda own: own.view_as(own), lambda gradient: all_reduce(gradient, group=group)
    )


def reduce(
    tensor: Tensor, destination: int = 0, op: Reduction = "sum", group: Group = None, check: bool = False
) -> Tensor:
    """Reduce over ranks; one rank gets the result. The gradient is a broadcast.

        rank 0   x₀ ─┐         ┌    ·
        rank 1   x₁ ─┤  x' =   │    ·
        rank 2   x₂ ─┤  Σ xᵣ   ├─▶ x'   destination=2
        rank 3   x₃ ─┘         └    ·

    Args:
        tensor: of any shape, the same on all ranks.
        destination: the rank that gets the result.
        op: only `sum` and `mean` have a gradient.
        group: the ranks that take part.
        check: first make sure that all ranks are about to do the same.

    Returns:
        Like `tensor` on the destination; of shape (0,) elsewhere.
    """
    rank, size = _meet("reduce", tensor, group, check, op=op, destination=destination)
    summand = _summand(tensor, op, size)

    def move(own: Tensor) -> Tensor:
        result = _own_copy(own)
        _run("reduce", dist.reduce, group, result, op=_reduce_op(op), group_dst=destination)
        return result if rank == destination else own.new_empty(0)

    def back(gradient: Tensor) -> Tensor:
        known = gradient if rank == destination else _placeholder(gradient, tensor.shape)
        return broadcast(known, destination, group)

    return _apply(summand, size, move, back)


def broadcast(tensor: Tensor, source: int = 0, group: Group = None, check: bool = False) -> Tensor:
    """Give one rank's tensor to everybody. The gradient is a reduction to that rank, and zero elsewhere.

        rank 0    ·  ┐         ┌─▶ x₂
        rank 1    ·  │         ├─▶ x₂
        rank 2   x₂ ─┼─────────┼─▶ x₂   source=2
        rank 3    ·  ┘         └─▶ x₂

    Args:
        tensor: of any shape, the same on all ranks; only the source's values are read.
        source: the rank whose tensor it is.
        group: the ranks that take part.
        check: first make sure that all ranks are about to do the same.

    Returns:
        Like `tensor`.
    """
    rank, size = _meet("broadcast", tensor, group, check, source=source)

    def move(own: Tensor) -> Tensor:
        result = _own_copy(own) if rank == source else _like(own, own.shape)
        _run("broadcast", dist.broadcast, group, result, group_src=source)
        return result

    def back(gradient: Tensor) -> Tensor:
        total = reduce(gradient, source, group=group)
        return total if rank == source else _placeholder(total, tensor.shape)

    return _apply(tensor, size, move, back)


def all_gather(tensor: Tensor, dim: int = 0, group: Group = None, check: bool = False) -> Tensor:
    """Join all ranks' pieces; everybody gets the whole. The gradient is a reduce-scatter.

        rank 0   x₀ ─┐     ┌─▶ x₀ x₁ x₂ x₃
        rank 1   x₁ ─┤     ├─▶ x₀ x₁ x₂ x₃
        rank 2   x₂ ─┤     ├─▶ x₀ x₁ x₂ x₃
        rank 3   x₃ ─┘     └─▶ x₀ x₁ x₂ x₃

    Args:
        tensor: this rank's piece, of one shape on all ranks, with at least one dimension.
        dim: the dimension along which pieces are joined.
        group: the ranks that take part.
        check: first make sure that all ranks are about to do the same.

    Returns:
        Like `tensor`, as many times as long along `dim` as there are ranks.
    """
    _, size = _meet("all_gather", tensor, group, check, dim=dim)

    def move(own: Tensor) -> Tensor:
        piece = own.movedim(dim, 0).contiguous()
        whole = _like(own, (size * piece.shape[0], *piece.shape[1:]))
        _run("all_gather", _all_gather_single, group, whole, piece)
        return whole.movedim(0, dim).contiguous()

    return _apply(tensor, size, move, lambda gradient: reduce_scatter(gradient, dim, group=group))


def reduce_scatter(
    tensor: Tensor, dim: int = 0, op: Reduction = "sum", group: Group = None, check: bool = False
) -> Tensor:
    """Reduce over ranks; every rank gets its piece of the result. The gradient is an all-gather.

        rank 0   a₀ b₀ c₀ d₀ ─┐     ┌─▶ Σ aᵣ
        rank 1   a₁ b₁ c₁ d₁ ─┤     ├─▶ Σ bᵣ
        rank 2   a₂ b₂ c₂ d₂ ─┤     ├─▶ Σ cᵣ
        rank 3   a₃ b₃ c₃ d₃ ─┘     └─▶ Σ dᵣ

    Args:
        tensor: of one shape on all ranks, its length along `dim` a multiple of their number.
        dim: the dimension along which the result is cut.
        op: only `sum` and `mean` have a gradient.
        group: the ranks that take part.
        check: first make sure that all ranks are about to do the same.

    Returns:
        Like `tensor`, 1/ranks as long along `dim`.
    """
    _, size = _meet("reduce_scatter", tensor, group, check, op=op, dim=dim, cut=dim)
    summand = _summand(tensor, op, size)

    def move(own: Tensor) -> Tensor:
        whole = own.movedim(dim, 0).contiguous()
        piece = _like(own, (whole.shape[0] // size, *whole.shape[1:]))
        _run("reduce_scatter", _reduce_scatter_single, group, piece, whole, op=_reduce_op(op))
        return piece.movedim(0, dim).contiguous()

    return _apply(summand, size, move, lambda gradient: all_gather(gradient, dim, group))


def gather(
    tensor: Tensor, destination: int = 0, dim: int = 0, group: Group = None, check: bool = False
) -> Tensor:
    """Join all ranks' pieces; one rank gets the whole. The gradient is a scatter.

        rank 0   x₀ ─┐     ┌   ·
        rank 1   x₁ ─┤     ├─▶ x₀ x₁ x₂ x₃   destination=1
        rank 2   x₂ ─┤     │   ·
        rank 3   x₃ ─┘     └   ·

    Args:
        tensor: this rank's piece, of one shape on all ranks, with at least one dimension.
        destination: the rank that gets the whole.
        dim: the dimension along which pieces are joined.
        group: the ranks that take part.
        check: first make sure that all ranks are about to do the same.

    Returns:
        On the destination like `tensor`, as many times as long along `dim` as there are ranks; elsewhere of shape (0,).
    """
    rank, size = _meet("gather", tensor, group, check, destination=destination, dim=dim)

    def move(own: Tensor) -> Tensor:
        piece = own.contiguous()
        pieces = [_like(own, own.shape) for _ in range(size)] if rank == destination else None
        _run("gather", dist.gather, group, piece, pieces, group_dst=destination)
        return own.new_empty(0) if pieces is None else torch.cat(pieces, dim)

    def back(gradient: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] *= size
        known = gradient if rank == destination else _placeholder(gradient, shape)
        return scatter(known, destination, dim, group)

    return _apply(tensor, size, move, back)


def scatter(
    tensor: Tensor, source: int = 0, dim: int = 0, group: Group = None, check: bool = False
) -> Tensor:
    """Give every rank its piece of one rank's tensor. The gradient is a gather to that rank, and zero elsewhere.

        rank 0    ·            ┌─▶ x₀
        rank 1   x₀ x₁ x₂ x₃ ──┼─▶ x₁   source=1
        rank 2    ·            ├─▶ x₂
        rank 3    ·            └─▶ x₃

    Args:
        tensor: the whole, its length along `dim` a multiple of the number of ranks. Only the source's values are read,
            but all ranks say shape and dtype: `torch.empty(()).expand(shape)` needs no memory.
        source: the rank whose tensor it is.
        dim: the dimension along which it is cut.
        group: the ranks that take part.
        check: first make sure that all ranks are about to do the same.

    Returns:
        Like `tensor`, 1/ranks as long along `dim`.
    """
    rank, size = _meet("scatter", tensor, group, check, source=source, dim=dim, cut=dim)

    def move(own: Tensor) -> Tensor:
        shape = list(own.shape)
        shape[dim] //= size
        piece = _like(own, shape)
        pieces = [part.contiguous() for part in own.chunk(size, dim)] if rank == source else None
        _run("scatter", dist.scatter, group, piece, pieces, group_src=source)
        return piece

    def back(gradient: Tensor) -> Tensor:
        whole = gather(gradient, source, dim, group)
        return whole if rank == source else _placeholder(whole, tensor.shape)

    return _apply(tensor, size, move, back)


def all_to_all(
    tensor: Tensor, split_dim: int = 0, join_dim: int = 0, group: Group = None, check: bool = False
) -> Tensor:
    """Cut every rank's tensor into pieces, send the r-th to rank r, join what arrives. The gradient goes back alike.

        rank 0   a₀ b₀ c₀ d₀ ─┐     ┌─▶ a₀ a₁ a₂ a₃
        rank 1   a₁ b₁ c₁ d₁ ─┤     ├─▶ b₀ b₁ b₂ b₃
        rank 2   a₂ b₂ c₂ d₂ ─┤     ├─▶ c₀ c₁ c₂ c₃
        rank 3   a₃ b₃ c₃ d₃ ─┘     └─▶ d₀ d₁ d₂ d₃

    With `split_dim=1, join_dim=0` a shard of the tokens with all heads, (T/n, H, D), becomes all tokens with a shard of
    the heads, (T, H/n, D): the exchange of Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509).

    Args:
        tensor: of one shape on all ranks, its length along `split_dim` a multiple of their number.
        split_dim: the dimension along which it is cut.
        join_dim: the dimension along which pieces are joined, by the rank they come from.
        group: the ranks that take part.
        check: first make sure that all ranks are about to do the same.

    Returns:
        Like `tensor`, 1/ranks as long along `split_dim` and then as many times as long along `join_dim`.
    """
    _, size = _meet("all_to_all", tensor, group, check, split_dim=split_dim, join_dim=join_dim, cut=split_dim)

    def move(own: Tensor) -> Tensor:
        sent = torch.stack(own.chunk(size, split_dim))
        received = _like(own, sent.shape)
        _run("all_to_all", dist.all_to_all_single, group, received, sent)
        return torch.cat(received.unbind(), join_dim)

    return _apply(tensor, size, move, lambda gradient: all_to_all(gradient, join_dim, split_dim, group))


class _Transposable(torch.autograd.Function):
    """A linear map whose transpose is known: `move` takes tensors forward, `back` takes gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return move(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _apply(
    tensor: Tensor, size: int, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """Move, with its gradient; in a group of one every collective is a copy."""
    if size == 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    result: Tensor = _Transposable.apply(tensor, move, back)  # type: ignore[no-untyped-call]
    return result


def _meet(
    name: str,
    tensor: Tensor,
    group: Group,
    check: bool,
    *,
    cut: int | None = None,
    **options: Any,
) -> tuple[int, int]:
    """Refuse what cannot be meant, on all ranks alike if `check`; this rank and the number of ranks.

    Args:
        name: the collective.
        tensor: its argument.
        group: the ranks that take part.
        check: exchange name, tensor's description and options first.
        cut: the dimension that must be a multiple of the number of ranks.
        options: op, source, destination and dimensions, as the user passed them.
    """
    rank, size = place_in(group)
    graded = tensor.requires_grad and torch.is_grad_enabled()
    if check:
        dtype, shape = (
            str(tensor.dtype).removeprefix("torch."),
            "×".join(map(str, tensor.shape)) or "a number",
        )
        told = "".join(f", {option}={value}" for option, value in options.items())
        agree(f"{name}({dtype} {shape} on {tensor.device.type}{told}{', with gradient' * graded})", group)
    for option, value in options.items():
        if option.endswith("dim") and not -tensor.dim() <= value < tensor.dim():
            has = f"dimensions 0 … {tensor.dim() - 1}" if tensor.dim() else "none: pass tensor.reshape(1)"
            raise ValueError(f"{name}: {option}={value}, but the tensor has {has}")
        if option in ("source", "destination") and not 0 <= value < size:
            raise ValueError(f"{name}: {option}={value}, but the group's ranks are 0 … {size - 1}")
        if option == "op":
            _check_reduction(name, value, tensor, graded)
    if cut is not None and tensor.shape[cut] % size:
        length = tensor.shape[cut]
        raise ValueError(
            f"{name}: {size} ranks cannot share dimension {cut}, which is {length} long, evenly;"
            f" pad it to {-(-length // size) * size}"
        )
    return rank, size


def _check_reduction(name: str, op: str, tensor: Tensor, graded: bool) -> None:
    if op not in get_args(Reduction):
        hint = "; for a factor, multiply the tensor and take op='sum'" if "premul" in str(op).lower() else ""
        raise ValueError(f"{name}: op={op!r} is none of {', '.join(get_args(Reduction))}{hint}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{name}: a mean of {tensor.dtype} is no whole number; take op='sum' and divide it")
    if graded and op not in ("sum", "mean"):
        raise ValueError(f"{name}: op={op!r} has no gradient here; pass tensor.detach() or take op='sum'")


def _reduce_op(op: Reduction) -> Any:
    operations = dist.ReduceOp
    table = {"max": operations.MAX, "min": operations.MIN, "product": operations.PRODUCT}
    return table.get(op, operations.SUM)


def _summand(tensor: Tensor, op: Reduction, size: int) -> Tensor:
    """What a rank adds: backends differ in means (gloo has none of integers, and sums before it divides)."""
    return tensor / size if op == "mean" and size > 1 else tensor


def _own_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _like(tensor: Tensor, shape: Any) -> Tensor:
    """Memory to receive into: contiguous, whatever the strides of `tensor`."""
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def _placeholder(empty: Tensor, shape: Any) -> Tensor:
    """Zeros of a shape without memory, from an empty tensor and with its gradient."""
    return empty.sum().expand(shape)


def _run(name: str, collective: Callable[..., Any], group: Group, *tensors: Any, **options: Any) -> None:
    """Run a collective; if it fails, find out which ranks are missing.

    Raises:
        TimeoutError: ranks are missing; they are named.
        RuntimeError: the backend's own error, where all ranks have met one.
    """
    try:
        collective(*tensors, group=group, **options)
    except RuntimeError as error:
        try:
            roll_call(name, group, GRACE_SECONDS, purpose="failed")
        except TimeoutError as missing:
            raise TimeoutError(f"{name} failed ({error}); asked why, {missing}") from error
        raise
