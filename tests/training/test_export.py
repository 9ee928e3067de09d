"""A trained model as a folder that transformers loads."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from multipack.cli import app
from multipack.data.packs.collate import PackedCollator
from multipack.data.text.chat import ChatTemplate
from multipack.data.text.texts import CHAT_TEMPLATE
from multipack.data.text.tokenizer import Tokenizer, byte_tokenizer, character_tokenizer
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.shapes import ModelShape
from multipack.training import export as export_module
from multipack.training.export import export, loading_code
from multipack.training.inference import load_run
from multipack.training.source_files import find_template
from multipack.training.weights import find_weights

LLAMA = ModelShape(2, 2, 1, 16, 24, vocabulary_size=264, tied=False, context=64)
GPT2 = ModelShape(
    2, 2, 2, 16, 24, vocabulary_size=257, context=64, positions="learned", norm="layernorm", activation="gelu"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def single_document(ids):
    """A pack of one document without targets."""
    none = np.zeros((0, 2), dtype=np.int64)
    return PackedCollator(1, len(ids))([Document(np.asarray(ids, dtype=np.uint32), none)])


@pytest.fixture
def run(tmp_path, save_decoder):
    """(shape, tokenizer, further files) → a run with one checkpoint, and its model."""

    def make(shape=LLAMA, tokenizer=None, **files):
        torch.manual_seed(5)
        model = Decoder(shape)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return save_decoder(tmp_path / "run", model, tokenizer or byte_tokenizer(), **files), model.eval()

    return make


@pytest.fixture
def transformers():
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return library


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_an_export_is_complete_and_loads_here(run, shape, tmp_path):
    path, model = run(shape)
    rows = dict(export(path, tmp_path / "out"))
    written = {file.name for file in (tmp_path / "out").iterdir()}
    weights, configs = "model.safetensors", ("config", "generation_config", "tokenizer", "tokenizer_config")
    assert written == {weights, *(f"{name}.json" for name in configs)} <= rows.keys()
    assert rows["weights of"] == str(path / "checkpoints" / "step-00000001")
    decoder, tokenizer = load_run(tmp_path / "out")
    assert tokenizer.hash == byte_tokenizer().hash
    batch = single_document(tokenizer.encode("some text"))
    assert torch.equal(decoder.logits(batch), model.logits(batch))


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_transformers_loads_it_and_agrees(run, shape, tmp_path, transformers):
    path, model = run(shape)
    scope: dict = {}
    export(path, tmp_path / "out")
    exec(loading_code(tmp_path / "out"), scope)
    theirs, tokenizer = scope["model"].eval(), scope["tokenizer"]
    ids = tokenizer("Grüße, some text", return_tensors="pt").input_ids
    assert ids[0].tolist() == byte_tokenizer().encode("Grüße, some text")
    assert tokenizer.decode(ids[0]) == "Grüße, some text"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 256)
    assert theirs.generation_config.eos_token_id == 256
    assert theirs.config.bos_token_id is None
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits[0]
        found = model.logits(single_document(ids[0].tolist()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_character_tokenizer_survives(run, tmp_path, transformers):
    tokenizer = character_tokenizer(iter(["no man is an island\n"]))
    path, _ = run(ModelShape(1, 2, 1, 16, 24, vocabulary_size=32), tokenizer)
    export(path, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("is an island").input_ids == tokenizer.encode("is an island")
    assert theirs.decode(tokenizer.encode("is an island")) == "is an island"
    assert theirs.eos_token is None


def test_a_chat_template_goes_with_it(run, chat_tokenizer, tmp_path, transformers):
    names = ["<|im_start|>", "<|im_end|>"]
    template = ChatTemplate(TEMPLATE, names, eos_token="<|im_end|>", name="chatml").to_json()
    path, _ = run(LLAMA, chat_tokenizer(*names), **{CHAT_TEMPLATE: template})
    assert ("chat template", "chatml") in export(path, tmp_path / "out")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ours = find_template(tmp_path / "out")
    assert ours.parts(messages) == find_template(path).parts(messages)
    assert (ours.eos_token, ours.end_of_turn) == ("<|im_end|>", "<|im_end|>")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "".join(part.text for part in ours.parts(messages))
    assert theirs.apply_chat_template(messages, tokenize=False) == text
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids[0] == 257
    assert theirs.eos_token_id == 258
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [258, 256]


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_in_half_precision(run, tmp_path, dtype, expected):
    path, model = run()
    export(path, tmp_path / "out", dtype=dtype)
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {expected}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert f"torch.{config['dtype']}" == str(expected)
    found = find_weights(tmp_path / "out").read("norm.weight")
    assert torch.equal(found, model.norm.weight.to(expected).float())


def test_notes_name_what_transformers_does_differently(run, tmp_path):
    fields = json.loads(byte_tokenizer().to_json())
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [end, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
        },
    }
    rows = export(run(GPT2, Tokenizer(json.dumps(fields)))[0], tmp_path / "out")
    notes = "\n".join(value for name, value in rows if name == "note")
    assert "transformers puts <|endoftext|> around text" in notes
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(run, save_decoder, tmp_path, monkeypatch):
    path, model = run()
    with torch.no_grad():
        model.norm.weight.mul_(1e6)
    large = save_decoder(tmp_path / "large", model, byte_tokenizer())
    foreign = ModelShape(1, 2, 2, 16, 24, vocabulary_size=257, norm="layernorm", bias=True)
    other = save_decoder(tmp_path / "other", Decoder(foreign), byte_tokenizer())
    for run_path, options, message in (
        (path, {"weights": "first"}, "choose one of latest, best"),
        (path, {"dtype": "int8"}, "--dtype='int8'"),
        (large, {"dtype": "fp16"}, r"model\.norm\.weight \(1 tensors in all\) are not finite"),
        (other, {}, "transformers has no model for this decoder"),
    ):
        with pytest.raises(ValueError, match=message):
            export(run_path, tmp_path / "out", **options)
    with pytest.raises(FileNotFoundError, match="checkpoints/best names"):
        export(path, tmp_path / "out", "best")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(export_module, "write_atomically", full)
    with pytest.raises(OSError, match="no space left"):
        export(path, tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"run", "large", "other"}
    with pytest.raises(FileExistsError, match="run exists and is not empty: choose another folder"):
        export(path, path)


def test_the_command_prints_what_it_wrote_and_how_to_load_it(run, tmp_path):
    path, _ = run()
    result = CliRunner().invoke(app, ["export", str(path), f"out={tmp_path / 'out'}", "--dtype", "bf16"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "LlamaForCausalLM" in result.output
    assert f"AutoModelForCausalLM.from_pretrained('{tmp_path / 'out'}')" in result.output
