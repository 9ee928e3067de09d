"""Models of transformers in our trainer (`model=hf:FOLDER`), compared with transformers' own passes."""

import json
import math
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from hf_models import SIZES, dequantize, quantized_matrices, run_words, save_model
from multipack.data.packs.batch import without_tokens
from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.models.foreign import foreign_names, foreign_settings, foreign_shape, open_foreign
from multipack.models.probe_batch import packed_batch
from multipack.models.tiny_models import tiny_config
from multipack.ops.attention import foreign_attention
from multipack.ops.int8 import Int8
from multipack.ops.nf4 import Nf4
from multipack.run import RunDirectory
from multipack.training.blueprint import open_engine
from multipack.training.checkpoint import load_checkpoint
from multipack.training.checks import check
from multipack.training.export import export
from multipack.training.foreign_checks import check_isolated
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train

transformers = pytest.importorskip("transformers", "5.2", reason="transformers >= 5.2 is not installed")
WIDE = {"hidden_size": 64, "intermediate_size": 64}
"""Rows that blocks of NF4 divide."""
QUANTIZE = {"nf4": Nf4.quantize, "int8": Int8.quantize}
ATTENTION = ["adapter=lora", "adapter.rank=2", "adapter.targets=[self_attn]"]
DOCUMENTS = [[*range(5, 16)], [*range(40, 47)], [*range(90, 110)], [7, 7]]


def model_of(folder):
    """The model of a folder in `Decoder`."""
    shape = foreign_shape(str(folder))
    model, read = Decoder(shape), open_foreign(shape)
    model.load_state_dict({name: read(name) for name, _ in model.named_parameters()})
    return model


def result(out):
    """The model's tensors in the last checkpoint of a run, and the losses of its steps."""
    run = RunDirectory(out)
    losses = [record["loss"] for record in run.records() if "loss" in record]
    return load_checkpoint(run.latest_checkpoint()).source.whole("model"), losses


def untied_head(model):
    """The head's matrix, if it is not the embedding."""
    return [] if model.lm_head.weight is model.get_input_embeddings().weight else [model.lm_head.weight]


@pytest.mark.parametrize(
    "kind",
    [
        *("mixtral", "gpt_oss", "phi", "deepseek_v3", "phi3"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_moe", "opt", "cohere", "gpt_neox")),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("phimoe", "llama")),
    ],
)
def test_a_pack_equals_its_documents_alone(kind, tmp_path):
    theirs = save_model(kind, tmp_path)
    ours = model_of(tmp_path)
    expected = torch.zeros(())
    for document in DOCUMENTS:
        tokens = torch.tensor([document])
        logits = theirs(tokens, use_cache=False).logits[0]
        expected = expected + F.cross_entropy(logits[:-1].float(), tokens[0, 1:], reduction="sum")
    expected.backward()
    found = ours(packed_batch(DOCUMENTS))
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}
    names = foreign_names(ours.shape)
    trained = {name: each for name, each in ours.named_parameters() if each.requires_grad}
    assert {names[name] for name in trained} == gradients.keys()
    for name, each in trained.items():
        scale = gradients[names[name]].abs().max().clamp(min=1.0)
        torch.testing.assert_close(each.grad / scale, gradients[names[name]] / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("phi", marks=pytest.mark.slow)])
def test_documents_that_share_tokens_equal_those_that_do_not(kind, tmp_path):
    save_model(kind, tmp_path)
    model, found = model_of(tmp_path), []
    trained = [each for each in model.blocks.parameters() if each.requires_grad]
    begin, span = list(range(20, 32)), np.array([[3, 15]])
    texts = [*begin, 7, 8, 9], [*begin, 40, 41, 42], [*begin[:5], *range(90, 100)]
    documents = [Document(np.array(text, dtype=np.uint16), span) for text in texts]
    for min_prefix in (None, 1):
        batch = PackedCollator(3, 15, min_prefix=min_prefix)(documents)
        loss = model(batch)
        found.append((loss.detach(), torch.autograd.grad(loss, trained, allow_unused=True)))
    assert batch.num_slots == 12 + 3 + 3 + 10
    torch.testing.assert_close(*(loss for loss, _ in found), rtol=1e-5, atol=0)
    for each, other in zip(*(gradients for _, gradients in found), strict=True):
        if each is not None:
            torch.testing.assert_close(other, each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["phi3", "llama", "phimoe"])
