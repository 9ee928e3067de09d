"""A process group of one rank through every collective, strategy, checkpoint and exit: of gloo, and of nccl on a GPU.

With one rank nothing is exchanged, but all functions of torch and of the backend are called with this device's tensors.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from multipack.parallel import collectives
from multipack.parallel.build import build_engine, replicate
from multipack.parallel.engine import ModelEngine
from multipack.parallel.joining import connected
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.world import World
from multipack.parallel.zero1 import ShardedOptimizer
from multipack.run import RunDirectory
from multipack.training.checkpoint import CheckpointWriter, load_checkpoint

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

import sharding as tiny

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_GPU])]
SLOW = [pytest.param(data, marks=pytest.mark.slow) for data in ("zero1", "zero2")]


@pytest.fixture(scope="module", params=DEVICES)
def world(request):
    with connected(request.param, 60.0, group_of_one=True) as world:
        yield world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives_with_gradients_return_the_tensor(world, dtype):
    values = torch.arange(12, device=world.device).reshape(4, 3).to(dtype)
    for collective in (
        collectives.identity,
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.all_to_all,
    ):
        given = values.clone().requires_grad_(dtype.is_floating_point)
        found = collective(given)
        assert torch.equal(found, values)
        if dtype.is_floating_point:
            found.backward(values)
            assert torch.equal(given.grad, values)


def test_text_and_numbers_pass_through_the_backend(world):
    assert world.backend == ("nccl" if world.device.type == "cuda" else "gloo")
    assert world.sum([1.5, 2.0**53]) == [1.5, 2.0**53]
    assert (world.gather("ü"), world.gather(""), world.from_main("text")) == (["ü"], [""], "text")
    assert world.on_main(lambda: "done") == "done"
    with pytest.raises(ValueError, match="no room"):
        world.on_main(lambda: (_ for _ in ()).throw(ValueError("no room")))
    world.barrier()
    world.synchronize()
    assert collectives.scatter_bytes([b"pack"], 0).cpu().numpy().tobytes() == b"pack"


def test_groups_of_every_kind(world):
    """Split from the world's group, of the CPU for checkpoints, and made by members alone for readers."""
    limit = timedelta(seconds=60)
    made = [
        dist.new_group(backend="gloo", timeout=limit),
        dist.new_group([0], timeout=limit, backend="gloo", use_local_synchronization=True),
    ]
    if world.backend == "nccl":
        made.append(dist.split_group(split_ranks=[[0]], timeout=limit))
    for group in [*made, world.subgroup([[0]])]:
        on_gpu = dist.get_backend(group) == "nccl"
        total = torch.ones(3, device=world.device if on_gpu else "cpu")
        dist.all_reduce(total, group=group)
        assert total.tolist() == [1.0] * 3
        assert world.gather("text", group) == ["text"]


def engine_of(world, data):
    """A strategy's engine; DDP and ZeRO-1, which one rank does not need, are applied here."""
    config = ParallelConfig(data=data)
    if data not in ("ddp", "zero1"):
        return tiny.engine_of(world, config, tiny.LLAMA)
    model = tiny.blueprint(tiny.LLAMA).build(None).to(world.device)
    mesh, parameters = build_mesh(config, world), dict(model.named_parameters())
    axis = mesh.axis("dp_replicate")
    adamw = lambda named: tiny.adamw(named.values())  # noqa: E731
    optimizer = ShardedOptimizer(adamw, parameters, axis) if data == "zero1" else adamw(parameters)
    return ModelEngine([model], optimizer, mesh, call=replicate(model, axis))


def train(engine, steps):
    found = []
    for step in range(steps):
        packs, targets = tiny.packs_of_step(step, 1, micro_batches=2)
        result = engine.forward_backward(packs[0], targets)
        found.append((sum(result.losses), engine.clip(1.0)))
        engine.step(1e-3)
    return found


@pytest.mark.parametrize("data", ["ddp", *SLOW, "zero3"])
def test_a_strategy_trains_saves_and_continues(world, tmp_path, data):
    engine = engine_of(world, data)
    begun = train(engine, 2)
    for background in (False, True):
        run = RunDirectory(tmp_path / str(background))
        run.create("a: 1\n")
        writer = CheckpointWriter(run, world, keep=1, background=background)
        writer.save(2, engine.state(), {}, {"config.yaml": "a: 1\n"})
        writer.wait()
        fresh = engine_of(world, data)
        fresh.load_state(load_checkpoint(run.latest_checkpoint(), world).source)
        assert not fresh.nonfinite_parameters()
        if not background:
            continued = train(fresh, 2)
    assert train(engine, 2) == continued
    plain_mesh = Mesh.plain(World(device=world.device))
    plain = build_engine(
        tiny.blueprint(tiny.LLAMA), lambda named: tiny.adamw(named.values()), plain_mesh, ParallelConfig()
    )
    for (loss, norm), (expected, expected_norm) in zip(begun, train(plain, 2), strict=True):
        assert (loss, norm) == pytest.approx((expected, expected_norm), rel=1e-4)


ENDS = """
import sys
import torch
from multipack.cli.command_options import fail
from multipack.parallel.joining import connected

try:
    with connected(sys.argv[1], 60.0, group_of_one=True) as world:
        work = torch.distributed.all_reduce(torch.ones(1 << 20, device=world.device), async_op=True)
        raise torch.OutOfMemoryError("out of memory")
except Exception as error:
    fail(error, 1, one_line=False)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_an_exit_by_an_exception_takes_seconds(device):
    command = [sys.executable, "-c", ENDS, device]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "torch.OutOfMemoryError: out of memory"
