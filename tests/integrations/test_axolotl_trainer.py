"""Axolotl 0.19 itself with the plugin, on a CPU: steps promised are steps run, and no document is lost or repeated."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

if importlib.util.find_spec("axolotl") is None:
    pytest.skip("needs Axolotl: pip install axolotl==0.19.0", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
DOCUMENTS = 203


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The example of this repository, with a tiny random model and a local data set in place of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("axolotl")
    words = {f"w{number}": number for number in range(256)} | {"<s>": 256, "</s>": 257, "<pad>": 258}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes)).save_pretrained(folder / "model")
    draw = np.random.default_rng(0)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(DOCUMENTS):
            rest = draw.integers(0, 250, int(np.clip(draw.lognormal(3.3, 0.8), 1, 120))).tolist()
            ids = [256, number // 100, number % 100, *rest, 257]
            row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}
            file.write(json.dumps(row) + "\n")
    config = yaml.safe_load((ROOT / "examples" / "axolotl.yml").read_text())
    del config["saves_per_epoch"]
    return config | {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "data.jsonl"), "ds_type": "json", "type": None}],
        "dataset_prepared_path": str(folder / "prepared"),
        "special_tokens": {"pad_token": "<pad>"},
        "val_set_size": 0,
        "sequence_len": 128,
        "bf16": False,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler": "constant",
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "seed": 7,
    }


def run(config, folder, processes=1, settings=None, **changes):
    """The finished process of a training."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yml").write_text(yaml.safe_dump(config | {"output_dir": str(folder / "out")} | changes))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, str(Path(__file__).with_name("axolotl_run.py"))]
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    environment = os.environ | quiet | {"PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "disabled"}
    words = [*command, str(folder / "config.yml"), str(folder / "result"), json.dumps(settings or {})]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=540)


def train(config, folder, processes=1, settings=None, **changes):
    """Results of each rank."""
    done = run(config, folder, processes, settings, **changes)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(processes)]


def each_alone(config, results):
    """Weights after the same steps, where the model reads every document alone, and how far they moved."""
    from transformers import AutoModelForCausalLM

    rows = [json.loads(line) for line in Path(config["datasets"][0]["path"]).read_text().splitlines()]
    documents = [torch.tensor([row["input_ids"]]) for row in rows]
    model = AutoModelForCausalLM.from_pretrained(config["base_model"])
    first = {name: torch.tensor(value) for name, value in results[0]["first"].items()}
    if "adapter" in config:
        from peft import LoraConfig, get_peft_model

        sizes = {"r": config["lora_r"], "lora_alpha": config["lora_alpha"]}
        model = get_peft_model(model, LoraConfig(**sizes, target_modules=config["lora_target_modules"]))
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(first[name])
    optimizer = torch.optim.SGD(trained.values(), lr=config["learning_rate"])
    for step in range(results[0]["run"]):
        batches = [held for result in results for _, of, held in result["seen"] if of == step]
        for held in batches:  # Axolotl 0.19 takes the mean of each micro-batch, and the mean of these
            targets = sum(documents[number].shape[1] - 1 for number in held)
            for number in held:
                ids = documents[number]
                loss = cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
                (loss / targets / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    last = {name: value.detach() for name, value in trained.items()}
    moved = max(float((last[name] - first[name]).abs().max()) for name in last)
    return {name: value.double() for name, value in last.items()}, moved


def check(config, results):
    """Steps promised are run; every document once an epoch, in another order; weights of every document alone."""
    steps = results[0]["promised"]
    for result in results:
        assert result["promised"] == result["run"] == steps
        assert len(result["seen"]) == steps * config["gradient_accumulation_steps"]
    epochs = [
        [held for result in results for of, _, held in result["seen"] if of == epoch] for epoch in (0, 1)
    ]
    for epoch in epochs:
        assert sorted(number for held in epoch for number in held) == list(range(DOCUMENTS))
    assert epochs[0] != epochs[1]
    alone, moved = each_alone(config, results)
    assert alone.keys() == results[0]["weights"].keys()
    for name, weights in results[0]["weights"].items():
        assert torch.tensor(weights).sub(alone[name]).abs().max() <= 1e-6, name
    assert moved >= 1e-2


LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 32,
    "lora_target_modules": ["q_proj", "v_proj"],
    "learning_rate": 1.0,
}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_every_document_once_an_epoch_and_resumed_equals_whole(
    config, tmp_path, processes, accumulation, adapter
):
    config = config | adapter | {"gradient_accumulation_steps": accumulation}
    saving = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 100}
    whole = train(config, tmp_path / "whole", processes, **saving)
    check(config, whole)
    steps = whole[0]["run"]
    checkpoint = steps // 2 // 4 * 4 + 4  # in epoch 1
    saved = str(tmp_path / "whole" / "out" / f"checkpoint-{checkpoint}")
    resumed = train(config, tmp_path / "resumed", processes, resume_from_checkpoint=saved)
    for result, before in zip(resumed, whole, strict=True):
        assert result["run"] == steps
        assert result["seen"] == before["seen"][checkpoint * accumulation :]
        assert result["weights"] == before["weights"]


