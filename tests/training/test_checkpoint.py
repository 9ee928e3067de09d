"""Checkpoints of one process: read back, complete after a kill, refused when damaged."""

import errno
import hashlib
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from multipack import checksums
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.run import RunDirectory, find_run
from multipack.training import checkpoint_tensors
from multipack.training.checkpoint import CheckpointWriter, load_checkpoint, name_of, restore_rng
from multipack.training.run_config import compose
from multipack.training.run_files import RunLog
from multipack.training.train import train
from multipack.words import read_yaml


def _content(step, value=None):
    weight = torch.full((2, 3), float(step if value is None else value))
    tensors = {"model": {"weight": weight}, "optimizer": {"weight.exp_avg": torch.ones(2, 3)}}
    return step, tensors, {"data": [step]}, {"config.yaml": "a: 1\n"}


def _save(run, step, keep=2, value=None, best=False):
    return CheckpointWriter(run, World(), keep).save(*_content(step, value), best)


def _weight(run):
    return load_checkpoint(run.latest_checkpoint()).source.tensor("model", "weight")[0, 0].item()


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("seed: 1\n")
    return directory


def test_a_checkpoint_is_read_back(run):
    before = os.umask(0o027)
    try:
        path = _save(run, 5)
    finally:
        os.umask(before)
    found = load_checkpoint(path)
    assert (found.path, found.step, found.progress) == (path, 5, {"data": [5]})
    source = found.source
    assert torch.equal(source.whole("model")["weight"], torch.full((2, 3), 5.0))
    assert source.shapes("optimizer") == {"weight.exp_avg": (2, 3)}
    assert source.shapes("unknown") == source.whole("unknown") == {}
    assert (path / "config.yaml").read_text() == "a: 1\n"
    # Files are readable for whom the umask allows it.
    assert {file.stat().st_mode & 0o777 for file in path.rglob("*") if file.is_file()} == {0o640}
    for given, named in ((run.path, None), (path, path)):
        found, checkpoint = find_run(given)
        assert (found.path, checkpoint) == (run.path, named)
    with pytest.raises(FileNotFoundError, match="neither a run directory"):
        find_run(run.path.parent)
    with pytest.raises(ValueError, match=r"model\.bias"):
        source.fill("model", {"bias": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"model\.weight"):
        source.fill("model", {"weight": torch.zeros(3, 2)})


def test_the_newest_and_the_best_are_kept(run):
    _save(run, 1, best=True)
    for step in (2, 3, 10):
        _save(run, step)
    names = sorted(path.name for path in run.checkpoints.glob("step-*"))
    assert names == [name_of(1), name_of(3), name_of(10)]
    assert run.latest_checkpoint().name == name_of(10)
    assert run.best_checkpoint().name == name_of(1)
    _save(run, 11, keep=0)
    assert len(list(run.checkpoints.glob("step-*"))) == 4


def test_a_lost_pointer_is_replaced_or_refused(run):
    assert not run.has_checkpoints
    with pytest.raises(FileNotFoundError, match="another out="):
        run.latest_checkpoint()
    path = _save(run, 3)
    for content in (b"step-00000099\n", b"\xff", b""):
        run.latest.write_bytes(content)
        with pytest.raises(FileNotFoundError, match=name_of(3)):
            run.latest_checkpoint()
    run.latest.unlink()
    assert run.has_checkpoints
    assert run.latest_checkpoint() == path
    (path / ".complete").unlink()
    with pytest.raises(FileNotFoundError, match="another out="):
        run.latest_checkpoint()


PLACES = ["latest", "step-00000003/config.yaml", "step-00000003/state.json", "step-00000003/.complete"]
PLACES += [
    "step-00000003/tensors/weights-00001.safetensors",
    "../metrics.jsonl",
    "../samples.txt",
    "../config.yaml",
]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["pipe", "link"])
def test_a_pipe_in_the_place_of_a_file_is_refused(run, name, make):
    path = run.checkpoints / name
    _save(run, 3, best=True)
    path.unlink(missing_ok=True)
    make(path)

    def read():
        load_checkpoint(run.latest_checkpoint())
        read_yaml(run.config)
        RunLog(run)

    with pytest.raises((ValueError, OSError), match=re.escape(path.name)) as refused:
        read()
    assert "\n" not in str(refused.value)