def test_documents_are_not_rotated_by_longer_padding_and_longer_documents_are_refused(kind, tmp_path):
    """Phi-3.5 and Phi-4-mini have longrope, phimoe too; Llama has dynamic here."""
    save_model(kind, tmp_path)
    model, pad = model_of(tmp_path), PackedCollator(4, 64, pad_to=128)
    documents = [Document(np.array(each), np.array([[0, len(each)]])) for each in DOCUMENTS]
    torch.testing.assert_close(model(pad(documents)), model(packed_batch(DOCUMENTS)), rtol=1e-5, atol=0)
    assert model(packed_batch([[*range(40)]])).isfinite()
    with pytest.raises(ValueError, match=r"document 1 has 41 tokens.*rope_type=.*=40"):
        model(packed_batch([[1, 2], [*range(41)]]))


@pytest.mark.parametrize("kind", ["phi3", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_run_with_longer_documents_than_are_rotated_alike_is_refused(kind, tmp_path):
    save_model(kind, tmp_path / "base")
    words = [*run_words(tmp_path, tmp_path / "base"), "train.steps=1"]
    train(compose_run([*words, f"out={tmp_path / 'run'}"]))
    with (tmp_path / "documents.jsonl").open("a") as file:
        file.write(json.dumps({"text": "a" * 45}) + "\n")
    with pytest.raises(ValueError, match=r"document \d+ has 4\d tokens.*rope_type=.*use plan\.capacity=40"):
        train(compose_run([*words, f"out={tmp_path / 'refused'}"]))


@pytest.mark.parametrize(
    "kind",
    [
        "phi",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("gpt_oss", "mixtral", "deepseek_v3", "opt")
        ),
    ],
)
def test_code_that_cannot_share_tokens_is_refused(kind, tmp_path, monkeypatch):
    """Documents that share tokens have the log-probabilities of those that do not; a tree that shares none is found."""
    save_model(kind, tmp_path)
    shape = foreign_shape(str(tmp_path))
    check_isolated(shape, torch.device("cpu"), shares=True)
    original = foreign_attention._packed
    monkeypatch.setattr(
        foreign_attention,
        "_packed",
        lambda q, k, v, batch, limits: original(q, k, v, without_tokens(batch.cu_seqlens.tolist()), limits),
    )
    check_isolated(shape, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"model=hf:.*use data\.share_prefixes=off"):
        check_isolated(shape, torch.device("cpu"), shares=True)


def test_the_export_of_a_run_loads(tmp_path, capsys):
    save_model("mixtral", tmp_path / "base")
    whole = tmp_path / "whole"
    train(compose_run([*run_words(tmp_path, tmp_path / "base"), "log.verbose=true", f"out={whole}"]))
    assert "auxiliary losses of routers are not added" in " ".join(capsys.readouterr().out.split())
    expected, losses = result(whole)
    assert losses[-1] < losses[0]
    shutil.rmtree(tmp_path / "base")  # the run has its configuration
    export(whole, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = model_of(tmp_path / "out").eval()
    for name, value in ours.named_parameters():
        assert torch.equal(value, expected[name]), name
    with torch.no_grad():
        logits = loaded(torch.tensor(DOCUMENTS[:1]), use_cache=False).logits[0]
        torch.testing.assert_close(ours.logits(packed_batch(DOCUMENTS[:1])), logits, rtol=1e-5, atol=1e-5)


def test_a_resumed_run_has_the_code_of_its_checkpoint(tmp_path):
    """Whatever happens to the folder; another config.json that is named is refused."""
    base, out = tmp_path / "base", tmp_path / "run"
    save_model("phi", base)
    train(compose_run([*run_words(tmp_path, base), f"out={out}"]))
    expected, losses = result(out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    (out / "checkpoints" / "latest").unlink()
    file = base / "config.json"
    changed = json.loads(file.read_text())
    changed["rope_parameters"]["partial_rotary_factor"] = 0.25
    file.write_text(json.dumps(changed))
    shutil.copytree(base, tmp_path / "other")
    resume = ["train.resume=true", f"out={out}"]
    with pytest.raises(ValueError, match=r"model=hf:.*other has another config\.json"):
        train(compose_run([*resume, f"model=hf:{tmp_path / 'other'}"]))
    train(compose_run(resume))
    found, again = result(out)
    assert again == losses
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for name in ("config.json", "model.safetensors"):  # documents need the tokenizer
        (base / name).unlink()
    train(compose_run([*resume, "train.steps=6"]))
    with pytest.raises(ValueError, match=r"model=hf:.*base.*config\.json"):
        train(compose_run([*run_words(tmp_path, base), f"out={tmp_path / 'new'}"]))


@pytest.mark.parametrize(
    ("kind", "name", "sizes"),
    [
        ("mixtral", "nf4", WIDE),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("phi", "nf4", WIDE), ("gpt_oss", "int8", {}), ("deepseek_v3", "int8", {}))
        ),
    ],
)
def test_linear_layers_and_experts_are_quantized_and_nothing_else(kind, name, sizes, tmp_path, capsys):
    base = save_model(kind, tmp_path / "base", **sizes)
    save_model(kind, tmp_path / "rounded", change=partial(dequantize, QUANTIZE[name]), **sizes)
    words = [*run_words(tmp_path, tmp_path / "base"), *ATTENTION, f"adapter.quantize={name}"]
    whole, other = (tmp_path / out for out in ("whole", "other"))
    train(compose_run([*words, "log.verbose=true", f"out={whole}"]))
    count = sum(each.numel() for each in quantized_matrices(base))
    rest = len(torch.nn.utils.parameters_to_vector(base.parameters())) - count
    rest += sum(each.numel() for name, each in base.named_buffers() if name.endswith("correction_bias"))
    header = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"; {count:,} frozen ones are in {name.upper()} with [\w ]+, {rest:,} are not", header)
    train(compose_run([*run_words(tmp_path, tmp_path / "rounded"), *ATTENTION, f"out={other}"]))
    (held, losses), (expected, theirs) = result(whole), result(other)
    assert losses == pytest.approx(theirs, rel=1e-6)
    assert losses[-1] < losses[0]
    for key, value in expected.items():
        torch.testing.assert_close(held[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("mixtral", "none"), ("mixtral", "nf4"), ("deepseek_v3", "int8")])
