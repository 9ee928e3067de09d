import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from multipack.parallel.world import World
from multipack.run import RunDirectory, find_run
from multipack.training import checkpoint as checkpoint_module
from multipack.training.checkpoint import (
    CheckpointWriter,
    Content,
    gather_rng,
    load_checkpoint,
    name_of,
    restore_rng,
    save_checkpoint,
)


def _save(run, step, keep=2, value=None):
    tensors = {
        "model": {"weight": torch.full((2, 3), float(step if value is None else value))},
        "optimizer": {"weight.exp_avg": torch.ones(2, 3)},
    }
    rng = {"rank-0.cpu": torch.get_rng_state()}
    return save_checkpoint(run, step, tensors, {"data": {"step": step}}, rng, {"config.yaml": "a: 1\n"}, keep)


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("seed: 1\n")
    return directory


def test_what_is_saved_is_read_back(run):
    _save(run, 5)
    found = load_checkpoint(run.latest_checkpoint())
    assert found.step == 5
    assert found.progress == {"data": {"step": 5}}
    assert torch.equal(found.whole("model")["weight"], torch.full((2, 3), 5.0))
    assert (found.path / "config.yaml").read_text() == "a: 1\n"


def test_the_newest_stay_and_latest_names_the_last(run):
    for step in (1, 2, 3, 10):
        _save(run, step, keep=2)
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == [name_of(3), name_of(10)]
    assert run.latest_checkpoint().name == name_of(10)
    _save(run, 11, keep=0)
    assert len(list(run.checkpoints.glob("step-*"))) == 3


def test_the_step_that_latest_names_is_never_written_twice(run):
    _save(run, 4, value=1.0)
    _save(run, 4, value=2.0)
    assert load_checkpoint(run.latest_checkpoint()).whole("model")["weight"][0, 0] == 1.0


def test_an_abandoned_later_checkpoint_is_replaced_when_its_step_comes_again(run):
    early = _save(run, 4, keep=0)
    _save(run, 8, keep=0, value=1.0)
    run.point_to(early)
    _save(run, 8, keep=0, value=2.0)
    assert load_checkpoint(run.latest_checkpoint()).whole("model")["weight"][0, 0] == 2.0


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_torn_checkpoint_is_refused_naming_the_file(run, damage):
    path = _save(run, 3)
    victim = path / "model.safetensors"
    if damage == "truncate":
        os.truncate(victim, 20)
    else:
        victim.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors (has 20 bytes|is missing)"):
        load_checkpoint(path)


def test_a_folder_that_is_no_checkpoint_or_a_newer_format_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        load_checkpoint(tmp_path)
    path = _save(run, 3)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load_checkpoint(path)


