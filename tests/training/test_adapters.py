"""Runs that train adapters: checkpoints hold only these, and frozen weights are those that they were trained beside."""

import json
import math
import os
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_models import save_model, short_run
from multipack import untrusted
from multipack.cli.plan_settings import compose_plan
from multipack.data.packs.collate import PackedCollator
from multipack.data.text.tokenizer import byte_tokenizer
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.training.checkpoint import load_checkpoint
from multipack.training.export import export, loading_code
from multipack.training.frozen_files import check_base
from multipack.training.inference import load_model
from multipack.training.run_config import compose_run, trained_shape
from multipack.training.train import train
from multipack.training.weights import find_weights
from multipack.words import ConfigError

SHAPE = ModelShape(2, 2, 1, 16, 24, vocabulary_size=264, tied=False, context=64)


@pytest.fixture
def words(tmp_path, save_decoder):
    """Words of a run with adapters of rank 2 on a saved base."""
    torch.manual_seed(1)
    base = save_decoder(tmp_path / "base", Decoder(SHAPE), byte_tokenizer())
    return [
        *short_run(tmp_path),
        *(["log.every=0", "optimizer.lr=0.01", "adapter.rank=2"]),
        f"train.init_from={base}",
    ]


def tensors_of(checkpoint):
    found = {}
    for file in sorted((checkpoint / "tensors").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def run(words, out):
    train(compose_run([*words, f"out={out}"]))
    return out / "checkpoints"


def test_checkpoints_hold_adapters_only(words, tmp_path, capsys):
    whole = run([*words, "adapter=dora", "adapter.train=[norm]", "adapter.dropout=0.1"], tmp_path / "whole")
    printed = " ".join(capsys.readouterr().out.split())
    held = tensors_of(whole / "step-00000004")
    model = {name.removeprefix("model."): value for name, value in held.items() if name.startswith("model.")}
    count = sum(map(math.prod, (value.shape for value in model.values())))
    matrices = [(16, 16), (16, 8), (16, 8), (16, 16), (16, 24), (16, 24), (24, 16)]
    assert count == 2 * sum(2 * (inputs + outputs) + outputs for inputs, outputs in matrices) + 16
    assert f"DoRA of rank 2, alpha 32, on 14 matrices, and norm whole: {count:,} parameters" in printed
    moments = [name for name in held if name.startswith("optimizer.") and not name.endswith(".step")]
    assert len(moments) == 2 * len(model)


def test_a_run_is_read_with_its_adapters_merged(words, tmp_path):
    out = run([*words, "adapter=lora", "adapter.targets=[q_proj,down_proj]"], tmp_path / "run").parent
    trained, base = find_weights(out), find_weights(tmp_path / "base")
    changed = {name for name in base.state() if not torch.equal(trained.read(name), base.read(name))}
    parts = ("attention.query", "feed_forward.down")
    assert changed == {f"blocks.{layer}.{part}.weight" for layer in (0, 1) for part in parts}
    a, b = (trained.adapter.read(f"blocks.1.attention.query.lora_{kind}") for kind in "ab")
    expected = base.read("blocks.1.attention.query.weight") + 16.0 * b @ a
    torch.testing.assert_close(load_model(out).get_parameter("blocks.1.attention.query.weight"), expected)
    # Plans count what is trained.
    adapted = CostModel.from_shape(SHAPE, adapter=trained.adapter.config)
    assert load_checkpoint(trained.folder).progress["data"]["options"]["cost"] == adapted.key()
    assert CostModel.from_shape(SHAPE).linear > adapted.linear
    with pytest.raises(ConfigError, match=r"train.init_from=.* is not read with adapter.base=.*: leave one"):
        compose_run([*words, "adapter=lora", f"adapter.base={out}"])
    compose_run([*words, "adapter=lora", words[-1].replace("train.init_from", "adapter.base")])  # the same
    with pytest.raises(ConfigError, match=r"adapter\.rank"):
        compose_run(["train.resume=true", f"out={out}", "adapter.rank=4"])
    with pytest.raises(ConfigError, match=r"adapter.rank=0 must be at least 1"):
        compose_run([*words, "adapter.rank=0"])
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"holds adapters of .*base.*, which cannot be read"):
        load_model(out)


