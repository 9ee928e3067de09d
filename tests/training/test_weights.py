"""Trained weights of runs and Hugging Face folders, and runs that start with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from multipack.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from multipack.models.decoder import Decoder
from multipack.models.families import config_of, to_huggingface
from multipack.parallel.world import World
from multipack.run import RunDirectory, config_yaml, is_export
from multipack.shapes import ModelShape
from multipack.training.checkpoint import CheckpointWriter, load_checkpoint
from multipack.training.weights import (
    Initial,
    begin_from,
    initial_shape,
    initial_weights,
)

SHAPE = ModelShape(2, 2, 1, 16, 24, vocabulary_size=257, tied=False)


def with_special_tokens(tokenizer, *names):
    """The same tokenizer with more special tokens at its end."""
    fields = json.loads(tokenizer.to_json())
    like = fields["added_tokens"][0]
    more = [
        {**like, "id": tokenizer.vocabulary_size + number, "content": name}
        for number, name in enumerate(names)
    ]
    return Tokenizer(json.dumps({**fields, "added_tokens": [*fields["added_tokens"], *more]}))


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Decoder(SHAPE)


@pytest.fixture
def run(tmp_path, model):
    """A run with two checkpoints: the first was the best, the second has a moving average."""
    run = RunDirectory(tmp_path / "run")
    values = config_yaml_of(SHAPE)
    run.create(values)
    files = {"config.yaml": values, "tokenizer.json": byte_tokenizer().to_json()}
    for step, factor in ((4, 1.0), (8, 2.0)):
        state = {name: tensor.detach() * factor for name, tensor in model.named_parameters()}
        tensors = {"model": state, "optimizer": {}}
        if step == 8:
            tensors["observers"] = {
                f"average.{name}": tensor / 4 for name, tensor in state.items() if "norm" not in name
            }
        CheckpointWriter(run, World(), 0).save(step, tensors, {}, files, best=step == 4)
    return run


def config_yaml_of(shape):
    from multipack.training.run_config import compose

    words = [f"model.{name}={value}" for name, value in shape.to_dict().items()]
    return config_yaml(compose(words))


@pytest.fixture
def export(tmp_path, model):
    """A Hugging Face folder without a tokenizer."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(SHAPE)))
    save_file(to_huggingface(SHAPE, model.state_dict()), folder / "model.safetensors")
    return folder


@pytest.fixture
def initial(model):
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Initial(Path("runs/a"), SHAPE, state, byte_tokenizer())


def test_a_runs_weights_are_those_asked_for(run, model):
    own = model.state_dict()
    latest = initial_weights(run.path)
    assert latest.shape == initial_shape(run.path) == SHAPE
    assert latest.folder == run.checkpoints / "step-00000008"
    assert latest.step == 8
    assert latest.tokenizer.hash == byte_tokenizer().hash
    assert all(torch.equal(latest.state[name], own[name] * 2) for name in own)
    best = initial_weights(run.path, "best")
    assert best.step == 4
    assert all(torch.equal(best.state[name], own[name]) for name in own)
    mean = initial_weights(run.path, "ema")
    assert all(torch.equal(mean.state[name], own[name] * (2 if "norm" in name else 0.5)) for name in own)
    assert initial_weights(run.checkpoints / "step-00000004").step == 4


def test_a_folder_of_hugging_face_is_read(export, model):
    assert is_export(export)
    found = initial_weights(export)
    assert found.shape == replace(SHAPE, head_dim=8)
    assert initial_shape(export) == found.shape
    assert found.tokenizer is None
    assert all(torch.equal(found.state[name], tensor) for name, tensor in model.state_dict().items())
    byte_tokenizer().save(export / "tokenizer.json")
    assert initial_weights(export).tokenizer.vocabulary_size == 257


def test_weights_that_are_not_there_are_refused(run, export, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not there"):
        initial_weights(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="neither a run directory"):
        initial_weights(tmp_path)
    with pytest.raises(ValueError, match="is an export, which has no ema weights"):
        initial_weights(export, "ema")
    with pytest.raises(ValueError, match=r"step-00000004 has no moving average .* train\.ema_decay"):
        initial_weights(run.checkpoints / "step-00000004", "ema")
    with pytest.raises(ValueError, match="is one checkpoint; for the best one"):
        initial_weights(run.checkpoints / "step-00000004", "best")
    run.best.unlink()
    with pytest.raises(FileNotFoundError, match="checkpoints/best names"):
        initial_weights(run.path, "best")


def test_a_checkpoint_of_another_model_than_it_says_is_refused(run):
    folder = run.latest_checkpoint()
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("d_ff: 24", "d_ff: 25"))
    with pytest.raises(ValueError, match=r"config\.yaml is not what was written"):
        initial_weights(run.path)
    (folder / "config.yaml").write_text("model: 3\n")
    with pytest.raises(ValueError, match="does not describe a model"):
        initial_shape(run.path)


