"""Shapes: published parameter counts, refusals, and config.json files as they are found."""

import json
from dataclasses import replace

import pytest

from multipack.planning.cost import CostModel
from multipack.shapes import SHAPES, ModelShape, rotation_limit


def published(kind, layers, heads, kv_heads, d_model, d_ff, vocabulary, context, **others):
    """The content of a config.json in Llama's names."""
    sizes = {"hidden_size": d_model, "intermediate_size": d_ff, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    return {"model_type": kind, **sizes, "max_position_embeddings": context, **others}


LLAMA = published(
    *("llama", 32, 32, 8, 4096, 14_336, 128_256, 8192),
    rope_theta=500_000.0,
    tie_word_embeddings=False,
    hidden_act="silu",
)
QWEN = published(
    *("qwen2", 24, 14, 2, 896, 4864, 151_936, 32_768),
    max_window_layers=21,
    sliding_window=32_768,
    use_sliding_window=False,
    tie_word_embeddings=True,
    rope_theta=1_000_000.0,
)
MIXTRAL = published(
    *("mixtral", 32, 32, 8, 4096, 14_336, 32_000, 32_768),
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=None,
    hidden_act="silu",
)
DEEPSEEK = published(
    *("deepseek_v3", 61, 128, 128, 7168, 18_432, 129_280, 163_840),
    head_dim=64,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    num_nextn_predict_layers=1,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    tie_word_embeddings=False,
)
GPT_OSS = published(
    *("gpt_oss", 24, 64, 8, 2880, 2880, 201_088, 131_072),
    head_dim=64,
    num_local_experts=32,
    num_experts_per_tok=4,
    experts_per_token=4,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12,
    rope_theta=150_000,
)


def all_parameters(shape):
    """All matrix elements: experts, embeddings, learned positions; without biases and norms."""
    expert = (3 if shape.gated else 2) * shape.d_model * (shape.expert_width or shape.d_ff)
    idle = (shape.layers - shape.dense_layers) * (shape.experts - shape.experts_per_token) * expert
    table = shape.context if shape.positions == "learned" else 0
    rows = shape.vocabulary_size * (1 if shape.tied else 2) + table
    return shape.token_parameters + idle + shape.d_model * rows


def test_published_parameter_counts():
    """All but norms and biases, which are a thousandth at most."""
    for name, billions in (
        ("gpt2-xl", 1.5576),
        ("llama-1b", 1.2358),
        ("llama-8b", 8.0303),
        ("llama-70b", 70.5537),
        ("llama-405b", 405.85),
        ("qwen2.5-0.5b", 0.4940),
        ("qwen2.5-7b", 7.6156),
        ("qwen3-0.6b", 0.5960),
        ("qwen3-8b", 8.1907),
        ("gemma-3-1b", 0.9999),
        ("mistral-7b", 7.2480),
        ("phi-3-mini", 3.8211),
        ("phi-4", 14.6595),
        ("smollm3-3b", 3.0751),
        ("olmo2-7b", 7.2989),
        ("mixtral-8x7b", 46.7028),
        ("gpt-oss-20b", 20.9146),
        ("deepseek-v3", 671.026),
    ):
        assert all_parameters(SHAPES[name]) / 1e9 == pytest.approx(billions, rel=1e-3), name


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(KeyError, match=r"llama-9b .*llama-8b"):
        SHAPES["llama-9b"]
    assert "llama-9b" not in SHAPES
    assert SHAPES.get("llama-9b") is None


def test_published_active_parameters():
    """Blocks and output layer; models count their input embedding here, or do not."""
    for name, billions in (("mixtral-8x7b", 12.88), ("gpt-oss-20b", 3.61), ("deepseek-v3", 37.55)):
        shape = SHAPES[name]
        embeddings = shape.d_model * shape.vocabulary_size * (2 if name != "gpt-oss-20b" else 1)
        assert (shape.token_parameters + embeddings) / 1e9 == pytest.approx(billions, rel=0.005), name


def test_neutral_defaults_leave_dense_shapes_as_they_were():
    shape = ModelShape()
    assert shape.token_parameters == shape.layers * shape.layer_parameters
    assert ModelShape(**SHAPES["deepseek-v3"].to_dict()) == SHAPES["deepseek-v3"]


def test_sizes_beyond_any_model_are_refused():
    for name, value in (
        ("layers", 1 << 64),
        ("heads", 1 << 40),
        ("d_model", 10**30),
        ("d_ff", 1 << 53),
        ("vocabulary_size", 10**12),
        ("context", 1 << 62),
        ("norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_factor", 0.5),
    ):
        with pytest.raises(ValueError, match=rf"model\.{name}=.* must be at "):
            ModelShape(**{name: value})


def test_half_described_shapes_are_refused():
    latent = {"kv_rank": 8, "nope_width": 4, "value_width": 4}
    for fields, message in (
        ({"experts": 8}, r"experts_per_token=0 .*model\.experts=8"),
        ({"experts": 8, "experts_per_token": 9}, "experts_per_token=9"),
        ({"experts_per_token": 2}, r"model\.experts_per_token=2 .*model\.experts=0"),
        ({"shared_experts": 1}, r"model\.shared_experts=1 .*model\.experts=0"),
        ({"window_layers": 2}, r"set model\.window, or leave model\.window_layers out"),
        ({"window": -1}, r"model\.window"),
        ({"window": 8, "window_layers": 7}, r"model\.window_layers=7 .*model\.layers=6"),
        ({"experts": 4, "experts_per_token": 1, "dense_layers": 7}, r"model\.dense_layers=7"),
        ({"kv_rank": 8, "nope_width": 4}, r"model\.nope_width and model\.value_width"),
        ({**latent, "kv_heads": 2}, "a key for every head"),
        ({**latent, "rope_width": 3}, "even head width, got 3"),
        ({"query_rank": 8}, r"model\.query_rank=8 .*model\.kv_rank=0"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelShape(**fields)


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA, "llama-8b"),
        (QWEN, "qwen2.5-0.5b"),
        (MIXTRAL, "mixtral-8x7b"),
        (DEEPSEEK, "deepseek-v3"),
        (GPT_OSS, "gpt-oss-20b"),
    ],
)
def test_published_files_give_the_presets(config, preset):
    shape, known = ModelShape.from_huggingface(config), SHAPES[preset]
    assert CostModel.from_shape(shape) == CostModel.from_shape(known)
    assert all_parameters(shape) == all_parameters(known)
    names = ("layers", "heads", "kv_heads", "d_model", "context", "vocabulary_size", "tied")
    assert [getattr(shape, name) for name in names] == [getattr(known, name) for name in names]
    assert shape.sliding_layers == known.sliding_layers
    assert (shape.qkv_bias, shape.rope_factor) == (known.qkv_bias, known.rope_factor)


