"""The ranks of a run as a grid with one axis per strategy; ranks along the innermost axis are neighbors.

    (pp, dp_replicate, dp_shard, cp, tp) = (2, 1, 2, 1, 2)

    pp 0    ┌ dp 0: rank 0 ─ rank 1 ┐  tp         ranks 0, 1, 4 and 5 hold one model and get the same packs;
            └ dp 1: rank 2 ─ rank 3 ┘             0 and 2 hold shards of the same weights (data parallel);
    pp 1    ┌ dp 0: rank 4 ─ rank 5 ┐             0 and 1 halves of every matrix (tensor parallel);
            └ dp 1: rank 6 ─ rank 7 ┘             0 and 4 different layers (pipeline parallel)

Tensor parallelism communicates most, in every layer, and is innermost: its ranks should share a host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from multipack.parallel.parallel_config import AXES, DATA_AXES, ParallelConfig
from multipack.parallel.world import World


@dataclass(frozen=True)
class Mesh:
    """The grid of ranks, seen from one of them.

    Attributes:
        world: all ranks.
        sizes: ranks along each of `AXES`.
        weights: torch's mesh of pipeline, replicas, shards and tensors. Ranks that divide tokens hold the same weights
            and sum their gradients, so that `cp` is folded into the shards of parameters or, without shards, into
            replicas. None without a process group.
        tokens: the mesh of all five axes if ranks divide tokens, else None.
    """

    world: World
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    weights: DeviceMesh | None = None
    tokens: DeviceMesh | None = None

    @classmethod
    def plain(cls, world: World) -> Mesh:
        """A mesh of replicas without torch's mesh: every rank holds the whole model and has packs of its own."""
        return cls(world, {**dict.fromkeys(AXES, 1), "dp_replicate": world.size})

    def coordinate(self, axis: str) -> int:
        """This rank's index along an axis."""
        stride = math.prod(self.sizes[inner] for inner in AXES[AXES.index(axis) + 1 :])
        return self.world.rank // stride % self.sizes[axis]

    @property
    def data_size(self) -> int:
        """Number of model replicas; each has packs of its own."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def data_rank(self) -> int:
        """Index of this rank's model replica; the ranks of a replica get the same packs."""
        return self.coordinate("dp_replicate") * self.sizes["dp_shard"] + self.coordinate("dp_shard")

    @property
    def is_replica_leader(self) -> bool:
        """True on the first rank of each model replica; per-pack values are counted there."""
        return all(self.coordinate(axis) == 0 for axis in AXES if axis not in DATA_AXES)

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds the whole model and has packs of its own."""
        return all(self.sizes[axis] == 1 for axis in ("pp", "dp_shard", "cp", "tp"))

    @property
    def gradient_size(self) -> int:
        """Number of ranks over which DDP and FSDP average gradients: replicas times ranks that divide tokens."""
        return self.data_size * self.sizes["cp"]

    def axis(self, *names: str) -> DeviceMesh:
        """Torch's mesh of some axes: `cp`, or axes of `weights`."""
        mesh = self.tokens if names == ("cp",) else self.weights
        assert mesh is not None, "a run of one process has no mesh"
        return mesh[names if len(names) > 1 else names[0]]


def build_mesh(config: ParallelConfig, world: World) -> Mesh:
    """Arrange the ranks; collective.

    Raises:
        ValueError: their number does not fit the configuration.
    """
    sizes = config.axes(world.size)
    if not dist.is_initialized():
        return Mesh(world, sizes)
    tokens = _device_mesh(world, sizes)
    if sizes["cp"] == 1:
        return Mesh(world, sizes, tokens)
    folded = dict(sizes)
    folded["dp_shard" if config.shards_parameters else "dp_replicate"] *= folded.pop("cp")
    return Mesh(world, sizes, _device_mesh(world, folded), tokens)


def _device_mesh(world: World, sizes: dict[str, int]) -> DeviceMesh:
    """Torch's mesh of all ranks in their order, with the world's process groups (`World.subgroup`)."""
    grid = torch.arange(world.size).reshape(tuple(sizes.values()))
    groups = [
        world.subgroup(grid.movedim(axis, -1).reshape(-1, size).tolist())
        for axis, size in enumerate(grid.shape)
    ]
    return DeviceMesh.from_group(groups, world.device.type, mesh=grid, mesh_dim_names=tuple(sizes))
