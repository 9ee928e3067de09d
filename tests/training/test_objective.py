"""Documents decide what is minimized; settings of the other objective are refused."""

import json

import pytest

from multipack.training.run_config import compose
from multipack.training.trainer import train


@pytest.fixture
def pairs(words, tmp_path):
    file = tmp_path / "preferences.jsonl"
    rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}!"} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*words, f"data.path={file}", "train.steps=2", "train.eval_every=2", f"out={tmp_path / 'run'}"]


@pytest.mark.parametrize("setting", ["train.label_smoothing=0.1", "train.z_loss=1e-4"])
def test_pairs_refuse_what_is_about_tokens(pairs, setting):
    with pytest.raises(ValueError, match=rf"{setting.split('=')[0]}=.* preference pairs"):
        train(compose([*pairs, setting]))


def test_text_refuses_what_is_about_preferences(words, tmp_path):
    with pytest.raises(ValueError, match=r"preference\.\* is about preference pairs"):
        train(compose([*words, "preference.beta=0.5", f"out={tmp_path / 'run'}"]))


def test_pairs_are_trained_by_preference_and_tell_rewards(pairs, tmp_path, capsys):
    train(compose(pairs))
    printed = capsys.readouterr().out
    assert "reward_margin" in printed  # in the legend
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: nothing is preferred yet
    assert {"reward_accuracy", "reward_margin"} <= set(steps[0])
    evaluations = [record for record in records if "val_loss" in record]
    assert all("val_reward_accuracy" in record for record in evaluations)


def test_fp16_that_always_overflows_ends_the_run(words, tmp_path, monkeypatch):
    """Every step is left out until no scale is left; then the run says so and where it was good."""
    from multipack.parallel.engine import ModelEngine
    from multipack.training.run_state import NonFiniteLoss

    clip = ModelEngine.clip

    def overflowing(self, max_norm):
        clip(self, max_norm)
        self.overflowed = True
        return float("inf")

    monkeypatch.setattr(ModelEngine, "clip", overflowing)
    monkeypatch.setattr(ModelEngine, "loss_scale", property(lambda self: 0.5))
    words = [*words, "train.dtype=fp16", "train.eval_every=0", f"out={tmp_path / 'run'}"]
    with pytest.raises(NonFiniteLoss, match="overflows fp16 however little the loss is scaled"):
        train(compose(words))
