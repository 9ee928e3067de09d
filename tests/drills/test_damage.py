"""Damage to every file of a run: it is refused in one line, or the run goes on as if there were none. No hang."""

import hashlib
import json
import os
import random
import shutil
import signal
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path

import forked
import pytest

from multipack.run import RunDirectory
from multipack.training.run_config import compose_run
from multipack.training.train import train

pytestmark = pytest.mark.timeout(1200)

FILES = ["tensors/weights-00001.safetensors", "tensors/state-00001.safetensors", "state.json", "config.yaml"]
FILES += ["tokenizer.json", ".complete"]


def _flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _zero(path, rng):
    content = bytearray(path.read_bytes())
    begin = rng.randrange(len(content))
    content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))
    path.write_bytes(content)


def _older(path, rng):
    """The same file of the checkpoint before."""
    shutil.copy(str(path).replace("step-00000006", "step-00000004"), path)


def _link_to_older(path, rng):
    path.unlink()
    path.symlink_to(str(path).replace("step-00000006", "step-00000004"))


def _replaced(make):
    def damage(path, rng):
        path.unlink()
        make(path)

    return damage


DAMAGES = {
    "flip": _flip,
    "zero": _zero,
    "older": _older,
    "link": _link_to_older,
    "truncate": lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
    "longer": lambda path, rng: path.write_bytes(path.read_bytes() + b" "),
    "missing": lambda path, rng: path.unlink(),
    "pipe": _replaced(os.mkfifo),
    "folder": _replaced(Path.mkdir),
    "nowhere": _replaced(lambda path: path.symlink_to("nowhere")),
}
POINTERS = {
    "empty": lambda path, rng: path.write_bytes(b""),
    "binary": lambda path, rng: path.write_bytes(b"\xff\x00"),
    "lost": lambda path, rng: path.write_text("step-00000099\n"),
    "foreign": lambda path, rng: path.write_text("../../elsewhere\n"),
}


def _entry(name, value):
    """Another value of an entry of state.json, with all checksums made again."""

    def damage(checkpoint, rng):
        state = json.loads((checkpoint / "state.json").read_text())
        *groups, last = name.split(".")
        reduce(getitem, groups, state)[last] = value
        text = json.dumps(state)
        (checkpoint / "state.json").write_text(text)
        (checkpoint / ".complete").write_text(hashlib.sha256(text.encode()).hexdigest())

    return damage


WRONG = [None, "3", [1, 2], {"a": 1}, True, 1e400, -5]
ENTRIES = ["step", "files", "progress"]
ENTRIES += [f"progress.{name}" for name in ("data", "corpus", "files", "running", "evaluated", "best_step")]
ENTRIES += [f"progress.{name}" for name in ("callbacks", "marks", "marks.metrics", "marks.metrics.bytes")]
ENTRIES += [f"progress.{name}" for name in ("corpus.tokens", "data.epoch", "data.step", "data.micro_batch")]
ENTRIES += [f"progress.{name}" for name in ("data.carried", "data.fingerprint", "data.seed")]


@contextmanager
def _deadline(seconds):
    def late(*_):
        raise TimeoutError("hung")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _trained(folder, words):
    """The directory of a run of six of eight steps; its cache is shared by all that follow."""
    more = ["train.steps=6", "train.eval_every=0", "train.checkpoint_every=2", "optimizer.decay_steps=8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        train(compose_run([*words, *more, f"out={folder / 'run'}"]))
    return folder / "run"


@pytest.fixture(scope="module")
def original(tmp_path_factory, run_words):
    """A run with three checkpoints."""
    return _trained(tmp_path_factory.mktemp("damage"), [*run_words, "train.keep_checkpoints=0"])


@pytest.fixture(scope="module")
def preferences(tmp_path_factory, run_words):
    """A run on pairs, whose directory has the reference's values."""
    folder = tmp_path_factory.mktemp("preferences")
    rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}!"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return _trained(folder, [*run_words, f"data.path={folder / 'pairs.jsonl'}"])


def _resumed(path):
    """What resuming did: `refused` in one line, the records after it, or how it failed."""
    try:
        with _deadline(60):
            train(compose_run([f"out={path}", "train.resume=true", "train.steps=7"]))
    except (ValueError, OSError) as error:
        if isinstance(error, TimeoutError):
            return "hung"
        return "refused" if "\n" not in str(error) else f"several lines: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return forked.records(path)


def _try(original, tmp_path, cases, finish, capsys):
    """Damage copies and resume them."""
    shutil.copytree(original, tmp_path / "whole")
    expected, rng = _resumed(tmp_path / "whole"), random.Random(0)
    counts, lost = {"refused": 0, "same": 0}, []
    for name, file, damage in cases:
        path = tmp_path / "copy"
        shutil.copytree(original, path)
        damage(path / file, rng)
        found = _resumed(path)
        kind = "refused" if found == "refused" else "same" if found == expected else ""
        if kind:
            counts[kind] += 1
        else:
            lost.append((name, found if isinstance(found, str) else "different"))
        shutil.rmtree(path)
    capsys.readouterr()
    finish(lost, damages=len(cases), **counts)


def test_damaged_files(original, tmp_path, finish, capsys):
    latest = "checkpoints/step-00000006"
    cases = [
        (f"{how} {name}", f"{latest}/{name}", damage) for name in FILES for how, damage in DAMAGES.items()
    ]
    more = ["pipe", "folder", "nowhere", "missing", "flip"]
    cases += [
        (f"{how} {name}", name, DAMAGES[how])
        for name in ("metrics.jsonl", "samples.txt", "config.yaml")
        for how in more
        if (name, how) != ("samples.txt", "flip")
    ]
    cases += [(f"{how} latest", "checkpoints/latest", damage) for how, damage in POINTERS.items()]
    cases += [(f"{how} latest", "checkpoints/latest", DAMAGES[how]) for how in more]
    _try(original, tmp_path, cases, finish, capsys)


def test_damaged_files_beside_checkpoints(preferences, tmp_path, finish, capsys):
    """The log-probabilities of the reference model."""
    name = "reference.safetensors"
    hows = [how for how in DAMAGES if how not in ("older", "link")] + ["flip"] * 6
    cases = [(f"{how} {name}", name, DAMAGES[how]) for how in hows]
    _try(preferences, tmp_path, cases, finish, capsys)


def test_wrong_types_in_saved_state(original, tmp_path, finish, capsys):
    cases = [
        (f"{name}={value!r}", "checkpoints/step-00000006", _entry(name, value))
        for name in ENTRIES
        for value in WRONG
    ]
    _try(original, tmp_path, cases, finish, capsys)


def test_what_is_refused_names_a_checkpoint_that_is_there(original, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(original, path)
    RunDirectory(path).latest.write_bytes(b"")
    with pytest.raises(ValueError, match=r"latest.*step-00000004, step-00000006"):
        compose_run([f"out={path}", "train.resume=true"])
