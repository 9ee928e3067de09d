"""The mesh: ranks of one model replica get the same packs, replicas different ones; groups and hosts."""

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.parallel_config import AXES, ParallelConfig
from multipack.parallel.world import World

LENGTHS = np.random.default_rng(3).integers(5, 60, 200)


def packs_of(mesh):
    """Documents that a rank gets in an epoch."""
    sampler = PackedBatchSampler(
        LENGTHS, capacity=64, packs_per_step=8, rank=mesh.data_rank, world_size=mesh.data_size
    )
    return [[int(document) for document in pack] for pack in sampler]


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"data": "zero3"},
        {"data": "hsdp", "tensor": 2},
        {"data": "zero1", "context": 2, "pipeline": 2},
        {"context": 2, "tensor": 2},
        {"context": 2, "tensor": 2, "pipeline": 2},
    ],
    ids=str,
)
def test_ranks_of_one_model_see_the_same_packs_and_others_their_own(words):
    config = ParallelConfig(**words)
    meshes = [Mesh(World(rank, 8), config.axes(8)) for rank in range(8)]
    groups = {}
    for mesh in meshes:
        data = mesh.coordinate("dp_replicate"), mesh.coordinate("dp_shard")
        groups.setdefault(data, []).append(packs_of(mesh))
    assert len(groups) == config.data_size(8)
    seen = []
    for packs, *others in groups.values():
        assert len(others) == config.model_ranks - 1
        assert all(other == packs for other in others)
        seen += [document for pack in packs for document in pack]
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert [mesh.is_replica_leader for mesh in meshes].count(True) == config.data_size(8)


def coordinates(world, words):
    """This rank's places by our arithmetic and by torch's mesh, and how many ranks talk along each axis."""
    config = ParallelConfig(**words)
    mesh = build_mesh(config, world)
    torchs = mesh.tokens if mesh.tokens is not None else mesh.weights
    assert dict(zip(torchs.mesh_dim_names, torchs.mesh.shape, strict=True)) == mesh.sizes
    return [mesh.coordinate(axis) for axis in AXES], [torchs.get_local_rank(axis) for axis in AXES]


@pytest.mark.parametrize(
    "words", [{"data": "hsdp"}, {"data": "zero3", "tensor": 2}, {"context": 2, "pipeline": 2}], ids=str
)
def test_torchs_mesh_is_the_same_grid(pools, words):
    for ours, torchs in pools(4).run(coordinates, words):
        assert ours == torchs


def _without_a_neighbor(world):
    """Rank 1 takes no part in its tensor group until rank 0's collective has timed out."""
    mesh = build_mesh(ParallelConfig(tensor=2), replace(world, timeout_seconds=0.5, groups={}))
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 1:
        store.wait(["given up"], timedelta(seconds=20))
        return ""
    try:
        dist.all_reduce(torch.ones(3), group=mesh.axis("tp").get_group())
    except RuntimeError as error:
        store.set("given up", "")
        return str(error)
    return ""


def test_groups_of_a_mesh_have_the_timeout_of_the_world(pools):
    told = pools(4).run(_without_a_neighbor, seconds=30)
    assert "Timed out waiting 500ms" in told[0]
    assert told[1:] == [""] * 3


def _groups(world):
    world, made = replace(world, groups={}), []
    for words in ({}, {"data": "zero3"}, {"tensor": 2}, {"context": 2}, {"tensor": 2, "pipeline": 2}):
        mesh = build_mesh(ParallelConfig(**words), world)
        made.append({name for each in (mesh.weights, mesh.tokens) if each for name in each._dim_group_names})
    return [sorted(each) for each in made], len(world.groups)


def test_meshes_share_groups_of_the_same_ranks(pools):
    for found, groups in pools(4).run(_groups):
        assert groups == 3  # single ranks, neighbors, and every other one; beside the world
        assert [len(each) for each in found] == [2, 2, 3, 4, 3]
