import pytest
import torch

from multipack.parallel.world import World, choose_device, connected, hosts, launched_by


def test_without_a_launcher_the_world_is_one_process():
    with connected("cpu") as world:
        assert (world.rank, world.size, world.backend, world.is_main) == (0, 1, "none", True)
        assert world.sum([1.5, 2.0]) == [1.5, 2.0]
        assert world.gather("a") == ["a"]
        assert world.from_main("b") == "b"
        assert len(hosts(world)) == 1
        world.barrier()


def test_a_half_told_world_is_refused_with_the_command_that_tells_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"RANK.*torchrun --nproc-per-node 4"), connected("cpu"):
        pass


def test_a_missing_rank_is_an_error_after_the_timeout(monkeypatch):
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    with pytest.raises(Exception, match=r"(?i)time|clients"), connected("cpu", timeout_seconds=2):
        pass


def test_a_gpu_that_is_not_there_is_refused():
    assert choose_device("cpu", 0) == torch.device("cpu")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"train\.device=cpu"):
        choose_device("cuda", 0)


def test_the_launcher_is_recognized():
    assert launched_by({})[0] == "none"
    assert launched_by({"RANK": "0"})[0].startswith("environment")
    name, command = launched_by({"TORCHELASTIC_RUN_ID": "none", "RANK": "0"})
    assert name == "torchrun"
    assert command


def test_a_world_is_a_value():
    assert World(rank=1, size=2) == World(rank=1, size=2)
    assert not World(rank=1, size=2).is_main
