"""A model that is loaded and saved again: weights bit for bit, tokenizer and settings as they were."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import SIZES, save_model, short_run
from multipack.data.text.tokenizer import byte_tokenizer
from multipack.training.export import export
from multipack.training.run_config import compose_run
from multipack.training.train import train

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.fixture
def source(tmp_path):
    """A folder as people publish them: bf16, in two files, with a padding token and settings of generation."""
    folder = tmp_path / "source"
    config = transformers.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)
    torch.manual_seed(4)
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, pad_token_id=257)
    model.save_pretrained(folder, max_shard_size="12KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    names = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    definition = json.loads(byte_tokenizer(names).to_json())
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 9,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition, indent=1))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "padding_side": "left",
        "model_max_length": 777,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|pad|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    kept = json.loads((folder / "config.json").read_text()) | {"a_key_of_the_hub": [1, 2]}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def check_same(source, out):
    expected, found = tensors_of(source), tensors_of(out)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        expected, found = (json.loads((folder / name).read_text()) for folder in (source, out))
        assert expected.items() <= found.items(), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.padding_side) == (
        "<|pad|>",
        "<|im_end|>",
        "left",
    )
    assert tokenizer.chat_template == TEMPLATE
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert (loaded.generation_config.temperature, loaded.generation_config.pad_token_id) == (0.6, 257)


def test_a_folder_is_written_as_it_was(source, tmp_path):
    export(source, tmp_path / "out")
    check_same(source, tmp_path / "out")
    export(source, tmp_path / "wide", dtype="fp32")
    assert {value.dtype for value in tensors_of(tmp_path / "wide").values()} == {torch.float32}


def test_every_tensor_keeps_its_own_dtype(source, tmp_path):
    tensors = {name: value.contiguous() for name, value in tensors_of(source).items()}
    for file in (*source.glob("*.safetensors"), source / "model.safetensors.index.json"):
        file.unlink()
    tensors["model.norm.weight"] = torch.full((16,), 1 + 2.0**-20)
    save_file(tensors, source / "model.safetensors")
    export(source, tmp_path / "out")
    check_same(source, tmp_path / "out")


def test_a_run_keeps_what_it_started_with(source, tmp_path):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": "abcdefghij" * 2}) + "\n" for _ in range(40)))
    words = [
        *f"data=jsonl data.path={file} plan.capacity=64 plan.packs_per_step=2 train.device=cpu".split(),
        *f"train.dtype=fp32 train.steps=1 train.eval_every=0 optimizer.lr=0 train.init_from={source}".split(),
    ]
    train(compose_run([*words, f"out={tmp_path / 'run'}"]))
    train(compose_run(["train.resume=true", f"out={tmp_path / 'run'}", "train.steps=2"]))
    export(tmp_path / "run", tmp_path / "out")
    check_same(source, tmp_path / "out")


@pytest.mark.parametrize("settings", ["", "adapter=lora"])
def test_a_run_keeps_a_family_that_its_shape_does_not_show(tmp_path, settings, capsys):
    """Phi-3 with full rotary width has the shape of Llama, and other tensors."""
    source = tmp_path / "source"
    save_model("phi3", source, num_key_value_heads=2, sliding_window=None)
    words = [*short_run(tmp_path), *settings.split(), "train.steps=1", "optimizer.lr=0"]
    train(compose_run([*words, f"train.init_from={source}", f"out={tmp_path / 'run'}"]))
    assert "Phi3," in capsys.readouterr().out
    train(compose_run(["train.resume=true", f"out={tmp_path / 'run'}", "train.steps=2"]))
    export(tmp_path / "run", tmp_path / "out", merge=bool(settings))
    expected, found = tensors_of(source), tensors_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "out"))
    assert after == before
    shape = "layers=2 heads=4 kv_heads=2 d_model=16 d_ff=24 context=64 tied=false norm_eps=1e-6 family=llama"
    words += [
        *(f"model.{word}" for word in shape.split()),
        f"train.init_from={source}",
        f"out={tmp_path / 'x'}",
    ]
    with pytest.raises(ValueError, match=r"model\.family=llama \(there phi3\)"):
        train(compose_run(words))


def test_the_language_model_of_a_model_with_images_is_exported_alone(tmp_path):
    """Its tensors bit for bit, under the names of a language model."""
    text = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "tokenizer.json").write_text(byte_tokenizer().to_json())
    export(tmp_path / "whole", tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(found).__name__ == "Gemma3ForCausalLM"
    expected, own = whole.model.language_model.state_dict(), found.model.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], value) for name, value in expected.items())
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, whole(tokens).logits, rtol=1e-6, atol=1e-6)
    export(tmp_path / "out", tmp_path / "again")
    again, once = (tensors_of(tmp_path / name) for name in ("again", "out"))
    assert again.keys() == once.keys()
    assert all(torch.equal(again[name], value) for name, value in once.items())
