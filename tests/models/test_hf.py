"""Weights and shapes in Hugging Face's names, against transformers' own models where it is installed."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from multipack.models.decoder import Decoder
from multipack.models.hf import build_decoder, config_of, from_huggingface, shape_of, to_huggingface
from multipack.models.hf_files import load_weights
from multipack.shapes import ModelShape


@pytest.fixture
def folder(tmp_path):
    """(model) → a folder with its config.json and weights."""

    def write(model):
        (tmp_path / "config.json").write_text(json.dumps(config_of(model.shape)))
        save_file(to_huggingface(model.shape, model.state_dict()), tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.fixture
def transformers():
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return library


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def shape_there(shape):
    """The shape as the format knows it: GPT-2 has biases there, and head widths are written out."""
    biased = True if shape.positions == "learned" else shape.bias
    head_dim = 0 if shape.positions == "learned" else shape.head_width
    return dataclasses.replace(shape, bias=biased, head_dim=head_dim)


def test_there_and_back_is_the_same(model, folder, pack, documents):
    shape, state = load_weights(folder(model))
    assert shape == shape_there(model.shape)
    batch = pack(documents)
    assert torch.equal(build_decoder(shape, state).logits(batch), model.eval().logits(batch))
    own = model.state_dict()
    assert own.keys() <= state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in own.items())
    assert not any(
        tensor.any() for name, tensor in state.items() if name not in own
    )  # biases that it did not have


def test_names_are_inverse_to_each_other(model):
    tensors = to_huggingface(model.shape, model.state_dict())
    shape = shape_there(model.shape)
    again = to_huggingface(shape, from_huggingface(shape, tensors))
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_transformers_computes_the_same_logits_from_our_files(model, folder, pack, documents, transformers):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder(model), attn_implementation="eager"
    ).eval()
    assert type(theirs).__name__ == config_of(model.shape)["architectures"][0]
    for document in documents:
        tokens = torch.from_numpy(document.tokens.astype("int64"))[None]
        with torch.no_grad():
            expected = theirs(tokens, use_cache=False).logits[0]
            ours = model.eval().logits(pack([document]))
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shards", ["10GB", "8KB"])
def test_what_transformers_saves_gives_the_same_logits_here(
    shape, tmp_path, pack, documents, transformers, shards
):
    config = config_of(shape)
    made = transformers.AutoConfig.for_model(**config)
    theirs = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    theirs.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shards == "8KB")
    found, state = load_weights(tmp_path)
    assert found == shape_there(shape)
    ours = build_decoder(found, state)
    for document in documents:
        with torch.no_grad():
            expected = theirs(
                torch.from_numpy(document.tokens.astype("int64"))[None], use_cache=False
            ).logits[0]
            torch.testing.assert_close(ours.logits(pack([document])), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 16])
def test_mistral_slides_as_far_as_our_window(transformers, tmp_path, pack, documents, window):
    shape = ModelShape(2, 4, 2, 32, 48, vocabulary_size=50, context=64, tied=False, window=window)
    try:
        model = Decoder(shape).eval()
    except ValueError as refusal:
        pytest.skip(f"the decoder builds no sliding windows: {refusal}")
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape)))
    save_file(to_huggingface(shape, model.state_dict()), tmp_path / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert type(theirs).__name__ == "MistralForCausalLM"
    for document in documents:
        with torch.no_grad():
            expected = theirs(
                torch.from_numpy(document.tokens.astype("int64"))[None], use_cache=False
            ).logits[0]
            torch.testing.assert_close(model.logits(pack([document])), expected, rtol=1e-5, atol=1e-5)
    assert load_weights(tmp_path)[0] == shape_there(shape)


def test_files_of_models_without_a_head_and_old_buffers_are_understood(model, folder):
    where = folder(model)
    tensors = load_file(where / "model.safetensors")
    prefix = "transformer." if model.shape.positions == "learned" else "model."
    buffer = (
        "h.0.attn.bias" if model.shape.positions == "learned" else "layers.0.self_attn.rotary_emb.inv_freq"
    )
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    save_file({**bare, buffer: torch.ones(1)}, where / "model.safetensors")
    _, state = load_weights(where)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_half_precision_is_read_as_asked(model, folder):
    where = folder(model)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(where / "model.safetensors").items()}
    save_file(tensors, where / "model.safetensors")
    _, state = load_weights(where)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["norm.weight"], model.norm.weight.bfloat16().float())
    assert load_weights(where, torch.bfloat16)[1]["norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "integers", "truncated"])
def test_weights_that_do_not_fit_are_refused_by_name(model, folder, damage):
    where = folder(model)
    file = where / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    if damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        tensors["model.extra.weight"] = torch.ones(1)
    elif damage == "shape":
        tensors[name] = torch.ones(3, 7)
    elif damage == "integers":
        tensors[name] = torch.ones(tensors[name].shape, dtype=torch.int8)
    save_file(tensors, file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    said = {
        "missing": f"the weights lack {name}",
        "unknown": r"have unknown model\.extra\.weight",
        "shape": rf"{name} \[3, 7\] instead of",
        "integers": rf"no floating point numbers in {name} \(I8\)",
        "truncated": "the weights are damaged",
    }
    with pytest.raises(ValueError, match=said[damage]):
        load_weights(where)


def test_pickles_are_refused_with_the_reason(model, folder):
    where = folder(model)
    (where / "model.safetensors").rename(where / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle, which can run code"):
        load_weights(where)
    (where / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"there is no model\.safetensors"):
        load_weights(where)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "missing.safetensors", "model.bin"])
def test_an_index_may_only_name_safetensors_of_its_folder(model, folder, name):
    where = folder(model)
    (where / "model.safetensors").unlink()
    (where / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="which is no safetensors file of that folder"):
        load_weights(where)


def test_tied_embeddings_that_differ_are_refused(folder):
    shape = ModelShape(1, 2, 1, 16, 24, vocabulary_size=20)
    where = folder(Decoder(shape))
    tensors = load_file(where / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, where / "model.safetensors")
    assert load_weights(where)[0].tied
    save_file({**tensors, "lm_head.weight": head + 1}, where / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_weights(where)


LLAMA_CONFIG = config_of(ModelShape(1, 2, 1, 16, 24, vocabulary_size=20))
GPT2_CONFIG = config_of(
    ModelShape(
        1,
        2,
        2,
        16,
        24,
        vocabulary_size=20,
        positions="learned",
        norm="layernorm",
        activation="gelu",
        bias=True,
    )
)


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (LLAMA_CONFIG, {"model_type": "qwen2"}, "biases in query, key and value alone"),
        (LLAMA_CONFIG, {"model_type": "gemma2"}, "weights of llama, mistral, gpt2 can be read"),
        (LLAMA_CONFIG, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA_CONFIG, {"attention_bias": True}, "attention_bias=True, mlp_bias=False"),
        (LLAMA_CONFIG, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling="),
        (LLAMA_CONFIG, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters="),
        (LLAMA_CONFIG, {"quantization_config": {"bits": 4}}, "quantization_config="),
        (LLAMA_CONFIG, {"num_key_value_heads": 3}, r"config\.json: .*kv_heads=3"),
        (GPT2_CONFIG, {"activation_function": "gelu"}, "activation_function='gelu'"),
        (GPT2_CONFIG, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ],
)
def test_models_that_compute_otherwise_are_refused(config, changes, said):
    assert shape_of(config).layers == 1
    with pytest.raises(ValueError, match=said):
        shape_of({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm": "layernorm"}, r"Llama has no model\.norm=layernorm"),
        ({"positions": "learned"}, r"GPT-2 has no model\.norm=rmsnorm, model\.activation=swiglu"),
        ({"window": 8, "bias": True}, r"model\.bias=True with window=8"),
        ({"window": 8, "window_layers": 1}, r"model\.window_layers=1"),
    ],
)
def test_shapes_that_nobody_has_are_refused(changes, said):
    shape = dataclasses.replace(ModelShape(2, 2, 2, 16, 24, vocabulary_size=20), **changes)
    with pytest.raises(ValueError, match=said):
        config_of(shape)


def test_a_configuration_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not there"):
        load_weights(tmp_path)
    for text, said in (("{", "is not JSON"), ("[]", "holds list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            load_weights(tmp_path)


def test_a_decoder_is_not_built_from_other_weights(model):
    state = dict(model.state_dict())
    state["norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match="not those of a decoder of their shape"):
        build_decoder(model.shape, state)