def test_the_same_shape_and_tokenizer_begin_with_the_very_weights(initial):
    # None of these changes a weight.
    shape = replace(SHAPE, dropout=0.1, head_dim=8, context=99)
    state, note = begin_from(initial, shape, byte_tokenizer())
    assert all(state[name] is tensor for name, tensor in initial.state.items())
    assert "rows of the vocabulary" not in note


def test_new_special_tokens_begin_as_the_mean_of_the_others(initial):
    tokenizer = with_special_tokens(byte_tokenizer(), "<|im_start|>", "<|im_end|>")
    shape = SHAPE.with_vocabulary(tokenizer.vocabulary_size)
    state, note = begin_from(initial, shape, tokenizer)
    assert "2 rows of the vocabulary are new" in note
    for name in ("embedding.weight", "head.weight"):
        assert torch.equal(state[name][:257], initial.state[name])
        torch.testing.assert_close(state[name][257:], initial.state[name].mean(0).expand(2, -1))
    assert Decoder(shape).load_state_dict(state)


def test_rows_that_no_token_had_are_new_too_when_a_token_gets_them(initial):
    wide = replace(SHAPE, vocabulary_size=264)
    rows = {name: torch.randn(264, 16) for name in ("embedding.weight", "head.weight")}
    padded = replace(initial, shape=wide, state={**initial.state, **rows})
    state, _ = begin_from(padded, wide, with_special_tokens(byte_tokenizer(), "<|im_end|>"))
    torch.testing.assert_close(state["head.weight"][257], rows["head.weight"][:257].mean(0))
    assert torch.equal(state["head.weight"][258:], rows["head.weight"][258:])


def test_a_larger_vocabulary_of_the_model_is_fine(initial):
    shape = replace(SHAPE, vocabulary_size=320)
    state, note = begin_from(initial, shape, byte_tokenizer())
    assert state["embedding.weight"].shape == (320, 16)
    assert "63 rows" in note


def test_another_tokenizer_is_refused_and_the_remedy_named(initial):
    other = train_bpe(iter(["some text to make pairs of, some more text"]), 280)
    with pytest.raises(
        ValueError, match=r"lacks or renumbers 257 tokens of .*: prepare them with tokenizer=file"
    ) as error:
        begin_from(initial, SHAPE.with_vocabulary(other.vocabulary_size), other)
    assert "tokenizer.path=" in str(error.value)


def test_without_a_tokenizer_only_sizes_are_compared(initial):
    unknown = replace(initial, tokenizer=None)
    state, _ = begin_from(unknown, SHAPE, byte_tokenizer())
    assert torch.equal(state["head.weight"], initial.state["head.weight"])
    grown = with_special_tokens(byte_tokenizer(), "<|im_end|>")
    with pytest.raises(ValueError, match=r"has 257 and no tokenizer\.json that says which"):
        begin_from(unknown, SHAPE.with_vocabulary(258), grown)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"d_ff": 32, "layers": 3},
            r"model\.layers=3 \(there 2\), model\.d_ff=32 \(there 24\); omit the settings",
        ),
        ({"kv_heads": 2}, r"model\.kv_heads=2 \(there 1\)"),
        ({"rope_theta": 5.0}, r"model\.rope_theta=5\.0 \(there 10000\.0\)"),
        ({"tied": True}, r"model\.tied=True"),
        ({"positions": "learned"}, r"model\.positions=learned \(there rope\)"),
        ({"vocabulary_size": 256}, r"model\.vocabulary_size=256 is smaller than that of train\.init_from"),
    ],
)
def test_another_shape_is_refused_by_its_settings(initial, change, said):
    with pytest.raises(ValueError, match=said):
        begin_from(initial, replace(SHAPE, **change), byte_tokenizer())


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(initial):
    grown = with_special_tokens(byte_tokenizer(), "<|im_end|>")
    with pytest.raises(ValueError, match=r"model\.vocabulary_size=257 is smaller than the tokenizer's 258"):
        begin_from(initial, SHAPE, grown)


def test_a_saved_moving_average_is_complete(run):
    """Of frozen weights, which have no average, the export holds the weights themselves."""
    kept = load_checkpoint(run.latest_checkpoint()).source.shapes("observers")
    assert len(kept) < len(initial_weights(run.path, "ema").state)
