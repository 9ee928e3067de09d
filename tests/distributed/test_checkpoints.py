"""Checkpoints over several processes: written in pieces on one mesh, read on any other, to the last bit."""

import os
import re
import signal
import threading
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from multipack.parallel.state import Whole, local, piece_of
from multipack.run import RunDirectory
from multipack.training import checkpoint as checkpoint_module
from multipack.training import shard_writer, sharded
from multipack.training.checkpoint import (
    CheckpointWriter,
    Content,
    load_checkpoint,
    name_of,
    save_checkpoint,
)

SHAPES = {
    "even": (8, 6),
    "uneven": (7, 5),
    "few": (3, 4),
    "column": (6, 8),
    "row": (6, 8),
    "both": (10, 8),
    "column.weight": (10, 8),
    "column.bias": (10,),
    "replicated": (5, 3),
    "plain": (4, 4),
    "half": (6, 4),
    "counts": (9, 2),
    "blocks.0.weight": (6, 3),
    "blocks.1.weight": (5, 3),
    **{f"{number}.exp_avg": (3, number + 1) for number in range(4)},
    "step": (),
}
OPTIMIZER = [name for name in SHAPES if name.endswith("exp_avg") or name == "step"]


def _whole():
    """The tensors as one process has them, the same everywhere."""
    draw = torch.Generator().manual_seed(11)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    tensors["half"] = tensors["half"].bfloat16()
    tensors["counts"] = torch.arange(18).reshape(9, 2)
    return tensors


