"""The loop, end to end in one process, and its ends: finished, stopped, killed, diverged, refused."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint
from multipack.training.metrics import LEGEND
from multipack.training.run_config import compose, compose_run
from multipack.training.session import NonFiniteLoss
from multipack.training.trainer import StopRequest, train


def _records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _steps(out):
    return [record for record in _records(out) if "loss" in record]


def _untimed(out):
    """Every record, evaluations too, without what a clock or the memory says."""
    timed = {
        "dt",
        "dtf",
        "dtb",
        "dto",
        "data_time",
        "sps",
        "tps",
        "sps_per_device",
        "tps_per_device",
        "mfu",
        "memory",
    }
    return [{key: value for key, value in record.items() if key not in timed} for record in _records(out)]


def _losses(out):
    return [record["loss"] for record in _steps(out)]


def _weights(out):
    return load_checkpoint(RunDirectory(out).latest_checkpoint()).source.whole("model")


def _with(words, *more):
    keys = {word.partition("=")[0] for word in more}
    return [word for word in words if word.partition("=")[0] not in keys] + list(more)


def test_a_run_learns_prints_and_leaves_its_directory(words, tmp_path, capsys):
    out = tmp_path / "run"
    result = train(compose(_with(words, "train.steps=24", "train.compare_padding=true", f"out={out}")))
    printed = capsys.readouterr().out
    assert result.step == 24
    assert result.stopped_by is None
    losses = _losses(out)
    assert losses[-1] < losses[0] - 0.5
    evaluations = [record for record in _records(out) if "val_loss" in record]
    assert [record["step"] for record in evaluations] == list(range(0, 25, 3))
    assert "train_loss" not in evaluations[0]
    assert evaluations[1]["train_loss"] == pytest.approx(
        sum(r["loss"] * r["target_tokens"] for r in _steps(out)[:3])
        / sum(r["target_tokens"] for r in _steps(out)[:3])
    )
    assert evaluations[-1]["val_loss"] == result.val_loss
    assert set(_steps(out)[0]) == set(LEGEND) - {"train_loss", "val_loss"}
    for told in (
        *[
            "device",
            "backend",
            "world size",
            "hosts",
            "launcher",
            "versions",
            "parameters",
            "seed",
            "corpus hash",
        ],
        *[
            "packing efficiency",
            "displacement",
            "dropped",
            "padding instead",
            "start-up time",
        ],
        *["grad_norm", "packed / padded", "pad factor", "final validation loss", str(out / "metrics.jsonl")],
    ):
        assert told in printed, told
    assert "\x1b[" not in printed  # no terminal: plain lines
    assert printed.count("\nstep=") == 13  # the first, and every second one
    assert result.comparison is not None
    assert result.comparison.ratio > 0
    samples = (out / "samples.txt").read_text()
    assert samples.count("=== step") == len(evaluations)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "best",
        "latest",
        "step-00000021",
        "step-00000024",
    ]
    assert RunDirectory(out).best_checkpoint().name == "step-00000024"
    assert {path.name for path in RunDirectory(out).latest_checkpoint().iterdir()} == {
        *["tensors", ".complete"],
        *["state.json", "config.yaml", "tokenizer.json"],
    }


def test_the_saved_configuration_starts_the_same_run_again(words, tmp_path):
    train(compose(_with(words, f"out={tmp_path / 'a'}")))
    train(compose([f"config={tmp_path / 'a' / 'config.yaml'}", f"out={tmp_path / 'b'}"]))
    assert _losses(tmp_path / "a") == _losses(tmp_path / "b")


def test_the_fake_clock_is_the_only_clock(words, tmp_path):
    """Each look at the clock is one second: every time in the log is a count of looks."""
    ticks = itertools.count()
    out = tmp_path / "run"
    train(
        compose(_with(words, "train.steps=3", "train.eval_every=0", f"out={out}")),
        clock=lambda: float(next(ticks)),
    )
    for record in _steps(out):
        # Four micro-batches: each begins, turns and ends; the step then waits for data, clips and ends.
        assert (record["dtf"], record["dtb"]) == (4.0, 4.0)
        assert record["dto"] == 1.0
        assert record["data_time"] == 1.0
        assert record["dt"] == 16.0
        assert record["tps"] == pytest.approx(record["tps_per_device"])
        assert record["sps"] * record["dt"] == pytest.approx(round(record["sps"] * record["dt"]))


def test_resuming_is_bit_for_bit_the_run_that_never_stopped(words, tmp_path):
    long = _with(words, "train.steps=12", "train.eval_every=4", "model.dropout=0.1", "plan.window=2")
    train(compose([*long, f"out={tmp_path / 'whole'}"]))
    out = tmp_path / "parts"
    train(compose(_with(long, "train.steps=8", "optimizer.decay_steps=12", f"out={out}")))
    # As if killed after step 8 had been followed by lines that no checkpoint saw:
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')
    train(compose_run([f"out={out}", "train.resume=true", "train.steps=12"]))
    assert _untimed(out) == _untimed(tmp_path / "whole")
    assert [r["step"] for r in _steps(out)] == list(range(1, 13))
    for name, weight in _weights(tmp_path / "whole").items():
        assert torch.equal(weight, _weights(out)[name]), name
    assert (out / "samples.txt").read_text() == (tmp_path / "whole" / "samples.txt").read_text()


def test_resuming_goes_through_the_ends_of_epochs(words, tmp_path):
    """Small epochs, and a stop at each step in turn: the losses are always those of the whole run."""
    many = _with(
        words, "plan.capacity=1024", "train.steps=9", "train.eval_every=0", "train.checkpoint_every=1"
    )
    many += ["train.keep_checkpoints=0"]
    whole = tmp_path / "whole"
    train(compose([*many, f"out={whole}"]))
    losses = _losses(whole)
    for step in (1, 2, 3, 5, 8):
        train(compose_run([f"train.resume={whole / 'checkpoints' / f'step-{step:08d}'}"]))
        assert _losses(whole) == losses, step


@pytest.mark.parametrize("at_step", [4, 7])
def test_sigkill_loses_nothing_that_a_checkpoint_saw(words, tmp_path, at_step):
    long = _with(words, "train.steps=12", "train.checkpoint_every=2", "log.every=1", "train.eval_every=4")
    train(compose([*long, f"out={tmp_path / 'whole'}"]))
    out = tmp_path / "killed"
    program = [sys.executable, "-m", "multipack", "train", *long, f"out={out}"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if line.startswith(f"step={at_step} "):
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.read()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    before = RunDirectory(out).latest_checkpoint()
    assert load_checkpoint(before).step >= at_step - 2
    train(compose_run([f"out={out}", "train.resume=true"]))
    assert _untimed(out) == _untimed(tmp_path / "whole")
    for name, weight in _weights(tmp_path / "whole").items():
        assert torch.equal(weight, _weights(out)[name]), name


def test_a_loss_that_is_not_a_number_names_documents_and_keeps_the_good_checkpoint(
    words, tmp_path, monkeypatch
):
    from multipack.models.decoder import Decoder

    out, forward, calls = tmp_path / "run", Decoder.forward, itertools.count(1)

    def spoiled(self, batch):
        loss = forward(self, batch)
        # Seven micro-batches into training (4 a step): the third pack of step 2. Evaluation does not count.
        return loss * float("nan") if self.training and next(calls) == 15 else loss

    monkeypatch.setattr(Decoder, "forward", spoiled)
    with pytest.raises(NonFiniteLoss) as caught:
        train(compose(_with(words, f"out={out}")))
    message = str(caught.value)
    assert "step 4 is not finite" in message
    assert "step-00000003" in message
    named = [int(number) for number in re.findall(r"(\d+) \(pairs\.jsonl", message)]
    assert 0 < len(named) < 60  # of one pack, not of the whole step
    assert load_checkpoint(RunDirectory(out).latest_checkpoint()).step == 3
    assert [record["step"] for record in _steps(out)] == [1, 2, 3]
    monkeypatch.setattr(Decoder, "forward", forward)
    train(compose_run([f"out={out}", "train.resume=true"]))
    assert len(_losses(out)) == 6


def test_a_taken_run_directory_is_refused_and_untouched(words, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        train(compose([*words, f"out={out}"]))
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("plan.capacity=512", r"plan\.capacity was 256"),
        ("model.layers=3", r"model\.layers was 2"),
        ("model=small", "checkpoint lacks|other shapes"),
        ("plan.packs_per_step=2", "fingerprint|options"),
    ],
)
def test_a_resumed_run_refuses_what_would_make_it_another_run(words, tmp_path, changed, message):
    out = tmp_path / "run"
    train(compose([*words, f"out={out}"]))
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        train(compose_run([f"out={out}", "train.resume=true", "train.steps=9", changed]))
    assert (out / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("plan.capacity=20", "20"),
        ("data.validation=0", "validation"),
        ("model.vocabulary_size=10", "smaller than the tokenizer's"),
    ],
)
def test_bad_settings_fail_before_anything_is_written(words, tmp_path, wrong, message):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        train(compose([*words, wrong, f"out={out}"]))
    assert not out.exists()


def test_evaluating_only_writes_no_step(words, tmp_path):
    out = tmp_path / "run"
    result = train(compose([*words, "train.eval_only=true", f"out={out}"]))
    assert result.step == 0
    assert result.val_loss is not None
    assert [sorted(record) for record in _records(out)] == [["step", "val_loss"]]


def test_eval_packs_limits_the_evaluation(words, tmp_path):
    full = train(compose([*words, "train.eval_only=true", f"out={tmp_path / 'a'}", "data.validation=0.5"]))
    part = train(
        compose(
            [
                *words,
                "train.eval_only=true",
                "train.eval_packs=1",
                f"out={tmp_path / 'b'}",
                "data.validation=0.5",
            ]
        )
    )
    assert full.val_loss != part.val_loss


def test_fixed_shape_gives_the_same_losses(words, tmp_path):
    for name, fixed in (("free", "false"), ("fixed", "true")):
        train(compose([*words, f"train.fixed_shape={fixed}", f"out={tmp_path / name}"]))
    assert _losses(tmp_path / "fixed") == pytest.approx(_losses(tmp_path / "free"), rel=1e-5)
    assert all(r["padding"] > 0 for r in _steps(tmp_path / "fixed"))
    assert all(r["padding"] == 0 for r in _steps(tmp_path / "free"))


def test_gpt2_and_bf16_train_too(words, tmp_path):
    gpt = ["model.positions=learned", "model.norm=layernorm", "model.activation=gelu", "model.context=256"]
    train(compose(_with(words, "train.steps=20", *gpt, "train.dtype=bf16", f"out={tmp_path / 'run'}")))
    losses = _losses(tmp_path / "run")
    assert losses[-1] < losses[0] - 0.3


def test_ctrl_c_asks_once_and_interrupts_twice():
    with StopRequest(lambda: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_stop_at_an_evaluation_loses_no_evaluation(words, tmp_path, monkeypatch):
    """Asked to stop in step 3, which an evaluation follows: the resumed run makes up for it."""
    from multipack.training import trainer

    train(compose([*words, f"out={tmp_path / 'whole'}"]))
    agree = trainer._agree

    def asked(session, data, result, stop):
        if session.step == 2:
            stop.signal = signal.SIGTERM
        return agree(session, data, result, stop)

    monkeypatch.setattr(trainer, "_agree", asked)
    stopped = train(compose([*words, f"out={tmp_path / 'parts'}"]))
    assert (stopped.step, stopped.stopped_by) == (3, signal.SIGTERM)
    monkeypatch.setattr(trainer, "_agree", agree)
    train(compose_run([f"out={tmp_path / 'parts'}", "train.resume=true"]))
    assert _untimed(tmp_path / "parts") == _untimed(tmp_path / "whole")


def test_evaluating_a_saved_run_changes_nothing_of_it(words, tmp_path):
    out = tmp_path / "run"
    train(compose([*words, f"out={out}"]))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    found = train(
        compose_run([f"train.resume={out / 'checkpoints' / 'step-00000003'}", "train.eval_only=true"])
    )
    assert found.val_loss == next(r["val_loss"] for r in _records(out) if "val_loss" in r and r["step"] == 3)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(words, tmp_path):
    train(compose([*words, f"out={tmp_path / 'whole'}"]))
    out = tmp_path / "run"
    train(compose([*words, f"out={out}"]))
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints").mkdir()
    train(compose_run([f"out={out}", "train.resume=true"]))
    assert _untimed(out) == _untimed(tmp_path / "whole")


def test_a_checkpoint_of_another_course_is_refused_before_anything_changes(words, tmp_path):
    out = tmp_path / "run"
    keep = _with(words, "train.checkpoint_every=1", "train.keep_checkpoints=0")
    train(compose([*keep, f"out={out}"]))
    train(
        compose_run(
            [f"train.resume={out / 'checkpoints' / 'step-00000002'}", "optimizer.lr=1e-4", "train.steps=4"]
        )
    )
    latest, metrics = (out / "checkpoints" / "latest").read_text(), (out / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="took another course"):
        train(compose_run([f"train.resume={out / 'checkpoints' / 'step-00000006'}"]))
    assert (out / "checkpoints" / "latest").read_text() == latest
    assert (out / "metrics.jsonl").read_bytes() == metrics


def test_other_documents_of_the_same_lengths_are_refused(words, tmp_path, corpus_path):
    other = tmp_path / "other.jsonl"
    other.write_text(corpus_path.read_text().replace("pack", "hack"))
    out = tmp_path / "run"
    train(compose([*words, f"out={out}"]))
    with pytest.raises(ValueError, match="trained on other documents"):
        train(compose_run([f"out={out}", "train.resume=true", "train.steps=9", f"data.path={other}"]))


def test_a_vocabulary_larger_than_the_tokenizers_samples_only_what_it_can_say(words, tmp_path):
    train(
        compose(_with(words, "model.vocabulary_size=2048", "train.sample_top_k=0", f"out={tmp_path / 'run'}"))
    )
    assert (tmp_path / "run" / "samples.txt").read_text().count("=== step") == 3


def test_weights_that_are_not_finite_are_never_saved(words, tmp_path):
    out = tmp_path / "run"
    wild = _with(
        words,
        "optimizer.lr=1e38",
        "optimizer.warmup_steps=0",
        "train.checkpoint_every=1",
        "train.eval_every=0",
    )
    with pytest.raises(NonFiniteLoss, match="not finite"):
        train(compose([*wild, f"out={out}"]))
    for path in (out / "checkpoints").glob("step-*"):
        assert all(
            torch.isfinite(weight).all() for weight in load_checkpoint(path).source.whole("model").values()
        )


def test_evaluation_leaves_the_random_numbers_alone(words, tmp_path):
    for name, more in (
        ("often", ["train.eval_every=1"]),
        ("never", ["train.eval_every=0", "train.prefetch=0"]),
    ):
        train(compose(_with(words, "model.dropout=0.2", *more, f"out={tmp_path / name}")))
    assert _losses(tmp_path / "often") == _losses(tmp_path / "never")
