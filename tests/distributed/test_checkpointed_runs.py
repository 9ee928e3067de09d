"""Runs that continue from sharded checkpoints: exports, and the trainer on other meshes."""

import pytest
import sharding as tiny
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from multipack.data.text.tokenizer import byte_tokenizer
from multipack.models.decoder import Decoder
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.run import RunDirectory, config_yaml
from multipack.shapes import ModelShape
from multipack.training import checkpoint_tensors
from multipack.training.checkpoint import CheckpointWriter, load_checkpoint
from multipack.training.export import export
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train
from multipack.training.weights import adapt_weights, find_weights

SHAPE = ModelShape(2, 2, 2, 16, 24, vocabulary_size=257, context=64)


def _save_decoder(world, path, files):
    torch.manual_seed(5)
    line = init_device_mesh("cpu", (world.size,))
    model = {
        name: distribute_tensor(each, line, [Shard(0)]) for name, each in Decoder(SHAPE).named_parameters()
    }
    CheckpointWriter(RunDirectory(path), world, 0).save(7, {"model": model}, {}, files)


def test_a_sharded_checkpoint_is_exported_to_one_file_and_starts_a_run(pools, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    values = config_yaml(compose([f"model.{name}={value}" for name, value in SHAPE.to_dict().items()]))
    run.create(values)
    files = {"config.yaml": values, "tokenizer.json": byte_tokenizer().to_json()}
    pools(2).run(_save_decoder, run.path, files)
    torch.manual_seed(5)
    expected = Decoder(SHAPE).state_dict()
    export(run.path, tmp_path / "out")
    for folder in (run.path, tmp_path / "out"):
        found = find_weights(folder)
        read_tensor, _ = adapt_weights(found, found.shape, byte_tokenizer())
        for name, tensor in expected.items():
            assert torch.equal(read_tensor(name), tensor), name
    read = []
    monkeypatch.setattr(checkpoint_tensors.TensorFiles, "tensor", lambda self, group, name: read.append(name))
    read_tensor, _ = adapt_weights(find_weights(run.path), SHAPE, byte_tokenizer())
    # Nothing is read before it is used, and then that tensor alone.
    assert not read
    read_tensor("norm.weight")
    assert read == ["norm.weight"]


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_continues_with_the_same_losses_on_other_meshes(pools, words, tmp_path, tensor):
    """ZeRO-3 on 2 ranks; ZeRO-3 on 2 × 2 tensor ranks, saved in the background; 1 process; compared with 1 process."""
    steady = [word for word in words if not word.startswith("train.steps")]
    steady += [
        "model.kv_heads=2",
        "model.vocabulary_size=264",
        "train.ema_decay=0.9",
        "train.eval_every=2",
        "optimizer.decay_steps=4",
    ]
    whole, parts, cache = tmp_path / "whole", tmp_path / "parts", tmp_path / "cache"
    train(compose([*steady, "train.steps=4", f"out={whole}"]))
    pools(2).run(tiny.train_here, [*steady, "train.steps=2", "parallel.data=zero3", f"out={parts}"], cache)
    again = [f"out={parts}", "train.resume=true"]
    two = ["train.steps=3", "parallel.tensor=2", "train.checkpoint_async=true", "train.checkpoint_every=1"]
    if tensor > 1:
        pools(4).run(tiny.train_here, [*again, *two], cache)
    one = ["train.steps=4", "parallel.tensor=1", "parallel.data=ddp", "train.checkpoint_async=false"]
    train(compose_run([*again, *one]))
    expected, found = (
        {
            key: {r["step"]: r[key] for r in RunDirectory(out).records() if key in r}
            for key in ("loss", "val_loss_ema")
        }
        for out in (whole, parts)
    )
    assert sorted(found["loss"]) == [1, 2, 3, 4]
    spreads = {r["step"]: r["time_spread"] for r in RunDirectory(parts).records() if "time_spread" in r}
    assert sorted(spreads) == [2]  # of the step before, where data-parallel ranks have taken one
    assert all(0 <= spread < 1 for spread in spreads.values())
    for step, loss in expected["loss"].items():
        assert found["loss"][step] == pytest.approx(loss, abs=1e-5), step
    assert found["val_loss_ema"][4] == pytest.approx(expected["val_loss_ema"][4], abs=1e-5)
    last = [load_checkpoint(RunDirectory(out).latest_checkpoint()) for out in (whole, parts)]
    for group in ("model", "callbacks"):
        one, other = (checkpoint.source.whole(group) for checkpoint in last)
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=2e-5)


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