def test_published_files_give_what_the_decoder_builds():
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    small = published(
        *("llama", 16, 32, 8, 2048, 8192, 128_256, 131_072),
        head_dim=64,
        rope_theta=500_000.0,
        rope_scaling=scaling,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    assert ModelShape.from_huggingface(small) == replace(SHAPES["llama-1b"], head_dim=64)
    assert ModelShape.from_huggingface({**QWEN, "rms_norm_eps": 1e-6}) == SHAPES["qwen2.5-0.5b"]


def test_scaled_rotation_is_read_from_both_spellings():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    for name in ("rope_scaling", "rope_parameters"):
        shape = ModelShape.from_huggingface({**LLAMA, name: scaling})
        assert (shape.rope_factor, shape.rope_theta) == (8.0, 5e5)
    with pytest.raises(ValueError, match="differ"):
        ModelShape.from_huggingface(
            {**LLAMA, "rope_scaling": scaling, "rope_parameters": {"rope_type": "default"}}
        )


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32}}, 32),
        ({"rope_parameters": {"rope_type": "longrope"}}, 8192),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            64,
        ),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        ({"rope_scaling": None}, None),
    ],
)
def test_the_length_up_to_which_rotations_do_not_depend_on_it(scaling, tokens):
    found = rotation_limit(LLAMA | scaling)
    assert (found.tokens if found else None) == tokens
    if found:
        assert f"{found.setting}={tokens:,}" in str(found)


def test_gpt2s_own_names():
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}
    gpt2 |= {"n_positions": 1024, "vocab_size": 50_257}
    assert ModelShape.from_huggingface(gpt2) == SHAPES["gpt2"]
    assert ModelShape.from_huggingface({**gpt2, "n_inner": 1000}).d_ff == 1000


def test_settings_that_cost_nothing_are_read_too():
    settings = {"rms_norm_eps": 1e-6, "rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}
    shape = ModelShape.from_huggingface({**LLAMA, **settings})
    assert (shape.norm_eps, shape.rope_theta) == (1e-6, 500_000.0)
    plain = ModelShape.from_huggingface({**LLAMA, "rope_theta": None, "tie_word_embeddings": True})
    assert (plain.norm_eps, plain.rope_theta, plain.tied) == (1e-5, 10_000.0, True)


def test_a_gpt_neox_has_no_gate():
    neox = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6}
    shape = ModelShape.from_huggingface(
        {"model_type": "gpt_neox", **neox, "max_position_embeddings": 2048, "vocab_size": 50_304}
    )
    assert (shape.gated, shape.positions, shape.norm, shape.tied) == (False, "rope", "layernorm", False)
    assert shape.layer_parameters == 12 * 512**2


