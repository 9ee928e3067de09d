"""A trained model as a folder that transformers loads."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from multipack.cli import app
from multipack.data.chat import ChatTemplate
from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.data.shards import CHAT_TEMPLATE
from multipack.data.tokenizer import Tokenizer, byte_tokenizer, character_tokenizer
from multipack.models.decoder import Decoder
from multipack.parallel.world import World
from multipack.run import RunDirectory, config_yaml
from multipack.shapes import ModelShape
from multipack.training.checkpoint import CheckpointWriter
from multipack.training.export import export, loading_code
from multipack.training.inference import find_template, load_run
from multipack.training.run_config import compose
from multipack.training.weights import initial_weights

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


def chat_tokenizer():
    """Bytes, the end token, and two more special tokens."""
    fields = json.loads(byte_tokenizer().to_json())
    like = fields["added_tokens"][0]
    names = ["<|im_start|>", "<|im_end|>"]
    more = [{**like, "id": 257 + number, "content": name} for number, name in enumerate(names)]
    return Tokenizer(json.dumps({**fields, "added_tokens": [*fields["added_tokens"], *more]}))


@pytest.fixture
def run(tmp_path):
    """(shape, tokenizer, template) → a run with one checkpoint."""

    def make(shape=LLAMA, tokenizer=None, template="", change=None):
        torch.manual_seed(5)
        model = Decoder(shape)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if change is not None:
                change(model)
        run = RunDirectory(tmp_path / "run")
        values = config_yaml(compose([f"model.{name}={value}" for name, value in shape.to_dict().items()]))
        run.create(values)
        files = {"config.yaml": values, "tokenizer.json": (tokenizer or byte_tokenizer()).to_json()}
        if template:
            made = ChatTemplate(
                template, ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", name="chatml"
            )
            files[CHAT_TEMPLATE] = made.to_json()
        state = {name: parameter.detach() for name, parameter in model.named_parameters()}
        CheckpointWriter(run, World(), 0).save(7, {"model": state}, {}, files)
        return run.path, model.eval()

    return make


@pytest.fixture
def transformers():
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return library


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_an_export_is_complete_and_loads_here(run, shape, tmp_path):
    path, model = run(shape)
    made = export(path, tmp_path / "out")
    names = {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert dict(made)["weights of"] == str(path / "checkpoints" / "step-00000007")
    decoder, tokenizer = load_run(tmp_path / "out")
    assert tokenizer.hash == byte_tokenizer().hash
    batch = single_document(tokenizer.encode("some text"))
    assert torch.equal(decoder.logits(batch), model.logits(batch))
    again, _ = load_run(tmp_path / "out")
    assert torch.equal(again.logits(batch), model.logits(batch))


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
        torch.testing.assert_close(
            model.logits(single_document(ids[0].tolist())), expected, rtol=1e-5, atol=1e-5
        )


def test_a_character_tokenizer_survives(run, tmp_path, transformers):
    tokenizer = character_tokenizer(iter(["no man is an island\n"]))
    path, _ = run(ModelShape(1, 2, 1, 16, 24, vocabulary_size=32), tokenizer)
    export(path, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("is an island").input_ids == tokenizer.encode("is an island")
    assert theirs.decode(tokenizer.encode("is an island")) == "is an island"
    assert theirs.eos_token is None


def test_a_chat_template_goes_with_it(run, tmp_path, transformers):
    path, _ = run(LLAMA, chat_tokenizer(), TEMPLATE)
    made = export(path, tmp_path / "out")
    assert ("chat template", "chatml") in made
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ours = find_template(tmp_path / "out")
    assert ours.parts(messages) == find_template(path).parts(messages)
    assert (ours.eos_token, ours.end_of_turn) == ("<|im_end|>", "<|im_end|>")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.apply_chat_template(messages, tokenize=False) == "".join(
        part.text for part in ours.parts(messages)
    )
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
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(expected).removeprefix(
        "torch."
    )
    assert torch.equal(
        initial_weights(tmp_path / "out").state["norm.weight"], model.norm.weight.to(expected).float()
    )


def test_numbers_too_large_for_fp16_are_refused(run, tmp_path):
    path, _ = run(change=lambda model: model.norm.weight.mul_(1e6))
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight \(1 tensors in all\) are not finite as torch\.float16"
    ):
        export(path, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()


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
    for part in ("they are zeros", "transformers puts <|endoftext|> around text"):
        assert part in notes
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_an_existing_folder_is_not_overwritten(run, tmp_path):
    path, _ = run()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists and is not empty: choose another folder"):
        export(path, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_unknown_choices_and_shapes_are_refused(run, tmp_path):
    path, _ = run(ModelShape(1, 2, 2, 16, 24, vocabulary_size=257, norm="layernorm", bias=True))
    for options, said in (
        ({"weights": "first"}, "--weights first: one of latest, best, ema"),
        ({"dtype": "int8"}, "--dtype int8"),
    ):
        with pytest.raises(ValueError, match=said):
            export(path, tmp_path / "out", **options)
    with pytest.raises(ValueError, match="transformers has no model for this decoder"):
        export(path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="checkpoints/best names"):
        export(path, tmp_path / "out", "best")
    assert not (tmp_path / "out").exists()


def test_a_killed_export_leaves_nothing_that_loads(run, tmp_path):
    path, _ = run()
    script = f"""
import os, signal
from pathlib import Path
from multipack.training import export as module
module.write_atomically = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
module.export(Path({str(path)!r}), Path({str(tmp_path / "out" / "model")!r}))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert all(entry.name.endswith(".partial") for entry in (tmp_path / "out").iterdir())
    # The next export removes what is left.
    export(path, tmp_path / "out" / "model")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["model"]


@pytest.mark.parametrize("prefix", ["", "out="])
def test_the_command_says_what_it_wrote_and_how_to_load_it(run, tmp_path, prefix):
    path, _ = run()
    result = CliRunner().invoke(app, ["export", str(path), f"{prefix}{tmp_path / 'out'}", "--dtype", "bf16"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "LlamaForCausalLM" in result.output
    assert f"AutoModelForCausalLM.from_pretrained('{tmp_path / 'out'}')" in result.output
