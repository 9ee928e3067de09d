"""What is recommended, why, and how the command says it."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from multipack.cli import app
from multipack.launch.advise import FAMILIES, WITHIN, advise
from multipack.launch.advise_request import AdviseRequest, model_words, read_size
from multipack.launch.candidates import Candidate, check, configurations, leanest_that_fits
from multipack.parallel.parallel_config import ParallelConfig
from multipack.shapes import SHAPES, ModelShape
from multipack.training.run_config import compose
from multipack.words import merge

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"
GIB = 2**30


def request(*words):
    return merge(AdviseRequest, words)


def family(candidate):
    return next(name for name, belongs in FAMILIES.items() if belongs(candidate))


# --- what is recommended ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["model=gpt2", "devices=8"], "ddp"),
        (["model=gpt2", "devices=1"], "ddp"),
        (["devices=16"], "zero"),
        (["devices=16", "link=slow"], "pipeline"),
        (["devices=16", "capacity=131072"], "context"),
        (["devices=8", "capacity=32768", "memory=40GiB", "model.window=4096"], "context"),
        (["model=llama-405b", "devices=256"], "together"),
    ],
)
def test_the_talks_tree(words, wanted):
    advice = advise(request(*words))
    assert family(advice.chosen) == wanted
    assert advice.chosen.fits
    assert advice.path[-1].answer.startswith("yes: ")
    assert all(not step.answer.startswith("yes") for step in advice.path[:-1])


def test_the_simplest_of_the_fast_ones_is_taken():
    asked = request("devices=16")
    setting, chosen = asked.setting(), advise(asked).chosen
    every = [leanest_that_fits(setting, config) for config in configurations(setting)]
    fast = [each for each in every if each.fits and each.config.offload == "none"]
    most = max(each.tokens_per_second for each in fast)
    assert chosen.tokens_per_second >= WITHIN * most
    simpler = [each for each in fast if each.complexity < chosen.complexity]
    assert all(each.tokens_per_second < WITHIN * most for each in simpler)


def test_no_more_is_computed_again_than_must_be():
    advice = advise(request("devices=16"))
    fits = [each.recompute for each in advice.recompute if each.fits]
    assert advice.chosen.recompute == fits[0]
    peaks = [each.memory.peak for each in advice.recompute]
    assert peaks == sorted(peaks, reverse=True)


def test_hosts_memory_is_for_what_fits_in_no_other_way():
    advice = advise(request("devices=2", "memory=48GiB", "capacity=2048"))
    assert advice.chosen.config.offload == "cpu"
    assert "120 GiB of each host" in advice.path[-1].answer
    assert all(step.answer.startswith("no: it takes") for step in advice.path[:-1])


def test_where_nothing_fits_it_says_what_would():
    advice = advise(request("devices=1", "memory=24GiB"))
    assert advice.chosen is None
    assert advice.command == ""
    assert not any(row.fits for row in advice.rows)
    (remedy,) = advice.remedies
    devices = re.search(r"devices=\d+", remedy)[0]
    assert advise(request(devices, "memory=24GiB")).chosen.fits
    shorter = advise(request("devices=2", "memory=24GiB", "capacity=262144")).remedies[0]
    capacity = re.search(r"capacity=\d+", shorter)[0]
    assert advise(request("devices=2", "memory=24GiB", capacity)).chosen.fits


def test_slow_links_between_hosts_keep_shards_within_one():
    setting = request("devices=16", "host_bandwidth=300", "network_bandwidth=2").setting()
    seconds = {
        data: Candidate(setting, ParallelConfig(data=data), "full").step_seconds for data in ("zero3", "hsdp")
    }
    assert seconds["hsdp"] < seconds["zero3"] / 4
    alone = request("devices=8", "network_bandwidth=0.001").setting()
    fast = Candidate(alone, ParallelConfig(data="zero3"), "full")
    assert fast.step_seconds == pytest.approx(fast.compute_seconds)  # one host: its own link


def test_pipelines_wait_less_with_more_micro_batches():
    few, many = (
        Candidate(
            request("devices=4", f"micro_batches={count}").setting(), ParallelConfig(pipeline=4), "full"
        )
        for count in (1, 8)
    )
    assert (few.micro_batches, many.micro_batches) == (4, 32)
    assert many.tokens_per_second > 1.2 * few.tokens_per_second
    twice = request("devices=4", "micro_batches=1").setting()
    raised = Candidate(dataclasses.replace(twice, packs=2), ParallelConfig(pipeline=4), "full")
    assert raised.packs == 4  # as many as a pipeline of four needs


@given(
    devices=st.sampled_from([1, 2, 4, 8, 16, 32]),
    capacity=st.sampled_from([1024, 4096, 16_384, 65_536]),
    model=st.sampled_from(["gpt2", "llama-1b", "llama-8b", "qwen2.5-7b"]),
    link=st.sampled_from(["fast", "slow"]),
)
@settings(deadline=None, max_examples=15)
def test_all_that_is_compared_would_be_taken(devices, capacity, model, link):
    asked = request(f"devices={devices}", f"capacity={capacity}", f"model={model}", f"link={link}")
    setting, advice = asked.setting(), advise(asked)
    for row in advice.rows:
        check(setting, row.config)
        assert row.memory.peak >= row.memory.parameters + row.memory.optimizer
        assert row.step_seconds >= row.compute_seconds > 0
    for setting_words, message in advice.refused.items():
        words = dict(word.removeprefix("parallel.").split("=") for word in setting_words.split())
        typed = {name: int(value) if value.isdigit() else value for name, value in words.items()}
        with pytest.raises(ValueError, match=re.escape(message)):
            ParallelConfig(**typed).check(setting.shape, devices, capacity)


# --- words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["model=gpt2", "devices=8"],
        ["devices=16", "link=slow"],
        ["devices=16", "model.layers=20", "model.dropout=0.1", "capacity=65536"],
        ["model=llama-405b", "devices=256"],
        ["devices=2", "memory=48GiB", "capacity=2048"],
    ],
)
def test_train_takes_the_words(words):
    advice = advise(request(*words))
    config = compose(advice.words)
    assert config.parallel == advice.chosen.config
    assert config.train.recompute == advice.chosen.recompute
    assert config.plan.packs_per_step == advice.chosen.packs
    assert config.plan.capacity == advice.setting.capacity
    for name, value in advice.setting.shape.to_dict().items():
        if name != "vocabulary_size":
            assert getattr(config.model, name) == value
    assert advice.command.endswith(" ".join(advice.words))


def test_model_words_name_the_nearest_preset():
    assert model_words(SHAPES["gpt2-xl"]) == ["model=gpt2-xl"]
    changed = dataclasses.replace(SHAPES["gpt2"], layers=3, tied=False)
    assert model_words(changed) == ["model=gpt2", "model.layers=3", "model.tied=false"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("24 GB", 24 * 10**9), ("1.5TiB", 1536 * GIB), ("512MiB", 512 << 20)],
)
def test_sizes(text, size):
    assert read_size("memory", text) == size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory=80"], "memory=80 is no size: .* memory=80GiB"),
        (["memory=-1GiB"], "is no size"),
        (["devices=12"], "devices=12 are no whole hosts of devices_per_host=8: use devices=16"),
        (["devices=0"], "devices must be at least 1"),
        (["link=medium"], "link=medium"),
        (["capactiy=4096"], "did you mean capacity"),
        (["device=4"], "did you mean devices"),
        (["plan.capacity=4096"], "did you mean capacity"),
        (["model=lama-8b"], "did you mean model=llama-8b"),
        (["reserve=1"], "reserve must be in"),
        (["teraflops=-1"], "teraflops must not be negative"),
    ],
)
def test_bad_words_are_named(words, message):
    with pytest.raises(ValueError, match=message):
        request(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=mixtral-8x7b"], "model.experts=8: this model serves planning only"),
        (["model=deepseek-v3"], "model.experts"),
        (["model=small"], "say model.vocabulary_size"),
        (["model=gpt2", "document_tokens=4096"], "model.context=1024"),
    ],
)
def test_models_that_are_not_trained_here_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        advise(request(*words))


def test_fp16_is_not_sharded():
    advice = advise(request("dtype=fp16", "devices=8", "model=llama-1b"))
    assert {row.config.data for row in advice.rows} <= {"ddp", "zero1"}
    assert any(row.config.tensor > 1 for row in advice.rows)
    assert "train.dtype=fp16 with parallel.data=zero3" in advice.refused["parallel.data=zero3"]


# --- the command --------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words: CliRunner().invoke(app, ["advise", *words], catch_exceptions=False)


@pytest.mark.parametrize("words", [["devices=16"], ["model=llama-405b", "devices=256"], ["devices=1"]])
def test_lines_are_no_longer_than_the_terminal(run, words):
    shown = run(*words).stdout
    assert max(len(line) for line in shown.splitlines()) <= 100
    assert ("to train so" in shown) != ("nothing fits" in shown)


def test_it_shows_the_path_the_table_and_the_command(run):
    shown = run("devices=16").stdout
    advice = advise(request("devices=16"))
    assert f"→ {advice.chosen.name} " in shown
    assert "× ddp" in shown
    for word in advice.words:
        assert word in shown
    assert "parallel.tensor=16" in shown  # refused, with its reason
    for each in advice.chosen.traffic:
        assert f"{each.method} {each.kind}" in shown


def test_json_has_bytes_and_seconds(run):
    told = json.loads(run("model=gpt2", "devices=4", "--json").stdout)
    assert told["recommended"]["name"] == "ddp"
    held = told["recommended"]["memory"]
    assert held["peak"] == max(held["instants"].values())
    assert held["parameters"] == 4 * told["parameters"]
    assert told["rows"][0]["traffic"][0]["kind"] == "all_reduce"
    assert told["command"].startswith("multipack launch -n 4 --ppn 4 -- train data=… model=gpt2 ")


def test_a_config_of_hugging_face_is_a_model(run, tmp_path):
    sizes = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    more = {"intermediate_size": 2048, "vocab_size": 32_000, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **more}))
    told = json.loads(run(f"model={tmp_path}", "devices=2", "--json").stdout)
    assert told["setting"]["shape"]["d_model"] == 512
    assert compose(told["command"].split("data=… ")[1].split()).model.layers == 8


def test_settings_are_listed(run):
    shown = run("--settings").stdout
    assert shown.index("devices_per_host") < shown.index("model.layers")
    for field in dataclasses.fields(AdviseRequest):
        assert field.name in shown


def test_torch_is_not_loaded():
    code = (
        "import sys; from multipack.cli import main; sys.argv = ['multipack', 'advise', 'devices=2'];"
        "\ntry: main()\nexcept SystemExit as end: assert not end.code, end.code"
        "\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_commands_of_the_page_run(run):
    commands = re.findall(r"^multipack advise (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        assert run(*command.split()).exit_code == 0
    assert isinstance(AdviseRequest().model, ModelShape)