@pytest.mark.slow
def test_adapters_are_trained_on_a_run_with_adapters(words, tmp_path):
    first = run([*words, "adapter=lora"], tmp_path / "first").parent
    start = [word for word in words if not word.startswith("train.init_from")]
    second = run(
        [*start, "adapter=lora", f"train.init_from={first}", "optimizer.lr=0"], tmp_path / "second"
    ).parent
    ours, theirs = find_weights(second).state(), find_weights(first).state()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_frozen_weights_are_compared_whole_and_nothing_else_is(words, tmp_path, monkeypatch):
    """Their files are read once while they stay the same, also as a file system sees it."""
    base = tmp_path / "hf"
    export(tmp_path / "base", base)
    file, unsampled = base / "model.safetensors", 30_000
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(tensors, file, {"format": "pt", "note": "x" * (1 << 23)})
    out = run([*words[:-1], f"train.init_from={base}", "adapter=lora"], tmp_path / "run").parent
    template = base / "tokenizer_config.json"
    template.write_text(template.read_text().replace("{", '{"chat_template": "x",', 1))
    resume = ["train.resume=true", f"out={out}", "train.steps=6"]
    with monkeypatch.context() as patch:
        patch.setattr("multipack.training.frozen_files.checksum", None)
        find_weights(out)
        train(compose_run(resume))
    before, content = file.stat(), bytearray(file.read_bytes())
    content[unsampled] ^= 1
    copy = tmp_path / "copy"
    copy.write_bytes(content)
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    for read in (lambda: train(compose_run(resume)), lambda: find_weights(out)):
        with pytest.raises(ValueError, match=r"adapter\.base=.*holds other weights"):
            read()


def test_hashes_of_earlier_versions_are_not_compared(tmp_path, save_decoder):
    base = save_decoder(tmp_path / "base", Decoder(SHAPE), byte_tokenizer())
    config = AdapterConfig("lora", base=str(base), base_hash="0" * 64)
    found = check_base(config, World())
    assert check_base(replace(config, base_hash=found), World()) == found
    with pytest.raises(ValueError, match=r"adapter\.base=.*holds other weights"):
        check_base(replace(config, base_hash=f"{found}0"), World())


@pytest.fixture
def exported(words, tmp_path):
    """Words of a run on a base in Hugging Face's format."""
    export(tmp_path / "base", tmp_path / "hf")
    return [*words[:-1], f"train.init_from={tmp_path / 'hf'}", "optimizer.lr=0.05"]


def logits_of(model, ids):
    none = np.zeros((0, 2), dtype=np.int64)
    return model.logits(PackedCollator(1, len(ids))([Document(np.asarray(ids, dtype=np.uint32), none)]))


@pytest.mark.parametrize(
    "settings", ["adapter=lora", "adapter=dora adapter.rank_stabilized=true adapter.train=[norm]"]
)
def test_peft_loads_an_export_and_we_load_it_too(exported, tmp_path, settings):
    pytest.importorskip("peft")
    out = run([*exported, *settings.split()], tmp_path / "run").parent
    rows = dict(export(out, tmp_path / "adapter"))
    assert rows["frozen weights"] == str(tmp_path / "hf")
    written = {file.name for file in (tmp_path / "adapter").iterdir()}
    files = "adapter_config.json adapter_model.safetensors tokenizer.json tokenizer_config.json"
    assert written == set(files.split())
    scope: dict = {}
    exec(loading_code(tmp_path / "adapter"), scope)
    ids = torch.tensor([[7, 30, 100, 41, 5]])
    with torch.no_grad():
        theirs = scope["model"].eval().double()(ids).logits[0]
        base = logits_of(load_model(tmp_path / "hf").double(), ids[0])
        # transformers' norms and rotations are in float32: a part of what our own float32 rounds.
        rounded = logits_of(load_model(out), ids[0]).double()
        for folder in (out, tmp_path / "adapter"):
            ours = logits_of(load_model(folder).double(), ids[0])
            torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * float((ours - rounded).abs().max()))
    assert (ours - base).abs().max() > 0.01
    export(out, tmp_path / "merged", merge=True)
    transformers = pytest.importorskip("transformers")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged.double()(ids).logits[0], ours, rtol=0, atol=1e-5)
    whole = load_model(tmp_path / "merged").double()
    torch.testing.assert_close(logits_of(whole, ids[0]), ours, rtol=0, atol=1e-6)
    # As peft writes it itself, and as the start of a run.
    scope["model"].float().save_pretrained(tmp_path / "again")
    again = logits_of(load_model(tmp_path / "again").double(), ids[0])
    torch.testing.assert_close(again, ours, rtol=0, atol=1e-6)
    start = [word for word in exported if not word.startswith(("train.init_from", "adapter."))]
    run([*start, f"train.init_from={tmp_path / 'again'}", "optimizer.lr=0"], tmp_path / "next")
    torch.testing.assert_close(
        logits_of(load_model(tmp_path / "next").double(), ids[0]), ours, rtol=0, atol=1e-6
    )


