"""Mutants of every file that multipack reads: each is accepted, or refused by an error of one line.

A mutant is a valid file with random damage: bits, cut ends, values of other types, huge numbers, deep nesting, names of
files and commands. Each is opened in a forked process with limits of time and memory. Lost are mutants that hang, crash
the interpreter, run a command, or raise anything but the errors that the command line shows in one line.
"""

import copy
import gzip
import hashlib
import io
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import struct
import time
import traceback
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest

from multipack.data.arriving import GrowingFolder
from multipack.data.chat import ChatTemplate, built_in_template
from multipack.data.corpus_report import read_lengths
from multipack.data.data_config import DataConfig
from multipack.data.documents import Documents
from multipack.data.prepare import items_of, prepare
from multipack.data.shards import FORMAT, HEADER, StoreHeader
from multipack.data.sources import Source
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer
from multipack.launch.allocation import parse_hostfile
from multipack.models.decoder import Decoder
from multipack.models.families import config_of, decoder_shape, parameter_shapes, to_huggingface
from multipack.models.pretrained import open_weights
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train
from multipack.training.trainer import Trainer
from multipack.training.weights import trained_shape

pytestmark = pytest.mark.timeout(1200)
SECONDS, WAIT, BYTES = 10, 120, 4 << 30  # of processor time, on a busy machine, beyond what is used
MARKER = Path("/tmp") / f"multipack-mutant-{os.getpid()}"
WRONG = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53,
    2**63 - 1,
    2**64,
    10**30,
    -(2**63),
    0.5,
    1e300,
    float("inf"),
    float("nan"),
]
WRONG += [
    "",
    "a",
    "x" * 5000,
    "\ud800",
    "../../etc/passwd",
    "/etc/passwd",
    "${oc.env:HOME}",
    "\0",
    "\n",
    "1e9",
    [],
    {},
]
WRONG += [
    ["a"],
    [[]],
    [1, 2, 3],
    {"a": 1},
    [[[[[[]]]]]],
    [None],
    [1e400],
    {"": {}},
    [2**70],
    f"$(touch {MARKER})",
]


# --- mutations ----------------------------------------------------------------------------------------