def test_batch_flattening_equals_every_document_alone(config, tmp_path):
    """Axolotl asks for attention that a CPU lacks; with sdpa, the collator's batches are isolated, too."""
    flat = config | {
        "sample_packing": False,
        "batch_flattening": True,
        "attn_implementation": "flex_attention",
    }
    flat |= {"micro_batch_size": 7, "gradient_accumulation_steps": 1}
    found = train(flat, tmp_path, settings={"attn_implementation": "sdpa"})
    assert found[0]["collator"] == "PackedDataCollator"
    check(flat, found)


@pytest.fixture
def verdict(config, tmp_path, monkeypatch):
    """A function from settings to what Axolotl makes of batch_flattening, or its error."""
    from axolotl.cli.config import load_cfg

    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")

    def of(**changes):
        settings = {name: value for name, value in (config | changes).items() if value is not None}
        (tmp_path / "config.yml").write_text(yaml.safe_dump(settings | {"output_dir": str(tmp_path)}))
        try:
            return bool(load_cfg(str(tmp_path / "config.yml")).batch_flattening)
        except ValueError as error:
            return str(error)

    return of


def test_a_refusal_is_one_line(verdict):
    """Before Axolotl's own validation, whose errors have many; `test_axolotl_plugin` has all of them."""
    message = verdict(multipack_prob=False)
    assert "multipack_prob is not a key of the multipack plugin; did you mean" in message
    assert "\n" not in message


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("flattening", [None, True, "auto"])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("size", [1, 2])
def test_combinations_with_batch_flattening_are_those_of_axolotl(
    verdict, packing, flattening, attention, size
):
    """What Axolotl refuses is refused; the plugin refuses to pack nothing, too."""
    changes = {"sample_packing": packing, "batch_flattening": flattening}
    changes |= {"attn_implementation": attention, "micro_batch_size": size}
    theirs, ours = verdict(**changes, plugins=None), verdict(**changes)
    if not packing and not flattening:
        assert theirs is False
        assert "set sample_packing: true" in ours
    elif packing and flattening is True:
        assert isinstance(theirs, str)
        assert "remove batch_flattening" in ours
    elif isinstance(theirs, str):
        assert "requires a varlen-capable attention backend" in theirs
        assert "requires a varlen-capable attention backend" in ours
    else:
        assert theirs == ours


def test_flattening_that_axolotl_turns_off_is_no_silent_padding(config, tmp_path):
    done = run(config, tmp_path, sample_packing=False, batch_flattening="auto")
    assert "ValueError: batch_flattening=False flattens nothing here" in done.stderr


def test_a_model_that_mixes_documents_is_refused_unless_the_probe_is_off(config, tmp_path):
    """transformers' OPT makes its mask without looking at positions."""
    from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(vocab_size=320, **sizes)).save_pretrained(tmp_path / "opt")
    AutoTokenizer.from_pretrained(config["base_model"]).save_pretrained(tmp_path / "opt")
    leaking = config | {
        "base_model": str(tmp_path / "opt"),
        "dataset_prepared_path": str(tmp_path / "prepared"),
    }
    done = run(leaking, tmp_path / "probed")
    assert "ValueError: packed documents are not isolated: document" in done.stderr
    assert train(leaking, tmp_path / "trained", multipack_probe=False)[0]["run"] > 0