@pytest.mark.slow
def test_eight_bit_moments_continue_on_other_meshes(pools, words, tmp_path):
    """Codes and scales that two ranks of ZeRO-3 saved are those of one process, but for noise of rounding."""
    steady = [word for word in words if not word.startswith("train.steps")]
    steady += ["optimizer.name=adamw_8bit", "model.vocabulary_size=263", "optimizer.decay_steps=4"]
    whole, parts, cache = tmp_path / "whole", tmp_path / "parts", tmp_path / "cache"
    train(compose([*steady, "train.steps=4", f"out={whole}"]))
    pools(2).run(tiny.train_here, [*steady, "train.steps=2", "parallel.data=zero3", f"out={parts}"], cache)
    saved = load_checkpoint(RunDirectory(parts).latest_checkpoint()).source
    codes, scales = (saved.tensor("optimizer", f"embedding.weight.exp_avg{end}") for end in ("", "_scale"))
    assert (codes.dtype, codes.shape, scales.shape) == (torch.float8_e4m3fn, (263, 64), (263, 1))
    train(compose_run([f"out={parts}", "train.resume=true", "train.steps=4", "parallel.data=ddp"]))
    losses = [[r["loss"] for r in RunDirectory(out).records() if "loss" in r] for out in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_adapters_continue_with_the_same_losses_on_other_meshes(pools, words, tmp_path, kind):
    """ZeRO-3 on 2 ranks; 2 pipeline × 2 tensor ranks; 1 process; compared with 1 process."""
    shape = ModelShape(2, 2, 2, 64, 128, vocabulary_size=264, tied=False, context=64, head_dim=64)
    torch.manual_seed(5)
    values = config_yaml(compose([f"model.{name}={value}" for name, value in shape.to_dict().items()]))
    base = RunDirectory(tmp_path / "base")
    base.create(values)
    files = {"config.yaml": values, "tokenizer.json": byte_tokenizer().to_json()}
    model = dict(Decoder(shape).named_parameters())
    CheckpointWriter(base, World(), 0).save(1, {"model": model}, {}, files)
    steady = [word for word in words if not word.startswith(("train.steps", "model"))]
    steady += [f"adapter={kind}", "adapter.rank=2", f"train.init_from={base.path}", "optimizer.decay_steps=6"]
    steady += ["train.fixed_shape=true", "plan.packs_per_step=4"]
    whole, parts, cache = tmp_path / "whole", tmp_path / "parts", tmp_path / "cache"
    train(compose_run([*steady, "train.steps=6", f"out={whole}"]))
    first = [*steady, "train.steps=2", "parallel.data=zero3", f"out={parts}"]
    pools(2).run(tiny.train_here, first, cache)
    again = [f"out={parts}", "train.resume=true"]
    pools(4).run(
        tiny.train_here,
        [*again, "train.steps=4", "parallel.data=ddp", "parallel.tensor=2", "parallel.pipeline=2"],
        cache,
    )
    train(compose_run([*again, "train.steps=6", "parallel.tensor=1", "parallel.pipeline=1"]))
    expected, found = (
        [r["loss"] for r in RunDirectory(out).records() if "loss" in r] for out in (whole, parts)
    )
    assert len(found) == 6
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