def test_windows():
    used = {"use_sliding_window": True, "max_window_layers": 28}
    one = ["sliding_attention"] + ["full_attention"] * 31
    for kind, changes, window, layers in (
        ("mistral", {"sliding_window": 4096}, 4096, 32),
        ("mistral", {"sliding_window": None}, 0, 0),
        ("phi3", {"sliding_window": 2047}, 2047, 32),
        ("qwen2", {"sliding_window": 512}, 0, 0),
        ("qwen2", {"sliding_window": 512, **used}, 512, 4),
        ("gemma2", {}, 4096, 16),
        ("gemma2", {"num_hidden_layers": 33}, 4096, 17),
        ("gemma2", {"sliding_window": None}, 0, 0),
        ("gemma3_text", {"sliding_window": 512}, 512, 27),
        ("olmo3", {"sliding_window": 64, "layer_types": ["full_attention"] * 32}, 0, 0),
        ("new", {"sliding_window": 64, "layer_types": one}, 64, 1),
    ):
        shape = ModelShape.from_huggingface({**LLAMA, "model_type": kind, **changes})
        assert (shape.window, shape.sliding_layers) == (window, layers), (kind, changes)


def test_a_model_of_images_and_text_is_its_text():
    """The published file of Gemma 3's 4B model leaves out what its class has as defaults."""
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
    shape = ModelShape.from_huggingface({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (shape.heads, shape.kv_heads, shape.head_width) == (8, 4, 256)
    assert (shape.window, shape.sliding_layers, shape.vocabulary_size) == (1024, 29, 262_208)
    assert all_parameters(shape) == pytest.approx(3.88e9, rel=0.002)


def test_mixtures_with_dense_layers_in_between():
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
    qwen = {**LLAMA, "model_type": "qwen3_moe", **experts}
    assert ModelShape.from_huggingface(qwen).dense_layers == 0
    assert ModelShape.from_huggingface({**qwen, "decoder_sparse_step": 2}).dense_layers == 16
    assert ModelShape.from_huggingface({**qwen, "mlp_only_layers": [0, 31]}).dense_layers == 2
    shared = ModelShape.from_huggingface({**qwen, "shared_expert_intermediate_size": 384})
    assert (shared.shared_experts, shared.shared_width) == (1, 384)
    attention = 4096 * 128 * (64 + 16)
    assert shared.layer_parameters == attention + 16 * 4096 + 3 * 4096 * (4 * 96 + 384)
    assert ModelShape.from_huggingface({**LLAMA, "n_shared_experts": 2, "num_experts": 0}).experts == 0


def test_files_and_folders(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert ModelShape.from_huggingface(source) == ModelShape.from_huggingface(LLAMA)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelShape.from_huggingface(tmp_path / "nowhere")
    for content, message in (("[1]", "holds list"), ("{", "is not JSON"), ("\xff", "is not JSON")):
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=message):
            ModelShape.from_huggingface(tmp_path)


def test_files_that_do_not_say_enough():
    no_width = {name: value for name, value in LLAMA.items() if name != "hidden_size"}
    for config, message in (
        ({"model_type": "llama"}, "lacks num_hidden_layers or n_layer"),
        (no_width, "'llama' lacks hidden_size or n_embd or d_model$"),
        ({**MIXTRAL, "num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ({**DEEPSEEK, "v_head_dim": None}, "lacks v_head_dim$"),
        ({**LLAMA, "model_type": "brandnew", "hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({}, "'\\?' is unknown"),
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**LLAMA, "attention_chunk_size": 8192}, "attention_chunk_size"),
        ({**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 16}, "'linear_attention'"),
        ({**LLAMA, "layer_types": ["full_attention"] * 3}, "layer_types .*32 layers .*3"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers .*'32'"),
        ({**LLAMA, "vocab_size": -1}, "vocab_size"),
        ({**LLAMA, "num_key_value_heads": 5}, "must divide"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelShape.from_huggingface(config)


def test_an_unknown_model_with_silu_is_read_as_gated():
    shape = ModelShape.from_huggingface({**LLAMA, "model_type": "brandnew"})
    assert shape.gated
    assert CostModel.from_shape(shape).linear == 57_256


def test_the_decoder_computes_no_experts_and_latents():
    for name in ("mixtral-8x7b", "gpt-oss-20b", "deepseek-v3"):
        with pytest.raises(ValueError, match="planning"):
            SHAPES[name].check_computed()
