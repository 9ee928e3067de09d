"""What is recommended, why, and how the command prints it."""

import dataclasses
import json
import re
from functools import cache

import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.launch.advise import CLOSE, Candidate, advise, candidates, model_words
from multipack.launch.advise_request import AdviseRequest
from multipack.parallel.parallel_config import ParallelConfig
from multipack.shapes import SHAPES
from multipack.training.run_config import compose
from multipack.words import merge

GIB = 2**30


def request(*words):
    return merge(AdviseRequest, words)


@cache
def advised(*words):
    return advise(request(*words))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["model=gpt2", "devices=8"], "ddp"),
        (["model=gpt2", "devices=1"], "ddp"),
        (["devices=16"], "zero"),
        (["devices=16", "link=slow"], "pipeline"),
        (["devices=16", "plan.capacity=131072"], "context"),
        (["devices=8", "plan.capacity=32768", "memory=40GiB", "model.window=4096"], "context"),
        (["model=llama-70b", "devices=64"], "together"),
    ],
)
def test_the_decision_path(words, wanted):
    advice = advised(*words)
    assert advice.chosen.family == wanted
    assert advice.chosen.fits
    answers = [answer for _, answer in advice.path]
    assert answers[-1].startswith("yes: ")
    assert not any(answer.startswith("yes") for answer in answers[:-1])


def test_the_simplest_of_the_fast_candidates_is_chosen():
    asked = request("devices=16")
    chosen = advise(asked).chosen
    fitting = [each for each in candidates(asked) if each.fits and each.config.offload == "none"]
    limit = min(each.seconds_per_pack for each in fitting) / CLOSE
    assert chosen.seconds_per_pack <= limit
    simpler = [each for each in fitting if each.complexity < chosen.complexity]
    assert all(each.seconds_per_pack > limit for each in simpler)
    for each in fitting:  # with the least activation checkpointing that fits
        kinds = ("none", "selective", "full")
        less = kinds[: kinds.index(each.recompute)]
        assert not any(dataclasses.replace(each, recompute=kind).fits for kind in less)


WITHOUT_BLOCKS = "model.d_ff=14330"
"""Of llama-8b; its rows cannot be quantized in blocks of 64."""


def test_offload_is_for_what_fits_in_no_other_way():
    advice = advised("devices=2", "memory=48GiB", "plan.capacity=2048", WITHOUT_BLOCKS)
    assert advice.chosen.config.offload == "cpu"
    assert "120 GiB in the memory of each host" in advice.path[-1][1]
    assert all(answer.startswith("no: ") for _, answer in advice.path[:-1])


def test_one_device_is_offered_recomputation_smaller_packs_and_offload():
    plain = advised("model=llama-3b", "devices=1")
    assert plain.chosen.recompute == "selective"
    assert [each.recompute for each in plain.rows] == ["none", "selective", "full"]
    smaller = advised("model=llama-3b", "devices=1", "memory=66GiB")
    assert (smaller.chosen.request.capacity, smaller.chosen.packs) == (4096, 8)  # as many tokens a step
    assert "plan.capacity=4096" in smaller.command
    assert "8 packs of 4,096" in smaller.path[-1][1]
    offloaded = advised("model=llama-8b", "devices=1", WITHOUT_BLOCKS)
    assert offloaded.command.startswith("multipack train data=")
    assert "parallel.offload=cpu" in offloaded.command
    assert "120 GiB in the memory of each host" in offloaded.path[-1][1]
    nothing = advised("model=llama-8b", "devices=1", "memory=4GiB")
    assert nothing.chosen is None
    assert all(answer.startswith("no: at least") for _, answer in nothing.path)
    assert len(nothing.path) == 5


