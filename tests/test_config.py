"""Configurations composed from words, presets, files and saved runs."""

import itertools
import os
import re
from dataclasses import fields, is_dataclass, replace
from functools import partial

import pytest

from multipack.cli.plan_settings import PlanCommand
from multipack.run import RunDirectory, config_yaml
from multipack.shapes import SHAPES
from multipack.training.checks import check
from multipack.training.other_names import ALIASES, HINTS
from multipack.training.run_config import Config, compose, compose_run, trained_shape
from multipack.words import ConfigError, describe, merge, preset_names


def test_defaults_compose_and_round_trip(tmp_path):
    config = compose([])
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(config))
    assert compose([f"config={path}"]) == config


def test_names_of_wordplay_and_of_earlier_versions_in_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {max_iters: 7}\n")
    assert compose([f"config={path}"]).train.steps == 7
    for group, name in (("data", "workers"), ("train", "eval_only")):  # of earlier versions
        path.write_text(f"{group}: {{{name}: 0}}\n")
        with pytest.raises(ConfigError, match=rf"{group}\.{name} has no equivalent here: "):
            compose([f"config={path}"])


def test_words_win_over_presets_over_files(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text("model:\n  layers: 9\n  heads: 8\n  d_model: 64\ntrain:\n  seed: 5\n")
    config = compose(["model.layers=3", "model=gpt2", f"config={path}", "train.steps=7"])
    assert config.model.layers == 3  # the word, though it came first
    assert config.model.heads == 12  # the preset
    assert config.train.seed == 5  # the file
    assert config.train.steps == 7


def test_names_of_other_tools_map_to_one_field():
    for word, field, value in (
        ("train.init_from=scratch", "train.resume", "false"),
        ("train.dtype=bfloat16", "train.dtype", "bf16"),
        ("preference.loss=dpo", "preference.loss", "sigmoid"),
        ("learning_rate=0.001", "optimizer.lr", 0.001),  # transformers' and peft's, alone or in a group
        ("train.num_train_epochs=3", "train.epochs", 3.0),
        ("max_length=1024", "plan.capacity", 1024),
        ("lora.r=8", "adapter.rank", 8),
        ("trl.max_length=512", "plan.capacity", 512),
    ):
        group, name = field.split(".")
        assert getattr(getattr(compose([word, "adapter=lora"]), group), name) == value, word
    known = {key for key, *_ in describe(Config)}
    assert set(ALIASES.values()) <= known
    leaves = {key.rpartition(".")[2] for key in known}
    assert not HINTS.keys() & (known | leaves)
    assert not ALIASES.keys() & known
    # A name of ours without its group is that setting, as `capacity=2048` in every command.
    assert all(ALIASES[name].endswith(f".{name}") for name in ALIASES.keys() & leaves)


def test_one_word_changes_what_follows_from_it():
    assert compose(["model=gpt2", "model.n_head=6"]).model.kv_heads == 6
    assert compose(["model=tiny", "model.d_model=128"]).model.kv_heads == 1


REFUSED = {
    "plan.window=0": ["plan.window"],
    "plan.capacity=0": ["plan.capacity"],
    "plan.align=16": ["plan.align", "leave it out"],
    "train.loss_weighting=documents": ["loss_weighting"],
    "model.attention=falsh": ["attention=falsh"],
    "data=jsonl": ["data.path"],
    "out=${oc.env:HOME}": ["out", "${"],
    "train.stepz=3": ["train.steps?"],
    "modle=tiny": ["model?"],
    "foo=1": ["--settings"],
    "tokenizer.capacity=64": ["no setting tokenizer.capacity", "plan.capacity"],
    "gradient_checkpointing=true": ["train.recompute=full"],
    "train.wd=0.1": ["optimizer.weight_decay"],
    "lora.r=16": ["no effect", "adapter=lora"],
    "adapter=lora": ["documents", "data=jsonl data.path=FILE"],  # not on Python's standard library
    "preference.loss=ipo": ["documents", "data=jsonl data.path=FILE"],
    "train.ema=0.1": ["--settings"],  # no other name is near
    "log.every=-1": ["log.every"],
    "trian.steps=3": ["train.steps?"],
    "train.steps=many": ["train.steps=many: must be a whole number"],
    "train.steps=1.5": ["train.steps=1.5"],
    "train.compile=perhaps": ["train.compile=perhaps"],
    "train.dtype=fp8": ["train.dtype=fp8", "bf16"],
    "model=gtp2": ["model=gpt2?"],
    "data=parquett": ["data=parquett", "parquet"],
    "log=loud": ["log"],
    "train": ["group.key=value"],
    "plan.capacity": ["plan.capacity=VALUE"],
    "train.seed=-1": ["train.seed"],
    "model.kv_heads=3": ["model.kv_heads=3", "nearest"],
    "model.d_model=30": ["model.d_model=30"],
    "optimizer.lr=inf": ["optimizer.lr=inf"],
    "optimizer.min_lr=nan": ["optimizer.min_lr=nan"],
    "optimizer.rules=embedding": ["optimizer.rules", "freeze"],
    "train.epochs=0": ["train.epochs"],
    "train.sample_tokens=-1": ["train.sample_tokens"],
    "track.to=tensorbord": ["track.to=", "nearest: tensorboard"],
    "preference.beta=0": ["preference.beta"],
    "config=nowhere.yaml": ["config=nowhere.yaml"],
    "train.init_from=gpt2": ["train.init_from=gpt2"],
    "train.init_from=none.gguf": ["no such file"],
    "train.resume=nowhere": ["train.resume=nowhere"],
    "train.resume=true": ["out="],
    "data.readers=\n": ["data.readers=\\n"],
    "optimizer.weight_decay=a\nb": ["optimizer.weight_decay=a\\nb"],
    "data.part=\n": ["data.part=\\n has no effect"],
}
"""Word → what the error must name."""


def test_illegal_words_name_the_field_and_the_nearest_choice():
    for word, names in REFUSED.items():
        with pytest.raises(ConfigError) as refused:
            compose_run([word])
        assert all(name in str(refused.value) for name in names), f"{word}: {refused.value}"
        assert "\n" not in str(refused.value)


def test_what_contradicts_or_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plan\.packs_per_step or plan\.micro_batches"):
        compose(["plan.packs_per_step=8", "optimizer.gas=2"])
    with pytest.raises(ConfigError, match=r"plan\.capacity=512 and max_length=1024 both set plan\.capacity"):
        compose(["plan.capacity=512", "max_length=1024"])
    assert compose(["plan.capacity=512", "max_length=512"]).plan.capacity == 512
    appended = compose(["plan.capacity=512", "plan.capacity=1024"])  # as shells append words
    assert appended.plan.capacity == 1024
    path = tmp_path / "bad.yaml"
    path.write_text("learning_rate: 0.1\noptimizer:\n  lr: 0.2\n")
    with pytest.raises(ConfigError, match=r"both set optimizer\.lr"):
        compose([f"config={path}"])
    path.write_text("train: [1, 2\n")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        compose([f"config={path}"])


def test_a_model_preset_leaves_the_vocabulary_to_the_tokenizer():
    for name in ("tiny", "llama-8b"):
        assert compose([f"model={name}"]).model.vocabulary_size == 0
    assert set(preset_names(Config)["model"]) == set(SHAPES)
    assert merge(PlanCommand, ["model=gpt2"]).model.vocabulary_size == SHAPES["gpt2"].vocabulary_size


def test_words_may_be_paths_and_lists(tmp_path):
    config = compose([f"tokenizer={tmp_path / 'my.json'}"])
    assert (config.tokenizer.kind, config.tokenizer.path) == ("file", str(tmp_path / "my.json"))
    for written in ("question,answer", "[question, answer]"):
        config = compose(["data=jsonl", "data.path=a.jsonl", f"data.fields={written}"])
        assert config.data.fields == ["question", "answer"]
    for quote in ('"', "'", ""):
        rules = f"[{quote}embedding lr=0.5{quote}, {quote}*.bias weight_decay=0{quote}]"
        composed = compose([f"optimizer.rules={rules}"])
        assert composed.optimizer.rules == ["embedding lr=0.5", "*.bias weight_decay=0"]


def test_every_setting_has_a_meaning():
    rows = describe(Config)
    assert [key for key, _, _, meaning in rows if not meaning.endswith((".", "…"))] == []
    config = Config()
    groups = [entry.name for entry in fields(Config) if is_dataclass(getattr(config, entry.name))]
    assert {key.split(".")[0] for key, *_ in rows if "." in key} == set(groups)


def test_defaults_are_those_of_the_command():
    """`multipack plan` costs documents as llama-8b would, whatever the decoder's own defaults are."""
    for schema, layers in ((PlanCommand, 32), (Config, 6)):
        shown = {key: default for key, _, default, _ in describe(schema)}
        assert shown["model.layers"] == str(layers)
        assert shown["plan.group"] == "true"


def test_resume_takes_the_saved_values_under_the_words(tmp_path):
    run = RunDirectory(tmp_path / "run")
    saved = compose(["train.seed=11", "model=tiny", "optimizer.lr=1e-5", "optimizer.min_lr=1e-6"])
    run.create(config_yaml(saved))
    config = compose_run([f"out={run.path}", "train.resume=true", "train.steps=9", "optimizer.lr=2e-6"])
    assert (config.train.seed, config.train.steps, config.model.layers) == (11, 9, 2)
    assert (config.optimizer.lr, config.optimizer.min_lr) == (2e-6, 1e-6)
    by_path = compose_run([f"train.resume={run.path}"])
    assert by_path.out == str(run.path)
    with pytest.raises(ConfigError, match="is not the run of"):
        compose_run([f"train.resume={run.path}", f"out={tmp_path / 'other'}"])
    with pytest.raises(ConfigError, match=r"model\.layers was 2 in that run and cannot become 3"):
        compose_run([f"train.resume={run.path}", "model.layers=3"])


def test_a_saved_value_that_is_no_longer_legal_is_named_and_can_be_replaced(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(config_yaml(compose(["parallel.context_method=planned"])).replace("planned", "ring"))
    with pytest.raises(ConfigError, match=r"^parallel\.context_method=ring: .*planned.*ulysses"):
        compose_run([f"train.resume={run.path}"])
    resumed = compose_run([f"train.resume={run.path}", "parallel.context_method=planned"])
    assert resumed.parallel.context_method == "planned"


def test_a_checkpoint_continues_with_its_own_settings(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(config_yaml(compose(["train.seed=11"])))
    assert compose_run([f"train.resume={run.path}"]).train.seed == 11  # there is no checkpoint
    checkpoint = run.checkpoints / "step-00000002"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    (checkpoint / "config.yaml").write_text(config_yaml(compose(["train.seed=22"])))
    assert compose_run([f"train.resume={checkpoint}"]).train.seed == 22
    run.point_to(checkpoint)
    assert compose_run([f"train.resume={run.path}"]).train.seed == 22


def test_auto_begins_a_run_and_continues_it_by_the_same_words(tmp_path):
    run = RunDirectory(tmp_path / "run")
    words = ["train.resume=auto", f"out={run.path}", "train.seed=11", "plan.micro_batches=2", "train.steps=9"]
    begun = compose_run(words)
    assert (begun.train.resume, begun.out, begun.plan.micro_batches) == ("false", str(run.path), 2)
    run.path.mkdir()
    (run.path / ".config.yaml.12ab.partial").write_text("tra")  # of a process that was killed as it began
    assert compose_run(words).train.resume == "false"
    # On two ranks this run had four packs a step; it has four on one rank as well.
    run.create(config_yaml(compose([*words[2:3], "plan.packs_per_step=4", "optimizer.lr=1e-5"])))
    continued = compose_run(words)
    assert (continued.train.resume, continued.out, continued.train.steps) == ("true", str(run.path), 9)
    assert (continued.plan.packs_per_step, continued.plan.micro_batches) == (4, 0)
    assert continued.optimizer.lr == 1e-5
    # The weights that it began with are named in it; words that would look for the newest ones do not count again.
    assert compose_run([*words, "train.init_from=nowhere"]).train.init_from == ""
    with pytest.raises(ConfigError, match=r"train\.resume=auto needs out=RUN_DIR"):
        compose_run(["train.resume=auto"])


STARTED = ("plan.packs_per_step=4", "model=tiny", "model.vocabulary_size=300", "train.seed=11")
"""Words of a run that is resumed below."""
KEPT = {
    "model.rope_theta=100": "model.rope_theta",
    "model.tied=false": "model.tied",
    "model.n_layer=3": "model.layers",  # another tool's name
    "model=small": "model.layers",  # a preset
    "model.vocabulary_size=301": "model.vocabulary_size",
    "plan.order=given": "plan.order",
    "max_length=1024": "plan.capacity",  # another tool's name
    "train.seed=12": "train.seed",
}
"""Setting that a resumed run must not change → its name."""


def resumable(folder, *more):
    """The directory of a run with the settings that it saves."""
    run = RunDirectory(folder)
    run.create(config_yaml(compose([*STARTED, *more])))
    return run


def as_file(path, word):
    """The word `config=FILE`, whose file holds this setting."""
    key, value = word.split("=")
    group, _, leaf = key.rpartition(".")
    path.write_text(f"{group}:\n  {leaf}: {value}\n" if group else f"{leaf}: {value}\n")
    return f"config={path}"


@pytest.fixture(params=["word", "file"])
def said(request, tmp_path):
    """Word → the same setting as a word, or in a file."""
    return lambda word: word if request.param == "word" else as_file(tmp_path / "file.yaml", word)


@pytest.mark.parametrize("resume", ["auto", "true", "path"])
def test_a_resumed_run_keeps_its_model_and_its_order_whatever_names_another(tmp_path, said, resume):
    run = resumable(tmp_path / "run")
    resumed = [f"out={run.path}", f"train.resume={run.path if resume == 'path' else resume}"]
    for word, name in list(KEPT.items())[:: 1 if resume == "auto" else 3]:
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)} was .* cannot become"):
            compose_run([*resumed, said(word)])
    for word in ("model.dropout=0.1", "model.attention=loop", "optimizer.lr=1e-5", "train.steps=7"):
        compose_run([*resumed, said(word)])


def test_settings_of_earlier_versions_are_passed_over_in_saved_runs_only(tmp_path):
    """A file that starts a new run may have them where they have no effect."""
    run = resumable(tmp_path / "run")
    saved = run.config.read_text()
    resume = [f"out={run.path}", "train.resume=true"]
    run.config.write_text(saved.replace("train:\n", "train:\n  sample_top_k: 9\n"))
    assert compose_run(resume).train == replace(compose(STARTED).train, resume="true")
    run.config.write_text(saved.replace("optimizer:\n", "optimizer:\n  lr_scaling: sqrt\n"))
    with pytest.raises(ConfigError, match=r"optimizer\.lr_scaling=sqrt of that run is gone"):
        compose_run(resume)
    file = tmp_path / "file.yaml"
    file.write_text("train: {ema_decay: 0.0, steps: 7}")
    assert compose([f"config={file}"]).train.steps == 7
    file.write_text("train: {ema_decay: 0.9}")
    for given in (f"config={file}", "train.ema_decay=0.9"):
        with pytest.raises(ConfigError, match=r"train\.ema_decay=0\.9.* leave it out"):
            compose([given])


@pytest.mark.parametrize(
    "word",
    [
        "model=tiny",
        "model.n_layer=2",
        "model.vocabulary_size=0",
        "max_length=2048",
        "plan.window=4",
        "model.tied=true",
    ],
)
def test_unchanged_settings_resume_a_run(tmp_path, said, word):
    run = resumable(tmp_path / "run")
    for resume in ("auto", "true", str(run.path)):
        config = compose_run([f"out={run.path}", f"train.resume={resume}", said(word)])
        assert (config.model, config.plan) == (compose(STARTED).model, compose(STARTED).plan)


def test_packs_of_a_resumed_run_are_those_of_its_steps(tmp_path, said):
    run = resumable(tmp_path / "run")

    def resumed(resume, word):
        return compose_run([f"out={run.path}", f"train.resume={resume}", said(word)])

    for word in ("plan.micro_batches=4", "plan.packs_per_step=8", "gradient_accumulation_steps=1"):
        for ranks in (1, 2, 4):  # a restart by the same words, also on other ranks
            assert resumed("auto", word).plan.for_ranks(ranks).packs_per_step == 4
    with pytest.raises(ConfigError, match=r"plan\.packs_per_step was 4"):
        resumed("true", "plan.packs_per_step=8")
    same = resumed("true", "plan.micro_batches=2")
    check(same, 2)
    with pytest.raises(ValueError, match=r"plan\.micro_batches=2 on 4 .* 8 packs .* have 4"):
        check(same, 4)
    with pytest.raises(ValueError, match="at most 4 data-parallel ranks"):
        check(resumed("true", "plan.packs_per_step=4"), 5)


def test_a_file_may_say_that_a_run_resumes_and_where(tmp_path):
    run, file = resumable(tmp_path / "run"), tmp_path / "file.yaml"
    file.write_text(f"out: {run.path}\ntrain:\n  resume: auto\n  steps: 9\n  init_from: nowhere\n")
    config = compose_run([f"config={file}"])
    assert (config.train.resume, config.train.steps, config.train.init_from) == ("true", 9, "")
    file.write_text(f"out: {tmp_path / 'new'}\ntrain:\n  resume: auto\n")
    assert compose_run([f"config={file}"]).train.resume == "false"


def test_yaml_booleans_and_packs_from_files_mean_what_they_look_like(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("train:\n  resume: false\nplan:\n  micro_batches: 2\n")
    assert compose([f"config={path}"]).train.resume == "false"
    assert compose([f"config={path}", "plan.packs_per_step=16"]).plan.for_ranks(4).packs_per_step == 16
    path.write_text("out: ${oc.env:HOME}\n")
    with pytest.raises(ConfigError, match="cannot hold"):
        compose([f"config={path}"])


@pytest.mark.parametrize(
    "word",
    [
        "optimizer.eps=.nan",
        "optimizer.lr=-.inf",
        "parallel.timeout_seconds=.nan",
        "parallel.timeout_seconds=.inf",
        "train.epochs=.nan",
        "train.epochs=.inf",
        "train.steps=1" + "0" * 400,
        "data.weights=[1.0, .nan]",
        "out=???",
    ],
)
def test_numbers_that_no_setting_can_have_are_refused(tmp_path, word):
    key = re.escape(word.partition("=")[0])
    with pytest.raises(ConfigError, match=rf"^{key}=.*finite") as refused:
        compose([as_file(tmp_path / "file.yaml", word)])
    assert len(str(refused.value)) < 200
    with pytest.raises(ConfigError, match=key):
        compose([word.replace(".nan", "nan").replace(".inf", "inf")])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('plan: {packs_per_step: {"": {}}}', "plan.packs_per_step."),
        ("plan: {packs_per_step: {}}", "plan.packs_per_step"),
        ('data: {fieldsx: {"": {}}}', "data.fieldsx"),
        ('optimizer: {"": {}}', "optimizer."),
        ("optimizr: {}", "optimizr"),
        ("out: {}", "out"),
        ("optimizer: {lr: {}}", "optimizer.lr"),
        ("adapter: {targets: [[q_proj]]}", "adapter.targets"),
        ("adapter: {targets: [{q_proj: k_proj}]}", "adapter.targets"),
        ("adapter: {targets: [q_proj, []]}", "adapter.targets"),
        ("optimizer: {rules: [[embedding lr=1]]}", "optimizer.rules"),
        ("log: {documents: 2}", "log.documents"),
        ("plan.capacity: 5\nplan: {capacity: 6}", "plan.capacity"),
        ("plan: {capacity: 6}\nplan.capacity: 5", "plan.capacity"),
    ],
)
def test_values_that_a_setting_cannot_have_are_refused(tmp_path, text, name):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(^|no setting ){re.escape(name)}"):
        compose([f"config={path}"])
    path.write_text("plan: {}")
    assert compose([f"config={path}"]) == compose([])


