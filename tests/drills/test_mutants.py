"""Mutants of every file and saved state of multipack: each is accepted, or refused by an error of one line.

A mutant is a valid file with random damage: bits, cut ends, values of other types, huge numbers, deep nesting, names of
files and commands. Each is opened in a forked process with limits of time and memory. Lost are mutants that hang, crash
the interpreter, run a command, or raise anything but the errors that the command line shows in one line.
"""

import hashlib
import io
import json
import resource
import shutil
import time
from dataclasses import fields
from itertools import islice

import numpy as np
import pytest
import torch
from attempts import Surface
from mutation import of_bytes, of_json, of_safetensors, of_text, of_tree
from safetensors.torch import save_file
from torch.utils.data import RandomSampler

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.stores.shards import HEADER, StoreHeader
from multipack.data.stores.store import TokenStore
from multipack.data.text.chat import ChatTemplate, built_in_template
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import Tokenizer, byte_tokenizer
from multipack.data.views.arriving import GrowingFolder
from multipack.data.views.documents import Documents
from multipack.integrations.axolotl import MultipackBatchSampler
from multipack.integrations.multipack_v2 import MultipackDistributedBatchSampler
from multipack.launch.allocation import parse_hostfile
from multipack.models.decoder import Decoder
from multipack.models.huggingface import decoder_shape, parameter_shapes, to_huggingface
from multipack.models.pretrained import open_weights
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.planning.stream import PackStream
from multipack.reports.console import Console
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.shapes.config_json import config_of
from multipack.training.assemble import assemble
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose_run, trained_shape
from multipack.training.trainer import Trainer

# --- stores and tokenizers ----------------------------------------------------------------------------


def read_store(path, verify=True):
    store = TokenStore(path)
    if verify:
        store.verify()
    documents = Documents.whole(store)
    assert documents.target_counts is not None
    for number in range(len(documents)):
        documents[number].shifted_targets()
        documents.name(number)
    assert documents.fingerprint
    store.tokenizer.decode(documents[0].tokens.tolist())


