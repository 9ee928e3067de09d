"""Models larger than the memory of a rank: built on the meta device, filled tensor by tensor.

    meta device        every rank: names and shapes, no values; divided, sharded, split into stages
    materialize        every rank draws the tensors that it holds, one at a time, and keeps its pieces;
                       or rank 0 reads a tensor ─ broadcast ─▶ every rank keeps its piece; the next tensor
    check_equal        ranks that hold the same piece compare its hash

Beside its own pieces a rank never holds more than one whole tensor (rank 0 also holds what its source needs).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multipack.ops.allocate import allocate
from multipack.parallel.state import local, local_range, piece_of
from multipack.parallel.world import World

Source = Callable[[str, torch.device], Tensor]
"""(name of a parameter, device to make it on) → its whole value."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integer type of as many bytes."""
STEP, MIX = -7046029254386353131, -4658895280553007687
"""Odd constants of splitmix64 (Steele et al. 2014), as signed numbers."""
CPU_CHUNK, GPU_CHUNK = 1 << 16, 1 << 22
"""Elements that `hash_tensor` sums at a time: 2 to 3 times as fast as sha256 on a CPU, few launches on a GPU."""


@torch.no_grad()
def materialize(
    models: Sequence[nn.Module],
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
    world: World,
    device: torch.device | None = None,
    *,
    empty_like: Callable[[Tensor], Tensor] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    from_main: bool = False,
) -> None:
    """Allocate models that are on the meta device and fill them with the source's values.

    Args:
        models: this rank's model, or its stages of one, whose parameters may be `DTensor`s. Names are those in the
            whole model; two stages of one rank may hold the same parameter (tied weights).
        source: returns the whole value of a parameter, on the world's device or on the CPU.
        shapes: names and whole shapes of the whole model's parameters, the same on every rank.
        world: all ranks.
        device: device of the parameters; None = the world's.
        empty_like: a parameter on the meta device → one with memory; None = on `device`.
        dtypes: name → dtype of the parameters whose dtype differs from the others'.
        from_main: call the source on rank 0 alone, which broadcasts its values; collective. Otherwise every rank
            calls it for the parameters that it holds, and nothing is sent.

    Raises:
        ValueError: a model has a buffer without values, or a parameter that is not in `shapes` or has another shape; or
            the source returns another shape.
    """
    for model in models:
        allocate(model, device or world.device, empty_like)
    held, other = _held(models, shapes), dtypes or {}
    usual = (tensors[0].dtype for name, tensors in held.items() if name not in other)
    most = next(usual, torch.float32)
    sends = from_main and world.size > 1
    for name, shape in shapes.items() if sends else [(name, shapes[name]) for name in held]:
        dtype = other.get(name, most)
        if sends and not world.is_main:
            whole = torch.empty(shape, dtype=dtype, device=world.device)
        else:
            whole = source(name, world.device).detach().to(world.device, dtype).contiguous()
            if tuple(whole.shape) != tuple(shape):
                raise ValueError(f"the source of weights gives {name} {tuple(whole.shape)}; expected {shape}")
        if sends:
            dist.broadcast(whole, src=0)
        for tensor in held.get(name, ()):
            local(tensor).copy_(piece_of(whole, tensor))
        del whole


def _held(models: Sequence[nn.Module], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Tensor]]:
    """This rank's parameters by name, of all its models."""
    held: dict[str, list[Tensor]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if tuple(parameter.shape) != tuple(shapes.get(name, (-1,))):
                raise ValueError(
                    f"{name} has shape {tuple(parameter.shape)}, and in the whole model {shapes.get(name)}"
                )
            held.setdefault(name, []).append(parameter)
    return held


@torch.no_grad()
def check_equal(tensors: Mapping[str, Tensor], world: World) -> str:
    """Check that ranks which hold the same piece of a tensor hold the same values; collective.

    Pieces are identified by the tensor's name and by their offsets and sizes; plain tensors are whole.

    Returns:
        A hash of all pieces of all ranks, the same on every rank.

    Raises:
        RuntimeError: on every rank, if values differ; names a tensor and the ranks that differ from its first holder.
    """
    hashes = [hash_tensor(local(tensor)).to(world.device) for tensor in tensors.values()]
    values = torch.stack(hashes).tolist() if hashes else []  # the only synchronization
    own = {_piece_name(*each): value for each, value in zip(tensors.items(), values, strict=True)}
    seen: dict[str, tuple[int, int]] = {}
    differing: dict[tuple[str, int], list[int]] = {}
    for rank, text in enumerate(world.gather(json.dumps(own))):
        for piece, digest in json.loads(text).items():
            first, expected = seen.setdefault(piece, (rank, digest))
            if digest != expected:
                differing.setdefault((piece, first), []).append(rank)
    if differing:
        (piece, first), ranks = next(iter(differing.items()))
        raise RuntimeError(
            f"ranks {ranks} hold another {piece} than rank {first} ({len(differing)} tensors in all);"
            " all must start from the same weights or checkpoint"
        )
    known = json.dumps({piece: digest for piece, (_, digest) in sorted(seen.items())})
    return hashlib.sha256(known.encode()).hexdigest()


def _piece_name(name: str, tensor: Tensor) -> str:
    """A tensor's name and, for a shard, its part of the whole: rows 2:4 of all columns are `[2:4, 0:8]`."""
    held = local_range(tensor)
    if [each.stop - each.start for each in held] == list(tensor.shape):
        return name
    return f"{name}[{', '.join(f'{each.start}:{each.stop}' for each in held)}]"


@torch.no_grad()
def hash_tensor(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, computed on its device: a 0-d int64 tensor.

    The elements are read as integers. In a chunk they are multiplied by odd numbers that depend on their position, and
    summed modulo 2^64; so are the chunks' sums. A change of one element always changes the hash, because odd numbers
    are invertible; other changes, such as exchanged elements, are missed with a probability below 2^-30
    (`torch.hash_tensor`, an xor, misses exchanged elements and two equal changes). Hashes of CPUs and of GPUs differ:
    chunks fit into the cache of a CPU, and are large on a GPU, to be few.
    """
    chunk = CPU_CHUNK if tensor.device.type == "cpu" else GPU_CHUNK
    flat = tensor.detach().reshape(-1)
    values = flat.view(INTEGERS[flat.element_size()])
    index = torch.arange(1, min(chunk, max(len(values), 1)) + 1, device=tensor.device)
    mixed = index * STEP
    odd = ((mixed ^ (mixed >> 30)) * MIX) | 1
    if values.dtype == torch.int64:  # folds the high bits in: the low bits of float64 are often zero
        values = values ^ (values >> 32)
    total, *others = [(part * odd.narrow(0, 0, len(part))).sum() for part in torch.split(values, chunk)]
    for each in others:
        total = total * MIX + each
    return total