def test_adapters_beside_quantized_weights_come_before_offload():
    advice = advised("model=llama-8b", "devices=1", "memory=24GiB")
    assert "adapter=qlora train.init_from=…" in advice.command
    assert advice.path[-1][0].startswith("Do adapters beside trained weights of 4 bits fit")
    assert all(answer.startswith("no: ") for _, answer in advice.path[:-1])
    assert any(each.config.offload != "none" for each in advice.rows)
    given = advised("model=llama-8b", "devices=1", "memory=24GiB", "adapter=qlora")
    assert given.chosen.memory.peak <= 24 * 2**30 * 0.9
    assert given.chosen.memory == advice.chosen.memory
    # 7.0 B numbers of blocks in 4.127 bits, 0.5 B of the embedding in 4 bytes and of the head in 2; 42 M are trained.
    weights = 6.98e9 * 4.127 / 8 + 128_256 * 4096 * 6 + 42e6 * 4
    assert given.chosen.memory.parameters == pytest.approx(weights, rel=0.01)
    assert given.chosen.memory.optimizer == pytest.approx(42e6 * 8, rel=0.01)
    bytes_each = advised(
        "model=llama-8b", "devices=1", "memory=24GiB", "adapter=lora", "adapter.quantize=int8"
    )
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)  # one float32 scale each
    expected = 6.98e9 + 4 * rows + 128_256 * 4096 * 6 + 42e6 * 4
    assert bytes_each.rows[0].memory.parameters == pytest.approx(expected, rel=0.01)
    lora = advised(
        "model=llama-8b", "devices=1", "memory=48GiB", "adapter=lora", "adapter.targets=[q_proj,v_proj]"
    )
    assert "adapter=lora" in lora.command
    assert "adapter=lora 'adapter.targets=[q_proj,v_proj]' train.init_from=…" in lora.command
    with pytest.raises(ValueError, match=r"adapter.targets: q_prj is no matrix of a block"):
        advised("adapter=lora", "adapter.targets=[q_prj]")


def test_smaller_states_come_before_offload():
    advice = advised("model=llama-1b", "devices=1", "memory=24GiB")  # all weights are trained
    assert advice.chosen.config.offload == "none"
    assert advice.chosen.optimizer == "adamw_bf16"
    assert "optimizer.name=adamw_bf16" in advice.command
    assert advice.path[-1][0].startswith("Do smaller optimizer states fit")
    fewer = advised("model=llama-1b", "devices=1", "memory=20GiB")
    assert fewer.chosen.optimizer == "adamw_8bit"
    fixed = advised("model=llama-1b", "devices=1", "memory=24GiB", "optimizer=adamw", "model.d_ff=8190")
    assert fixed.chosen.config.offload == "cpu"


def test_what_exceeds_the_memory_of_the_host_goes_to_files():
    words = ("model=llama-8b", "devices=1", "memory=40GiB", "host_memory=64GiB")
    advice = advised(*words)
    assert advice.chosen.config.offload == "disk"
    assert "30 GiB in the memory of each host, 90 GiB in files" in advice.path[-1][1]
    assert "parallel.offload=disk parallel.offload_folder=FOLDER" in advice.command
    assert advised(*words[:3], "host_memory=256GiB").chosen.config.offload == "cpu"
    assert advised(*words[:3], "host_memory=16GiB").chosen is None


def test_links_and_pipelines_change_estimated_times():
    slow = request("devices=16", "host_bandwidth=300", "network_bandwidth=2")
    zero3, hsdp = (
        Candidate(slow, ParallelConfig(data=data), "full").seconds_per_pack for data in ("zero3", "hsdp")
    )
    assert hsdp < zero3 / 4
    within_host = [
        Candidate(request("devices=8", f"network_bandwidth={speed}"), ParallelConfig(data="zero3"), "full")
        for speed in (0.001, 1000)
    ]
    assert within_host[0].seconds_per_pack == within_host[1].seconds_per_pack
    few, many = (
        Candidate(request("devices=4", f"micro_batches={count}"), ParallelConfig(pipeline=4), "full")
        for count in (1, 8)
    )
    assert (few.packs, many.packs) == (4, 32)
    assert few.seconds_per_pack > 1.2 * many.seconds_per_pack


def test_muon_has_less_state_and_no_offload():
    words = ("devices=2", "memory=48GiB", "plan.capacity=2048", WITHOUT_BLOCKS)
    adamw, muon = (advise(request(*words, f"optimizer={name}")) for name in ("adamw", "muon"))
    assert adamw.chosen.config.offload == "cpu"
    assert all(each.config.offload == "none" for each in muon.rows)
    states = [next(each.memory.optimizer for each in found.rows) for found in (adamw, muon)]
    assert states[1] < 0.7 * states[0]
    assert "optimizer.name=muon" in muon.rows[0].words


