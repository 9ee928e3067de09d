import re
from dataclasses import fields, is_dataclass

import pytest

from multipack import config
from multipack.config import (
    ALIASES,
    HINTS,
    Config,
    ConfigError,
    PlanCommand,
    compose,
    compose_run,
    describe,
    preset_names,
)
from multipack.run import RunDirectory, config_yaml
from multipack.shapes import SHAPES


def test_defaults_compose_and_round_trip(tmp_path):
    config = compose([])
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(config))
    assert compose([f"config={path}"]) == config


def test_words_win_over_presets_over_files(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text("model:\n  layers: 9\n  heads: 8\n  d_model: 64\ntrain:\n  seed: 5\n")
    config = compose(["model.layers=3", "model=gpt2", f"config={path}", "train.steps=7"])
    assert config.model.layers == 3  # the word, though it came first
    assert config.model.heads == 12  # the preset
    assert config.train.seed == 5  # the file
    assert config.train.steps == 7


@pytest.mark.parametrize(
    ("theirs", "field", "value"),
    [
        ("train.max_iters=100", "train.steps", 100),
        ("train.eval_interval=25", "train.eval_every", 25),
        ("train.log_interval=5", "log.every", 5),
        ("train.init_from=scratch", "train.resume", "false"),
        ("train.eval_only=true", "train.eval_only", True),
        ("train.eval_iters=20", "train.eval_packs", 20),
        ("train.backend=DDP", "parallel.data", "ddp"),
        ("train.dtype=bfloat16", "train.dtype", "bf16"),
        ("model.n_layer=3", "model.layers", 3),
        ("model.dropout=0.1", "model.dropout", 0.1),
        ("model.activation=gelu", "model.activation", "gelu"),
        ("optimizer.gas=4", "plan.micro_batches", 4),
        ("optimizer.learning_rate=0.001", "optimizer.lr", 0.001),
        ("data=shakespeare", "tokenizer.kind", "char"),
    ],
)
def test_wordplays_names_map_to_one_field_of_ours(theirs, field, value):
    group, name = field.split(".")
    words = [theirs, "data.path=input.txt"] if theirs.startswith("data=") else [theirs]
    assert getattr(getattr(compose(words), group), name) == value


def test_one_word_changes_what_follows_from_it():
    assert compose(["model=gpt2", "model.n_head=6"]).model.kv_heads == 6
    assert compose(["model.n_head=2"]).model.kv_heads == 2
    assert compose(["model=tiny", "model.d_model=128"]).model.kv_heads == 1
    assert compose(["optimizer.learning_rate=1e-5"]).optimizer.lr == 1e-5


def test_every_alias_leads_to_a_field():
    known = {key for key, *_ in describe(Config)}
    assert {name for name, _ in ALIASES.values()} <= known
    assert not HINTS.keys() & known


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("plan.window=0", "plan.window must be at least 1"),
        ("plan.capacity=0", "plan.capacity must be at least 2"),
        ("model.attention=falsh", "attention=falsh is unknown"),
        ("data=jsonl", "data.path"),
        ("out=${oc.env:HOME}", "cannot hold ${"),
        ("train.stepz=3", "did you mean train.steps"),
        ("steps=3", "did you mean train.steps"),
        ("modle=tiny", "did you mean model?"),
        ("foo=1", "--settings"),
        ("log.every=-1", "log.every"),
        ("trian.steps=3", "did you mean train.steps"),
        ("model.nlayers=3", "did you mean model.layers"),
        ("train.steps=many", "train.steps=many"),
        ("train.steps=1.5", "train.steps=1.5"),
        ("train.compare_padding=perhaps", "train.compare_padding=perhaps"),
        ("train.dtype=fp8", "expected one of"),
        ("model=gtp2", "did you mean model=gpt2"),
        ("data=parquett", "data=parquett is no preset; there are"),
        ("log=loud", "log has no presets"),
        ("train", "write group=preset or group.key=value"),
        ("plan.capacity", "plan.capacity has no value: write plan.capacity=VALUE"),
        ("train.seed=-1", "train.seed must not be negative"),
        ("model.kv_heads=3", "the nearest is"),
        ("model.d_model=30", "must divide model.d_model=30"),
        ("optimizer.lr=-1", "optimizer.lr"),
        ("train.epochs=0", "train.epochs"),
        ("model.batch_size=64", "plan.capacity counts tokens"),
        ("config=nowhere.yaml", "cannot be read"),
        ("train.init_from=gpt2", "train.init_from=gpt2: gpt2 is not there"),
        ("train.resume=nowhere", "neither a run directory"),
        ("train.resume=true", "needs out="),
    ],
)
def test_what_cannot_be_fails_with_the_field_and_the_nearest(word, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose_run([word])


def test_two_ways_to_set_the_packs_of_a_step_contradict():
    with pytest.raises(ConfigError, match=r"plan\.packs_per_step or plan\.micro_batches"):
        compose(["plan.packs_per_step=8", "optimizer.gas=2"])


def test_a_broken_yaml_file_is_named(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("train: [1, 2\n")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        compose([f"config={path}"])


def test_a_model_preset_leaves_the_vocabulary_to_the_tokenizer():
    for name in SHAPES:
        assert compose([f"model={name}"]).model.vocabulary_size == 0
    assert set(preset_names("model")) == set(SHAPES)


def test_a_tokenizer_can_be_a_path(tmp_path):
    config = compose([f"tokenizer={tmp_path / 'my.json'}"])
    assert (config.tokenizer.kind, config.tokenizer.path) == ("file", str(tmp_path / "my.json"))


def test_field_lists_take_commas():
    for written in ("question,answer", "[question, answer]"):
        config = compose(["data=jsonl", "data.path=a.jsonl", f"data.fields={written}"])
        assert config.data.fields == ["question", "answer"]


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


def test_every_public_name_is_there():
    for name in config.__all__:
        assert getattr(config, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Cofnig'"):
        getattr(config, "Cofnig")  # noqa: B009


def test_resume_takes_the_saved_values_under_the_words(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(
        config_yaml(compose(["train.seed=11", "model=tiny", "optimizer.lr=1e-5", "optimizer.min_lr=1e-6"]))
    )
    config = compose_run([f"out={run.path}", "train.resume=true", "train.steps=9", "optimizer.lr=2e-6"])
    assert (config.train.seed, config.train.steps, config.model.layers) == (11, 9, 2)
    assert (config.optimizer.lr, config.optimizer.min_lr) == (2e-6, 1e-6)
    by_path = compose_run([f"train.resume={run.path}"])
    assert by_path.out == str(run.path)
    with pytest.raises(ConfigError, match="is not the run of"):
        compose_run([f"train.resume={run.path}", f"out={tmp_path / 'other'}"])
    with pytest.raises(ConfigError, match=r"model\.layers was 2 in that run and cannot become 3"):
        compose_run([f"train.resume={run.path}", "model.layers=3"])


def test_a_checkpoint_goes_on_with_its_own_settings(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(config_yaml(compose(["train.seed=11"])))
    checkpoint = run.checkpoints / "step-00000002"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    (checkpoint / "config.yaml").write_text(config_yaml(compose(["train.seed=22"])))
    assert compose_run([f"train.resume={checkpoint}"]).train.seed == 22
    assert compose_run([f"train.resume={run.path}"]).train.seed == 11  # latest names none so far
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
    # On two ranks this run settled on four packs a step; whoever continues it on one has four as well.
    run.create(config_yaml(compose([*words[2:3], "plan.packs_per_step=4", "optimizer.lr=1e-5"])))
    continued = compose_run(words)
    assert (continued.train.resume, continued.out, continued.train.steps) == ("true", str(run.path), 9)
    assert (continued.plan.packs_per_step, continued.plan.micro_batches) == (4, 0)
    assert continued.optimizer.lr == 1e-5
    # The weights that it began with are named in it; words that would look for the newest ones do not count again.
    assert compose_run([*words, "train.init_from=nowhere"]).train.init_from == ""
    with pytest.raises(ConfigError, match=r"train\.resume=auto needs out=RUN_DIR"):
        compose_run(["train.resume=auto"])


def test_yaml_booleans_and_packs_from_files_mean_what_they_look_like(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("train:\n  resume: false\nplan:\n  micro_batches: 2\n")
    assert compose([f"config={path}"]).train.resume == "false"
    assert compose([f"config={path}", "plan.packs_per_step=16"]).plan.keywords(4)["packs_per_step"] == 16
    path.write_text("out: ${oc.env:HOME}\n")
    with pytest.raises(ConfigError, match="cannot hold"):
        compose([f"config={path}"])


@pytest.mark.parametrize(
    "word",
    [
        'optimizer.rules=["embedding lr=0.5", "*.bias weight_decay=0"]',
        "optimizer.rules=['embedding lr=0.5','*.bias weight_decay=0']",
        "optimizer.rules=embedding lr=0.5,*.bias weight_decay=0",
    ],
)
def test_lists_may_keep_their_quotes(word):
    assert compose([word]).optimizer.rules == ["embedding lr=0.5", "*.bias weight_decay=0"]


@pytest.mark.parametrize(
    ("words", "processes", "message"),
    [
        (
            ["plan.packs_per_step=2"],
            3,
            "3 data-parallel ranks cannot share plan.packs_per_step=2 packs: set it to at least 3",
        ),
        (
            ["plan.packs_per_step=1", "parallel.tensor=2", "model=small"],
            4,
            "2 data-parallel ranks cannot share",
        ),
    ],
)
def test_steps_with_fewer_packs_than_ranks_are_refused(words, processes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        compose(words).check(processes)
    compose(["plan.micro_batches=1", *words[1:]]).check(processes)


def test_a_pipeline_takes_the_packs_that_it_needs_unless_a_run_has_settled_them(tmp_path):
    words = ["model=tiny", "model.layers=8", "plan.packs_per_step=3"]
    compose([*words, "parallel.pipeline=4"]).check(4)
    run = RunDirectory(tmp_path / "run")
    run.create(config_yaml(compose(words)))
    goes_on = ["train.resume=true", f"out={run.path}"]
    with pytest.raises(ValueError, match=r"needs 4 packs a step .* has 3: use parallel\.pipeline=2$"):
        compose_run([*goes_on, "parallel.pipeline=4"]).check(4)
    compose_run([*goes_on, "parallel.pipeline=2"]).check(4)
    with pytest.raises(ValueError, match=r"\(interleaved\) needs 4 .* has 3: use parallel\.pipeline=1$"):
        compose_run([*goes_on, "parallel.pipeline=2", "parallel.schedule=interleaved"]).check(2)


def test_aligned_packs_of_one_shape_that_ranks_cannot_divide_are_refused():
    words = ["model=tiny", "model.kv_heads=2", "plan.capacity=256", "plan.align=5", "parallel.tensor=2"]
    compose(words).check(2)  # packs end anywhere, and are filled up
    with pytest.raises(
        ValueError, match=r"plan\.align=5 leaves 255 slots .* use plan\.capacity=250, or plan\.align=2"
    ):
        compose([*words, "train.fixed_shape=true"]).check(2)
    compose([*words, "train.fixed_shape=true", "plan.capacity=250"]).check(2)
