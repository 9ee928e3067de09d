"""Models in GGUF files, written here by the gguf package, against transformers' model that they were written from."""

import json
import os

import numpy as np
import pytest
import torch

from hf_models import SIZES
from multipack.data.text.tokenizer import Tokenizer, byte_tokenizer
from multipack.hub import model_folder
from multipack.models.probe_batch import packed_batch
from multipack.training.inference import load_model
from multipack.training.run_config import compose_run

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
transformers = pytest.importorskip("transformers", "5.2", reason="transformers >= 5.2 is not installed")
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(path, model, tokens, merges):
    """A GGUF file of a Llama, with matrices in Q8_0: blocks of 32 numbers."""
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    names = OUTER | {
        f"model.layers.{n}.{a}": f"blk.{n}.{b}"
        for n in range(config.num_hidden_layers)
        for a, b in INNER.items()
    }
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            if parameter.dim() == 2:  # the model has the rounded values
                rounded = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rounded))
            values = parameter.numpy()
            if number := heads.get(module.rpartition(".")[2]):  # llama.cpp rotates neighbors
                parts = values.reshape(number, 2, len(values) // number // 2, -1)
                values = np.ascontiguousarray(parts.swapaxes(1, 2).reshape(values.shape))
            quantized = gguf.quantize(values, kind) if values.ndim == 2 else values
            writer.add_tensor(
                f"{names[module]}.weight", quantized, raw_dtype=kind if values.ndim == 2 else None
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny(seed=0):
    """A Llama and its tokens: bytes, a pair of them, and special tokens."""
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    vocabulary = json.loads(byte_tokenizer().to_json())["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get), "ab", "<|endoftext|>"]
    return model, [*tokens, *(f"<|{number}|>" for number in range(264 - len(tokens)))]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of a GGUF file, beside an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "tiny.gguf"


def test_a_gguf_file_is_read_everywhere(file):
    theirs, tokens = tiny()
    write(file, theirs, tokens, ["a b"])
    ours, document = load_model(file), [5, 9, 70, 200, 3, 3, 17]
    with torch.no_grad():
        expected = theirs(torch.tensor([document]), use_cache=False).logits[0]
        torch.testing.assert_close(ours.logits(packed_batch([document])), expected, rtol=1e-4, atol=1e-4)
    composed = compose_run([f"train.init_from={file}", "data=stdlib"])
    assert composed.model.d_model == 32
    assert composed.tokenizer.path == str(model_folder(str(file), "x") / "tokenizer.json")
    tokenizer = Tokenizer.load(model_folder(str(file), "x"))
    assert tokenizer.encode("abc") == [tokens.index("ab"), tokens.index("c")]
    assert tokenizer.eos_token == "<|endoftext|>"


def test_a_file_that_was_replaced_is_another_and_damage_is_one_line(file):
    """Also one of equal size and time, as `cp -p` makes it; a merge without its token is a panic in Rust."""
    found = []
    for seed in (0, 1):
        model, tokens = tiny(seed)
        new = file.with_name("new")
        write(new, model, tokens, ["a b"])
        os.utime(new, ns=(10**18, 10**18))
        os.replace(new, file)
        found.append(load_model(file).embedding.weight)
    assert not torch.equal(*found)
    write(file, model, tokens, ["a c"])
    file.with_name("broken.gguf").write_bytes(b"GGUF" + bytes(100))
    for name in ("tiny.gguf", "broken.gguf"):
        with pytest.raises(ValueError, match=rf"load_model=.*{name}: transformers reads no model") as caught:
            load_model(file.with_name(name))
        assert "\n" not in str(caught.value)
