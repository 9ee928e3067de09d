"""Runs that a guard ends: one line, a code of their own, and the checkpoint that is still good."""

import json

import pytest

from multipack.cli import main
from multipack.run import RunDirectory
from multipack.training.observer import Observer, RunStopped
from multipack.training.session import NonFiniteLoss
from multipack.training.spikes import RunningMoments, SpikeGuard


class Jump(SpikeGuard):
    """Has statistics from the beginning, and finds that steps jump from the third one on."""

    def judge(self, step, loss, grad_norm):
        mean = 1e9 if step < 3 else 0.0
        self._moments = {name: RunningMoments(100, mean) for name in self._moments}
        return super().judge(step, loss, grad_norm)


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_spike_ends_the_command_in_one_line_that_names_the_last_checkpoint(
    action, words, tmp_path, monkeypatch, capsys
):
    from multipack.training import spikes, watch

    monkeypatch.setattr(watch, "SpikeGuard", Jump)
    monkeypatch.setattr(spikes, "MOST_IN_A_ROW", 2)
    out = tmp_path / "run"
    more = [f"train.spike={action}", "train.eval_every=2", f"out={out}"]
    monkeypatch.setattr("sys.argv", ["multipack", "train", *words, *more])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert f"train.spike={action}" in lines[0]
    last = RunDirectory(out).latest_checkpoint()
    assert lines[0].endswith(f"Last good checkpoint: {last}")
    assert json.loads((last / "state.json").read_text())["step"] == 2


def test_a_loss_that_is_not_finite_is_one_of_them():
    assert issubclass(NonFiniteLoss, RunStopped)
    assert Observer().judge(1, 1.0, 1.0) == "apply"