def test_peft_loads_adapters_and_they_are_merged(kind, name, tmp_path):
    """Beside quantized matrices the merged model has the values that they stand for."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    sizes = WIDE if name == "nf4" else {}
    base = save_model(kind, tmp_path / "base", **sizes)
    if name != "none":
        base = save_model(kind, tmp_path / "rounded", change=partial(dequantize, QUANTIZE[name]), **sizes)
    words = [*run_words(tmp_path, tmp_path / "base"), *ATTENTION, f"adapter.quantize={name}"]
    train(compose_run([*words, f"out={tmp_path / 'run'}"]))
    held, losses = result(tmp_path / "run")
    assert losses[-1] < losses[0]
    assert all(each.endswith((".lora_a", ".lora_b")) for each in held)
    before = {each: value.clone() for each, value in base.state_dict().items()}
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    export(tmp_path / "run", tmp_path / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = torch.tensor(DOCUMENTS[:1])
    with torch.no_grad():
        one, two = (model(tokens, use_cache=False).logits for model in (adapted, merged))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    after = merged.state_dict()
    changed = {each for each, value in before.items() if not torch.equal(after[each], value)}
    assert changed
    assert all(".self_attn." in each for each in changed)


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_frozen_matrices_have_the_dtype_of_products(kind, tmp_path, monkeypatch):
    base = save_model(kind, tmp_path / "base")
    words = [*run_words(tmp_path, tmp_path / "base"), *ATTENTION]
    train(compose_run([*words, f"out={tmp_path / 'fp32'}"]))
    engines = []
    monkeypatch.setattr(
        "multipack.training.assemble.open_engine",
        lambda *given: engines.append(open_engine(*given)) or engines[-1],
    )
    train(compose_run([*words, "train.dtype=bf16", f"out={tmp_path / 'bf16'}"]))
    frozen = [each for each in engines[0].parameters.values() if not each.requires_grad]
    matrices = sum(each.numel() for each in [*quantized_matrices(base), *untied_head(base)])
    assert sum(each.nbytes for each in frozen) == 4 * sum(each.numel() for each in frozen) - 2 * matrices
    (_, expected), (_, losses) = result(tmp_path / "fp32"), result(tmp_path / "bf16")
    assert losses == pytest.approx(expected, rel=2e-2)


def test_a_model_without_matrices_to_quantize_is_refused(tmp_path):
    save_model("mixtral", tmp_path / "base")
    words = [*run_words(tmp_path, tmp_path / "base"), "adapter=qlora", f"out={tmp_path / 'run'}"]
    with pytest.raises(
        ValueError, match=r"adapter.quantize=nf4: .* no frozen linear layers with rows of a mult"
    ):
        train(compose_run(words))


def test_preferences_train(tmp_path):
    save_model("mixtral", tmp_path / "base")
    words = run_words(tmp_path, tmp_path / "base")
    file = tmp_path / "documents.jsonl"
    pairs = [{"prompt": "ab" * (n % 3 + 1), "chosen": "c" * 5, "rejected": "d" * 6} for n in range(40)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    train(compose_run([*words, f"out={tmp_path / 'run'}"]))
    _, losses = result(tmp_path / "run")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # the reference is the model itself
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_folder_without_weights_starts_with_random_ones(tmp_path):
    save_model("mixtral", tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    words = [*run_words(tmp_path, tmp_path / "base"), "tokenizer=byte", "train.steps=1"]
    outs = [tmp_path / "one", tmp_path / "two"]
    for out in outs:
        train(compose_run([*words, f"out={out}"]))
    (one, losses), (two, again) = map(result, outs)
    assert losses == again
    assert all(torch.equal(two[name], value) for name, value in one.items())


def test_a_model_that_mixes_documents_is_refused_with_the_reason(tmp_path):
    save_model("jamba", tmp_path / "base")
    words = [*run_words(tmp_path, tmp_path / "base"), f"out={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match=r"model=hf:.*documents of a row are mixed: blocks\.0\.mamba"):
        train(compose_run(words))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["parallel.tensor=2"], "parallel.tensor=2 is not supported .* use parallel.data=zero3"),
        (["train.tiles=2"], "train.tiles=2 is not supported"),
        (["train.compile=true"], "train.compile=true is not supported"),
        (["model.attention=dense"], "model.attention=dense is not supported"),
        (["preference.loss=reward"], "preference.loss=reward needs a head of scores"),
        (["model.layers=3"], "model.layers=3 has no effect .*config.json says 2"),
    ],
)
def test_what_it_cannot_do_is_refused(words, reason, tmp_path):
    save_model("gpt_neox", tmp_path / "base")
    config = compose([*run_words(tmp_path, tmp_path / "base"), *words])
    with pytest.raises(ValueError, match=reason):
        check(config, 2)


@pytest.mark.slow
def test_the_language_model_of_a_model_with_images_is_trained_alone(tmp_path):
    """Of files with its names in a model with images; the export is the language model."""
    theirs = save_model("ministral3", tmp_path / "text")
    given = json.loads((tmp_path / "text" / "config.json").read_text())
    outer = transformers.Mistral3Config(text_config=given).to_dict()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps({**outer, "text_config": given}))
    for prefix in ("language_model.", "model.language_model."):
        tensors = {
            (
                prefix + name if prefix != "model.language_model." else name.replace("model.", prefix, 1)
            ): each.clone()
            for name, each in theirs.state_dict().items()
        }
        tensors["vision_tower.patch_conv.weight"] = torch.ones(2)
        save_file(tensors, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
        found, expected = model_of(tmp_path / "whole"), model_of(tmp_path / "text")
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other)
    assert foreign_settings(str(tmp_path / "whole"))["architectures"] == ["Ministral3ForCausalLM"]


def test_weights_in_mxfp4_are_read_as_their_definition_says(tmp_path):
    """Two numbers of 4 bits a byte, low one first, and an exponent for 32 of them (OCP Microscaling, 2023)."""
    config = tiny_config(transformers.AutoConfig.for_model("gpt_oss"))
    config.hidden_size = config.intermediate_size = 32
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
        whole = numbers * 2.0 ** (scales[..., None].float() - 127)
        expected[name] = whole.reshape(experts, outputs, inputs).transpose(1, 2)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shape = foreign_shape(str(tmp_path))
    read = open_foreign(shape)
    found = {theirs: read(ours) for ours, theirs in foreign_names(shape).items() if theirs in expected}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert "quantization_config" not in foreign_settings(str(tmp_path))


def test_folders_that_hold_no_such_model_are_refused(tmp_path):
    for kind, reason in (("bloom", "attention of its own"), ("t5", "no causal language model")):
        transformers.CONFIG_MAPPING[kind]().save_pretrained(tmp_path / kind)
        with pytest.raises(ValueError, match=rf"model=hf:{tmp_path / kind}: .*{reason}"):
            Decoder(foreign_shape(str(tmp_path / kind)))
    with pytest.raises(ValueError, match="model=hf:nowhere is no folder here"):
        compose(["model=hf:nowhere"])


@pytest.mark.parametrize(
    "change",
    [
        *({"num_attention_heads": 0}, {"hidden_act": "x"}, {"pad_token_id": 10**9}, {"rope_parameters": []}),
        *({"num_hidden_layers": 10**9}, {"num_nextn_predict_layers": 1e30}, {"vocab_size": 10**12}),
        *({"tie_word_embeddings": "x"}, {"hidden_size": 10**400}, {"rope_parameters": {"rope_type": [1]}}),
        *({"layer_types": 7}, {"model_type": ["llama"]}, {"text_config": {"num_hidden_layers": 10**9}}),
        *({"quantization_config": "x"}, {"num_attention_heads": -4}),
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_damaged_config_is_refused_in_one_line(change, tmp_path):
    config = transformers.CONFIG_MAPPING["llama"](**SIZES).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=rf"model=hf:{tmp_path}: .*config\.json: ") as caught:
        foreign_names(foreign_shape(str(tmp_path)))
    assert "\n" not in str(caught.value)