def with_checksum(content, draw):
    """A header of other values whose checksum is right."""
    header = {**json.loads(content)}
    about = {key: header.pop(key) for key in ("format", "version", "checksum")}
    header = of_tree(header, draw)
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    about["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({**about, **header} if isinstance(header, dict) else header).encode()


def stores(folder, store):
    header, shard = store / HEADER, store / "shard-0000-00001.safetensors"
    assert {field.name for field in fields(StoreHeader)} <= json.loads(header.read_text()).keys()
    yield Surface(
        "header", header, {of_bytes: 250, of_json: 150, with_checksum: 450}, lambda: read_store(store)
    )
    yield Surface("shard", shard, {of_bytes: 150, of_safetensors: 350}, lambda: read_store(store))
    unverified = {of_bytes: 350, of_safetensors: 150}
    yield Surface("shard unverified", shard, unverified, lambda: read_store(store, verify=False))


def positions_of_streams(folder, store):
    def of_state(content, draw):
        saved = json.loads(content)
        name = draw.choice(("stream", "item"))
        return json.dumps({**saved, name: of_tree(saved[name], draw)}).encode()

    data = DataConfig(source="store", path=str(store), stream=True, patience_seconds=0.1, validation=0.1)
    file = folder / "state.json"

    def read():
        stream = GrowingFolder(data, 2000)
        saved = json.loads(file.read_bytes())
        stream.load_state_dict(saved["stream"])
        stream.document(saved["item"])
        for item in islice(stream, 3):
            stream.document(item)

    stream = GrowingFolder(data, 2000)
    items = list(islice(stream, 20))
    file.write_text(json.dumps({"stream": stream.state_dict(), "item": items[-1]}))
    yield Surface("position", file, {of_state: 400}, read)


def tokenizers(folder, store):
    file, beside = folder / "tokenizer.json", folder / "tokenizer_config.json"
    byte_tokenizer(["<|im_start|>", "<|im_end|>"]).save(file)
    template = built_in_template("chatml")
    beside.write_text(json.dumps({"eos_token": {"content": "</s>"}, "chat_template": template.source}))

    def read():
        loaded = Tokenizer.load(folder)
        if loaded.chat_template:
            special = (loaded.special_tokens, loaded.bos_token, loaded.eos_token)
            chat = ChatTemplate(loaded.chat_template, *special)
            loaded.encode_parts([chat.parts([{"role": "user", "content": "a"}])])

    yield Surface("tokenizer_config", beside, {of_bytes: 100, of_json: 150}, read)
    chat, source = folder / "chat_template.json", folder / "template.jinja"
    chat.write_text(template.to_json())
    source.write_text(template.source)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def read_source():
        ChatTemplate(source.read_bytes().decode("utf-8", "replace"), ["<|im_end|>"]).parts(messages)

    read_chat = lambda: ChatTemplate.from_json(chat.read_text()).parts(messages)  # noqa: E731
    yield Surface("chat_template.json", chat, {of_json: 200}, read_chat)
    yield Surface("template", source, {of_bytes: 250, of_text: 450}, read_source)


# --- settings, weights and measurements ---------------------------------------------------------------


def words_of_commands(folder, store):
    words = folder / "words"
    words.write_text(
        "model=tiny data=jsonl data.path=a.jsonl data.fields=[a,b] train.steps=3 optimizer.lr=1e-3"
        " tokenizer=byte plan.capacity=512 optimizer.warmup_steps=2 out=somewhere train.dtype=fp32"
    )
    read = lambda: compose_run(words.read_bytes().decode("utf-8", "replace").split(" "))  # noqa: E731
    yield Surface("words", words, {of_text: 250}, lambda: read() and None)


def weights_of_huggingface(folder, store):
    shape = ModelShape(1, 2, 1, 16, 24, vocabulary_size=20)
    config, weights = folder / "config.json", folder / "model.safetensors"
    written = {**config_of(shape), "layer_types": ["full_attention"], "text_config": None}
    config.write_text(json.dumps(written))
    tensors = to_huggingface(shape, Decoder(shape).state_dict())
    save_file(tensors, weights)

    def shapes():
        CostModel.from_shape(ModelShape.from_huggingface(config)).cost(np.arange(1, 9))

    def read():
        for value in open_weights(folder)[1].values():
            value()

    yield Surface("config.json for planning", config, {of_bytes: 150, of_json: 450}, shapes)
    yield Surface("config.json", config, {of_json: 250}, lambda: parameter_shapes(decoder_shape(config)))
    yield Surface("config.json with weights", config, {of_json: 250}, read)
    yield Surface("weights", weights, {of_bytes: 200, of_safetensors: 350}, read)
    index = folder / "model.safetensors.index.json"
    weights.rename(folder / "model-1.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    yield Surface("index", index, {of_bytes: 50, of_json: 100}, read)


def hosts(folder, store):
    hosts = folder / "hosts"
    hosts.write_text("node1 slots=8\nnode2:4\n# comment\n")
    read_hosts = lambda: parse_hostfile(hosts.read_text(errors="replace"), "hosts")  # noqa: E731
    yield Surface("hosts", hosts, {of_text: 150}, read_hosts)


# --- runs ---------------------------------------------------------------------------------------------


def with_hash(path):
    """A function that makes the checksum of a checkpoint's state.json again."""
    state = path / "state.json"
    return lambda: (path / ".complete").write_text(hashlib.sha256(state.read_bytes()).hexdigest())


def checkpoints(folder, finished):
    run = RunDirectory(shutil.copytree(finished, folder / "run"))
    path = run.latest_checkpoint()
    state, config = path / "state.json", path / "config.yaml"

    def of_files():
        content = json.loads(state.read_bytes())
        for name in content["files"]:
            content["files"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
        state.write_text(json.dumps(content))
        with_hash(path)()

    def read():
        source = load_checkpoint(path).source
        for group in ("model", "optimizer"):
            source.whole(group)

    tensors = max((path / "tensors").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    again, latest = (
        lambda: compose_run([f"train.resume={path}"]),
        lambda: RunDirectory(run.path).latest_checkpoint(),
    )
    yield Surface("state.json", state, {of_bytes: 100}, read)
    yield Surface("state.json with its hash", state, {of_bytes: 100, of_json: 350}, read, with_hash(path))
    yield Surface("complete", path / ".complete", {of_bytes: 30}, read)
    yield Surface("tensors", tensors, {of_bytes: 100}, read)
    yield Surface("tensors with their hash", tensors, {of_safetensors: 250, of_bytes: 60}, read, of_files)
    yield Surface("config.yaml", config, {of_bytes: 100, of_text: 100}, again)
    yield Surface("shape", config, {of_bytes: 50, of_text: 150}, lambda: trained_shape(path))
    yield Surface("latest", run.latest, {of_bytes: 100}, latest)
    yield Surface("metrics", run.metrics, {of_bytes: 150}, lambda: list(RunDirectory(run.path).records()))


def progress_of_checkpoints(folder, finished):
    """Fields of a run's progress, through the trainer that restores them."""
    run = RunDirectory(shutil.copytree(finished, folder / "run"))
    path = run.latest_checkpoint()
    assert json.loads((path / "state.json").read_bytes())["progress"]

    def of_progress(content, draw):
        tree = json.loads(content)
        tree["progress"] = of_tree(tree["progress"], draw)
        return json.dumps(tree).encode()

    def read():
        for name in ("metrics.jsonl", "samples.txt"):
            shutil.copyfile(finished / name, run.path / name)
        config = compose_run([f"train.resume={path}", "train.steps=8"])
        console = Console(stream=io.StringIO())
        Trainer(assemble(config, World(), console, time.perf_counter), console).close()

    yield Surface("progress", path / "state.json", {of_progress: 150}, read, with_hash(path))


# --- states of the planner and the samplers -----------------------------------------------------------

LENGTHS = np.random.default_rng(3).integers(1, 60, 60)


def sampler(**options):
    sizes = {"capacity": 128, "packs_per_step": 4, "rank": 1, "world_size": 2, "seed": 3}
    return PackedBatchSampler(LENGTHS, **sizes, **options)


class Stored:
    """A source with a state of its own."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < len(LENGTHS):
            self.next += 1
            yield {"length": int(LENGTHS[self.next - 1])}

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        if "next" not in state:
            raise ValueError("the state of the source lacks next")
        self.next = state["next"]


def stream():
    return PackStream(Stored(), capacity=128, packs_per_step=2, window=2, length=lambda item: item["length"])


def axolotl():
    order = RandomSampler(LENGTHS, generator=torch.Generator().manual_seed(1))
    return MultipackBatchSampler(order, 2, 128, LENGTHS)


MAKERS = {
    "sampler, keep": sampler,
    "sampler, carry": lambda: sampler(tail="carry"),
    "stream": stream,
    "multipack_v2": lambda: MultipackDistributedBatchSampler(128, LENGTHS, 2, 1),
    "axolotl": axolotl,
}


def state_of(name):
    """A surface whose mutants stay in memory, where a state has tensors."""

    def saved_states(folder, store):
        make, mutants = MAKERS[name], []
        begun = make()
        iterator = iter(begun)
        for _ in range(3):
            next(iterator)
        state = begun.state_dict()
        state = state if name == "axolotl" else json.loads(json.dumps(state))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def of_state(content, draw):
            mutants.append(of_tree(state, draw))
            return content

        def read():
            """Documents of the next batches."""
            made = make()
            made.load_state_dict(mutants.pop() if mutants else state)
            after = [getattr(batch, "positions", batch) for batch in made]
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + (1 << 20)  # KiB
            return [each.tolist() if hasattr(each, "tolist") else each for each in after]

        (folder / "state").write_bytes(b"")
        yield Surface(name, folder / "state", {of_state: 2000}, read)

    return saved_states


SURFACES = [stores, positions_of_streams, tokenizers, words_of_commands, weights_of_huggingface, hosts]
RUNS = [checkpoints, progress_of_checkpoints]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "make",
    [*SURFACES, *(pytest.param(state_of(name), id=name) for name in MAKERS)],
    ids=lambda make: make.__name__,
)
def test_mutants(make, drill, tmp_path, store):
    drill(make(tmp_path, store))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__)
def test_mutants_of_runs(make, drill, tmp_path, finished):
    drill(make(tmp_path, finished))