def test_what_cannot_be_removed_is_reported_once_and_ends_no_run(run, monkeypatch):
    lines, remove = [], shutil.rmtree
    (run.checkpoints / ".best.1f3a.partial").touch()
    (run.checkpoints / ".step-00000001.1f3a.old").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: os.rmdir("/proc"))
    writer = CheckpointWriter(run, World(), 1, report=lines.append)
    for step in (2, 4, 6):
        writer.save(*_content(step))
    (line,) = lines
    assert ".step-00000001.1f3a.old" in line
    assert "could not be removed" in line
    assert run.latest_checkpoint().name == name_of(6)
    monkeypatch.setattr(shutil, "rmtree", remove)
    writer.save(*_content(8))
    assert {path.name for path in run.checkpoints.iterdir()} == {"latest", name_of(8)}


def test_only_an_abandoned_checkpoint_is_replaced(run):
    early = _save(run, 4, value=1.0)
    _save(run, 4, value=2.0)
    assert _weight(run) == 1.0
    _save(run, 8, keep=0, value=1.0)
    run.point_to(early)
    _save(run, 8, keep=0, value=2.0)
    assert _weight(run) == 2.0


def _flip(name):
    """Change one bit in the middle of a file."""

    def damage(path):
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(content)

    return damage


def _change_state(**values):
    """Change values of state.json, and the checksum with them."""

    def damage(path):
        text = json.dumps({**json.loads((path / "state.json").read_text()), **values})
        (path / "state.json").write_text(text)
        (path / ".complete").write_text(hashlib.sha256(text.encode()).hexdigest())

    return damage


SHARD = "tensors/weights-00001.safetensors"


