"""Names of models on the Hugging Face hub, with a cache on disk and without a network."""

import json

import pytest
import torch

from hf_models import short_run
from multipack.hub import model_folder
from multipack.models.decoder import Decoder
from multipack.shapes import ModelShape
from multipack.training.export import export, loading_code
from multipack.training.inference import load_model
from multipack.training.run_config import compose_run
from multipack.training.train import train
from multipack.words import ConfigError

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
SHAPE = ModelShape(1, 2, 2, 8, 16, vocabulary_size=257, context=64)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of the hub, empty, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def snapshot(cache, tmp_path):
    """A model in the cache, in the hub's layout: files are links to blobs."""
    from safetensors.torch import save_file

    from multipack.data.text.tokenizer import byte_tokenizer
    from multipack.models.huggingface import to_huggingface
    from multipack.shapes.config_json import config_of

    torch.manual_seed(0)
    place = cache / "models--some--model"
    folder, blobs = place / "snapshots" / ("0" * 40), place / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    save_file(to_huggingface(SHAPE, Decoder(SHAPE).state_dict()), blobs / "weights")
    (blobs / "config").write_text(json.dumps(config_of(SHAPE)))
    (blobs / "tokenizer").write_text(byte_tokenizer().to_json())
    for name, blob in (
        ("model.safetensors", "weights"),
        ("config.json", "config"),
        ("tokenizer.json", "tokenizer"),
    ):
        (folder / name).symlink_to(blobs / blob)
    return folder


def test_a_model_in_the_cache_needs_no_network(snapshot, tmp_path):
    assert load_model("some/model").shape.d_model == SHAPE.d_model
    words = ["train.init_from=some/model", "adapter=lora", "preference.reference=some/model", "data=stdlib"]
    config = compose_run(words)
    name = f"some/model@{'0' * 40}"
    assert config.train.init_from == config.preference.reference == config.adapter.base == name
    assert config.model.d_model == SHAPE.d_model
    assert config.tokenizer.path == str(snapshot / "tokenizer.json")


def test_an_adapter_names_its_base_as_the_hub_does(snapshot, tmp_path, capsys):
    """For those who have another cache: the run, its checkpoints and what is exported."""
    words = [*short_run(tmp_path), f"out={tmp_path / 'run'}", "train.init_from=some/model", "adapter=lora"]
    words += ["train.eval_every=0", "train.sample_tokens=0", "log.verbose=true"]
    train(compose_run(words))
    assert "some/model at 0000" in " ".join(capsys.readouterr().out.split())
    rows = dict(export(tmp_path / "run", tmp_path / "adapter"))
    assert rows["frozen weights"] == f"some/model at {'0' * 40}"
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == ("some/model", "0" * 40)
    assert f"'some/model', revision='{'0' * 40}'" in loading_code(tmp_path / "adapter")
    assert load_model(tmp_path / "adapter").shape.d_model == SHAPE.d_model
    for file in (tmp_path / "run").rglob("config.yaml"):
        assert f"base: some/model@{'0' * 40}" in file.read_text()
    train(compose_run([*words, "train.resume=auto", "train.steps=3"]))
    assert load_model(tmp_path / "run").shape.d_model == SHAPE.d_model


def test_a_folder_of_that_name_comes_first(snapshot, tmp_path):
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert model_folder("some/model", "x").resolve() == tmp_path / "some" / "model"
    assert model_folder("./not/there", "x").name == "there"


def test_half_a_model_is_not_taken(snapshot):
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="not whole in the cache"):
        model_folder("some/model", "x")


@pytest.mark.parametrize("setting", ["train.init_from", "preference.reference", "model"])
def test_without_network_the_error_says_so(setting, cache):
    value = "hf:other/model" if setting == "model" else "other/model"
    words = [f"{setting}={value}", *(["train.init_from=other/model"] if setting != "train.init_from" else [])]
    with pytest.raises((ConfigError, FileNotFoundError)) as caught:
        compose_run(words)
    message = str(caught.value)
    assert "other/model is no folder here" in message
    assert "cannot be downloaded (no network)" in message
    assert "\n" not in message