def _divided(world):
    """The same on four ranks, each tensor divided in another way."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, stage = _whole(), world.rank // 2
    placed = {
        "even": (line, [Shard(0)]),
        "uneven": (line, [Shard(0)]),
        "few": (line, [Shard(0)]),  # the last rank has none of it
        "half": (line, [Shard(1)]),
        "counts": (line, [Shard(0)]),
        "column": (grid, [Replicate(), Shard(0)]),
        "row": (grid, [Replicate(), Shard(1)]),
        "both": (grid, [Shard(0), Shard(1)]),
        "replicated": (grid, [Replicate(), Replicate()]),
        f"blocks.{stage}.weight": (grid["tp"], [Shard(0)]),  # stages of a pipeline
    }
    model = {name: distribute_tensor(whole[name], *where) for name, where in placed.items()}
    # Shards of shards, as FSDP2 makes them of a tensor-parallel layer: five rows of each, of which ranks have 3 and 2.
    layer = nn.Sequential(OrderedDict(column=nn.Linear(8, 10)))
    layer.load_state_dict({name: whole[name] for name in ("column.weight", "column.bias")})
    parallelize_module(layer, grid["tp"], {"column": ColwiseParallel()})
    model |= dict(fully_shard(layer, mesh=grid["dp"]).named_parameters())
    own = f"{world.rank}.exp_avg"  # optimizer state that one rank owns whole
    optimizer = {own: whole[own], "step": whole["step"]}
    return {"model": {**model, "plain": whole["plain"]}, "optimizer": optimizer}


def _save(world, path, step=3):
    run = RunDirectory(path)
    rng = {"rank-0.cpu": torch.get_rng_state()}
    return str(
        save_checkpoint(
            run, step, _divided(world), {"at": step}, rng, {"config.yaml": "a: 1\n"}, 2, world=world
        )
    )


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("seed: 1\n")
    return directory


@pytest.fixture
def saved(pools, run):
    """A checkpoint of four ranks."""
    paths = pools(4).run(_save, run.path)
    assert len(set(paths)) == 1
    return run.latest_checkpoint()


def _load(world, path):
    """Every tensor in several placements; what each rank holds is what it would hold of the whole."""
    line = init_device_mesh("cpu", (world.size,))
    meshes = [(line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()])]
    if world.size == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshes += [
            (grid, [Shard(0), Shard(1)]),
            (grid, [Shard(1), Replicate()]),
            (grid["tp"], [Shard(0)]),
        ]
    source, whole = load_checkpoint(path).source, _whole()
    compared = 0
    for mesh, placements in meshes:
        for group in ("model", "optimizer"):
            dims = {name: len(shape) for name, shape in source.shapes(group).items()}
            fitting = [n for n in dims if all(not p.is_shard() or p.dim < dims[n] for p in placements)]
            into = {n: distribute_tensor(torch.zeros_like(whole[n]), mesh, placements) for n in fitting}
            source.fill(group, into)
            for name, tensor in into.items():
                assert torch.equal(local(tensor), piece_of(whole[name], tensor)), (name, placements)
                compared += 1
    return compared


@pytest.mark.parametrize("size", [2, 4])
def test_what_four_ranks_divided_is_read_on_other_meshes_bit_for_bit(pools, saved, size):
    assert min(pools(size).run(_load, saved)) > 40


def test_one_process_reads_it_whole(saved):
    checkpoint, whole = load_checkpoint(saved), _whole()
    assert (checkpoint.step, checkpoint.progress) == (3, {"at": 3})
    assert checkpoint.source.groups == ["model", "optimizer"]
    found = checkpoint.whole("model") | checkpoint.whole("optimizer")
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert checkpoint.source.shapes("optimizer").keys() == set(OPTIMIZER)


def test_every_rank_writes_its_own_and_nothing_twice(saved):
    files = sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file())
    shards = [
        f"{group}/shard-{rank:05d}.safetensors" for group in ("model", "optimizer") for rank in (1, 2, 3, 4)
    ]
    others = [".complete", "config.yaml", "rng.safetensors", "state.json"]
    assert files == sorted([*shards, "model/index.json", "optimizer/index.json", *others])
    for group, names in (("model", SHAPES.keys() - set(OPTIMIZER)), ("optimizer", OPTIMIZER)):
        held = sum(file.stat().st_size for file in (saved / group).glob("*.safetensors"))
        needed = sum(_whole()[name].nbytes for name in names)
        assert needed < held < needed + 4 * 2000  # headers


def test_torchs_own_reader_understands_it(saved):
    hf_storage = pytest.importorskip(
        "torch.distributed.checkpoint.hf_storage", reason="this torch has no reader"
    )
    whole = _whole()
    into = {name: torch.zeros_like(whole[name]) for name in SHAPES.keys() - set(OPTIMIZER)}
    reader = hf_storage.HuggingFaceStorageReader(str(saved / "model"))
    dcp_load(into, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    for name, tensor in into.items():
        assert torch.equal(tensor, whole[name]), name


def _files_opened(world, path):
    opened, before = [], sharded.safe_open

    def watched(file, kind):
        opened.append(file.name)
        return before(file, kind)

    source = load_checkpoint(path).source
    sharded.safe_open = watched
    try:
        line = init_device_mesh("cpu", (2,))
        source.fill("model", {"even": distribute_tensor(torch.zeros(8, 6), line, [Shard(0)])})
    finally:
        sharded.safe_open = before
    return opened


def test_a_rank_opens_only_the_files_that_hold_something_for_it(pools, saved):
    first, second = pools(2).run(_files_opened, saved)
    assert first == ["shard-00001.safetensors", "shard-00002.safetensors"]
    assert second == ["shard-00003.safetensors", "shard-00004.safetensors"]


def _save_replicas(world, path):
    tensors = {"model": {"weight": torch.arange(6.0)}, "optimizer": {}}
    rng = {"rank-0.cpu": torch.get_rng_state()}
    save_checkpoint(RunDirectory(path), 5, tensors, {}, rng, {}, 2, world=world)


def test_what_every_rank_holds_whole_is_one_file(pools, run):
    pools(2).run(_save_replicas, run.path)
    path = run.latest_checkpoint()
    names = {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"}
    assert {file.name for file in path.iterdir()} == names
    assert torch.equal(load_checkpoint(path).whole("model")["weight"], torch.arange(6.0))


def _save_unlike(world, path, kind):
    line = init_device_mesh("cpu", (2,))
    tensors = {"model": {"weight": distribute_tensor(torch.ones(4, 2), line, [Shard(0)])}}
    if world.rank == 1 and kind == "gap":
        del tensors["model"]["weight"]
    if world.rank == 1 and kind == "groups":
        tensors["more"] = {}
    try:
        save_checkpoint(RunDirectory(path), 5, tensors, {}, {}, {}, 2, world=world)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "said"), [("gap", "rank 0: .*weight invalid fill"), ("groups", "other groups of tensors")]
)
def test_pieces_that_make_no_whole_are_refused_on_every_rank(pools, run, kind, said):
    for message in pools(2).run(_save_unlike, run.path, kind):
        assert re.search(said, message)
    assert not run.latest.exists()
    assert list(run.checkpoints.iterdir()) == []


def _content(world, step, value):
    line = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.full((5, 2), float(value)), line, [Shard(0)])
    model = {"weight": weight, "bias": torch.full((2,), float(value))}
    return Content(step, {"model": model, "optimizer": {}}, {"at": step}, {"rank-0.cpu": torch.zeros(1)}, {})


def _in_the_background(world, path):
    """The thread is held up: `save` has returned, weights go on changing, and latest still names the one before."""
    run, may_write, before = RunDirectory(path), threading.Event(), checkpoint_module.write_pieces
    writer = CheckpointWriter(run, world, keep=0, background=True, timeout_seconds=20)

    def held_up(*arguments):
        may_write.wait(20)
        return before(*arguments)

    content = _content(world, 1, 1)
    writer.save(content)
    writer.wait()
    checkpoint_module.write_pieces = held_up
    try:
        content = _content(world, 2, 2)
        writer.save(content)
        with torch.no_grad():
            for tensor in content.tensors["model"].values():
                local(tensor).fill_(99)
        content.progress["at"] = 99
        world.sum([1.0])  # training's own collectives go on meanwhile
        seen = run.latest_checkpoint().name
        world.barrier()
        may_write.set()
        writer.wait()
    finally:
        checkpoint_module.write_pieces = before
    writer.wait()  # there is nothing more to wait for
    return seen


def test_in_the_background_a_checkpoint_is_what_it_was_when_asked_for(pools, run):
    assert pools(2).run(_in_the_background, run.path) == [name_of(1)] * 2
    checkpoint = load_checkpoint(run.latest_checkpoint())
    assert (checkpoint.step, checkpoint.progress) == (2, {"at": 2})
    assert torch.equal(checkpoint.whole("model")["weight"], torch.full((5, 2), 2.0))
    assert torch.equal(checkpoint.whole("model")["bias"], torch.full((2,), 2.0))


def _at_once_and_in_the_background(world, path):
    for name, background in (("sync", False), ("async", True)):
        run = RunDirectory(path / name)
        writer = CheckpointWriter(run, world, keep=0, background=background, timeout_seconds=20)
        writer.save(_content(world, 4, 7))
        writer.wait()


def test_both_ways_write_the_same(pools, tmp_path):
    for name in ("sync", "async"):
        RunDirectory(tmp_path / name).create("")
    pools(2).run(_at_once_and_in_the_background, tmp_path)
    folders = [tmp_path / name / "checkpoints" / name_of(4) for name in ("sync", "async")]
    one, other = ({file.relative_to(folder): file for file in folder.rglob("*")} for folder in folders)
    assert one.keys() == other.keys()
    assert len(one) == 8  # model (two shards and a table), optimizer, rng, state.json, .complete
    for name, file in one.items():
        if file.suffix == ".safetensors":
            first, second = load_file(file), load_file(other[name])
            assert first.keys() == second.keys()
            assert all(torch.equal(first[key], second[key]) for key in first)
        elif file.is_file():
            assert file.read_bytes() == other[name].read_bytes()


def _disk_full(world, path, background):
    """Rank 1 cannot write its second checkpoint; returns what each rank is told, and when."""
    writer = CheckpointWriter(RunDirectory(path), world, 0, background, timeout_seconds=20)
    writer.save(_content(world, 1, 1))
    writer.wait()
    before, told = shard_writer._write, []

    def failing(*arguments):
        if world.rank == 1:
            raise OSError("no space left")
        before(*arguments)

    shard_writer._write = failing
    try:
        writer.save(_content(world, 2, 2))
    except ValueError as error:
        told.append(("the same save", str(error)))
    finally:
        if background:
            writer._thread.join()
        shard_writer._write = before
    try:
        writer.save(_content(world, 3, 3))
        writer.wait()
    except ValueError as error:
        told.append(("the next save", str(error)))
    return told


@pytest.mark.parametrize(("background", "when"), [(False, "the same save"), (True, "the next save")])
def test_a_rank_that_cannot_write_fails_all_and_leaves_latest(pools, run, background, when):
    for told in pools(2).run(_disk_full, run.path, background):
        ((found, message),) = told
        assert found == when
        assert "rank 1: no space left" in message
    # At once, the failed save is over and the third was written; in the background the third never began.
    assert run.latest_checkpoint().name == name_of(1 if background else 3)
    assert not list(run.checkpoints.glob(".step-*"))


def _fill_wrongly(world, path):
    source = load_checkpoint(path).source
    line = init_device_mesh("cpu", (world.size,))
    told = []
    for name, shape in (("even", (6, 8)), ("missing", (2, 2))):
        try:
            source.fill("model", {name: distribute_tensor(torch.zeros(shape), line, [Shard(0)])})
        except ValueError as error:
            told.append(str(error))
    dist.barrier()
    return told


def test_other_shapes_and_names_are_refused(pools, saved):
    for shape, name in pools(2).run(_fill_wrongly, saved):
        assert "has even (8, 6) instead of (6, 8)" in shape
        assert "has no tensor missing" in name


def test_whole_tensors_in_memory_are_the_same_source(saved):
    """What `Whole` gives and what a checkpoint gives is alike."""
    source, whole = load_checkpoint(saved).source, Whole({"model": load_checkpoint(saved).whole("model")})
    assert source.shapes("model") == whole.shapes("model")
    for each in (source, whole):
        into = {"both": torch.zeros(10, 8)}
        each.fill("model", into)
        assert torch.equal(into["both"], _whole()["both"])


def _killed_before_the_marker(world, path):
    save, before = CheckpointWriter(RunDirectory(path), world, keep=0).save, checkpoint_module._write_text
    save(_content(world, 3, 3))

    def fatal(file, text):
        if file.name == checkpoint_module.COMPLETE:
            assert len(list((file.parent / "model").glob("shard-*.safetensors"))) == 2
            assert _is_refused(file.parent)
            os.kill(os.getpid(), signal.SIGKILL)
        before(file, text)

    checkpoint_module._write_text = fatal
    save(_content(world, 6, 6))


def _is_refused(folder):
    try:
        load_checkpoint(folder)
    except ValueError as error:
        return ".complete, which is written last, is missing" in str(error)


def test_a_kill_between_shards_and_marker_leaves_the_last_good_one(pools, run):
    outcomes = pools(2).outcomes(_killed_before_the_marker, run.path)
    assert f"exit code -{signal.SIGKILL.value}" in outcomes[0].error
    assert outcomes[1].error
    assert run.latest_checkpoint().name == name_of(3)
    assert torch.equal(
        load_checkpoint(run.latest_checkpoint()).whole("model")["weight"], torch.full((5, 2), 3.0)
    )
    assert not (run.checkpoints / name_of(6)).exists()
    assert list(run.checkpoints.glob(".step-00000006.*.partial"))
    # The next writer, of any number of processes, sweeps away what was left.
    save_checkpoint(run, 6, {"model": {"weight": torch.ones(2)}}, {}, {}, {}, 0)
    assert load_checkpoint(run.latest_checkpoint()).step == 6
    assert not list(run.checkpoints.glob(".step-*"))
