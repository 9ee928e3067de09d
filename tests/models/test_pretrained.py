"""Weights and shapes in Hugging Face's names, against transformers' own models where it is installed."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import FAMILY_SHAPES, save_model
from multipack.models.decoder import Decoder
from multipack.models.huggingface import build_decoder, decoder_shape, to_huggingface
from multipack.models.pretrained import open_weights
from multipack.shapes import SHAPES, ModelShape
from multipack.shapes.config_json import config_of
from multipack.shapes.families import BY_TYPE
from multipack.training.export import export


def load_weights(folder):
    """Shape and all weights of a folder."""
    shape, readers = open_weights(folder)
    return shape, {name: read() for name, read in readers.items()}


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


@pytest.fixture
def same_logits(pack, documents):
    """(their model, our model): the logits of every document are close, alone and in a pack."""

    def compare(theirs, ours):
        packed = ours.eval().logits(pack(documents)).detach()
        first = 0
        for document in documents:
            tokens = torch.from_numpy(document.tokens.astype("int64"))[None]
            with torch.no_grad():
                expected = theirs.eval()(tokens, use_cache=False).logits[0]
                found = ours.logits(pack([document]))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-5)
            torch.testing.assert_close(packed[first : first + len(found)], expected, rtol=1e-5, atol=3e-5)
            first += len(found)

    return compare


def shape_there(shape):
    """The shape as the format knows it: GPT-2 has biases there, and head widths are written out."""
    biased = True if shape.positions == "learned" else shape.bias
    head_dim = 0 if shape.positions == "learned" else shape.head_width
    return dataclasses.replace(shape, bias=biased, head_dim=head_dim)


@pytest.mark.parametrize(
    ("shape", "shards"),
    [(name, "8KB" if name in ("gpt2", "phi3") else "10GB") for name in FAMILY_SHAPES],
    indirect=["shape"],
)
def test_transformers_reads_our_files_and_we_read_its(
    model, folder, same_logits, transformers, shards, tmp_path
):
    """Our own come back as they were; those of transformers have all its biases, and some have several shards."""
    shape, state = load_weights(folder(model))
    assert shape == shape_there(model.shape)
    own = model.state_dict()
    assert own.keys() <= state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in own.items())
    assert not any(
        tensor.any() for name, tensor in state.items() if name not in own
    )  # biases it did not have
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(theirs).__name__ == config_of(model.shape)["architectures"][0]
    other = copy.deepcopy(theirs)  # before scaled rotations change with the longest document
    same_logits(theirs, model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    other.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file() == (shards == "8KB")
    found, state = load_weights(tmp_path / "theirs")
    assert found == shape
    same_logits(other, build_decoder(found, state))


LONG = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]},
}
PLAIN = {
    "gpt2": {"intermediate_size": 64},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 16},
    "qwen2": {"use_sliding_window": True},
    "exaone4": {"sliding_window": 8},
}
CASES = [(kind, None) for kind in BY_TYPE] + [("phi3", "longrope")]
CASES += [(kind, "yarn") for kind in BY_TYPE if kind not in ("gpt2", "ministral3", "phi3")]
FAST = ("phi3", "gpt2", "qwen2")


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [pytest.param(*case, marks=[] if case[0] in FAST else pytest.mark.slow) for case in CASES],
)
def test_the_plainest_and_the_longest_model_of_each_family_as_transformers_writes_it(
    transformers, tmp_path, same_logits, kind, scaling
):
    """Its logits, tensors bit by bit and config.json; families whose shapes are equal differ in names of tensors."""
    rope = {} if scaling is None else {"rope_parameters": dict(LONG[scaling])}
    if rope and "window_theta" in BY_TYPE[kind].fields:
        plain = {"rope_type": "default", "rope_theta": 1e4}
        rope = {"rope_parameters": {"full_attention": LONG[scaling], "sliding_attention": plain}}
    heads = {} if kind == "gpt2" else {"num_key_value_heads": 2, "head_dim": 4}
    theirs = save_model(kind, tmp_path / "theirs", **heads, **PLAIN.get(kind, {}), **rope)
    shape, state = load_weights(tmp_path / "theirs")
    assert shape.family == kind
    same_logits(theirs, build_decoder(shape, state))
    export(tmp_path / "theirs", tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], each) for name, each in before.items())
    assert [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours")] == [
        json.loads((tmp_path / "theirs" / "config.json").read_text())
    ] * 2


def test_a_folder_is_one_call(model, folder, pack, documents):
    import multipack

    path = folder(model)
    found = multipack.load_model(str(path))
    assert torch.equal(found.logits(pack(documents)), model.eval().logits(pack(documents)))
    with pytest.raises(ValueError, match="device nowhere"):
        multipack.load_model(path, "nowhere")
    with pytest.raises(FileNotFoundError, match="missing"):
        multipack.load_model(path / "missing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [name for name in FAMILY_SHAPES if name not in ("dynamic", "longrope", "phi3-long")],
    indirect=True,
)  # the longest row of a batch decides there
def test_transformers_computes_the_same_scores(shape, folder, pack, documents, transformers):
    """At the last token of each row of a padded batch, those of a decoder with scores; read back bit for bit."""
    if (kind := config_of(shape)["model_type"]) in ("granite", "vaultgemma"):
        with pytest.raises(ValueError, match=f"transformers has no {kind} with scores"):
            config_of(dataclasses.replace(shape, scores=1))
        return
    model = Decoder(dataclasses.replace(shape, scores=1)).eval()
    path, pad = folder(model), shape.vocabulary_size - 1
    config = json.loads((path / "config.json").read_text()) | {"pad_token_id": pad}
    (path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, attn_implementation="eager"
    )
    assert type(theirs).__name__ == config["architectures"][0]
    batch = pack(documents)
    rows = torch.full((len(documents), batch.longest), pad)
    for row, document in enumerate(documents):
        rows[row, : len(document.tokens)] = torch.from_numpy(document.tokens.astype("int64"))
    with torch.no_grad():
        expected = theirs.eval()(rows, attention_mask=(rows != pad).long()).logits
        found = model.logits(batch)[batch.cu_seqlens[1 : len(documents) + 1].long() - 1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-5)
    back, state = load_weights(path)
    assert back == dataclasses.replace(shape_there(shape), scores=1)
    assert torch.equal(state["score.weight"], model.score.weight)


@pytest.mark.parametrize("shape", ["gemma3_text"], indirect=True)
def test_the_language_model_of_a_model_with_images_is_read(model, folder):
    """With names of older and of newer files, beside tensors of images."""
    place = folder(model)
    text = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    plain = to_huggingface(model.shape, model.state_dict())
    for name_of in (
        lambda name: f"language_model.{name}",
        lambda name: f"model.language_model.{name.removeprefix('model.')}",
    ):
        images = {"vision_tower.patch.weight": torch.ones(2), "model.vision_tower.norm.weight": torch.ones(2)}
        save_file({name_of(name): each for name, each in plain.items()} | images, place / "model.safetensors")
        found, state = load_weights(place)
        assert found == shape_there(model.shape)
        assert all(torch.equal(state[name], each) for name, each in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *(
            (name, "llama")
            for name in ("llama-1b", "llama-405b", "llama-8b", "llama-3.1-8b", "mistral-7b", "phi-4")
        ),
        *((name, "qwen2") for name in ("qwen2.5-0.5b", "qwen2.5-7b")),
        *((name, "qwen3") for name in ("qwen3-0.6b", "qwen3-8b")),
        *(("gemma-3-1b", "gemma3_text"), ("smollm3-3b", "smollm3"), ("olmo2-7b", "olmo2")),
        *(("phi-3-mini", "mistral"), ("gpt2", "gpt2"), ("gpt2-xl", "gpt2")),
    ],
)
def test_a_preset_is_the_model_of_its_name(transformers, kind, model_type, pack, documents, same_logits):
    """Tensors, biases, positions and activations of transformers' model with the preset's settings, made small."""
    preset = SHAPES[kind]
    layers = max(preset.full_every, preset.unrotated_every, 1)
    width = preset.head_width // 2 if preset.positions == "rope" else 4
    heads, kv_heads = min(preset.heads // preset.kv_heads, 4), 1
    if preset.positions == "learned":
        heads = kv_heads = 2
    small = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "vocabulary_size": 50, "d_ff": 24}
    small |= {"d_model": heads * width, "head_dim": width if preset.positions == "rope" else 0}
    if preset.embedding_scale != 1.0:
        small["embedding_scale"] = small["d_model"] ** 0.5
    shape = dataclasses.replace(preset, **small)
    made = transformers.AutoConfig.for_model(**config_of(shape))
    assert made.model_type == model_type
    theirs = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    model = Decoder(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    theirs.load_state_dict(to_huggingface(shape, model.state_dict()), strict=not shape.tied)
    theirs.tie_weights()
    same_logits(theirs, model)


def test_names_and_files_of_families_that_are_others(transformers):
    """Phi-3.5's settings as in its files, and Llama under other names."""
    long = {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [1.5, 4.0]}
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    phi = {**size, "model_type": "phi3", "intermediate_size": 48, "vocab_size": 9, "pad_token_id": None}
    phi |= {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": long}
    shape = decoder_shape({**phi, "partial_rotary_factor": 0.5})
    assert (shape.rope_factor, shape.rope_factors, shape.rope_context) == (4.0, (1.0, 1.1, 1.5, 4.0), 16)
    for name in ("internlm3", "iquestcoder"):
        assert decoder_shape({**LLAMA_CONFIG, "model_type": name}) == decoder_shape(LLAMA_CONFIG)
        bare = {key: value for key, value in LLAMA_CONFIG.items() if key != "head_dim"} | {"model_type": name}
        assert decoder_shape(bare).head_width == 128
        assert transformers.AutoConfig.for_model(name).head_dim == 128


def test_files_without_a_head_and_with_old_buffers(model, folder):
    where = folder(model)
    tensors = load_file(where / "model.safetensors")
    names = {"learned": ("transformer.", "h.0.attn.bias")}
    names["rope"] = "model.", "layers.0.self_attn.rotary_emb.inv_freq"
    prefix, buffer = names[model.shape.positions]
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    save_file({**bare, buffer: torch.ones(1)}, where / "model.safetensors")
    _, state = load_weights(where)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_half_precision_is_read_as_float32(model, folder):
    where = folder(model)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(where / "model.safetensors").items()}
    save_file(tensors, where / "model.safetensors")
    _, state = load_weights(where)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["norm.weight"], model.norm.weight.bfloat16().float())


