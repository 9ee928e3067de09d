import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from multipack.parallel.world import World
from multipack.run import RunDirectory, find_run
from multipack.training.checkpoint import gather_rng, load_checkpoint, name_of, restore_rng, save_checkpoint


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
    assert torch.equal(found.tensors["model"]["weight"], torch.full((2, 3), 5.0))
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
    assert load_checkpoint(run.latest_checkpoint()).tensors["model"]["weight"][0, 0] == 1.0


def test_an_abandoned_later_checkpoint_is_replaced_when_its_step_comes_again(run):
    early = _save(run, 4, keep=0)
    _save(run, 8, keep=0, value=1.0)
    run.point_to(early)
    _save(run, 8, keep=0, value=2.0)
    assert load_checkpoint(run.latest_checkpoint()).tensors["model"]["weight"][0, 0] == 2.0


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


def test_random_numbers_continue(run):
    torch.manual_seed(3)
    rng = gather_rng(World())
    expected = torch.rand(4)
    torch.manual_seed(99)
    assert restore_rng(World(), rng)
    assert torch.equal(torch.rand(4), expected)
    assert not restore_rng(World(rank=1), rng)


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
