"""From Axolotl's keys to a configuration that our parser takes; what cannot be honored is named."""

import json
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from multipack import untrusted
from multipack.cli import app
from multipack.data.text.sources import Source
from multipack.imports.imported import translate_keys
from multipack.shapes.families import BY_TYPE
from multipack.shapes.hub_names import model_type_of
from multipack.training.run_config import compose

EXAMPLE = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "sequence_len": 2048,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": "2e-4",
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.1,
    "wandb_project": None,
    "flash_attention": True,
    "load_in_8bit": False,
}

CHATS = [{"path": "a/b", "type": "chat_template"}]


@pytest.fixture
def parsed(tmp_path):
    """What was imported → the configuration that its YAML is parsed to."""

    def parse(found):
        settings = yaml.safe_load(found.to_yaml())
        if str(settings.get("model", "")).startswith("hf:"):  # its config.json is not here
            del settings["model"]
        (tmp_path / "ours.yaml").write_text(yaml.safe_dump(settings))
        return compose([f"config={tmp_path / 'ours.yaml'}"])

    return parse


@pytest.fixture
def imported(parsed):
    """Changed keys → what is imported, and the configuration of it."""

    def read(**keys):
        found = translate_keys({**EXAMPLE, **keys})
        return found, parsed(found)

    return read


def keys_of(found):
    """All keys of the four lists."""
    return [*found.translated, *found.left, *found.unneeded, *found.lacking]


def test_axolotls_meaning_is_kept(imported):
    found, config = imported()
    assert not found.lacking
    assert (config.plan.capacity, config.plan.packs_per_step, config.plan.max_documents) == (2048, 8, 0)
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (2e-4, 0.1)
    # Axolotl's defaults, where ours differ
    assert (config.optimizer.weight_decay, config.optimizer.beta2, config.optimizer.min_lr) == (0, 0.999, 0)
    assert (config.data.validation, config.data.overlong, config.data.format) == (0, "drop", "alpaca")
    assert (config.train.init_from, config.adapter.name) == ("NousResearch/Llama-3.2-1B", "none")
    assert "·N" in found.translated["micro_batch_size"]
    assert found.translated["gradient_accumulation_steps"] == "plan.packs_per_step=8"
    assert "flash_attention" in found.unneeded
    assert "wandb_project" not in keys_of(found)  # null is as if it was not there


def test_documents_of_every_kind(imported):
    chats = {"path": "a/b", "type": "chat_template", "split": "train[:5%]", "field_messages": "turns"}
    mapped = {"message_property_mappings": {"role": "from", "content": "value"}}
    _, config = imported(datasets=[{**chats, **mapped}], val_set_size=0.05)
    read = (config.data.source, config.data.part, config.data.fields)
    assert read == ("huggingface", "train[:5%]", ["turns"])
    assert (config.data.validation, config.train.eval_every) == (0.05, 50)
    assert imported(datasets=[{**chats, "drop_system_message": True}])[1].data.drop_system
    _, config = imported(datasets=[{"path": "web/a.jsonl.gz", "type": "completion", "field": "body"}])
    assert (config.data.source, config.data.fields, config.data.overlong) == ("jsonl", ["body"], "split")
    stream = {"path": "allenai/c4", "name": "en", "type": "pretrain"}
    _, config = imported(datasets=None, pretraining_dataset=[stream], max_steps=100)
    assert (config.data.stream, config.data.subset, config.train.steps) == (True, "en", 100)
    found, config = imported(datasets=[chats, *EXAMPLE["datasets"]])
    assert config.data.paths == ["1-b.store", "2-GPT4-LLM-Cleaned.store"]
    assert (
        "multipack prepare data.source=huggingface data.path=a/b 'data.part=train[:5%]'" in found.commands[0]
    )
    pairs = {"path": "p.json", "type": "chatml.intel"}
    _, config = imported(datasets=[pairs], rl="ipo", rl_beta=0.2, sample_packing=None)
    assert (config.preference.loss, config.preference.beta, config.data.as_chat) == ("ipo", 0.2, True)
    assert (config.data.fields[0], config.plan.max_documents) == ("question", 1)
    labels = {"path": "a/b", "type": "llama3.ultra"}
    _, config = imported(datasets=[labels], rl="kto", kto_desirable_weight=0.5)
    assert (config.data.format, config.preference.desirable) == ("label", 0.5)
    rewards = {"path": "a/b", "type": "bradley_terry.chat_template"}
    _, config = imported(datasets=[rewards], reward_model=True, num_labels=1)
    assert (config.data.format, config.preference.loss) == ("preference", "reward")


