"""`multipack probe MODEL`."""

import json

import pytest
import torch
from typer.testing import CliRunner

from multipack import Decoder, ModelShape
from multipack.cli import app
from multipack.models.tiny_models import load_causal_model, tiny_model

transformers = pytest.importorskip("transformers", "4.53", "transformers makes masks of documents since 4.53")


def probe(*words):
    return CliRunner().invoke(app, ["probe", *map(str, words)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Llama with weights, and a configuration of a large one without."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model(transformers.LlamaConfig())
    model.save_pretrained(folder / "weights")
    transformers.LlamaConfig().save_pretrained(folder / "config")
    return folder


def test_models_that_isolate_documents(folders):
    for model in (folders / "weights", folders / "config", "qwen2"):
        done = probe(model, "--attention", "eager")
        assert done.exit_code == 0, done.output
        assert "isolated: 3 documents" in done.output


def test_a_leak_has_exit_code_1():
    done = probe("opt")
    assert done.exit_code == 1
    assert "leak: document 1 → 2" in done.output
    assert "OPTAttention" in done.output
    report = json.loads(probe("opt", "--json").output)
    assert not report["ok"]
    assert {key: report["leaks"][0][key] for key in ("from", "into")} == {"from": 0, "into": 1}
    assert report["findings"][0]["cause"] == "leak"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-model"], "no run, no architecture of transformers and no model on this machine"),
        (["weights", "--attention", "nope"], "cannot be loaded"),
    ],
)
def test_errors_are_one_line(folders, words, message):
    words = [folders / word if word == "weights" else word for word in words]
    error = probe(*words).exception
    assert isinstance(error, ValueError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_tiny_models_are_the_same_each_time():
    one, two = (load_causal_model("llama")[0] for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), two.parameters(), strict=True))
    assert sum(parameter.numel() for parameter in one.parameters()) < 100_000


def test_runs_are_probed(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from multipack.training import weights

    shape = ModelShape(layers=1, heads=2, d_model=16, d_ff=24, vocabulary_size=64)
    saved = SimpleNamespace(shape=shape, state=Decoder(shape).state_dict)
    monkeypatch.setattr(weights, "find_weights", lambda path: saved)
    assert "isolated" in probe(tmp_path).output
    assert "for models of transformers" in str(probe(tmp_path, "--tiny").exception)
