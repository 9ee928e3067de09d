"""Weights that runs start from: of runs, checkpoints and Hugging Face folders; which fit, and how rows are added."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from multipack.data.text.tokenizer import byte_tokenizer, train_bpe
from multipack.models.decoder import Decoder
from multipack.models.huggingface import to_huggingface
from multipack.parallel.world import World
from multipack.run import RunDirectory, config_yaml
from multipack.shapes import ModelShape
from multipack.shapes.config_json import config_of
from multipack.training.checkpoint import CheckpointWriter
from multipack.training.run_config import compose, trained_shape
from multipack.training.weights import TrainedWeights, adapt_weights, find_weights

SHAPE = ModelShape(2, 2, 1, 16, 24, vocabulary_size=257, tied=False)


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Decoder(SHAPE)


@pytest.fixture
def run(tmp_path, model):
    """A run with two checkpoints: the first was the best."""
    run = RunDirectory(tmp_path / "run")
    values = config_yaml(compose([f"model.{name}={value}" for name, value in SHAPE.to_dict().items()]))
    run.create(values)
    files = {"config.yaml": values, "tokenizer.json": byte_tokenizer().to_json()}
    for step, factor in ((4, 1.0), (8, 2.0)):
        state = {name: tensor.detach() * factor for name, tensor in model.named_parameters()}
        CheckpointWriter(run, World(), 0).save(step, {"model": state}, {}, files, best=step == 4)
    return run


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
    return TrainedWeights(Path("runs/a"), SHAPE, state.__getitem__, byte_tokenizer())


def same(found, model, factor):
    """Whether weights are the model's times a factor."""
    return all(torch.equal(found.read(name), own * factor) for name, own in model.state_dict().items())


def test_weights_of_a_run(run, model):
    latest = find_weights(run.path)
    assert latest.shape == trained_shape(run.path) == SHAPE
    assert (latest.folder, latest.step) == (run.checkpoints / "step-00000008", 8)
    assert latest.tokenizer.hash == byte_tokenizer().hash
    assert same(latest, model, 2)
    assert list(latest.state()) == list(model.state_dict())
    best = find_weights(run.path, "best")
    assert best.step == find_weights(run.checkpoints / "step-00000004").step == 4
    assert same(best, model, 1)


def test_weights_of_a_hugging_face_folder(export, model):
    found = find_weights(export)
    assert found.shape == trained_shape(export) == replace(SHAPE, head_dim=8)
    assert found.tokenizer is None
    assert same(found, model, 1)
    byte_tokenizer().save(export / "tokenizer.json")
    assert find_weights(export).tokenizer.vocabulary_size == 257


def test_missing_and_damaged_weights_are_refused(run, export, tmp_path):
    first = run.checkpoints / "step-00000004"
    refusals = [
        (FileNotFoundError, tmp_path / "nowhere", "latest", "is not there"),
        (FileNotFoundError, tmp_path, "latest", "neither a run directory"),
        (ValueError, export, "best", "is an export, which has no best weights"),
        (ValueError, first, "best", "is one checkpoint; for the best one"),
    ]
    for error, path, weights, message in refusals:
        with pytest.raises(error, match=message):
            find_weights(path, weights)
    run.best.unlink()
    with pytest.raises(FileNotFoundError, match="checkpoints/best names"):
        find_weights(run.path, "best")
    config = run.latest_checkpoint() / "config.yaml"
    config.write_text(config.read_text().replace("d_ff: 24", "d_ff: 25"))
    with pytest.raises(ValueError, match=r"config\.yaml is not what was written"):
        find_weights(run.path)
    for text in (
        "model: 3\n",
        "",
        "model: {layers: many}",
        "model: {layers: -1}",
        "model: [",
        "model: *a",
        "3",
    ):
        config.write_text(text)
        with pytest.raises(
            ValueError, match=r"config\.yaml (does not describe a model|is not YAML): \S"
        ) as refused:
            trained_shape(run.path)
        assert "\n" not in str(refused.value)


def test_the_same_shape_and_tokenizer_keep_the_weights(initial):
    # None of these changes a weight.
    shape = replace(SHAPE, dropout=0.1, head_dim=8, context=99)
    read, note = adapt_weights(initial, shape, byte_tokenizer())
    assert all(read(name) is tensor for name, tensor in initial.state().items())
    assert "rows of the vocabulary" not in note


def test_new_tokens_start_as_the_mean_of_the_others(initial, chat_tokenizer):
    tokenizer = chat_tokenizer("<|im_start|>", "<|im_end|>")
    shape = SHAPE.with_vocabulary(320)
    read, note = adapt_weights(initial, shape, tokenizer)
    assert "63 rows of the vocabulary are new" in note
    for name in ("embedding.weight", "head.weight"):
        assert torch.equal(read(name)[:257], initial.read(name))
        torch.testing.assert_close(read(name)[257:], initial.read(name).mean(0).expand(63, -1))


def test_rows_without_a_token_are_new_when_a_token_gets_them(initial, chat_tokenizer):
    wide = replace(SHAPE, vocabulary_size=264)
    rows = torch.randn(264, 16)
    padded = replace(initial, shape=wide, read=lambda name: rows)
    read, _ = adapt_weights(padded, wide, chat_tokenizer("<|im_end|>"))
    torch.testing.assert_close(read("head.weight")[257], rows[:257].mean(0))
    assert torch.equal(read("head.weight")[258:], rows[258:])


def test_a_tokenizer_that_does_not_fit_is_refused(initial, chat_tokenizer):
    other = train_bpe(iter(["some text to make pairs of, some more text"]), 280)
    with pytest.raises(ValueError, match=r"257 tokens of .*tokenizer=file tokenizer\.path="):
        adapt_weights(initial, SHAPE.with_vocabulary(other.vocabulary_size), other)
    grown = chat_tokenizer("<|im_end|>")
    unknown = replace(initial, tokenizer=None)
    read, _ = adapt_weights(unknown, SHAPE, byte_tokenizer())
    assert torch.equal(read("head.weight"), initial.read("head.weight"))
    with pytest.raises(ValueError, match=r"has 257 and no tokenizer\.json that says which"):
        adapt_weights(unknown, SHAPE.with_vocabulary(258), grown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_ff": 32, "layers": 3}, r"model\.layers=3 \(there 2\), model\.d_ff=32 \(there 24\)"),
        ({"kv_heads": 2}, r"model\.kv_heads=2 \(there 1\)"),
        ({"head_dim": 16}, r"model\.head_dim=16 \(there 8\)"),
        ({"rope_theta": 5.0}, r"model\.rope_theta=5\.0 \(there 10000\.0\)"),
        ({"tied": True}, r"model\.tied=True"),
        ({"positions": "learned"}, r"model\.positions=learned \(there rope\)"),
        ({"vocabulary_size": 256}, r"model\.vocabulary_size=256 is smaller than that of train\.init_from"),
    ],
)
def test_another_shape_is_refused_by_its_settings(initial, change, message):
    with pytest.raises(ValueError, match=message):
        adapt_weights(initial, replace(SHAPE, **change), byte_tokenizer())