def test_the_prompts_of_an_imported_file_are_read(imported, tmp_path):
    record = {"instruction": "Add.", "input": "1 2", "output": "3"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    _, config = imported(datasets=[{"path": str(tmp_path / "a.jsonl"), "type": "alpaca"}])
    (document,) = Source(config.data)
    assert document.parts[0].text.endswith("### Input:\n1 2\n\n### Response:\n")


def test_the_command_ends_with_1_if_another_run_would_be_trained(tmp_path):
    file = tmp_path / "axolotl.yml"
    for more, code in (({}, 0), ({"neftune_noise_alpha": 5}, 1)):
        file.write_text(yaml.safe_dump({**EXAMPLE, **more}))
        ended = CliRunner().invoke(app, ["import-config", str(file)])
        assert ended.exit_code == code
        assert ("neftune_noise_alpha" in ended.output) == bool(code)


def test_adapters_and_parallelism(imported):
    keys = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "peft_use_rslora": True}
    _, config = imported(**keys, lora_target_modules=["q_proj", "self_attn.v_proj"], load_in_8bit=True)
    assert (config.adapter.name, config.adapter.rank, config.adapter.scale) == ("lora", 8, 16 / 8**0.5)
    assert config.adapter.targets == ["q_proj", "v_proj"]
    assert config.adapter.quantize == "int8"
    assert imported(adapter="qlora", load_in_8bit=True)[1].adapter.quantize == "nf4"
    pattern = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj"
    targets = imported(**keys, lora_target_modules=pattern)[1].adapter.targets
    assert targets == ["q_proj", "up_proj", "down_proj"]
    assert imported(**keys, lora_target_linear=True)[1].adapter.targets == ["all-linear"]
    fsdp = {"fsdp_version": 2, "fsdp_config": {"offload_params": True, "reshard_after_forward": True}}
    parallel = imported(**fsdp)[1].parallel
    assert (parallel.data, parallel.offload) == ("zero3", "cpu")
    assert imported(deepspeed="deepspeed_configs/zero2.json")[1].parallel.data == "zero2"
    assert imported(deepspeed={"zero_optimization": {"stage": 1}})[1].parallel.data == "zero1"


def test_a_step_has_packs_for_every_rank_that_is_known(imported):
    found, config = imported(dp_shard_size=4, dp_replicate_size=2, tensor_parallel_size=2)
    assert (config.plan.packs_per_step, config.parallel.replicate) == (64, 2)
    assert "8 data-parallel ranks" in found.translated["micro_batch_size"]
    assert config.plan.packs_per_step >= config.parallel.data_size(16)
    assert imported(micro_batch_size=None)[1].plan.packs_per_step == 4  # Axolotl's micro-batch of 1


