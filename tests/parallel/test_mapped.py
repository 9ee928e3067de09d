"""Optimizer state in memory-mapped files: values, bytes in memory, and files that disappear."""

import errno
import gc
import re
from pathlib import Path

import pytest
import torch

from multipack.parallel.mapped import MappedFiles, MappedOptimizer
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.state import create_optimizer_state, optimizer_state
from multipack.training.checks import check
from multipack.training.optimizer import build_optimizer
from multipack.training.run_config import compose
from multipack.training.settings import OptimizerConfig

MIB = 2**20


def anonymous():
    """Bytes of this process's memory that no file backs."""
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Anonymous: +(\d+)", text, re.MULTILINE)[1])


def resident():
    return 1024 * int(
        re.search(r"^Rss: +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[1]
    )


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_steps_are_those_of_the_optimizer_in_memory(tmp_path, name):
    weights = []
    for wrap in (
        lambda optimizer: optimizer,
        lambda optimizer: MappedOptimizer(optimizer, MappedFiles(tmp_path)),
    ):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict(
            {"blocks": torch.nn.Sequential(torch.nn.Linear(300, 8), torch.nn.Linear(8, 5))}
        )
        optimizer = wrap(build_optimizer(model, OptimizerConfig(name=name, lr=1e-2, rules=["*1.bias lr=2"])))
        create_optimizer_state(optimizer)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        weights.append(
            {**dict(model.named_parameters()), **optimizer_state(optimizer, dict(model.named_parameters()))}
        )
    for key, value in weights[0].items():
        assert torch.equal(value.float(), weights[1][key].float()), key
    assert not list(tmp_path.iterdir())  # removed as soon as they are mapped


@pytest.mark.slow
def test_state_takes_no_memory_between_steps(tmp_path):
    """Moments of 3 tensors of 36 MiB, more than malloc keeps when freed; with files those of one tensor at most."""
    grown = []
    for mapped in (False, True):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 2304, bias=False) for _ in range(3)))
        optimizer = build_optimizer(model, OptimizerConfig())
        files = MappedFiles(tmp_path)
        optimizer = MappedOptimizer(optimizer, files) if mapped else optimizer
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = anonymous(), resident()
        for _ in range(2):
            optimizer.step()
        grown.append([after - each for after, each in zip((anonymous(), resident()), before, strict=True)])
        assert sum(files._sizes.values()) == (216 * MIB if mapped else 0)
    assert grown[0][0] > 210 * MIB
    assert max(grown[1]) < 80 * MIB


def test_bad_folders_and_full_disks_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"parallel\.offload_folder=.*nowhere is not a folder"):
        MappedFiles(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"parallel\.offload_folder=/proc cannot be written"):
        MappedFiles("/proc")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as caught:
        MappedFiles(str(tmp_path)).empty_like(torch.zeros(4))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    for words, message in (
        ({"offload": "disk"}, "parallel.offload_folder"),
        ({"offload_folder": "x"}, "parallel.offload=disk"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            ParallelConfig(**words)
    words = [
        "optimizer.name=muon",
        "parallel.data=zero3",
        "parallel.offload=disk",
        "parallel.offload_folder=x",
    ]
    with pytest.raises(ValueError, match=r"optimizer\.name=muon .*parallel\.offload=disk"):
        check(compose(words), 1)
