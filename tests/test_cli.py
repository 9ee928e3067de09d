"""The commands as a user types them."""

import json
import os
import runpy
import signal
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import multipack
from multipack.cli import app, main
from multipack.training.apply import StopRequest


@pytest.fixture
def run():
    def invoke(*words):
        return CliRunner().invoke(app, list(words), catch_exceptions=False)

    return invoke


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(10, 900, 500))
    return path


@pytest.fixture
def ended(monkeypatch, capsys):
    """Words → exit code and errors of a command."""

    def invoke(*words):
        monkeypatch.setattr(sys, "argv", ["multipack", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr().err

    return invoke


@pytest.fixture
def fails(ended):
    """The message of a command that is refused, which is one line with exit code 2."""

    def invoke(*words):
        code, error = ended(*words)
        assert (code, error.count("\n"), error[:7]) == (2, 1, "error: "), words
        return error

    return invoke


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version(run, word):
    assert run(word).output == f"{multipack.__version__}\n"


def test_help_and_settings_fit_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [each.callback.__name__.replace("_", "-") for each in app.registered_commands]
    assert all(command in run("--help").output for command in names)
    assert "..." not in run("--help").output.split("Commands:")[1]  # no sentence is cut
    settings = {name: run(name, "--settings").output for name in ("train", "prepare", "plan", "pack")}
    for command, shown in settings.items():
        assert max(map(len, shown.splitlines())) <= 80
        assert "\n\n\n" not in shown
        lines = run(command, "--help").output.splitlines()
        assert max(map(len, lines)) <= 80
        assert sum(line.startswith("    multipack ") for line in lines) >= 2  # one line an example
    assert "plan.packs_per_step" in settings["train"]
    assert "data=huggingface|jsonl|mixture|" in settings["train"]
    assert "\n  data.fields  " in settings["prepare"]
    assert "plan." not in settings["prepare"]
    assert "\n  train.steps" not in settings["plan"]
    assert "time_budget" in settings["pack"]


TORCH_FREE = """
import sys
from multipack.cli import main
for words, code in COMMANDS.items():
    sys.argv, ended = ["multipack", *words.replace("LENGTHS", LENGTHS).split()], 0
    try:
        main()
    except SystemExit as end:
        ended = end.code or 0
    assert ended == code, (words, ended)
    heavy = {"torch", "transformers", "datasets"} | ({"numba"} if code else set())
    assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))
"""
COMMANDS = {
    "train train.stepz=2": 2,
    "train --help": 0,
    "train --settings": 0,
    "config model=tiny": 0,
    "launch -n 2 --dry-run -- train model=gpt2": 0,
    "submit --scheduler slurm -- train model=gpt2 parallel.data=zero3": 0,
    "plan LENGTHS plan.capacity=1000": 0,
    "pack LENGTHS capacity=1000": 0,
}
"""Command → its exit code; a mistake is answered before anything is loaded."""


def test_commands_without_tensors_do_not_import_torch(lengths_file):
    names = f"LENGTHS, COMMANDS = {str(lengths_file)!r}, {COMMANDS!r}\n"
    subprocess.run([sys.executable, "-c", names + TORCH_FREE], check=True, capture_output=True)


def test_config_prints_what_starts_the_same_run(run, tmp_path):
    shown = run("config", "model=tiny", "train.steps=3").output
    (tmp_path / "config.yaml").write_text(shown)
    assert run("config", f"config={tmp_path / 'config.yaml'}").output == shown
    assert "layers: 2" in shown


def test_settings_are_found_by_words_and_config_shows_what_was_changed(run):
    shown = run("train", "--settings", "overlap").output
    assert "data.overlap" in shown
    assert "train.steps" not in shown
    changed = run("config", "--changed", "train.steps=3", "data.validation=0.2").output
    assert changed.split() == ["data:", "validation:", "0.2", "train:", "steps:", "3"]


def test_the_capacity_has_one_name_and_others_are_understood(run):
    words = ["model=tiny", "model.vocabulary_size=512", "devices=1", "--json"]
    found = [
        json.loads(run("advise", f"{name}=1024", *words).output)
        for name in ("plan.capacity", "capacity", "max_length", "sequence_len")
    ]
    assert all(each == found[0] for each in found)
    for command in ("train", "plan", "pack", "advise"):
        assert "  plan.capacity  " in run(command, "--settings").output


def test_a_signal_is_answered_at_once(capfd):
    for number, said in ((signal.SIGTERM, "after this step\n"), (signal.SIGINT, "Ctrl-C once more")):
        with StopRequest(announces=True) as stop:
            os.kill(os.getpid(), number)
            assert stop.signal == number
            error = capfd.readouterr().err
            assert f"{number.name}: the run saves and stops after this step" in error
            assert said in error


def test_plan_reports_and_draws(run, lengths_file, monkeypatch):
    monkeypatch.chdir(lengths_file.parent)
    words = ("plan", lengths_file.name, "plan.capacity=2048", "plan.packs_per_step=8")
    shown = run(*words, "world_size=2").output
    balance = ("utilization", "imbalance", "L² lag", "κ", "of the ceiling")
    for row in ("packing efficiency", "padding instead", "cost utilization", *balance):
        assert f"  {row}" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    last = "multipack launch -n 2 -- train data=… plan.capacity=2048"
    assert shown.splitlines()[-1].startswith(f"  {last}")
    alone, lower = run(*words).output, run(*words, "plan.budget=1800").output
    assert not any(f"  {row}" in alone for row in balance)
    assert alone.count("cu_seqlens") == 4
    assert ["lower bound for full packs" in text for text in (alone, lower)] == [False, True]


def test_the_printed_command_trains_with_the_same_settings(run, lengths_file):
    words = ["plan.capacity=2048", "plan.group=false", "plan.micro_batches=3", "plan.window=8"]
    shown = run("plan", str(lengths_file), *words, "seed=4", "world_size=8", "context=2")
    launch, _, settings = shown.output.splitlines()[-1].strip().partition(" train data=… ")
    assert launch == "multipack launch -n 16 --"
    assert sorted(settings.split()) == sorted([*words, "train.seed=4", "parallel.context=2"])


def test_the_cost_of_a_plan_is_a_models(run, lengths_file, tmp_path):
    words = ["plan", str(lengths_file), "plan.capacity=2048", "plan.packs_per_step=4", "world_size=4"]

    def fingerprint(*more):
        return json.loads(run(*words, "--json", *more).stdout)["fingerprint"]

    report = json.loads(run(*words, "--json").stdout)
    assert (report["documents"], report["steps"] >= report["minimum_steps"]) == (500, True)
    assert 0 < report["padded_share"] < 1
    assert fingerprint() == fingerprint("model=llama-8b") != fingerprint("model=llama-70b")
    assert fingerprint("model.layers=80") != fingerprint()
    described = {
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert fingerprint(f"model={tmp_path / 'config.json'}") == fingerprint("model=llama-70b")


def test_pack_prints_and_saves_packs_with_their_bound(run, tmp_path):
    lengths = np.array([60, 45, 60, 45, 60, 45, 10, 10])
    np.save(tmp_path / "lengths.npy", lengths)
    out = tmp_path / "packs.npz"
    words = ("pack", str(tmp_path / "lengths.npy"), "capacity=100")
    assert "67.0000%" in run(*words, f"out={out}").output
    with np.load(out) as saved:
        packs = np.split(lengths[saved["order"]], saved["offsets"][1:-1])
        assert sorted(saved["order"]) == list(range(8))
        assert [len(packs), saved["lower_bound"], saved["capacity"]] == [5, 5, 100]
        assert max(pack.sum() for pack in packs) <= 100
    report = json.loads(run(*words, "method=next_fit", "plan.max_documents=1", "--json").stdout)
    assert (report["packs"], report["lower_bound"], report["gap"], report["documents"]) == (8, 8, 0, 8)
    report = json.loads(run(*words, "method=next_fit", "--json").stdout)
    assert (report["packs"], report["gap"], report["filled"]) == (6, 1, 335 / 600)


def test_prepare_plan_train_generate(run, words, tmp_path):
    store, out = tmp_path / "pairs.store", tmp_path / "run"
    data = [word for word in words if word.startswith("data")]
    assert "documents   120" in run("prepare", *data, "tokenizer=byte", "--store", str(store)).output
    planned = run("plan", str(store), "plan.capacity=256", "plan.packs_per_step=2").output
    assert "packing efficiency" in planned
    assert "proven bound" in run("pack", str(store), "capacity=256").output
    rest = [word for word in words if not word.startswith(("data", "tokenizer"))]
    trained = run("train", "data=store", f"data.path={store}", *rest, f"out={out}")
    assert trained.exit_code == 0
    assert "final validation loss" in trained.output
    ask = ("generate", str(out), "--prompt", "Q1: pack", "--max-tokens", "5", "--temperature", "0")
    answer = run(*ask).output
    assert answer.startswith("Q1: pack")
    assert run("generate", str(out / "checkpoints" / "step-00000006"), *ask[2:]).output == answer


def test_documents_are_planned_as_training_does(run, tmp_path, monkeypatch):
    """The same documents without those for validation, in the same order, and the command that trains with the plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    file = tmp_path / "pairs.jsonl"
    records = [{"prompt": "p" * (n % 7), "completion": "c" * (1 + n)} for n in range(60)]
    records[3]["completion"] = "long " * 100
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = ["data.overlong=truncate", "tokenizer=byte", "plan.capacity=128", "plan.packs_per_step=2"]
    shown = run("plan", str(file), *settings).output
    words = ("data=jsonl", f"data.path={file}", *settings)
    spelled = [*words[:4], "capacity=128", "plan.packs_per_step=2"]
    same = [
        json.loads(run("plan", *each, "--json").stdout) for each in ([str(file), *settings], words, spelled)
    ]
    assert len({each["fingerprint"] for each in same}) == 1
    assert same[0]["documents"] == 54
    for row in ("validation          6 documents", "too long            1 document longer than 128 tokens"):
        assert f"  {row}" in shown
    command = shown.splitlines()[-1].strip()
    assert command.startswith(f"multipack train data=jsonl data.path={file} data.overlong=truncate")
    resolved = run("config", *command.split()[2:]).output
    assert "capacity: 128" in resolved
    assert "kind: byte" in resolved
    assert len(shown.splitlines()) - shown.splitlines().index(f"plan of {file}") <= 40


def test_a_stream_is_planned_as_training_cuts_it(run, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 40)
    store = tmp_path / "text.store"
    words = ("data=text", f"data.path={tmp_path / 'text.txt'}", "data.documents=stream", "tokenizer=char")
    run("prepare", *words, "--store", str(store))
    planned = run("plan", str(store), "plan.capacity=100", "plan.packs_per_step=2", "--json")
    report = json.loads(planned.output)
    assert (report["documents"], report["tokens"]) == (16, 1548)  # without the last tenth, for validation


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("train train.stepz=2", "did you mean train.steps"),
        ("train data=text data.path=nowhere.txt", "nowhere.txt"),
        ("plan nowhere.npy", "nowhere.npy"),
        ("generate nowhere --prompt x", "nowhere"),
        ("prepare data=jsonl", "data.path"),
        ("plan LENGTHS world_size=9", "plan.packs_per_step"),
        ("plan LENGTHS model=llama-9b", "did you mean model=llama-8b"),
        ("plan LENGTHS plan.widnow=3", "did you mean plan.window"),
        ("plan LENGTHS plan.capacity=100", "capacity=100"),
        ("pack nowhere.npy", "nowhere.npy"),
        ("pack LENGTHS capacity=100", "capacity=100"),
        ("pack LENGTHS method=best", "method"),
        ("pack LENGTHS plan.max_documents=-1", "plan.max_documents"),
        ("pack LENGTHS out=packs.json", ".npz"),
        ("pack LENGTHS out=LENGTHS.npz", "exists"),
        ("pack LENGTHS plan.capactiy=9", "did you mean plan.capacity"),
        ("plan --foo", "--foo"),
        ("plan LENGTHS --pictrue a.html", "--picture"),
        ("plan", "nothing to plan"),
        ("plna", "'plna'"),
        ("generate somewhere", "--prompt"),
        ("plan LENGTHS plan.capacity", "plan.capacity=VALUE"),
        ("train train.steps=ten", "train.steps=ten: must be a whole number"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(fails, lengths_file, words, named):
    lengths_file.with_suffix(".npy.npz").touch()
    assert named in fails(*words.replace("LENGTHS", str(lengths_file)).split())


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train data.path=chats.jsonl", "set data=jsonl to read chats.jsonl"),
        ("train data.path=web/part.parquet", "set data=parquet"),
        ("train out=runs/none train.resume=true", "there is no folder runs/none"),
        ("train train.lora=true", "set adapter=lora"),
        ("train train.wd=0.1", "set optimizer.weight_decay"),
        ("train optimizer.type=adam", "optimizer.name"),
        ("train train.qwxyz=1", "--settings"),
        ("plan lengths.npy plan.xyzzy=1", "--settings"),
        ("train --settings xyzzy", "no setting has xyzzy"),
        ("generate nowhere hello", "nowhere"),
    ],
)
def test_mistakes_are_answered_with_what_to_type(fails, words, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = fails(*words.split())
    assert answer in message
    assert "did you mean" not in message


def test_torchrun_reports_the_reason(fails, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    message = fails("train", "train.stepz=2")
    written = json.loads((tmp_path / "error.json").read_text())
    assert written["message"]["message"] in message


def test_bad_files_of_lengths_are_refused(fails, tmp_path):
    path = tmp_path / "bad.npy"
    for command, array, named in (
        ("plan", np.array([3, 0, 5]), "document 1"),
        ("plan", np.array([3, -2, 5]), "document 1"),
        ("plan", np.array([3.0, 2.5]), "float"),
        ("plan", np.array([], dtype=np.int64), "empty"),
        ("plan", np.array([10, 50_000]), "50,000"),
        ("pack", np.array([[1, 2]]), "shape (1, 2)"),
    ):
        np.save(path, array)
        assert named in fails(command, str(path)), array
    path.write_text("hello")
    assert ".npy" in fails("plan", str(path))


def test_other_ranks_print_their_rank_after_rank_0(monkeypatch, ended):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert ended("plan", "nowhere.npy")[1].startswith("[rank 3] error: ")
    assert waited


def test_how_commands_end(monkeypatch, ended):
    def ending(error):
        def complain(**_):
            raise error

        monkeypatch.setattr("multipack.cli.app", complain)
        return ended()

    code, error = ending(KeyboardInterrupt())
    assert code == 130
    assert "interrupted" in error
    for raised, line in (
        (ValueError("a library's\nlines"), "error: a library's lines\n"),
        (ValueError(), "error: ValueError\n"),
        (
            OSError(28, "No space left on device", "file"),
            "error: [Errno 28] No space left on device: 'file'\n",
        ),
        (MemoryError(), "error: out of memory\n"),
        (RuntimeError("[alloc] can't allocate memory: 9 bytes"), "9 bytes)\n"),
    ):
        code, error = ending(raised)
        assert code == 2
        assert error.endswith(line)
        assert error.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        ending(ZeroDivisionError("a defect"))


def test_without_words_the_help_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multipack"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, 2)  # by Typer's version
    shown = "".join(capsys.readouterr())
    assert "advise" in shown
    assert "error:" not in shown
    monkeypatch.setattr(sys, "argv", ["multipack", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("multipack", run_name="__main__")
    assert capsys.readouterr().out.strip() == "0.1.0"