def test_weights_that_do_not_fit_are_refused_by_name(model, folder):
    where = folder(model)
    file = where / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    whole = {key: tensor for key, tensor in tensors.items() if key != name}
    for damaged, named in (
        (whole, name),
        ({**tensors, "model.extra.weight": torch.ones(1)}, "extra"),
        ({**tensors, name: torch.ones(3, 7)}, name),
        ({**tensors, name: torch.ones(tensors[name].shape, dtype=torch.int8)}, name),
    ):
        save_file(damaged, file)
        with pytest.raises(ValueError, match=f"{where}: .*{named}"):
            load_weights(where)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{where}: .*damaged"):
        load_weights(where)


def test_pickles_and_files_outside_the_folder_are_refused(model, folder):
    where = folder(model)
    (where / "model.safetensors").rename(where / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle.*safe_serialization"):
        load_weights(where)
    (where / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_weights(where)
    for name in ("../model.safetensors", "/etc/passwd", "missing.safetensors", "model.bin"):
        (where / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match=name):
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
LONG_ROPE = {"type": "su", "short_factor": [1], "long_factor": [2], "original_max_position_embeddings": 4}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": True}
GEMMA2 = {"model_type": "gemma2", "hidden_act": None, "num_hidden_layers": 3, "sliding_window": 4}
IRREGULAR = ["full_attention", "sliding_attention", "sliding_attention"]
LINEAR = {"rope_type": "linear", "factor": 2.0}
GPT2 = {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
GPT2_CONFIG = config_of(ModelShape(1, 2, 2, 16, 24, vocabulary_size=20, **GPT2))


def test_unsupported_models_are_refused(tmp_path):
    for config, changes, named in (
        (LLAMA_CONFIG, {"model_type": ["llama"]}, "model_type="),
        (LLAMA_CONFIG, {"model_type": "cohere"}, "cohere.* llama, mistral"),
        (LLAMA_CONFIG, {**QWEN2, "max_window_layers": 0}, "use_sliding_window=True.*use model=hf:"),
        (
            LLAMA_CONFIG,
            {**GEMMA2, "layer_types": IRREGULAR},
            "layer_types gives windows to 2 of 3.*model=hf:",
        ),
        (LLAMA_CONFIG, {"num_hidden_layers": 1 << 64}, r"num_hidden_layers=.* 4,096"),
        (LLAMA_CONFIG, {"hidden_size": 10**30}, r"model\.d_model=.* at most 16,777,216"),
        (LLAMA_CONFIG, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA_CONFIG, {"attention_bias": True}, "attention_bias=True, mlp_bias=False"),
        (LLAMA_CONFIG, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling="),
        (LLAMA_CONFIG, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters="),
        (LLAMA_CONFIG, {"rope_parameters": {"rope_type": "longrope", "long_factor": [1]}}, "rope_param"),
        (LLAMA_CONFIG, {"rope_parameters": LINEAR | {"llama_4_scaling_beta": 0.1}}, "rope_parameters="),
        (
            LLAMA_CONFIG,
            {"rope_parameters": LONG_ROPE | {"long_factor": ["a"]}},
            "long_factor must be a number",
        ),
        (LLAMA_CONFIG, {"rope_parameters": LONG_ROPE}, "rope_factors must hold 8 .* got 2"),
        (LLAMA_CONFIG, {"model_type": "phi3", "rope_scaling": LINEAR, "rope_parameters": LINEAR}, "rope_sc"),
        (LLAMA_CONFIG, {"quantization_config": {"bits": 4}}, "quantization_config="),
        (LLAMA_CONFIG, {"num_key_value_heads": 3}, r"config\.json: .*kv_heads=3"),
        (GPT2_CONFIG, {"activation_function": "gelu"}, "activation_function='gelu'"),
        (GPT2_CONFIG, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ):
        assert decoder_shape(config).layers == 1
        with pytest.raises(ValueError, match=named):
            decoder_shape({**config, **changes})
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_weights(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            load_weights(tmp_path)


def test_shapes_without_a_family_are_refused():
    for changes, named in (
        ({"norm": "layernorm"}, r"llama, has no model\.norm=layernorm"),
        ({"positions": "learned"}, r"llama, has no model\.positions=learned"),
        ({"window": 8, "bias": True}, r"model\.(window=8|bias=True)"),
        ({"window": 8, "qkv_bias": True}, r"model\.(window=8|qkv_bias=True)"),
        ({"window": 8, "window_layers": 1}, r"model\.window_layers=1"),
    ):
        shape = dataclasses.replace(ModelShape(2, 2, 2, 16, 24, vocabulary_size=20), **changes)
        with pytest.raises(ValueError, match=named):
            config_of(shape)
