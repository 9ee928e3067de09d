"""wordplay's run, character by character, at a size for a CPU."""

from pathlib import Path

import pytest

from multipack.training.run_config import compose
from multipack.training.trainer import train

TEXT = Path(__file__).parents[3] / "shared" / "data" / "text" / "tinyshakespeare.txt"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TEXT.is_file(), reason=f"{TEXT} is not there")
def test_a_small_model_learns_shakespeare(tmp_path, capsys):
    """nanoGPT's small CPU model reaches 1.88 in 2,000 steps of 768 characters; asked: 1.9."""
    result = train(
        compose(
            [
                *("data=shakespeare_char", f"data.path={TEXT}", "data.block_size=128", "train.seed=1"),
                *("model.layers=4", "model.heads=4", "model.d_model=128", "model.d_ff=344"),
                *("plan.capacity=2048", "plan.packs_per_step=1", "train.steps=400", "train.eval_every=400"),
                *("train.eval_packs=16", "optimizer.lr=4e-3", "optimizer.warmup_steps=40"),
                *("train.compare_padding=false", "log.every=0", f"out={tmp_path / 'run'}"),
            ]
        )
    )
    assert result.val_loss <= 1.9
    assert "65 tokens" in capsys.readouterr().out  # the vocabulary of characters
