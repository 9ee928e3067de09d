"""The loop, end to end in one process: finished, stopped, killed, diverged, refused, resumed."""

import itertools
import json
import math
import os
import re
import signal

import pytest
import torch

from multipack.cli import main
from multipack.models.decoder import Decoder
from multipack.run import RunDirectory
from multipack.training.apply import StopRequest
from multipack.training.callbacks import spikes
from multipack.training.callbacks.callback import NonFiniteLoss, RunStopped
from multipack.training.checkpoint import load_checkpoint
from multipack.training.feed import Validation
from multipack.training.metrics import LEGEND
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train

CALLBACKS = [
    "train.spike=skip",
    "train.patience=9",
    "log.gradient_noise=true",
    "optimizer.rules=[blocks.0.attention freeze, *norm* lr=2]",
]


def _tensors(out):
    source = load_checkpoint(RunDirectory(out).latest_checkpoint()).source
    return {
        f"{group}.{name}": t for group in ("model", "optimizer") for name, t in source.whole(group).items()
    }


def _assert_equal(out, other, files):
    assert files(out).untimed == files(other).untimed
    ours, theirs = _tensors(out), _tensors(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_run_learns_prints_and_leaves_its_directory(words, tmp_path, capsys, files, changed):
    out = tmp_path / "run"
    result = train(compose(changed(words, "train.dtype=auto", f"out={out}")), compare_padding=True)
    printed = capsys.readouterr().out
    assert compose_run(["train.resume=true", f"out={out}"]).train.dtype == "fp32"  # what auto chose
    found = files(out)
    assert (result.step, result.stopped_by) == (6, None)
    assert found.losses[-1] < found.losses[0] - 0.1
    assert [record["step"] for record in found.evaluations] == [0, 3, 6]
    assert "train_loss" not in found.evaluations[0]
    targets = [record["target_tokens"] for record in found.steps[:3]]
    mean = sum(loss * count for loss, count in zip(found.losses, targets, strict=False)) / sum(targets)
    assert found.evaluations[1]["train_loss"] == pytest.approx(mean)
    assert found.evaluations[-1]["val_loss"] == result.val_loss
    others = {"train_loss", "val_loss", "dtc", "time_spread", "skipped", "gradient_noise"}
    assert set(found.steps[0]) == set(LEGEND) - others
    for row in (
        "1 process on cpu",
        "attention loop",
        "filled (padded rows",
        "log.verbose=true prints more",
        "pad factor",
        "loss by step",
        f"written: {out}, {out / 'checkpoints' / 'step-00000006'}",
        f"final validation loss {result.val_loss:.4f} (perplexity {math.exp(result.val_loss):.4g})",
    ):
        assert row in " ".join(printed.split()), row
    assert len(printed.partition("start-up time")[0].strip().splitlines()) <= 10
    steps = re.findall(r"^step .*", printed, re.M)
    assert max(map(len, steps)) <= 100
    assert re.fullmatch(
        r"step 6/6  loss \d\.\d{4}  val \d\.\d{4}  [\d,]+ tokens/s  (MFU [\d.]+ %  )?0:00 left", steps[-1]
    )
    assert "\x1b[" not in printed  # not a terminal: plain lines
    assert len(steps) == 4  # the first, and every second one
    assert result.comparison.ratio > 0
    assert (out / "samples.txt").read_text().count("=== step") == len(found.evaluations)
    names = ["best", "latest", "step-00000003", "step-00000006"]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == names
    assert RunDirectory(out).best_checkpoint().name == "step-00000006"


def test_the_saved_configuration_starts_the_same_run_again(finished, tmp_path, files, capsys):
    words = [f"config={finished / 'config.yaml'}", f"out={tmp_path / 'again'}", "log.verbose=true"]
    train(compose(words))
    assert files(tmp_path / "again").untimed == files(finished).untimed
    printed = capsys.readouterr().out
    for text in (
        "corpus hash",
        "packing efficiency",
        "cost_spread ",
        "\nstep=2 loss=",
        "\nevaluation step=3 ",
    ):
        assert text in printed, text


def test_a_longer_run_with_every_callback_is_the_one_that_was_planned_so(words, tmp_path, files, changed):
    """Bit for bit, across the end of an epoch; test_resume.py asks the same of every kind of run."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ["train.steps=3", "train.eval_every=2", "model.dropout=0.1", *CALLBACKS]
    more += ["plan.capacity=1024", "plan.packs_per_step=4"]
    long = changed(words, *more)
    train(compose([*long, f"out={whole}"]))
    train(compose(changed(long, "train.steps=2", "optimizer.decay_steps=3", f"out={parts}")))
    # As if the process had been killed after it wrote records that no checkpoint saw.
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    train(compose_run([f"out={parts}", "train.resume=true", "train.steps=3"]))
    _assert_equal(parts, whole, files)
    assert (parts / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    epochs = [json.loads(line)["epoch"] for line in (whole / "documents.jsonl").read_text().splitlines()]
    assert epochs[0] < epochs[-1]


def test_a_run_on_files_is_that_in_memory_and_resumes(words, tmp_path, files, changed, capsys):
    """With a state in files, and with parameters too (zero3): losses, and what is saved, are equal bit for bit."""
    steady = changed(words, "train.steps=2", "train.eval_every=0", "optimizer.warmup_steps=1")
    drive = tmp_path / "drive"
    drive.mkdir()
    disk = ["parallel.offload=disk", f"parallel.offload_folder={drive}"]
    train(compose([*steady, f"out={tmp_path / 'plain'}"]))
    train(compose([*steady, *disk, f"out={tmp_path / 'state'}"]))
    assert "offloaded to files" in " ".join(capsys.readouterr().out.split())
    assert files(tmp_path / "state").losses == files(tmp_path / "plain").losses
    parts = changed(steady, "train.steps=1", "optimizer.decay_steps=2", "parallel.data=zero3", *disk)
    train(compose([*parts, f"out={tmp_path / 'parts'}"]))
    train(compose_run([f"out={tmp_path / 'parts'}", "train.resume=true", "train.steps=2"]))
    assert files(tmp_path / "parts").losses == pytest.approx(files(tmp_path / "plain").losses, rel=1e-6)
    assert not list(drive.iterdir())


def test_a_signal_before_an_evaluation_loses_no_evaluation(
    finished, words, tmp_path, files, watched, recorder
):
    watched.append(
        recorder(gradient=lambda step: os.kill(os.getpid(), signal.SIGTERM) or {} if step == 2 else {})
    )
    out = tmp_path / "run"
    stopped = train(compose([*words, f"out={out}"]))
    assert (stopped.step, stopped.stopped_by) == (3, signal.SIGTERM)
    watched.clear()
    train(compose_run([f"out={out}", "train.resume=true"]))
    assert files(out).untimed == files(finished).untimed


def test_ctrl_c_asks_once_and_interrupts_twice():
    asked = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in jobs in the background
    with StopRequest(lambda: asked.append(1)) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.signal, asked) == (signal.SIGINT, [1])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_loss_that_is_not_finite_names_documents_and_keeps_the_checkpoint(
    words, tmp_path, monkeypatch, files
):
    out, forward, calls = tmp_path / "run", Decoder.forward, itertools.count(1)

    def spoiled(self, batch):
        loss = forward(self, batch)
        # Micro-batch 8 of training is the second of step 4.
        return loss * float("nan") if self.training and next(calls) == 8 else loss

    monkeypatch.setattr(Decoder, "forward", spoiled)
    with pytest.raises(NonFiniteLoss, match=r"step 4 is not finite.*step-00000003") as caught:
        train(compose([*words, f"out={out}"]))
    named = re.findall(r"(\d+) \(pairs\.jsonl", str(caught.value))
    assert 0 < len(named) < 60  # of one pack, not of the whole step
    assert issubclass(NonFiniteLoss, RunStopped)
    assert [record["step"] for record in files(out).steps] == [1, 2, 3]
    monkeypatch.setattr(Decoder, "forward", forward)
    train(compose_run([f"out={out}", "train.resume=true", "train.steps=4"]))
    assert len(files(out).losses) == 4


def test_weights_that_are_not_finite_are_never_saved(words, tmp_path, changed):
    more = ["optimizer.lr=1e38", "optimizer.warmup_steps=0", "train.checkpoint_every=1", "train.eval_every=0"]
    with pytest.raises(NonFiniteLoss, match="not finite"):
        train(compose(changed(words, *more, f"out={tmp_path / 'run'}")))
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert all(
            torch.isfinite(weight).all() for weight in load_checkpoint(path).source.whole("model").values()
        )


def test_a_spike_ends_the_command_in_one_line(words, tmp_path, monkeypatch, capsys):
    def after_step(guard, step, engine, applied):
        if step == 2:
            guard._moments = {name: spikes.RunningMoments(100, 0.0) for name in ("loss", "grad_norm")}

    monkeypatch.setattr(spikes.SpikeGuard, "after_step", after_step)
    more = ["train.spike=stop", "train.eval_every=2", "train.checkpoint_every=2", f"out={tmp_path / 'run'}"]
    monkeypatch.setattr("sys.argv", ["multipack", "train", *words, *more])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    last = RunDirectory(tmp_path / "run").latest_checkpoint()
    assert "train.spike=stop" in line
    assert line.endswith(f"Last good checkpoint: {last}")
    assert json.loads((last / "state.json").read_text())["step"] == 2


def test_a_taken_run_directory_is_refused_and_untouched(words, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        train(compose([*words, f"out={out}"]))
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_a_resumed_run_refuses_what_would_make_it_another_run(finished, tmp_path, corpus_path):
    other = tmp_path / "other.jsonl"
    other.write_text(corpus_path.read_text().replace("pack", "hack"))
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="trained with other documents"):
        train(compose_run([f"out={finished}", "train.resume=true", "train.steps=9", f"data.path={other}"]))
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_illegal_settings_fail_before_anything_is_written(words, tmp_path):
    for word, named in (
        ("plan.capacity=20", "20"),
        ("model.vocabulary_size=10", "model.vocabulary_size=10"),
    ):
        with pytest.raises(ValueError, match=named):
            train(compose([*words, word, f"out={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("limit", "packs"), [(0, 14), (5, 6)])
def test_eval_packs_limits_evaluations(trainer, limit, packs):
    """To the first packs, in whole steps of two."""
    run, seen = trainer("data.validation=0.5", f"train.eval_packs={limit}"), []
    evaluate = run.engine.evaluate
    run.engine.evaluate = lambda batches: seen.extend(batches) or evaluate(batches)
    loss = run.feeds.validation.losses()[""]
    assert len(seen) == packs
    assert loss == pytest.approx(sum(evaluate(seen)) / sum(batch.num_target_tokens for batch in seen))


def test_evaluation_leaves_random_numbers_alone_and_samples_may_be_left_out(words, tmp_path, files, changed):
    often = ["train.eval_every=1", "train.sample_tokens=0"]
    for name, more in (("often", often), ("never", ["train.eval_every=0", "train.prefetch=0"])):
        train(compose(changed(words, "model.dropout=0.2", "train.steps=3", *more, f"out={tmp_path / name}")))
    assert files(tmp_path / "often").losses == files(tmp_path / "never").losses
    assert (tmp_path / "often" / "samples.txt").read_text() == ""


def test_fixed_shape_gives_the_same_losses(finished, words, tmp_path, files):
    train(compose([*words, "train.fixed_shape=true", f"out={tmp_path / 'fixed'}"]))
    fixed, free = files(tmp_path / "fixed"), files(finished)
    assert fixed.losses == pytest.approx(free.losses, rel=1e-5)
    assert all(record["padding"] > 0 for record in fixed.steps)
    assert all(record["padding"] == 0 for record in free.steps)


def test_gpt2_trains_in_bf16_with_muon(words, tmp_path, files, changed):
    shape = ["model.positions=learned", "model.norm=layernorm", "model.activation=gelu", "model.context=256"]
    more = ["train.eval_every=0", "train.dtype=bf16", "optimizer.name=muon"]
    train(compose(changed(words, *shape, *more, f"out={tmp_path / 'run'}")))
    losses = files(tmp_path / "run").losses
    assert losses[-1] < losses[0] - 0.1


def test_a_checkpoint_of_another_course_is_refused_before_anything_changes(finished):
    metrics, latest = finished / "metrics.jsonl", finished / "checkpoints" / "latest"
    metrics.write_bytes(metrics.read_bytes().replace(b'"step": 2', b'"step": 9'))
    before = metrics.read_bytes(), latest.read_bytes()
    with pytest.raises(ValueError, match="does not begin with what this checkpoint"):
        train(compose_run([f"train.resume={finished / 'checkpoints' / 'step-00000003'}"]))
    assert (metrics.read_bytes(), latest.read_bytes()) == before


@pytest.fixture
def val_losses(monkeypatch):
    """Validation losses to come, instead of measured ones."""
    coming = []
    monkeypatch.setattr(Validation, "losses", lambda self: {"": coming.pop(0)})
    return coming


def _best(out):
    run = RunDirectory(out)
    return run.best.read_text().strip() if run.best.is_file() else None


@pytest.mark.parametrize(
    ("more", "best"),
    [
        ("train.keep_best=true", 2),
        pytest.param("train.patience=9", 2, marks=pytest.mark.slow),
        pytest.param("train.keep_best=false", 3, marks=pytest.mark.slow),
    ],
)
def test_the_best_checkpoint_is_kept(words, tmp_path, val_losses, more, best):
    """Evaluations after which nothing is saved do not count."""
    out = tmp_path / "run"
    val_losses += [2.0, 4.0, 3.0, 6.0, 7.0]
    each = ["train.steps=4", "train.eval_every=1", "train.keep_checkpoints=1"]
    train(compose([*words, *each, more, f"out={out}"]))
    assert _best(out) == f"step-{best:08d}"
    kept = {path.name for path in (out / "checkpoints").glob("step-*")}
    assert kept == {f"step-{best:08d}", "step-00000004"}


def test_checkpoints_have_an_interval_of_their_own(words, tmp_path):
    more = ["train.steps=2", "train.checkpoint_every=0", "train.eval_every=1", "train.keep_checkpoints=0"]
    train(compose([*words, *more, f"out={tmp_path / 'run'}"]))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert _best(tmp_path / "run") == "step-00000002"


def test_a_resumed_run_makes_up_for_the_best_evaluation(words, tmp_path, val_losses, watched, recorder):
    watched.append(
        recorder(gradient=lambda step: os.kill(os.getpid(), signal.SIGTERM) or {} if step == 2 else {})
    )
    out = tmp_path / "run"
    val_losses += [5.0]
    assert train(compose([*words, f"out={out}"])).step == 3
    assert _best(out) is None
    watched.clear()
    val_losses += [3.0, 4.0]
    train(compose_run([f"out={out}", "train.resume=true", "train.keep_checkpoints=1"]))
    assert _best(out) == "step-00000003"
    assert RunDirectory(out).best_checkpoint().is_dir()


def test_a_run_that_goes_back_forgets_the_best_of_the_abandoned_course(words, tmp_path, val_losses):
    out = tmp_path / "run"
    val_losses += [9.0, 4.0, 5.0, 3.0]
    more = [
        "train.eval_every=1",
        "train.keep_checkpoints=0",
        "optimizer.decay_steps=4",
        "train.checkpoint_every=1",
    ]
    train(compose([*words, "train.steps=3", *more, f"out={out}"]))
    assert _best(out) == "step-00000003"
    val_losses += [4.5]
    train(compose_run([f"train.resume={out / 'checkpoints' / 'step-00000002'}", "train.steps=3"]))
    assert _best(out) == "step-00000001"
    state = json.loads((RunDirectory(out).latest_checkpoint() / "state.json").read_text())
    assert (state["progress"]["best"], state["progress"]["best_step"]) == (4.0, 1)
