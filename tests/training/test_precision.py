import pytest
import torch

from multipack.training.precision import deterministic, name_of_dtype
from multipack.training.run_config import compose
from multipack.training.trainer import train


def test_names_of_dtypes():
    assert [name_of_dtype(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [
        "fp32",
        "bf16",
        "fp16",
    ]


def test_determinism_is_switched_on_and_back():
    with deterministic(False, torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(True, torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_needs_its_workspace(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with (
        pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        deterministic(True, torch.device("cuda")),
    ):
        pass
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_two_deterministic_runs_are_equal_to_the_last_bit(words, tmp_path, dtype):
    losses = []
    for name in ("a", "b"):
        out = tmp_path / name
        train(
            compose(
                [
                    *words,
                    "train.deterministic=true",
                    f"train.dtype={dtype}",
                    "train.eval_every=3",
                    f"out={out}",
                ]
            )
        )
        losses.append([line.split('"dt"')[0] for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 3
