"""The commands as a user types them."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from multipack.cli import app, main
from multipack.cli.command_options import COMMANDS
from multipack.planning.cost import CostModel
from multipack.shapes import SHAPES


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


def _fails(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["multipack", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


def test_help_names_every_command_and_settings_are_listed(run):
    shown = run("--help").output
    for command in ("train", "prepare", "plan", "pack", "generate", "config"):
        assert command in shown
    assert "multipack train data=jsonl" in run("train", "--help").output
    settings = run("train", "--settings").output
    assert "plan.packs_per_step" in settings
    assert "data=huggingface|jsonl|mixture|" in settings
    assert "Peak learning rate." in settings
    assert "multipack plan lengths.npy plan.capacity=8192" in run("plan", "--help").output
    assert "model=tiny|" in run("plan", "--settings").output
    assert "multipack pack lengths.npy capacity=8192" in run("pack", "--help").output
    assert "time_budget" in run("pack", "--settings").output
    assert "train." not in run("plan", "--settings").output


def test_command_names_are_those_of_the_application(run):
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names | {group.name for group in app.registered_groups} == set(COMMANDS)


def test_help_needs_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from multipack.cli import app;"
        "CliRunner().invoke(app, ['train', '--help']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_planning_and_packing_need_no_torch(lengths_file):
    code = (
        "import sys; from typer.testing import CliRunner; from multipack.cli import app;"
        "words = [sys.argv[1], *sys.argv[3:]];"
        "done = CliRunner().invoke(app, [sys.argv[2], *words], catch_exceptions=False);"
        "assert done.exit_code == 0, done.output; assert 'torch' not in sys.modules"
    )
    for words in (
        ["plan", "plan.capacity=1000"],
        ["plan", "--explore"],
        ["pack", "capacity=1000"],
        ["plan", "--settings"],
    ):
        subprocess.run([sys.executable, "-c", code, str(lengths_file), *words], check=True)


def test_help_and_settings_fit_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("train", "prepare", "plan", "pack", "config"):
        settings = run(command, "--settings").output
        assert max(map(len, settings.splitlines())) <= 80
        assert "\n\n\n" not in settings
        examples = [
            line for line in run(command, "--help").output.splitlines() if line.startswith("   multipack ")
        ]
        assert all(len(line) == 80 and line.endswith(" ") for line in examples)  # none goes on below
    assert "\n  data.fields  " in run("prepare", "--settings").output
    assert "plan." not in run("prepare", "--settings").output
    assert "[32]" in next(
        line for line in run("plan", "--settings").output.splitlines() if line.startswith("  model.layers ")
    )


def test_config_prints_what_starts_the_same_run(run, tmp_path):
    shown = run("config", "model=tiny", "train.steps=3").output
    (tmp_path / "config.yaml").write_text(shown)
    assert run("config", f"config={tmp_path / 'config.yaml'}").output == shown
    assert "layers: 2" in shown


def test_plan_reports_and_draws(run, lengths_file):
    shown = run(
        "plan", str(lengths_file), "plan.capacity=2048", "plan.packs_per_step=4", "world_size=2"
    ).output
    for told in (
        "packing efficiency",
        "cost utilization",
        "padding instead",
        "cu_seqlens",
        "padded to the longest",
    ):
        assert told in shown
    assert "2 ranks" in shown
    assert "advice" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.partition("\nstep 0 of")[2].splitlines()) <= 35
    last = "torchrun --nproc-per-node 2 -m multipack train data=… plan.capacity=2048"
    assert shown.splitlines()[-1] == f"  {last}"


def test_one_rank_is_not_told_how_ranks_agree(run, lengths_file):
    words = ("plan", str(lengths_file), "plan.capacity=2048")
    shown = run(*words).output
    for row in ("utilization", "imbalance", "L² lag", "κ", "of the ceiling"):
        assert f"  {row}" not in shown
        assert f"  {row}" in run(*words, "world_size=2").output


def test_the_picture_grows_where_it_is_asked_for(run, lengths_file):
    words = ("plan", str(lengths_file), "plan.capacity=2048", "plan.packs_per_step=8", "--step", "-1")
    short, long = run(*words).output, run(*words, "--picture").output
    assert "more packs" in short
    assert "more packs" not in long
    assert short.count("cu_seqlens") == 4
    assert long.count("cu_seqlens") == 8


def test_a_budget_is_told_from_full_packs(run, lengths_file):
    words = ("plan", str(lengths_file), "plan.capacity=2048")
    assert "no packing could have fewer than" in run(*words).output
    shown = run(*words, "plan.budget=1800").output
    assert "no packing could" not in shown
    assert "full ones would be at least" in shown


def test_the_last_line_trains_with_the_same_settings(run, lengths_file):
    words = ["plan.capacity=2048", "plan.group=false", "plan.micro_batches=3", "plan.window=8"]
    shown = run("plan", str(lengths_file), *words, "seed=4", "world_size=16").output.splitlines()[-1]
    launch, _, settings = shown.strip().partition(" multipack train data=… ")
    assert launch == "torchrun --nnodes … --nproc-per-node … -m"
    assert sorted(settings.split()) == sorted([*words, "train.seed=4"])


def test_compilation_is_announced_before_the_report(run, lengths_file, monkeypatch):
    monkeypatch.setattr("multipack.planning.first_use.cached", lambda *rooms: False)
    for command, words in (("plan", ["plan.capacity=1000"]), ("pack", ["capacity=1000"])):
        shown = run(command, str(lengths_file), *words).output
        assert shown.startswith("compiling the planner, once")
        quiet = run(command, str(lengths_file), *words, "--json")
        json.loads(quiet.stdout)
        assert quiet.stderr.startswith("compiling the planner")


def test_plan_as_json_is_json_alone(run, lengths_file):
    words = (
        "plan",
        str(lengths_file),
        "plan.capacity=2048",
        "plan.packs_per_step=4",
        "world_size=2",
        "--json",
    )
    report = json.loads(run(*words).output)
    assert report["documents"] == 500
    assert report["steps"] >= report["minimum_steps"]
    assert 0 < report["padded_share"] < 1
    assert json.loads(run(*words).output)["fingerprint"] == report["fingerprint"]


@pytest.fixture
def heavy_file(tmp_path):
    path = tmp_path / "heavy.npy"
    np.save(path, np.concatenate([np.random.default_rng(0).integers(10, 900, 3000), [16000, 15000, 14000]]))
    return path


def test_plan_says_what_would_lift_a_low_ceiling(run, heavy_file):
    words = ("plan", str(heavy_file), "plan.capacity=16384", "plan.packs_per_step=16", "world_size=16")
    shown = run(*words, "model=tiny").output
    assert "advice" in shown
    assert "no arrangement of these steps exceeds" in " ".join(shown.split())
    report = json.loads(run(*words, "model=tiny", "--json").stdout)
    assert report["cost_utilization"] <= report["cost_utilization_ceiling"] < 0.99
    larger = json.loads(
        run(*words, "model=llama-70b", "--json").output
    )  # attention matters less in a wide model
    assert larger["cost_utilization_ceiling"] > report["cost_utilization_ceiling"] + 0.1
    assert report["advice"][0] in " ".join(shown.split())
    assert "plan.capacity=" in shown
    assert report["late_share"] is not None


def test_the_cost_of_a_plan_is_a_presets_or_a_files(run, lengths_file, tmp_path):
    words = (
        "plan",
        str(lengths_file),
        "plan.capacity=2048",
        "plan.packs_per_step=4",
        "world_size=4",
        "--json",
    )

    def fingerprint(*more):
        return json.loads(run(*words, *more).output)["fingerprint"]

    assert fingerprint() == fingerprint("model=llama-8b") != fingerprint("model=llama-70b")
    assert fingerprint("model.layers=80") != fingerprint()
    model = CostModel.from_shape(SHAPES["llama-70b"])
    model.save(tmp_path / "fitted.json")
    assert fingerprint(f"cost={tmp_path / 'fitted.json'}") == fingerprint("model=llama-70b")
    described = {
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert fingerprint(f"model={tmp_path / 'config.json'}") == fingerprint("model=llama-70b")


def test_a_sample_of_steps_is_said(run, lengths_file):
    words = ("plan", str(lengths_file), "plan.capacity=1000", "plan.packs_per_step=2", "world_size=2")
    assert "20 steps, evenly apart" in run(*words, "sample=20").output
    assert "evenly apart" not in run(*words, "sample=0").output


def test_explore_is_a_table(run, lengths_file):
    words = (
        "plan",
        str(lengths_file),
        "plan.capacity=2048",
        "plan.packs_per_step=4",
        "world_size=2",
        "--explore",
    )
    shown = run(*words, "plan.window=8").output
    for told in (
        "window",
        "filled",
        "ceiling",
        "spread",
        "sync=micro",
        "could have fewer than",
        "Randomness",
    ):
        assert told in shown
    (chosen,) = [line.split() for line in shown.splitlines() if line.strip().startswith("→ ")]
    assert chosen[1:4] == ["8", "2048", "yes"]
    rows = json.loads(run(*words, "plan.group=false", "--json").output)
    assert [(row["window"], row["group"]) for row in rows if row["chosen"]] == [(4, False)]
    assert all(row["cost_utilization"] <= row["cost_utilization_ceiling"] for row in rows)


def test_pack_prints_packs_bound_and_gap(run, tmp_path):
    lengths = np.array([60, 45, 60, 45, 60, 45, 10, 10])
    np.save(tmp_path / "lengths.npy", lengths)
    out = tmp_path / "packs.npz"
    words = ("pack", str(tmp_path / "lengths.npy"), "capacity=100")
    shown = run(*words, f"out={out}").output
    assert "no packing has fewer than 5 packs: these are the fewest" in shown
    assert "67.0000% of the slots" in shown
    with np.load(out) as saved:
        packs = np.split(lengths[saved["order"]], saved["offsets"][1:-1])
        assert sorted(saved["order"]) == list(range(8))
        assert [len(packs), saved["lower_bound"], saved["capacity"]] == [5, 5, 100]
        assert max(pack.sum() for pack in packs) <= 100
    told = json.loads(run(*words, "method=next_fit", "max_documents=1", "--json").output)
    assert (told["packs"], told["lower_bound"], told["gap"], told["documents"]) == (8, 8, 0, 8)
    assert told["method"] == "next_fit"
    told = json.loads(run(*words, "method=next_fit", "--json").output)
    assert (told["packs"], told["gap"], told["filled"]) == (6, 1, 335 / 600)


def test_pack_reads_histograms(run, tmp_path):
    counts = np.zeros(100, dtype=np.int32)
    counts[[59, 44, 9]] = 3, 3, 2
    np.save(tmp_path / "counts.npy", counts)
    words = ("pack", str(tmp_path / "counts.npy"), "capacity=100", "histogram=true", "--json")
    told = json.loads(run(*words, "method=fewest").output)
    assert (told["documents"], told["tokens"], told["packs"], told["gap"]) == (8, 335, 5, 0)


def test_a_store_is_prepared_planned_trained_and_asked(run, words, tmp_path):
    store, out = tmp_path / "pairs.store", tmp_path / "run"
    data = [word for word in words if word.startswith("data")]
    shown = run("prepare", *data, "tokenizer=byte", "--store", str(store)).output
    assert "documents   120" in shown
    assert (
        "packing efficiency" in run("plan", str(store), "plan.capacity=256", "plan.packs_per_step=2").output
    )
    assert "proven bound" in run("pack", str(store), "capacity=256").output
    rest = [word for word in words if not word.startswith(("data", "tokenizer"))]
    trained = run("train", "data=store", f"data.path={store}", *rest, f"out={out}")
    assert trained.exit_code == 0
    assert "final validation loss" in trained.output
    ask = ("generate", str(out), "--prompt", "Q1: pack", "--max-tokens", "5", "--temperature", "0")
    answer = run(*ask).output
    assert answer.startswith("Q1: pack")
    assert run(*ask).output == answer
    by_checkpoint = run("generate", str(out / "checkpoints" / "step-00000006"), *ask[2:]).output
    assert by_checkpoint == answer


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "train.stepz=2"], "did you mean train.steps"),
        (["train", "data=text", "data.path=nowhere.txt"], "nowhere.txt"),
        (["plan", "nowhere.npy"], "nowhere.npy does not exist"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere is not there"),
        (["prepare", "data=jsonl"], "data.path"),
        (["plan", "LENGTHS", "world_size=9"], "set plan.packs_per_step to 9 or more"),
        (["plan", "LENGTHS", "sample=-1"], "sample must be at least 0"),
        (["plan", "LENGTHS", "cost=nowhere.json"], "cost=nowhere.json is no file"),
        (["plan", "LENGTHS", "cost=a.json", "model=tiny"], "set only one of them"),
        (["plan", "LENGTHS", "plan.cost=measured"], "give cost=FILE"),
        (["plan", "LENGTHS", "model=llama-9b"], "did you mean model=llama-8b"),
        (["plan", "LENGTHS", "plan.widnow=3"], "did you mean plan.window"),
        (["plan", "LENGTHS", "plan.capacity=100", "--explore"], "a pack holds capacity=100"),
        (["pack", "nowhere.npy"], "nowhere.npy does not exist"),
        (["pack", "LENGTHS", "capacity=100"], "a pack holds capacity=100"),
        (["pack", "LENGTHS", "method=best"], "method"),
        (["pack", "LENGTHS", "max_documents=-1"], "max_documents must not be negative"),
        (["pack", "LENGTHS", "out=packs.json"], "must end with .npz"),
        (["pack", "LENGTHS", "out=LENGTHS.npz"], "exists already"),
        (["pack", "LENGTHS", "capactiy=9"], "did you mean capacity"),
        (["pack", ".", "histogram=true"], "is a folder"),
        (["plan", "--foo"], "No such option: --foo"),
        (["plan", "LENGTHS", "--stpe", "3"], "--step"),
        (["plan"], "see `multipack plan --help`"),
        (["pack", "--jsn"], "No such option: --jsn"),
        (["plna"], "No such command 'plna'"),
        (["--foo"], "No such option: --foo"),
        (["generate", "somewhere"], "--prompt"),
        (["plan", "LENGTHS", "--step", "99999"], "--step 99999 is none of the plan's"),
        (["plan", "LENGTHS", "--step", "-99999"], "or -1 for the last"),
        (["plan", "LENGTHS", "--tokens-per-character", "-4"], "--tokens-per-character"),
        (["plan", "LENGTHS", "plan.capacity"], "plan.capacity has no value: write plan.capacity=VALUE"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(monkeypatch, capsys, lengths_file, words, told):
    lengths_file.with_suffix(".npy.npz").touch()
    code, error = _fails(monkeypatch, capsys, *(word.replace("LENGTHS", str(lengths_file)) for word in words))
    assert code == 2
    assert error.startswith("error: ")
    assert told in error
    assert error.count("\n") == 1


def test_other_ranks_say_who_they_are(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert _fails(monkeypatch, capsys, "plan", "nowhere.npy")[1].startswith("[rank 3] error: ")
    assert waited  # so that rank 0 can say the same first, and its end ends this one


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.array([3, 0, 5]), "document 1"),
        (np.array([3, -2, 5]), "document 1"),
        (np.array([3.0, 2.5]), "float"),
        (np.array([], dtype=np.int64), "empty"),
        (np.array([10, 5000]), "5,000"),
    ],
)
def test_lengths_that_cannot_be_are_refused(monkeypatch, capsys, tmp_path, array, told):
    np.save(tmp_path / "bad.npy", array)
    code, error = _fails(monkeypatch, capsys, "plan", str(tmp_path / "bad.npy"), "plan.capacity=4096")
    assert code == 2
    assert told in error


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.array([[1, 2]]), "shape (1, 2)"),
        (np.array([1.0, 2.0]), "float64"),
        (np.array([3, -2]), "-2 documents of 2 tokens"),
        (np.array([0, 0]), "counts 0 documents"),
        (np.array([2**40]), "can be packed"),
    ],
)
def test_histograms_that_cannot_be_are_refused(monkeypatch, capsys, tmp_path, array, told):
    np.save(tmp_path / "bad.npy", array)
    code, error = _fails(monkeypatch, capsys, "pack", str(tmp_path / "bad.npy"), "histogram=true")
    assert code == 2
    assert told in error


def test_a_file_that_is_no_array_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "text.npy").write_text("hello")
    assert "not a .npy file of lengths" in _fails(monkeypatch, capsys, "plan", str(tmp_path / "text.npy"))[1]


def test_python_dash_m_is_the_same_program():
    done = subprocess.run([sys.executable, "-m", "multipack", "version"], capture_output=True, text=True)
    assert done.stdout.strip() == "0.1.0"


def test_a_stream_is_planned_as_training_would_cut_it(run, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 40)
    store = tmp_path / "text.store"
    words = ("data=text", f"data.path={tmp_path / 'text.txt'}", "data.documents=stream", "tokenizer=char")
    run("prepare", *words, "--store", str(store))
    report = json.loads(
        run("plan", str(store), "plan.capacity=100", "plan.packs_per_step=2", "--json").output
    )
    assert (report["documents"], report["tokens"]) == (18, 1720)


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    from multipack.training import run_config

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_config, "compose_run", interrupt)
    code, error = _fails(monkeypatch, capsys, "config")
    assert code == 130
    assert "interrupted" in error


class Usage(Exception):
    """What click's exceptions offer, whichever click it is."""

    exit_code = 2

    def format_message(self):
        return "No such thing."


def test_any_clicks_usage_errors_are_one_line(monkeypatch, capsys):
    def complain(**_):
        raise Usage

    monkeypatch.setattr("multipack.cli.app", complain)
    assert _fails(monkeypatch, capsys) == (2, "error: No such thing (see `multipack --help`)\n")


def test_a_defect_is_no_usage_error(monkeypatch):
    def break_down(**_):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("multipack.cli.app", break_down)
    with pytest.raises(ZeroDivisionError):
        main()


def test_no_words_at_all_show_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multipack"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = "".join(capsys.readouterr())
    assert ended.value.code in (0, 2)  # by Typer's version
    assert "Pack documents, whatever their order" in told