def test_a_tensor_is_read_only_when_it_is_asked_for(run):
    path = _save(run, 5)
    source = load_checkpoint(path).source
    assert source.shapes("model") == {"weight": (2, 3)}
    assert source.shapes("observers") == source.whole("observers") == {}
    os.truncate(path / "model.safetensors", 20)
    assert torch.equal(source.tensor("optimizer", "weight.exp_avg"), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        source.tensor("model", "weight")


def test_what_is_asked_for_must_be_there_and_of_the_same_shape(run):
    source = load_checkpoint(_save(run, 5)).source
    with pytest.raises(ValueError, match=r"step-00000005 \(model\) has no tensor bias"):
        source.fill("model", {"bias": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"\(model\) has weight \(2, 3\) instead of \(3, 2\)"):
        source.fill("model", {"weight": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"\(observers\) has no tensor x"):
        source.tensor("observers", "x")


def _content(step, tensor):
    return Content(step, {"model": {"weight": tensor}}, {"seen": [step]}, {"rank-0.cpu": torch.zeros(1)}, {})


def test_in_the_background_training_goes_on_and_the_checkpoint_is_of_before(run, monkeypatch):
    _save(run, 1)
    may_write, before = threading.Event(), checkpoint_module.write_whole

    def held_up(*arguments):
        assert may_write.wait(20)
        before(*arguments)

    monkeypatch.setattr(checkpoint_module, "write_whole", held_up)
    writer = CheckpointWriter(run, World(), keep=0, background=True)
    content = _content(2, torch.ones(4))
    writer.save(content)
    content.tensors["model"]["weight"].fill_(9)
    content.progress["seen"].append(9)
    assert run.latest_checkpoint().name == name_of(1)
    may_write.set()
    writer.wait()
    found = load_checkpoint(run.latest_checkpoint())
    assert (found.step, found.progress) == (2, {"seen": [2]})
    assert torch.equal(found.whole("model")["weight"], torch.ones(4))


@pytest.mark.parametrize("asking", ["save", "wait", "abandon"])
def test_what_went_wrong_in_the_background_is_told_once_at_the_next_occasion(run, monkeypatch, asking):
    def full(*_):
        raise OSError("no space left")

    writer = CheckpointWriter(run, World(), keep=0, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_whole", full)
        writer.save(_content(2, torch.ones(4)))
        writer._thread.join()
    message = "checkpoint step-00000002 was not written: no space left"
    if asking == "abandon":
        assert writer.abandon() == message
    else:
        ask = writer.wait if asking == "wait" else lambda: writer.save(_content(3, torch.ones(4)))
        with pytest.raises(ValueError, match=message):
            ask()
    assert list(run.checkpoints.iterdir()) == []
    writer.wait()
    assert writer.abandon() == ""
    writer.save(_content(4, torch.ones(4)))
    writer.wait()
    assert load_checkpoint(run.latest_checkpoint()).step == 4


def test_a_run_writes_in_the_background_what_it_writes_at_once(words, tmp_path, monkeypatch):
    """Checkpoints at steps 3 and 6; the last is there when the run ends."""
    from multipack.training.run_config import compose, compose_run
    from multipack.training.trainer import train

    for name, more in (("sync", []), ("async", ["train.checkpoint_async=true"])):
        train(compose([*words, *more, "train.ema_decay=0.9", f"out={tmp_path / name}"]))
    one, other = (load_checkpoint(RunDirectory(tmp_path / n).latest_checkpoint()) for n in ("sync", "async"))
    assert one.step == other.step == 6
    for group in ("model", "optimizer", "observers"):
        first, second = one.whole(group), other.whole(group)
        assert first.keys() == second.keys() != set()
        assert all(torch.equal(first[name], second[name]) for name in first)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint_module, "write_whole", full)
    with pytest.raises(ValueError, match="step-00000009 was not written: no space left"):
        train(compose_run([f"out={tmp_path / 'async'}", "train.resume=true", "train.steps=12"]))


def test_random_numbers_continue(run):
    torch.manual_seed(3)
    rng = gather_rng(World())
    expected = torch.rand(4)
    torch.manual_seed(99)
    assert restore_rng(World(), rng)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(99)
    for rank in range(2):  # both know that there is a new one; the first goes on with what it had
        assert not restore_rng(World(rank=rank, size=2), rng)
    assert torch.equal(torch.rand(4), expected)


def test_a_process_killed_while_saving_leaves_latest_whole(run):
    """SIGKILL at a random point inside save_checkpoint, many times over: latest always loads."""
    _save(run, 1)
    script = textwrap.dedent(
        f"""
        import torch
        from pathlib import Path
        from multipack.run import RunDirectory
        from multipack.training.checkpoint import save_checkpoint
        run = RunDirectory(Path({str(run.path)!r}))
        tensors = {{"model": {{"weight": torch.randn(400, 400)}}, "optimizer": {{"w.exp_avg": torch.randn(400, 400)}}}}
        print("ready", flush=True)
        for step in range(2, 100000):
            save_checkpoint(run, step, tensors, {{}}, {{"rank-0.cpu": torch.get_rng_state()}}, {{}}, 2)
            print(step, flush=True)
        """
    )
    for pause in (0.003, 0.011):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        process.stdout.readline()
        try:
            process.wait(pause)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert load_checkpoint(run.latest_checkpoint()).step >= 2


def test_paths_that_users_give_are_understood(run, tmp_path):
    path = _save(run, 3)
    assert find_run(run.path) == (run, None)
    assert find_run(path) == (run, path)
    with pytest.raises(FileNotFoundError, match="neither a run directory"):
        find_run(tmp_path)


def test_a_directory_that_holds_something_is_not_taken(run):
    with pytest.raises(FileExistsError, match=r"train\.resume=true out="):
        RunDirectory(run.path).create("seed: 2\n")
    assert run.config.read_text() == "seed: 1\n"
    RunDirectory(run.path.parent / "empty").create("")
