"""Shared by the tests of training/: one finished run, trainers, and callbacks added to runs."""

import json
import shutil
import time

import pytest

from multipack.data.text.tokenizer import Tokenizer, byte_tokenizer
from multipack.parallel.world import World
from multipack.reports.console import Console
from multipack.run import RunDirectory, config_yaml
from multipack.training import assemble
from multipack.training.callbacks.callback import Callback
from multipack.training.checkpoint import CheckpointWriter
from multipack.training.run_config import compose
from multipack.training.train import train
from multipack.training.trainer import Trainer

TIMED = {
    *("dt", "dtf", "dtb", "dto", "data_time", "mfu", "memory", "time_spread", "dtc"),
    *("sps", "tps", "sps_per_device", "tps_per_device"),
}
"""Metrics that differ between equal runs."""


class RunFiles:
    """The records of a run directory."""

    def __init__(self, path):
        self.path = path
        lines = (path / "metrics.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in lines]
        self.steps = [record for record in self.records if "loss" in record]
        self.losses = [record["loss"] for record in self.steps]
        self.evaluations = [record for record in self.records if "val_loss" in record]
        self.untimed = [
            {name: value for name, value in record.items() if name not in TIMED} for record in self.records
        ]


def _hook(name, default):
    def call(recorder, first, *_):
        first = first["step"] if name == "record" else first
        recorder.seen.append((name, first))
        return recorder.actions[name](first) if name in recorder.actions else default

    return call


class Recorder(Callback):
    """Records the hooks that are called with their first argument, and does in them what a test asks for."""

    name = "recorder"

    def __init__(self, **actions):
        self.seen, self.loaded, self.actions = [], None, actions

    def state(self):
        return {"count": len(self.seen)}

    def load_state(self, state):
        self.loaded = state["count"]


RESULTS = {"gradient": {}, "accept": True, "stop_reason": ""}
for each in ("before_step", "micro_batch", "after_step", "record", "sample", "close", *RESULTS):
    setattr(Recorder, each, _hook(each, RESULTS.get(each)))


@pytest.fixture(scope="session")
def save_decoder():
    """(path, model, tokenizer, further files) → a run at `path` with a checkpoint of the model's weights."""

    def save(path, model, tokenizer, **files):
        run = RunDirectory(path)
        words = [f"model.{name}={value}" for name, value in model.shape.to_dict().items()]
        files = {"config.yaml": config_yaml(compose(words)), "tokenizer.json": tokenizer.to_json(), **files}
        run.create(files["config.yaml"])
        CheckpointWriter(run, World(), 0).save(1, {"model": dict(model.named_parameters())}, {}, files)
        return path

    return save


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Names → bytes, the end token (256), and these special tokens (257 and on)."""

    def make(*names):
        fields = json.loads(byte_tokenizer().to_json())
        for number, name in enumerate(names, start=257):
            fields["added_tokens"].append({**fields["added_tokens"][0], "id": number, "content": name})
        return Tokenizer(json.dumps(fields))

    return make


@pytest.fixture(autouse=True)
def _known_peak(known_peak):
    pass


@pytest.fixture(scope="session")
def files():
    """Path of a run directory → its records."""
    return RunFiles


@pytest.fixture(scope="session")
def recorder():
    """Hook → action: a callback that records the hooks that are called."""
    return Recorder


@pytest.fixture(scope="session")
def changed():
    """Words with others in the place of those that set the same."""

    def change(words, *more):
        keys = {word.partition("=")[0] for word in more}
        return [word for word in words if word.partition("=")[0] not in keys] + list(more)

    return change


@pytest.fixture(scope="session")
def run_words(run_words, changed):
    """A run of half a second: one layer, and two packs a step. Tests of models and ranks have several."""
    return changed(run_words, "model.layers=1", "plan.packs_per_step=2")


@pytest.fixture(scope="session")
def _finished(corpus_path, run_words, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        train(compose([*run_words, "train.keep_checkpoints=0", f"out={path}"]))
    return path


@pytest.fixture
def finished(_finished, tmp_path):
    """A copy of a run that took the six steps of `words`, with checkpoints after steps 3 and 6."""
    return shutil.copytree(_finished, tmp_path / "finished")


@pytest.fixture
def trainer(words, tmp_path, changed):
    """More words → a trainer in one process, closed after the test."""
    made = []

    def make(*more):
        config = compose(changed(words, f"out={tmp_path / f'trainer{len(made)}'}", *more))
        console = Console(rank=1)
        made.append(Trainer(assemble.assemble(config, World(), console, time.perf_counter), console))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def watched(monkeypatch):
    """Callbacks that runs get beside their own, as long as they are in this list."""
    callbacks, build = [], assemble.build_callbacks
    monkeypatch.setattr(assemble, "build_callbacks", lambda *given: [*build(*given), *callbacks])
    return callbacks
