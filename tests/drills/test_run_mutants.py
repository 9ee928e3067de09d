"""Mutants of settings, weights and the files of runs; see test_mutants.py."""

import hashlib
import io
import json
import shutil
import time
from dataclasses import asdict

import numpy as np
import pytest
from mutation import of_bytes, of_json, of_safetensors, of_text, of_tree
from safetensors.torch import save_file

from multipack.launch.allocation import parse_hostfile
from multipack.models.decoder import Decoder
from multipack.models.huggingface import decoder_shape, parameter_shapes, to_huggingface
from multipack.models.pretrained import open_weights
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.shapes.config_json import config_of
from multipack.training.assemble import assemble
from multipack.training.checkpoint import load_checkpoint
from multipack.training.checks import check
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train
from multipack.training.trainer import Trainer
from multipack.training.weights import trained_shape

pytestmark = pytest.mark.timeout(1200)


def test_settings(drill, tmp_path):
    file, words = tmp_path / "config.yaml", tmp_path / "words"
    tree = {key: value for key, value in asdict(compose([])).items() if key != "out"}
    file.write_text(json.dumps(tree))
    words.write_text(
        "model=tiny data=jsonl data.path=a.jsonl data.fields=[a,b] train.steps=3 optimizer.lr=1e-3"
        " tokenizer=byte plan.capacity=512 optimizer.warmup_steps=2 out=somewhere train.dtype=fp32"
    )

    def read():
        config = compose([f"config={file}"])
        check(config, 1)
        if config.model.layers < 100 and config.model.d_model < 1 << 13:
            parameter_shapes(config.shape_with(300))

    drill("yaml", file, [(of_bytes, 100), (of_json, 200), (of_text, 100)], read)
    drill(
        "words",
        words,
        [(of_text, 250)],
        lambda: compose_run(words.read_bytes().decode("utf-8", "replace").split(" ")),
    )
    drill.check()


def test_weights_of_huggingface(drill, tmp_path):
    shape = ModelShape(1, 2, 1, 16, 24, vocabulary_size=20)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(
        json.dumps({**config_of(shape), "layer_types": ["full_attention"], "text_config": None})
    )
    save_file(to_huggingface(shape, Decoder(shape).state_dict()), weights)

    def shapes():
        CostModel.from_shape(ModelShape.from_huggingface(config)).cost(np.arange(1, 9))

    def read():
        for value in open_weights(tmp_path)[1].values():
            value()

    drill("config.json for planning", config, [(of_bytes, 150), (of_json, 450)], shapes)
    drill("config.json", config, [(of_json, 250)], lambda: parameter_shapes(decoder_shape(config)))
    drill("config.json with weights", config, [(of_json, 250)], read)
    drill("weights", weights, [(of_bytes, 200), (of_safetensors, 350)], read)
    index = tmp_path / "model.safetensors.index.json"
    weights.rename(tmp_path / "model-1.safetensors")
    names = to_huggingface(shape, Decoder(shape).state_dict())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    drill("index", index, [(of_bytes, 50), (of_json, 100)], read)
    drill.check()


def test_hosts(drill, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=8\nnode2:4\n# comment\n")
    drill(
        "hosts", hosts, [(of_text, 150)], lambda: parse_hostfile(hosts.read_text(errors="replace"), "hosts")
    )
    drill.check()


@pytest.fixture
def run(tmp_path, store):
    """A finished run of four steps, with its words."""
    words = [
        "data=store",
        f"data.path={store}",
        "model=tiny",
        "train.steps=4",
        "train.eval_every=2",
        "train.dtype=fp32",
    ]
    words += [
        "plan.capacity=1024",
        "plan.packs_per_step=2",
        "train.checkpoint_every=2",
        f"data.cache={tmp_path / 'cache'}",
    ]
    config = compose_run([*words, f"out={tmp_path / 'run'}", "train.sample_tokens=0"])
    train(config)
    return RunDirectory(tmp_path / "run")


def test_checkpoints(drill, run):
    path = run.latest_checkpoint()
    state, complete = path / "state.json", path / ".complete"

    def with_hash():
        complete.write_text(hashlib.sha256(state.read_bytes()).hexdigest())

    def of_files():
        content = json.loads(state.read_bytes())
        for name in content["files"]:
            content["files"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
        state.write_text(json.dumps(content))
        with_hash()

    def read():
        checkpoint = load_checkpoint(path)
        for group in ("model", "optimizer"):
            for name in checkpoint.source.shapes(group):
                checkpoint.source.tensor(group, name)

    drill("state.json", state, [(of_bytes, 100)], read)
    drill("state.json with its hash", state, [(of_bytes, 100), (of_json, 350)], read, with_hash)
    drill("complete", complete, [(of_bytes, 30)], read)
    tensors = max((path / "tensors").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    drill("tensors", tensors, [(of_bytes, 100)], read)
    drill("tensors with their hash", tensors, [(of_safetensors, 250), (of_bytes, 60)], read, of_files)
    drill(
        "config.yaml",
        path / "config.yaml",
        [(of_bytes, 100), (of_text, 100)],
        lambda: compose_run([f"train.resume={path}"]),
    )
    drill("shape", path / "config.yaml", [(of_bytes, 50), (of_text, 150)], lambda: trained_shape(path))
    drill("latest", run.latest, [(of_bytes, 100)], lambda: RunDirectory(run.path).latest_checkpoint())
    drill("metrics", run.metrics, [(of_bytes, 150)], lambda: list(RunDirectory(run.path).records()))
    drill.check()


def test_progress_of_checkpoints(drill, run):
    """Fields of a run's progress, through the trainer that restores them."""
    path = run.latest_checkpoint()
    state, original = path / "state.json", (path / "state.json").read_bytes()
    saved = shutil.copytree(run.path, run.path.with_name("copy"))

    def of_progress(content, draw):
        tree = json.loads(content)
        tree["progress"] = of_tree(tree["progress"], draw)
        return json.dumps(tree).encode()

    def with_hash():
        (path / ".complete").write_text(hashlib.sha256(state.read_bytes()).hexdigest())

    def read():
        for name in ("metrics.jsonl", "samples.txt"):
            shutil.copyfile(saved / name, run.path / name)
        config = compose_run([f"train.resume={path}", "train.steps=6"])
        console = Console(stream=io.StringIO())
        trainer = Trainer(assemble(config, World(), console, time.perf_counter), console)
        trainer.close()

    assert json.loads(original)["progress"]
    drill("progress", state, [(of_progress, 150)], read, with_hash)
    drill.check()