@pytest.mark.parametrize(
    "text",
    [
        'data: {fields: ["${oc.env:MULTIPACK_SECRET}"]}',
        'optimizer: {rules: ["embedding lr=${oc.env:MULTIPACK_SECRET}"]}',
        'data: {fields: [["a", "${oc.env:MULTIPACK_SECRET}"]]}',
        'data: {fields: [{"${oc.env:MULTIPACK_SECRET}": 1}]}',
        'data: {"${oc.env:MULTIPACK_SECRET}": 1}',
        '"${oc.env:MULTIPACK_SECRET}": 1',
        'model: ["${oc.env:MULTIPACK_SECRET}"]',
        'model: "${oc.env:MULTIPACK_SECRET}"',
        'model: {positions: "${oc.env:MULTIPACK_SECRET}"}',
        'model: {layers: ["${oc.env:MULTIPACK_SECRET}"]}',
        'model: {"${oc.env:MULTIPACK_SECRET}": 1}',
    ],
)
def test_no_file_of_settings_reads_the_environment(tmp_path, monkeypatch, text):
    """Neither config= nor the files of a run that is resumed or gives its weights, as text, in a list or in a key."""
    monkeypatch.setenv("MULTIPACK_SECRET", "7315")
    run = RunDirectory(tmp_path / "run")
    run.create(config_yaml(compose([])))
    checkpoint = run.checkpoints / "step-00000001"
    checkpoint.mkdir()
    for name in ("state.json", ".complete"):
        (checkpoint / name).write_text("{}")
    for file in (tmp_path / "file.yaml", run.config, checkpoint / "config.yaml"):
        file.write_text(text)
    places = [(name, path) for name in ("train.resume", "train.init_from") for path in (run.path, checkpoint)]
    words = [f"config={tmp_path / 'file.yaml'}", *(f"{name}={path}" for name, path in places)]
    for read in (*(partial(compose_run, [word]) for word in words), partial(trained_shape, run.path)):
        with pytest.raises(ConfigError) as refused:
            read()
        assert "7315" not in str(refused.value)