def _forge_dtype(path):
    """A dtype of one line break, in a file whose checksums are made again."""
    file = path / SHARD
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"\\n" ', 1))
    files = json.loads((path / "state.json").read_text())["files"]
    _change_state(files={**files, SHARD: checksums.checksum(file)})(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path / SHARD, 20), r"weights-00001\.safetensors is not what was written"),
        (lambda path: (path / SHARD).unlink(), r"weights-00001\.safetensors is missing"),
        (lambda path: (path / ".complete").unlink(), r"\.complete is missing"),
        (lambda path: (path / "state.json").unlink(), r"state\.json is missing"),
        (lambda path: (path / "state.json").write_text("[" * 100_000), "step-00000003 cannot be read"),
        (lambda path: (path / "tensors" / "more.safetensors").touch(), r"more\.safetensors is not listed"),
        (_flip(SHARD), r"weights-00001\.safetensors is not what was written"),
        (_flip("tensors/state-00001.safetensors"), r"state-00001\.safetensors is not what was written"),
        (_flip("config.yaml"), r"config\.yaml is not what was written"),
        (
            lambda path: (path / "state.json").write_text(
                (path / "state.json").read_text().replace('"step": 3', '"step": 4')
            ),
            r"state\.json is not what was written",
        ),
        (_change_state(format=3), "format 3.*format 5.*init_from"),
        # Checkpoints of the first format end without `.complete`.
        (lambda path: [_change_state(format=1)(path), (path / ".complete").unlink()], "format 1.*format 5"),
        (_change_state(files=[3]), "step-00000003 cannot be read"),
        (_change_state(files={"config.yaml": ["a"]}), "step-00000003 cannot be read"),
        (_forge_dtype, "step-00000003 cannot be read"),
        (_change_state(progress=3), "step-00000003 cannot be read"),
        (_change_state(step=None), "step-00000003 cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused(run, damage, message):
    path = _save(run, 3)
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("block", [1, 64, 100, 1 << 20])
def test_the_checksum_of_a_file_is_that_of_what_was_written(tmp_path, monkeypatch, block):
    for module in (checksums, checkpoint_tensors):
        monkeypatch.setattr(module, "BLOCK", block)
    tensors = {
        "half": torch.arange(9, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5),
        "turned": torch.randn(4, 5).T,
        "flags": torch.tensor([True, False]),
    }
    file = tmp_path / "a.safetensors"
    written = checkpoint_tensors.save_safetensors(file, tensors, {"format": "pt"})
    assert checksums.checksum(file) == written
    if block > file.stat().st_size:
        assert written == hashlib.sha256(file.read_bytes()).hexdigest()
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_full_disk_while_tensors_are_written_is_named_with_advice(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=rf"make room.*{tmp_path / 'file'}") as refused:
        checkpoint_tensors.save_safetensors(tmp_path / "file", {"a": torch.ones(3)}, {})
    assert refused.value.errno == errno.ENOSPC


def test_generation_verifies_only_the_files_that_it_reads(run):
    path = _save(run, 3)
    _flip("tensors/state-00001.safetensors")(path)
    assert load_checkpoint(path, weights_only=True).source.whole("model")
    _flip(SHARD)(path)
    with pytest.raises(ValueError, match=r"weights-00001\.safetensors is not what was written"):
        load_checkpoint(path, weights_only=True)


def test_copies_of_a_gpu_are_pinned_and_kept(run, monkeypatch):
    """With fake CUDA tensors: the same buffers take every copy, and each save waits for the device once."""
    made, waited, empty = [], [], torch.empty

    class OnGpu(torch.Tensor):
        is_cuda = True

    def pinned(*shape, pin_memory=False, **options):
        made.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(World, "synchronize", lambda self: waited.append(1))
    writer = CheckpointWriter(run, World(), 0, background=True)
    for value in (1.0, 2.0):
        pieces = {"model.a": (torch.full((3,), value).as_subclass(OnGpu), [0]), "rng.b": (torch.ones(2), [0])}
        copies = writer._copied(pieces)
        assert copies["model.a"][0].tolist() == [value] * 3
    assert made == [True]
    assert len(waited) == 2


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run(words, tmp_path, monkeypatch):
    """In the background it fails after the last step; tests/distributed/test_checkpoints.py has failures on ranks."""

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint_tensors, "save_safetensors", full)
    more = ["train.steps=2", "train.eval_every=0", "train.checkpoint_async=true", f"out={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match=r"step-00000002 was not written: .*no space left"):
        train(compose([*words, *more]))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def _engine(kind):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    return ModelEngine([model], kind(model.parameters(), lr=0.1), Mesh(World()))


def _steps(engine, first, last):
    for step in range(first, last):
        for parameter in engine.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        engine.step(0.1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_optimizer_state_of_any_shape_continues_bit_for_bit(run, kind):
    """Adafactor keeps means of rows and columns, which have other shapes than their parameter."""
    whole, parts, resumed = _engine(kind), _engine(kind), _engine(kind)
    _steps(whole, 0, 6)
    _steps(parts, 0, 3)
    path = CheckpointWriter(run, World(), 0).save(3, parts.state(), {}, {})
    resumed.load_state(load_checkpoint(path).source)
    _steps(resumed, 3, 6)
    for name, parameter in whole.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter), name
    other = torch.optim.Adafactor if kind is torch.optim.AdamW else torch.optim.AdamW
    with pytest.raises(ValueError, match=r"optimizer lacks 0\."):
        _engine(other).load_state(load_checkpoint(path).source)


def test_random_numbers_continue(run):
    torch.manual_seed(3)
    source = load_checkpoint(_save(run, 5)).source
    expected = torch.rand(4)
    torch.manual_seed(99)
    restore_rng(World(), source)
    assert torch.equal(torch.rand(4), expected)
    restore_rng(World(rank=1, size=2), source)  # a new rank keeps its own
    torch.manual_seed(99)
    restore_rng(World(rank=0, size=2), source)
    assert torch.equal(torch.rand(4), expected)