def test_keys_that_other_words_set_are_not_without_effect(imported):
    chats = {"path": "a/b", "type": "chat_template"}
    found, _ = imported(
        adapter="lora",
        lora_target_linear=True,
        load_in_4bit=True,
        chat_template="llama3",
        datasets=[chats],
        loss_watchdog_threshold=5.0,
        loss_watchdog_patience=3,
        saves_per_epoch=2,
        plugins=["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
        special_tokens={"pad_token": "<pad>"},
        trust_remote_code=True,
        base_model="meta-llama/Llama-3.2-1B",
    )
    assert "train.spike=stop" in found.left["loss_watchdog_threshold"]
    assert found.translated["load_in_4bit"] == "adapter.quantize=nf4"
    assert found.translated["chat_template"] == "data.chat_template=llama3"
    assert "train.checkpoint_every" in found.left["saves_per_epoch"]
    assert {"plugins", "special_tokens", "trust_remote_code"} <= set(found.unneeded)
    assert imported(load_in_4bit=True)[0].lacking.keys() == {"load_in_4bit"}  # all weights are trained


@pytest.mark.parametrize("pattern", ["(", "(([a-z._0-9])+)+!", "a{2}{3}{4}**", "\\"])
def test_patterns_of_a_file_end_in_bounded_time(imported, pattern, monkeypatch):
    monkeypatch.setattr(untrusted, "MOST_SECONDS", 2.0)
    keys = {"adapter": "lora", "lora_target_modules": pattern}
    assert list(imported(**keys)[0].lacking) == ["lora_target_modules"]


def test_a_file_of_a_stranger_writes_neither_settings_nor_commands(imported):
    """Line ends in keys and values stay in comments, and commands to paste are quoted."""
    injected = {f"a{end}out: elsewhere/x{end}#b": f"1{end}out: y" for end in ("\n", "\r", "\x85", "\u2028")}
    found, config = imported(**injected, saves_per_epoch=2)
    assert config.out == ""
    assert len(found.lacking) == 4
    for end in ("\x1b[2J", "\x85", "\u2028", "\u202e", "\ufffe", "\ue000", "é\n "):
        found = translate_keys({**EXAMPLE, "output_dir": f"a{end}b", f"x{end}": 1})
        text = found.to_yaml()
        assert yaml.safe_load(text)["out"] == f"a{end}b"
        assert text.replace("\n", "").isprintable()
    data = [{"path": "x; touch PWNED; $(id)", "type": "alpaca"}, {"path": "b c/d.jsonl", "type": "alpaca"}]
    found, _ = imported(datasets=data, base_model="a/b; id")
    for command in found.commands:
        words = shlex.split(command)
        assert words[:2] == ["multipack", "prepare"]
        assert all("=" in word for word in words[2:-2])
        assert words[-2] == "--store"
        assert {"touch", ";", "id"}.isdisjoint(words)


@pytest.mark.parametrize(
    "keys",
    [
        {"micro_batch_size": float("inf")},
        {"micro_batch_size": 10**400},
        {"num_epochs": 10**400},
        {"learning_rate": float("inf")},
        {"weight_decay": float("nan")},
        {"learning_rate": [1]},
        {"val_set_size": {}},
        {"lr_scheduler": {}},
        {"optimizer": ["a"]},
        {"datasets": [[1]]},
        {"datasets": [{"path": 5, "type": "alpaca"}, {"path": [], "type": "alpaca"}]},
        {"special_tokens": [1]},
        {"fsdp_config": [1]},
        {"deepspeed": {"zero_optimization": {"stage": float("inf")}}},
        {"plugins": 3},
        {"rl": {}},
        {7: 7},
    ],
)
def test_values_of_other_types_are_named(keys):
    found = translate_keys({**EXAMPLE, **keys})
    name, value = next(iter(keys.items()))
    assert str(name) in (found.lacking if isinstance(value, float | int) else keys_of(found))
    assert yaml.safe_load(found.to_yaml())


@pytest.mark.parametrize(
    ("keys", "name", "reason"),
    [
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha", "noise"),
        ({"my_own_key": 1}, "my_own_key", "not a key that is known"),
        ({"multipack_overlong": "drop"}, "multipack_overlong", "data.overlong"),
        ({"optimizer": "lion"}, "optimizer", "adamw_torch"),
        ({"lr_scheduler": "rex"}, "lr_scheduler", "cosine"),
        ({"base_model": "ai21labs/Jamba-v0.1"}, "base_model", "recurrent"),
        ({"base_model": "nvidia/Qwen3-30B-A3B-NVFP4"}, "base_model", "quantized"),
        ({"datasets": [{"path": "a/b", "type": "context_qa"}]}, "datasets", "context_qa"),
        (
            {"datasets": [{"path": "a/b", "type": "alpaca:phi"}]},
            "datasets",
            "write `prompt` and `completion`",
        ),
        ({"chat_template": "llama", "datasets": CHATS}, "datasets", "chat_template=llama is not that"),
        ({"datasets": [{"path": "a/b", "type": "alpaca", "shards": 3}]}, "datasets", "shards=3"),
        ({"special_tokens": {"eos_token": "<end>"}}, "special_tokens", "eos_token"),
        ({"val_set_size": 500}, "val_set_size", "share"),
        ({"plugins": ["a.KDPlugin"]}, "plugins", "KDPlugin"),
        ({"adapter": "llama-adapter"}, "adapter", "qlora"),
        ({"micro_batch_size": "many"}, "micro_batch_size", "many"),
    ],
)
def test_what_cannot_be_honored_is_named(imported, keys, name, reason):
    found, _ = imported(**keys)
    assert next(iter(found.lacking)) == name
    assert reason in found.lacking[name]
    assert f"#   {name}: " in found.to_yaml()


def test_names_of_other_tools_are_unknown():
    others = """
        num_train_epochs max_seq_length max_length lr_scheduler_type model.n_layer optimizer.gas lora.r target_modules
        wandb_foo mlflow_foo trackio_foo ray_foo liger_foo flash_foo flex_foo fp8_foo hub_foo a_multipack_foo
    """
    found = translate_keys({**EXAMPLE, **dict.fromkeys(others.split(), 3)})
    assert sorted(found.lacking) == sorted(others.split())
    assert found.settings == translate_keys(EXAMPLE).settings


def test_models_without_a_config_are_known_by_name():
    for name, kind in (
        ("meta-llama/Llama-3.1-8B", "llama"),
        ("Qwen/Qwen2.5-0.5B", "qwen2"),
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("google/gemma-3-270m-it/", "gemma3_text"),
        ("mistralai/Mistral-7B-v0.1", "mistral"),
        ("someone/their-model", ""),
    ):
        assert model_type_of(name) == kind
    assert {"llama", "qwen2", "gemma3_text"} <= BY_TYPE.keys()


def test_examples_of_axolotl_are_parsed_or_say_what_they_lack(parsed, shared_data):
    lines = (shared_data / "axolotl" / "examples.jsonl").open()
    configs = [json.loads(line)["config"] for line in lines]
    examples = [*map(translate_keys, configs)]
    whole = [found for found in examples if not found.lacking]
    assert len(whole) >= 65
    for found in whole[::6]:  # benchmarks/reach.py parses all of them
        parsed(found)
    for config, found in zip(configs, examples, strict=True):
        listed = keys_of(found)
        given = [key for key, value in config.items() if value not in (None, False, []) or key in listed]
        assert sorted(listed) == sorted(given)  # each in exactly one list
    unknown = {key for found in examples for key, why in found.lacking.items() if why.startswith("not a key")}
    assert not unknown