@pytest.mark.parametrize("word", ["optimizer=muon", "dtype=fp16"])
def test_one_device_is_not_advised_to_offload_what_training_keeps_there(word):
    assert all(row.config.offload == "none" for row in advised("model=llama-8b", "devices=1", word).rows)


@pytest.mark.parametrize(
    "words",
    [
        ["devices=16", "model.layers=20", "model.dropout=0.1", "plan.capacity=65536", "dtype=fp16"],
        ["devices=2", "memory=48GiB", "plan.capacity=2048"],
        ["devices=1"],
    ],
)
def test_train_accepts_the_recommended_words(words):
    advice = advised(*words)
    config = compose(advice.chosen.words)
    assert config.parallel == advice.chosen.config
    assert config.train.recompute == advice.chosen.recompute
    assert config.plan.packs_per_step == advice.chosen.packs
    assert config.plan.capacity == advice.request.capacity
    for name, value in vars(advice.request.model).items():
        if name != "vocabulary_size":
            assert getattr(config.model, name) == value
    assert advice.command.endswith(" ".join(advice.chosen.words))


def test_model_words_name_the_nearest_preset():
    assert model_words(SHAPES["gpt2-xl"]) == ["model=gpt2-xl"]
    changed = dataclasses.replace(SHAPES["gpt2"], layers=3, tied=False)
    assert model_words(changed) == ["model=gpt2", "model.layers=3", "model.tied=false"]


def test_bad_words_are_refused():
    for text, size in (("80GiB", 80 * GIB), ("24 GB", 24 * 10**9), ("1.5TiB", 1536 * GIB)):
        assert request(f"memory={text}", "reserve=0").usable == size
    for word, message in (
        ("memory=80", "memory=80GiB"),
        ("memory=-1GiB", "memory=-1GiB"),
        ("devices=12", "devices_per_host=8: use devices=16"),
        ("devices=0", "devices=0"),
        ("link=medium", "link=medium"),
        ("plan.capactiy=4096", "did you mean plan.capacity"),
        ("plan.capacity=1", "plan.capacity=1"),
        ("model=lama-8b", "did you mean model=llama-8b"),
        ("reserve=1", "reserve=1"),
        ("teraflops=-1", "teraflops=-1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            request(word)
    for words, message in (
        (["model=mixtral-8x7b"], "model.experts=8"),
        (["model=deepseek-v3"], "model.experts"),
        (["model=small"], "model.vocabulary_size"),
    ):
        with pytest.raises(ValueError, match=message):
            advise(request(*words))


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words: CliRunner().invoke(app, ["advise", *words], catch_exceptions=False)


def test_the_command_prints_path_table_and_command(run):
    shown = run("devices=16").stdout
    advice = advised("devices=16")
    assert max(len(line) for line in shown.splitlines()) <= 100
    assert re.search(rf"→ .* {advice.chosen.recompute} +{re.escape(advice.chosen.name)}", shown)
    assert re.search("× .* ddp 16", shown)
    for word in advice.chosen.words:
        assert word in shown
    assert "nothing fits" in run("devices=1", "memory=4GiB").stdout
    settings = run("--settings").stdout
    assert all(field.name in settings for field in dataclasses.fields(AdviseRequest))


def test_json_and_models_of_hugging_face(run, tmp_path):
    sizes = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    more = {"intermediate_size": 2048, "vocab_size": 32_000, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **more}))
    report = json.loads(run(f"model={tmp_path}", "devices=2", "--json").stdout)
    assert report["request"]["model"]["d_model"] == 512
    assert report["recommended"]["memory"]["parameters"] == 4 * report["parameters"]
    assert report["rows"][0]["traffic"][0]["kind"] == "all_reduce"
    assert report["command"].startswith("multipack launch -n 2 --ppn 2 -- train data=… model=")
    assert compose(report["command"].split("data=… ")[1].split()).model.layers == 8