def of_bytes(content, draw):
    """Bits, zeros, cut ends, doubled or inserted pieces."""
    raw = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        at, end = sorted(draw.randrange(len(raw) + 1) for _ in range(2)) if raw else (0, 0)
        piece = draw.choice(
            (b"\0", b"\xff" * 8, b"[" * 5000, b"{" * 50, b'"', b"9" * 400, os.urandom(0), b"\n", b"${a}")
        )
        kind = draw.randrange(6)
        if kind == 0 and raw:
            raw[min(at, len(raw) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del raw[at : min(end, at + 64)]
        elif kind == 2:
            raw = raw[:at]
        elif kind == 3:
            raw[at:at] = piece
        elif kind == 4:
            raw[at:at] = raw[at : min(end, at + 64)]
        else:
            raw[at : at + 8] = bytes(min(8, len(raw) - at))
    return bytes(raw)


def of_tree(tree, draw):
    """Values of other types and sizes, missing and moved entries, at one to three places of plain data."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = [(None, None), *_places(tree)]
        holder, key = draw.choice(places[1:] or places)
        if holder is None:
            return draw.choice(WRONG)
        kind = draw.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = copy.deepcopy(draw.choice(places[1:])[0])
        elif kind == 2 and isinstance(holder[key], int | float):
            holder[key] = holder[key] * draw.choice((-1, 2, 1000, 1e18)) + draw.choice((-1, 1))
        elif kind == 3 and isinstance(holder[key], list):
            holder[key] = holder[key] * draw.choice((0, 2, 30))
        elif kind == 4:
            for _ in range(draw.choice((3, 60))):
                holder[key] = [holder[key]]
        else:
            holder[key] = draw.choice(WRONG)
    return tree


def _places(tree):
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def of_json(content, draw):
    return json.dumps(of_tree(json.loads(content), draw)).encode()


def of_text(content, draw):
    """Words of a text exchanged, repeated or replaced by hostile ones."""
    words = re.split(r"(\W)", content.decode())
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(words))
        hostile = (
            "${oc.env:HOME}",
            "!!python/object/apply:os.system",
            "*a",
            "&a",
            "[" * 3000,
            "- " * 3000,
            "1e999",
        )
        hostile += (
            "10**10**9",
            "range(99999)",
            "{% for a in range(99999) %}",
            "{% endfor %}",
            "(" * 300,
            "~",
            "*",
            "|",
        )
        words[at] = draw.choice((draw.choice(words), draw.choice(hostile), "", str(draw.choice(WRONG))))
    return "".join(words).encode("utf-8", "surrogatepass")


def of_safetensors(content, draw):
    """The JSON header of a safetensors file, and of a shard the JSON inside it."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    about = header.get("__metadata__", {})
    if FORMAT in about and draw.random() < 0.5:
        about[FORMAT] = json.dumps(of_tree(json.loads(about[FORMAT]), draw))
    else:
        header = of_tree(header, draw)
    text = json.dumps(header).encode().ljust(size)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def of_npy(content, draw):
    """The header of a .npy file, an expression in Python."""
    size = struct.unpack("<H", content[8:10])[0]
    header = content[10 : 10 + size]
    pieces = (
        b"(1000000000000,)",
        b"(-1,)",
        b"(1 << 70,)",
        b"()",
        b"'|O'",
        b"'<f8'",
        b"'<M8'",
        b"(" * 3000,
        b"",
    )
    header = re.sub(rb"\([^)]*\)|'<i8'", lambda found: draw.choice((found[0], *pieces)), header)
    header = of_bytes(header, draw) if draw.random() < 0.4 else header
    return content[:8] + struct.pack("<H", len(header)) + header + content[10 + size :]


# --- running mutants ----------------------------------------------------------------------------------


def run_all(attempt, count, name):
    """Call `attempt(number)` for all numbers in forked processes, which are replaced when they hang or crash.

    Returns:
        Outcome (accepted, refused, hang, crash, or the kind of an error) → number of mutants; and texts about the lost.
    """
    outcomes, lost, number = Counter(), [], 0
    while number < count:
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.close(reader)
            _attempts(attempt, range(number, count), writer)
        os.close(writer)
        rest, begun, used = b"", time.monotonic(), 0.0
        while number < count:
            ready, _, _ = select.select([reader], [], [], 1.0)
            if not ready and _processor_seconds(child) - used < SECONDS and time.monotonic() < begun + WAIT:
                continue
            chunk = os.read(reader, 1 << 16) if ready else b""
            if not chunk:
                break
            used = _processor_seconds(child)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                outcome, _, text = line.decode().partition(" ")
                outcomes[outcome] += 1
                if outcome not in ("accepted", "refused"):
                    lost.append(f"{name} {number}: {outcome} {text}")
                number, begun = number + 1, time.monotonic()
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(reader)
        if number < count:
            outcome = "hang" if not ready else "crash"
            outcomes[outcome] += 1
            lost.append(f"{name} {number}: {outcome} (status {status})")
            number += 1
    return outcomes, lost


def _processor_seconds(process):
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _attempts(attempt, numbers, writer):
    """Of the forked process: one line per attempt; never returns."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for number in numbers:
        try:
            attempt(number)
            line = "accepted"
        except (ValueError, OSError) as error:  # what the command line shows in one line
            text = str(error)
            line = (
                "refused"
                if text.strip() and "\n" not in text and len(text) < 20_000
                else f"message {text[:300]!r}"
            )
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            own = [each for each in traceback.extract_tb(error.__traceback__) if "multipack" in each.filename]
            place = (
                f"{Path(own[-1].filename).name}:{own[-1].lineno}"
                if own
                else f"{frame.filename}:{frame.lineno}"
            )
            line = f"{type(error).__name__} {place} {str(error)[:200]!r}"
        os.write(writer, line.encode() + b"\n")
    os._exit(0)


class Drill:
    """Runs mutants of several files, and counts what was lost."""

    def __init__(self, outcome):
        self._outcome, self._total, self._lost = outcome, Counter(), []

    def __call__(self, name, file, mutations, read, finish=lambda: None):
        """Call `finish` and `read` after each mutation of a file; `mutations` are functions and their numbers."""
        original = file.read_bytes()
        for mutate, count in mutations:

            def attempt(number, mutate=mutate):
                draw = random.Random(f"{name} {mutate.__name__} {number}")
                file.write_bytes(mutate(original, draw))
                finish()
                read()

            found, lost = run_all(attempt, count, f"{name} {mutate.__name__}")
            self._total.update(found)
            self._lost += lost
        file.write_bytes(original)
        finish()

    def check(self):
        """Record the counts, and fail if a mutant was lost."""
        self._outcome("mutants", sum(self._total.values()))
        for kind in sorted({"accepted", "refused", "hang", "crash", *self._total}):
            self._outcome(kind, self._total[kind])
        self._outcome("executions", int(MARKER.exists()))
        MARKER.unlink(missing_ok=True)
        assert not self._lost, "\n".join(self._lost)


@pytest.fixture
def drill(outcome):
    return Drill(outcome)


# --- data ---------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    """A store of 40 documents in three shards."""
    source = tmp_path / "text"
    source.mkdir()
    for number in range(40):
        (source / f"{number:02}.txt").write_text(f"document {number} " * (number + 1))
    data = DataConfig(source="text", path=str(source), cache=str(tmp_path / "cache"))
    return prepare(data, TokenizerConfig("byte"), tmp_path / "store", shards=3)


def read_store(path, verify=True):
    store = TokenStore(path)
    if verify:
        store.verify()
    documents = Documents.whole(store)
    assert documents.target_counts is not None
    for number in range(len(documents)):
        documents[number].shifted_targets()
        documents.names(number)
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


def test_stores(drill, store):
    header, shard = store / HEADER, store / "shard-0000-00001.safetensors"
    drill(
        "header", header, [(of_bytes, 250), (of_json, 150), (with_checksum, 450)], lambda: read_store(store)
    )
    drill("shard", shard, [(of_bytes, 150), (of_safetensors, 350)], lambda: read_store(store))
    drill(
        "shard unverified", shard, [(of_bytes, 350), (of_safetensors, 150)], lambda: read_store(store, False)
    )
    assert {field.name for field in fields(StoreHeader)} <= json.loads(header.read_text()).keys()
    drill.check()


def test_positions_of_streams(drill, store, tmp_path):
    def of_state(content, draw):
        saved = json.loads(content)
        name = draw.choice(("stream", "item"))
        return json.dumps({**saved, name: of_tree(saved[name], draw)}).encode()

    data = DataConfig(source="store", path=str(store), stream=True, patience_seconds=0.1, validation=0.1)

    def read():
        stream = GrowingFolder(data, 2000)
        saved = json.loads((tmp_path / "state.json").read_bytes())
        stream.load_state_dict(saved["stream"])
        stream.document(saved["item"])
        for _, item in zip(range(3), stream, strict=False):
            stream.document(item)

    stream = GrowingFolder(data, 2000)
    items = [item for _, item in zip(range(20), stream, strict=False)]
    (tmp_path / "state.json").write_text(json.dumps({"stream": stream.state_dict(), "item": items[-1]}))
    drill("position", tmp_path / "state.json", [(of_state, 400)], read)
    drill.check()


def test_tokenizers(drill, tmp_path):
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"])
    file, beside = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    tokenizer.save(file)
    template = built_in_template("chatml")
    beside.write_text(json.dumps({"eos_token": {"content": "</s>"}, "chat_template": template.source}))

    def read():
        loaded = Tokenizer.load(tmp_path)
        loaded.decode(loaded.encode("some text, é\n\n")[:8])
        if loaded.chat_template:
            chat = ChatTemplate(
                loaded.chat_template, loaded.special_tokens, loaded.bos_token, loaded.eos_token
            )
            loaded.encode_parts([chat.parts([{"role": "user", "content": "a"}])])

    drill("tokenizer", file, [(of_bytes, 200), (of_json, 400)], read)
    drill("tokenizer_config", beside, [(of_bytes, 100), (of_json, 150)], read)
    chat = tmp_path / "chat_template.json"
    chat.write_text(template.to_json())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    drill(
        "chat_template.json",
        chat,
        [(of_json, 200)],
        lambda: ChatTemplate.from_json(chat.read_text()).parts(messages),
    )
    source = tmp_path / "template.jinja"
    source.write_text(template.source)
    drill(
        "template",
        source,
        [(of_bytes, 250), (of_text, 450)],
        lambda: ChatTemplate(source.read_bytes().decode("utf-8", "replace"), ["<|im_end|>"]).parts(messages),
    )
    drill.check()


RECORDS = {
    "text": {"text": "some text"},
    "completion": {"prompt": "a question", "completion": "an answer"},
    "chat": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [{"name": "f", "arguments": {"x": [1]}}]},
        ],
        "tools": [{"name": "f"}],
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]},
}


@pytest.mark.parametrize("form", RECORDS)
def test_records(drill, tmp_path, form):
    def read(file):
        config = DataConfig(source="jsonl", path=str(file), cache=str(tmp_path / "cache"))
        source = Source(config, TokenizerConfig("byte"))
        assert source.identity
        list(items_of(source))

    record = RECORDS[form]

    def of_record(content, draw):
        lines = [json.dumps(record), json.dumps(of_tree(record, draw)), json.dumps(record)]
        draw.shuffle(lines)
        return "\n".join(lines).encode()

    lines, listed, packed = tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "c.jsonl.gz"
    lines.write_text("\n".join([json.dumps(record)] * 3))
    listed.write_text(json.dumps([record] * 3))
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    drill(f"{form} lines", lines, [(of_record, 250), (of_bytes, 100)], lambda: read(lines))
    drill(f"{form} list", listed, [(of_json, 80), (of_bytes, 40)], lambda: read(listed))
    drill(f"{form} gz", packed, [(of_bytes, 50)], lambda: read(packed))
    drill.check()


def test_lengths(drill, tmp_path):
    file, counts = tmp_path / "lengths.npy", tmp_path / "counts.npy"
    np.save(file, np.arange(1, 50))
    np.save(counts, np.arange(50))
    drill("lengths", file, [(of_bytes, 300), (of_npy, 250)], lambda: read_lengths(file, 4096))
    drill(
        "counts", counts, [(of_bytes, 200), (of_npy, 150)], lambda: read_lengths(counts, 64, histogram=True)
    )
    drill.check()


# --- settings and weights -----------------------------------------------------------------------------


def test_settings(drill, tmp_path):
    file, words = tmp_path / "config.yaml", tmp_path / "words"
    tree = {key: value for key, value in asdict(compose([])).items() if key != "out"}
    file.write_text(json.dumps(tree))
    words.write_text(
        "model=tiny data=jsonl data.path=a.jsonl data.fields=[a,b] train.steps=3 optimizer.lr=1e-3"
        " tokenizer=byte plan.capacity=512 optimizer.rules=[a lr=1] out=somewhere train.dtype=fp32"
    )

    def read():
        config = compose([f"config={file}"])
        config.check(1)
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
    from safetensors.torch import save_file

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


def test_cost_models_and_hosts(drill, tmp_path):
    file, hosts = tmp_path / "cost.json", tmp_path / "hosts"
    CostModel.from_shape(ModelShape(vocabulary_size=300)).save(file)
    drill("cost", file, [(of_bytes, 100), (of_json, 300)], lambda: CostModel.load(file).cost(np.arange(1, 9)))
    hosts.write_text("node1 slots=8\nnode[2-4] slots=8\n# comment\n")
    drill(
        "hosts", hosts, [(of_text, 150)], lambda: parse_hostfile(hosts.read_text(errors="replace"), "hosts")
    )
    drill.check()


# --- runs ---------------------------------------------------------------------------------------------


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
        trainer = Trainer(config, World(), Console(stream=io.StringIO()))
        trainer.close()

    assert json.loads(original)["progress"]
    drill("progress", state, [(of_progress, 150)], read, with_hash)
    drill.check()
