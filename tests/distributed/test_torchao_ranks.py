"""AdamW of torchao on two ranks, compared with one process."""

import pytest
import sharding as tiny
import torch

from hf_models import short_run
from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train


def result(out):
    run = RunDirectory(out)
    losses = [record["loss"] for record in run.records() if "loss" in record]
    return load_checkpoint(run.latest_checkpoint()).source.whole("model"), losses


@pytest.mark.slow
@pytest.mark.parametrize("data", ["ddp", "zero1"])
def test_two_ranks_equal_one_process_and_one_continues(data, tmp_path, pools):
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = "model=tiny model.d_model=64 model.d_ff=128 model.layers=2 tokenizer=byte log.every=0"
    words = [*short_run(tmp_path), *model.split(), "optimizer.name=adamw_4bit_ao"]
    one, two = tmp_path / "one", tmp_path / "two"
    train(compose([*words, f"out={one}"]))
    steady = [*words, f"parallel.data={data}", "train.steps=2", "optimizer.decay_steps=4"]
    pools(2).run(tiny.train_here, [*steady, f"out={two}"], tmp_path / "cache")
    train(compose_run([f"out={two}", "train.resume=true", "parallel.data=ddp", "train.steps=4"]))
    (expected, losses), (found, again) = result(one), result(two)
    assert again == pytest.approx(losses, abs=1e-4)  # sums of gradients in another order move codes
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3)