def test_exports_and_adapters_that_are_refused(words, exported, tmp_path):
    out = run([*words, "adapter=lora"], tmp_path / "own").parent
    with pytest.raises(
        ValueError, match=r"which is no folder of a Hugging Face model: export .* with --merge"
    ):
        export(out, tmp_path / "x")
    run([*exported, "adapter=lora"], tmp_path / "run")
    export(tmp_path / "run", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    good = json.loads(file.read_text())
    for changes, message in (
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"target_parameters": ["x"]}, "target_parameters=.* is not computed here"),
        ({"rank_pattern": {"q_proj": 3}}, "is an adapter of another model"),
        ({"alpha_pattern": {"q_proj": "3"}}, "alpha_pattern must have a positive number"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not computed here"),
        ({"base_model_name_or_path": "meta/x"}, "base_model_name_or_path=meta/x is no folder here"),
        ({"r": 5}, "is an adapter of another model"),
        ({"r": 2.5}, "r must be"),
        ({"lora_alpha": 10**400}, "lora_alpha must be"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
        ({"use_dora": 0.5}, "use_dora must be true or false"),
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"fan_in_fan_out": "no"}, "fan_in_fan_out must be true or false"),
        ({"base_model_name_or_path": str(tmp_path / "adapter")}, "base_model_name_or_path leads back to"),
    ):
        file.write_text(json.dumps(good | changes))
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / "adapter")


def test_an_adapter_on_an_adapter_starts_a_run(exported, tmp_path):
    run([*exported, "adapter=lora"], tmp_path / "run")
    first, second = tmp_path / "first", tmp_path / "second"
    export(tmp_path / "run", first)
    shutil.copytree(first, second)
    settings = json.loads((second / "adapter_config.json").read_text())
    (second / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": str(first)})
    )
    for folder in (first, second):  # the model below them has one
        (folder / "tokenizer.json").unlink()
    start = [word for word in exported if not word.startswith(("train.init_from", "adapter.", "tokenizer"))]
    run([*start, f"train.init_from={second}", "optimizer.lr=0"], tmp_path / "next")
    ids = torch.arange(20)
    once, twice, trained = (
        logits_of(load_model(folder), ids) for folder in (first, second, tmp_path / "next")
    )
    assert (twice - once).abs().max() > 0.01
    torch.testing.assert_close(trained, twice, rtol=0, atol=1e-5)
    _, planned, _ = compose_plan(["lengths.npy", f"train.init_from={second}"])
    assert planned.model.d_model == trained_shape(second).d_model == SHAPE.d_model


def peft_adapter(folder, base, **settings):
    """An adapter with random values on the model in a folder, saved by peft; returns its model."""
    peft = pytest.importorskip("peft")
    library = pytest.importorskip("transformers")
    model = library.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=2, lora_alpha=3, **{"target_modules": ["q_proj", "down_proj"], **settings})
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in {id(each): each for each in adapted.parameters() if each.requires_grad}.values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder)
    return adapted


