"""Checkpoints over several processes: written on one mesh, read on any other, bit for bit."""

import os
import signal
import threading
from collections import OrderedDict
from unittest import mock

import pytest
import safetensors
import sharding as tiny
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from multipack.data.text.tokenizer import byte_tokenizer
from multipack.models.decoder import Decoder
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.state import local, piece_of
from multipack.parallel.world import World
from multipack.run import RunDirectory, config_yaml
from multipack.shapes import ModelShape
from multipack.training import checkpoint as checkpoint_module
from multipack.training import checkpoint_tensors
from multipack.training.checkpoint import CheckpointWriter, load_checkpoint, name_of
from multipack.training.export import export
from multipack.training.run_config import compose
from multipack.training.weights import adapt_weights, find_weights

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
    """The tensors as one process has them, the same on every rank."""
    draw = torch.Generator().manual_seed(11)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    tensors["half"] = tensors["half"].bfloat16()
    tensors["counts"] = torch.arange(18).reshape(9, 2)
    return tensors


def _divided(world):
    """The same on four ranks, each tensor sharded in another way."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, stage = _whole(), world.rank // 2
    placed = {
        "even": (line, [Shard(0)]),
        "uneven": (line, [Shard(0)]),
        # The last rank holds nothing of "few".
        "few": (line, [Shard(0)]),
        "half": (line, [Shard(1)]),
        "counts": (line, [Shard(0)]),
        "column": (grid, [Replicate(), Shard(0)]),
        "row": (grid, [Replicate(), Shard(1)]),
        "both": (grid, [Shard(0), Shard(1)]),
        "replicated": (grid, [Replicate(), Replicate()]),
        # Two stages of a pipeline.
        f"blocks.{stage}.weight": (grid["tp"], [Shard(0)]),
    }
    model = {name: distribute_tensor(whole[name], *where) for name, where in placed.items()}
    # FSDP2 shards a tensor-parallel layer again: of five rows per tensor rank, data ranks have 3 and 2.
    layer = nn.Sequential(OrderedDict(column=nn.Linear(8, 10)))
    layer.load_state_dict({name: whole[name] for name in ("column.weight", "column.bias")})
    parallelize_module(layer, grid["tp"], {"column": ColwiseParallel()})
    model |= dict(fully_shard(layer, mesh=grid["dp"]).named_parameters())
    # Under ZeRO-1 one rank holds the optimizer state of a parameter.
    own = f"{world.rank}.exp_avg"
    optimizer = {own: whole[own], "step": whole["step"]}
    return {"model": {**model, "plain": whole["plain"]}, "optimizer": optimizer}


def _save(world, path, step=3, keep=2, background=False):
    files = {"config.yaml": "a: 1\n"}
    writer = CheckpointWriter(RunDirectory(path), world, keep, background)
    final = writer.save(step, _divided(world), {"at": step}, files)
    writer.wait()
    return str(final)


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
def test_tensors_of_four_ranks_are_read_on_other_meshes_bit_for_bit(pools, saved, size):
    assert min(pools(size).run(_load, saved)) > 40


def test_one_process_reads_them_whole(saved):
    checkpoint, whole = load_checkpoint(saved), _whole()
    assert (checkpoint.step, checkpoint.progress) == (3, {"at": 3})
    found = checkpoint.source.whole("model") | checkpoint.source.whole("optimizer")
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert checkpoint.source.shapes("optimizer").keys() == set(OPTIMIZER)
    assert sorted(checkpoint.source.shapes("rng")) == [f"rank-{rank}.cpu" for rank in range(4)]


def test_every_rank_writes_its_files_and_nothing_is_written_twice(saved):
    files = sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file())
    shards = [
        f"tensors/{kind}-{rank:05d}.safetensors" for rank in (1, 2, 3, 4) for kind in ("weights", "state")
    ]
    assert files == sorted([*shards, ".complete", "config.yaml", "state.json"])
    held = sum((saved / name).stat().st_size for name in shards)
    needed = sum(tensor.nbytes for tensor in _whole().values()) + 4 * torch.get_rng_state().nbytes
    # The rest is headers.
    assert needed < held < needed + 8 * 5000


def _files_opened(world, path):
    """Files whose values a rank reads; headers were read before."""
    source, line = load_checkpoint(path).source, init_device_mesh("cpu", (2,))
    with mock.patch("safetensors.safe_open", wraps=safetensors.safe_open) as opened:
        source.fill("model", {"even": distribute_tensor(torch.zeros(8, 6), line, [Shard(0)])})
    return sorted(os.path.basename(call.kwargs["filename"]) for call in opened.call_args_list)


def test_a_rank_opens_only_the_files_that_hold_something_for_it(pools, saved):
    first, second = pools(2).run(_files_opened, saved)
    assert first == ["weights-00001.safetensors", "weights-00002.safetensors"]
    assert second == ["weights-00003.safetensors", "weights-00004.safetensors"]


def _save_gap(world, path):
    line = init_device_mesh("cpu", (2,))
    model = {"weight": distribute_tensor(torch.ones(4, 2), line, [Shard(0)])}
    tensors = {"model": model if world.rank == 0 else {}}
    with pytest.raises(ValueError, match=r"pieces of model\.weight overlap or leave a gap"):
        CheckpointWriter(RunDirectory(path), world, 2).save(5, tensors, {}, {})


def test_pieces_with_a_gap_are_refused_on_every_rank(pools, run):
    pools(2).run(_save_gap, run.path)
    assert list(run.checkpoints.iterdir()) == []


def _content(world, step, value):
    line = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.full((5, 2), float(value)), line, [Shard(0)])
    model = {"weight": weight, "bias": torch.full((2,), float(value))}
    return step, {"model": model, "optimizer": {}}, {"at": step}, {}


def _in_the_background(world, path):
    """The thread is held up: `save` has returned, weights change, and `latest` still names the previous one."""
    run, may_write, save = RunDirectory(path), threading.Event(), checkpoint_tensors.save_safetensors
    writer = CheckpointWriter(run, world, keep=0, background=True)

    def held_up(*arguments):
        may_write.wait(20)
        return save(*arguments)

    writer.save(*_content(world, 1, 1))
    writer.wait()
    with mock.patch.object(checkpoint_tensors, "save_safetensors", held_up):
        content = _content(world, 2, 2)
        writer.save(*content)
        with torch.no_grad():
            for tensor in content[1]["model"].values():
                local(tensor).fill_(99)
        content[2]["at"] = 99
        # Training's own collectives go on meanwhile.
        world.sum([1.0])
        seen = run.latest_checkpoint().name
        world.barrier()
        may_write.set()
        writer.wait()
    return seen


def test_in_the_background_a_checkpoint_is_what_it_was_when_asked_for(pools, run):
    assert pools(2).run(_in_the_background, run.path) == [name_of(1)] * 2
    checkpoint = load_checkpoint(run.latest_checkpoint())
    assert (checkpoint.step, checkpoint.progress) == (2, {"at": 2})
    assert torch.equal(checkpoint.source.tensor("model", "weight"), torch.full((5, 2), 2.0))
    assert torch.equal(checkpoint.source.tensor("model", "bias"), torch.full((2,), 2.0))


def _disk_full(world, path, background):
    """Rank 1 cannot write its second checkpoint; returns the errors of each rank, and of which call they are."""
    writer = CheckpointWriter(RunDirectory(path), world, 0, background)
    writer.save(*_content(world, 1, 1))
    writer.wait()
    save, errors = checkpoint_tensors.save_safetensors, []

    def failing(*arguments):
        if world.rank == 1:
            raise OSError("no space left")
        return save(*arguments)

    with mock.patch.object(checkpoint_tensors, "save_safetensors", failing):
        try:
            writer.save(*_content(world, 2, 2))
        except ValueError as error:
            errors.append(("the same save", str(error)))
        if background:
            writer._pending.exception()
    try:
        writer.save(*_content(world, 3, 3))
        writer.wait()
    except ValueError as error:
        errors.append(("the next save", str(error)))
    return errors


@pytest.mark.parametrize(("background", "when"), [(False, "the same save"), (True, "the next save")])
def test_a_rank_that_cannot_write_fails_all_and_leaves_latest(pools, run, background, when):
    for errors in pools(2).run(_disk_full, run.path, background):
        ((found, message),) = errors
        assert found == when
        assert "rank 1: no space left" in message
    # At once, the failed save is over and the third was written; in the background the third never began.
    assert run.latest_checkpoint().name == name_of(1 if background else 3)
    assert not list(run.checkpoints.glob(".step-*"))


def _killed_before_the_marker(world, path):
    save, before = (
        CheckpointWriter(RunDirectory(path), world, keep=0).save,
        checkpoint_module.write_atomically,
    )
    save(*_content(world, 3, 3))

    def fatal(file, content):
        if file.name == checkpoint_module.COMPLETE:
            assert len(list((file.parent / "tensors").glob("weights-*.safetensors"))) == 2
            assert _is_refused(file.parent)
            os.kill(os.getpid(), signal.SIGKILL)
        before(file, content)

    checkpoint_module.write_atomically = fatal
    save(*_content(world, 6, 6))


def _is_refused(folder):
    try:
        load_checkpoint(folder)
    except ValueError as error:
        return ".complete is missing" in str(error)


def test_a_kill_between_shards_and_marker_leaves_the_last_good_one(pools, run):
    outcomes = pools(2).outcomes(_killed_before_the_marker, run.path)
    assert f"exit code -{signal.SIGKILL.value}" in outcomes[0].error
    assert outcomes[1].error
    assert run.latest_checkpoint().name == name_of(3)
    assert torch.equal(
        load_checkpoint(run.latest_checkpoint()).source.tensor("model", "weight"), torch.full((5, 2), 3.0)
    )
    assert not (run.checkpoints / name_of(6)).exists()
    assert list(run.checkpoints.glob(".step-00000006.*.partial"))
    # The next writer, of any number of processes, removes what was left.
    CheckpointWriter(run, World(), 0).save(6, {"model": {"weight": torch.ones(2)}}, {}, {})
    assert load_checkpoint(run.latest_checkpoint()).step == 6
    assert not list(run.checkpoints.glob(".step-*"))


# What others read of them

DECODER = ModelShape(2, 2, 2, 16, 24, vocabulary_size=257, context=64)


def _save_decoder(world, path, files):
    torch.manual_seed(5)
    line = init_device_mesh("cpu", (world.size,))
    model = {
        name: distribute_tensor(each, line, [Shard(0)]) for name, each in Decoder(DECODER).named_parameters()
    }
    CheckpointWriter(RunDirectory(path), world, 0).save(7, {"model": model}, {}, files)


def test_a_sharded_checkpoint_is_exported_to_one_file_and_starts_a_run(pools, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    values = config_yaml(compose([f"model.{name}={value}" for name, value in DECODER.to_dict().items()]))
    run.create(values)
    files = {"config.yaml": values, "tokenizer.json": byte_tokenizer().to_json()}
    pools(2).run(_save_decoder, run.path, files)
    torch.manual_seed(5)
    expected = Decoder(DECODER).state_dict()
    export(run.path, tmp_path / "out")
    for folder in (run.path, tmp_path / "out"):
        found = find_weights(folder)
        read_tensor, _ = adapt_weights(found, found.shape, byte_tokenizer())
        for name, tensor in expected.items():
            assert torch.equal(read_tensor(name), tensor), name
    read = []
    monkeypatch.setattr(checkpoint_tensors.TensorFiles, "tensor", lambda self, group, name: read.append(name))
    read_tensor, _ = adapt_weights(find_weights(run.path), DECODER, byte_tokenizer())
    # Nothing is read before it is used, and then that tensor alone.
    assert not read
    read_tensor("norm.weight")
    assert read == ["norm.weight"]


def _resumed(world):
    """Each rank holds one tensor, as a stage does, and the saved state lacks that of the second."""
    held = nn.ParameterDict({f"stage-{world.rank}": nn.Parameter(torch.ones(3))})
    engine = ModelEngine(
        [held], torch.optim.AdamW(held.values()), Mesh.plain(world), shapes={"stage-0": (3,), "stage-1": (3,)}
    )
    saved = {
        "model": {name: torch.ones(3) for name in engine.shapes},
        "optimizer": {
            **{f"stage-0.{slot}": torch.ones(3) for slot in ("exp_avg", "exp_avg_sq")},
            "stage-0.step": torch.ones(()),
        },
    }
    with pytest.raises(ValueError, match="optimizer lacks stage-1"):
        engine.load_state(tiny.Whole(saved))


def test_optimizer_state_that_one_stage_lacks_is_an_error_on_all_ranks(pools):
    pools(2).run(_resumed)
