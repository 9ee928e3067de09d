"""A run directory of a real run that was resumed, and one that is written by hand."""

import json
import math
import shutil

import pytest


@pytest.fixture(scope="session")
def _trained(corpus_path, run_words, tmp_path_factory):
    from multipack.training.run_config import compose
    from multipack.training.train import train

    path = tmp_path_factory.mktemp("runs") / "trained"
    words = [word for word in run_words if not word.startswith("train.steps=")]
    more = ["model.layers=1", "plan.tail=carry", "plan.packs_per_step=2", "plan.capacity=512", f"out={path}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        train(compose([*words, *more, "train.steps=17"]))
        train(compose([*words, *more, "train.steps=20", f"train.resume={path}/checkpoints/step-00000015"]))
    return path


@pytest.fixture
def trained(_trained, tmp_path):
    """A copy of a run of 20 steps, over more than one epoch, that was resumed after step 15 when it had taken 17."""
    return shutil.copytree(_trained, tmp_path / "trained")


@pytest.fixture
def written(tmp_path):
    """(name, steps, setting) → a run directory with made-up records: every sixth step is an evaluation, too."""

    def write(name="made", steps=60, lr="0.002", first_step=1):
        path = tmp_path / name
        (path / "checkpoints").mkdir(parents=True)
        (path / "config.yaml").write_text(f"optimizer:\n  lr: {lr}\ntrain:\n  steps: {steps}\n")
        lines = [{"step": 0, "val_loss": 8.0}]
        for step in range(first_step, steps + 1):
            timed = {"dt": 0.5, "dtf": 0.2, "dtb": 0.2, "dto": 0.02, "data_time": 0.03, "tps": 2000.0}
            rest = {"padding": 0.1, "mfu": 30.0, "memory": 1.0, "cost_spread": 0.01 * (step % 3), "lr": 0.002}
            lines.append(
                {"step": step, "loss": 2 + 6 * math.exp(-step / 15), "grad_norm": 1.0} | timed | rest
            )
            if step % 6 == 0:
                lines.append({"step": step, "train_loss": 4.0, "val_loss": 2.1 + 6 * math.exp(-step / 15)})
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (path / "samples.txt").write_text("=== step 6\nonce▌ upon\n\n=== step 12\nonce▌ more\n\n")
        return path

    return write