def difference_of(folder, theirs):
    """Largest difference of logits to those of a model of transformers, in units of what float32 rounds in all."""
    ids = torch.tensor([[7, 30, 100, 41, 5]])
    with torch.no_grad():
        expected = theirs.double()(ids).logits[0]  # its norms and rotations stay in float32
        found, rounded = (
            logits_of(each, ids[0]) for each in (load_model(folder).double(), load_model(folder))
        )
    return float((found - expected).abs().max() / (found - rounded).abs().max())


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (False, {"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 5}, "alpha_pattern": {"down_proj": 7.5}}),
        (False, {"rank_pattern": {"1.mlp.down_proj": 1}, "use_rslora": True, "use_dora": True}),
        (False, {"layers_to_transform": [1], "layers_pattern": "layers", "alpha_pattern": {"q_proj": 1}}),
        (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ],
)
def test_adapters_with_ranks_and_scales_of_their_own_are_those_of_peft(tmp_path, tied, settings):
    """Read, written back, and as the start of a run that is resumed."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_model("llama", base, num_key_value_heads=2, tie_word_embeddings=tied)
    theirs = peft_adapter(adapter, base, **settings)
    assert difference_of(adapter, theirs) < 4
    (adapter / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    words = [*short_run(tmp_path), f"train.init_from={adapter}", "adapter=lora", "optimizer.lr=0"]
    run(words, tmp_path / "run")
    train(compose_run(["train.resume=true", f"out={tmp_path / 'run'}", "train.steps=6"]))
    assert difference_of(tmp_path / "run", theirs) < 4
    if tied:
        with pytest.raises(ValueError, match="--merge"):
            export(adapter, tmp_path / "again")
    else:
        export(adapter, tmp_path / "again")
        before, after = (
            load_file(each / "adapter_model.safetensors") for each in (adapter, tmp_path / "again")
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        import peft
        import transformers

        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        assert difference_of(adapter, peft.PeftModel.from_pretrained(plain, tmp_path / "again").eval()) < 4
    export(adapter, tmp_path / "merged", merge=True)
    assert difference_of(tmp_path / "merged", theirs) < 4


@pytest.mark.parametrize(
    ("tied", "settings", "named"),
    [
        (True, {"modules_to_save": ["embed_tokens"]}, "modules_to_save has .*embed_tokens"),
        (True, {"modules_to_save": ["lm_head"]}, "modules_to_save has .*lm_head"),
        (True, {"modules_to_save": ["embed_tokens", "lm_head"]}, "modules_to_save has .*lm_head"),
        (False, {"target_modules": ["q_proj", "lm_head"]}, "lm_head .*merge the adapter"),
        (False, {"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens .*merge the adapter"),
    ],
)
def test_adapters_of_peft_that_another_model_would_be_are_refused(tmp_path, tied, settings, named):
    base = tmp_path / "base"
    save_model("llama", base, num_key_value_heads=2, tie_word_embeddings=tied)
    peft_adapter(tmp_path / "adapter", base, **settings)
    with pytest.raises(ValueError, match=named):
        load_model(tmp_path / "adapter")


def test_an_adapter_of_a_module_that_settings_do_not_name_is_refused_as_peft_leaves_it_out(
    tmp_path, monkeypatch
):
    """And where the settings name all modules, the logits are those of peft."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_model("llama", base, num_key_value_heads=2)
    theirs = peft_adapter(adapter, base)
    file = adapter / "adapter_config.json"
    good = json.loads(file.read_text())
    for changes in (
        {"target_modules": r"(?i)model\.layers\.\d+\.(self_attn|mlp)\.((q|k|v|o|gate|up|x|y|z|down)_proj)"},
        {"target_modules": "All-Linear"},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "1.self_attn.q_proj", "mlp.down_proj"]},
        {"layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"], "exclude_modules": "q_proj"},
        {"rank_pattern": {"(a|b|c|d|e|f|g|h|i)+|.*k_.*": 5}, "exclude_modules": "(?i)Q_PROJ"},
        {"exclude_modules": ["proj", "lm_head"], "modules_to_save": ["q_pro"], "layers_to_transform": []},
    ):
        file.write_text(json.dumps(good | changes))
        assert difference_of(adapter, theirs) < 4
    monkeypatch.setattr(untrusted, "MOST_SECONDS", 0.5)
    for setting, value in (
        *(
            ("target_modules", each)
            for each in (["q_proj"], ["", "down_proj"], "q_proj", None, {"q_proj": 1})
        ),
        *(("target_modules", each) for each in ([["q_proj"], "down_proj"], "(", "(([a-z._0-9])+)+!")),
        *(("exclude_modules", each) for each in (["q_proj"], r".*\.1\.mlp\.\w+", 1)),
        *(("layers_to_transform", each) for each in (1, [0], [0, True], "01")),
        *(("rank_pattern", {each: 2}) for each in ("(", "(((.)+)+)+!")),
        *(("modules_to_save", each) for each in (["mlp"], ["q_proj"], "score", "\n")),
    ):
        file.write_text(json.dumps(good | {setting: value}))
        with pytest.raises(ValueError, match=rf"adapter_config.json: {setting}") as caught:
            load_model(adapter)
        assert "\n" not in str(caught.value)
    file.write_text(json.dumps(good | {"layers_to_transform": [0, 1], "layers_pattern": "h"}))
    with pytest.raises(ValueError, match="layers_to_transform"):
        load_model(adapter)