def test_files_of_settings_that_would_exhaust_a_reader_are_refused(tmp_path):
    path, names = tmp_path / "bomb.yaml", "abcdefghi"
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in itertools.pairwise(names)
    )
    for text in (bomb, "data: " + "[" * 100_000, "- " * 100_000, "a: " * 1000, " " * (1 << 21)):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(str(path))) as refused:
            compose([f"config={path}"])
        assert "\n" not in str(refused.value)
    path.unlink()
    os.mkfifo(path)
    path.with_name("binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in (path, path.with_name("binary.yaml"), tmp_path):
        with pytest.raises(ConfigError, match=re.escape(f"config={name} cannot be read")):
            compose([f"config={name}"])


def test_a_pipeline_takes_the_packs_that_it_needs_unless_a_saved_run_has_fewer(tmp_path):
    words = ["model=tiny", "model.layers=8", "plan.packs_per_step=3"]
    check(compose([*words, "parallel.pipeline=4"]), 4)
    run = RunDirectory(tmp_path / "run")
    run.create(config_yaml(compose(words)))
    resumed = ["train.resume=true", f"out={run.path}"]
    with pytest.raises(
        ValueError, match=r"needs 4 packs .* has 3: use parallel\.pipeline=1, or one of at most 3$"
    ):
        check(compose_run([*resumed, "parallel.pipeline=4"]), 4)
    check(compose_run([*resumed, "parallel.pipeline=2"]), 4)
    with pytest.raises(
        ValueError, match=r"\(interleaved\) needs 4 .* has 3: use parallel\.pipeline=1, or one of at most 3$"
    ):
        check(compose_run([*resumed, "parallel.pipeline=2", "parallel.schedule=interleaved"]), 2)


@pytest.mark.parametrize(("resume", "wider"), [("false", True), ("true", False)])
def test_advice_for_a_resumed_run_leaves_its_model_alone(resume, wider):
    words = ["model=tiny", "model.kv_heads=2", "model.vocabulary_size=257", "parallel.tensor=2"]
    config = compose([*words, f"train.resume={resume}"])
    with pytest.raises(ValueError, match=r"use .*parallel\.tensor=1") as error:
        check(config, 2)
    assert ("model.vocabulary_size=258" in str(error.value)) is wider
