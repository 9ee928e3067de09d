"""What every room's tests share: a small corpus, and the words of a run that takes a second."""

import importlib.util
import json
import os
import random
import sys
from functools import cache, partial
from pathlib import Path

# Tiny tensors on two threads spend their time waiting for each other, most of all on a busy machine. Set before
# torch is imported anywhere; processes that tests start inherit it. Tests pass with more, too: tests/machines.sh.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import settings

sys.path.append(str(Path(__file__).parent))  # tests of several rooms import hf_models.py
settings.register_profile("same", derandomize=True)  # every run draws the same cases: a red test stays red
settings.load_profile("same")


NEEDED = ("numba", "omegaconf", "rich", "safetensors", "scipy", "tokenizers", "torch", "typer")
"""Packages without which most tests cannot be imported."""


def pytest_configure(config):
    """Hide GPUs from all tests but those of `-m cuda`, and name packages that are missing."""
    # All other tests compare with results of the CPU. Processes that they start inherit this.
    parts = config.option.markexpr.split(" and ")
    if "cuda" not in parts or " or " in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and not all(Path(given.partition("::")[0]).is_file() for given in config.args):
        raise pytest.UsageError(
            f"{', '.join(missing)} not installed: pip install -e '.[dev]', or name the test files to run"
            " (benchmarks/gpu_check.py does so for the cuda tests)"
        )


def pytest_addoption(parser):
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of each, in a random order")


def pytest_collection_modifyitems(config, items):
    """Shuffle files, so that fixtures of one are still made once, and the tests of each."""
    if seed := config.getoption("shuffle"):
        draw = random.Random(seed)
        order = {path: draw.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: (order[item.path], draw.random()))


def pytest_report_header(config):
    return f"--shuffle={seed}" if (seed := config.getoption("shuffle")) else None


SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session", autouse=True)
def _commands_are_built_once():
    """Typer builds all commands for each call, which takes longer than most calls of tests."""
    if importlib.util.find_spec("typer") is None:  # where the files of tests for GPUs are named
        yield
        return
    import typer.main
    import typer.testing

    build = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", build)
        patch.setattr(typer.testing, "_get_command", build)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk():
    """A run of a second syncs its files forty times, and waits for the disk a third of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def known_peak():
    """Runs do not measure the matmul peak of this machine, which takes longer than most of them."""
    from multipack.training import precision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "matmul_peak", lambda *_, **__: 1e11)
        yield


@pytest.fixture
def shared_data():
    """The folder of real lengths and texts, where it is at hand."""
    if not SHARED.is_dir():
        pytest.skip("../shared/data is not here")
    return SHARED


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory):
    """120 prompt-completion pairs of very different lengths, as JSONL."""
    draw = np.random.default_rng(7)
    words = ["pack", "token", "rank", "plan", "loss", "step", "batch", "mask", "cost", "seed"]
    path = tmp_path_factory.mktemp("corpus") / "pairs.jsonl"
    with path.open("w") as file:
        for number in range(120):
            count = int(np.clip(draw.lognormal(1.6, 0.9), 1, 30))
            prompt = f"Q{number}: " + " ".join(draw.choice(words, 2))
            answer = " ".join(draw.choice(words, count))
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
    return path


@pytest.fixture(scope="session")
def run_words(corpus_path, known_peak):
    """A run of a second: bytes, a tiny decoder, four packs a step, fp32."""
    return [
        "data=jsonl",
        f"data.path={corpus_path}",
        "tokenizer=byte",
        "model=tiny",
        "plan.capacity=256",
        "plan.packs_per_step=4",
        "train.steps=6",
        "train.eval_every=3",
        "train.checkpoint_every=3",
        "train.dtype=fp32",
        "optimizer.lr=3e-3",
        "optimizer.warmup_steps=2",
        "train.sample_tokens=4",
        "log.every=2",
    ]


@pytest.fixture
def words(run_words, monkeypatch):
    """The words of a short run, to be added to; it writes no page, which takes a quarter of its time."""
    monkeypatch.setattr("multipack.reports.run_page.write_page", lambda run: str(run.page))
    return list(run_words)


# Packs of tests/models and tests/ops. Torch is imported by those that ask for one.


@pytest.fixture
def document():
    """(length, seed, prompt) → Document whose first `prompt` tokens are no targets."""
    from multipack.data.views.documents import Document

    def make(length: int, seed: int = 0, prompt: int = 0):
        tokens = np.random.default_rng([seed, length]).integers(0, 50, length).astype(np.uint16)
        return Document(tokens, np.array([[prompt, length]], dtype=np.int64))

    return make


@pytest.fixture
def documents(document):
    """Five documents of unequal lengths, one of a single token, two with prompts."""
    return [
        document(length, seed=index, prompt=index % 2 * 2) for index, length in enumerate((7, 1, 12, 3, 9))
    ]


@pytest.fixture
def pack():
    """(documents, pad_to) → PackedBatch."""
    from multipack.data.packs.collate import PackedCollator

    def make(documents, pad_to=None):
        return PackedCollator(max_documents=8, max_seqlen=64, pad_to=pad_to, pad_id=3)(documents)

    return make


@pytest.fixture
def pad():
    """Documents → PackedBatch of padded rows."""
    from multipack.data.packs.collate import pad_documents

    return partial(pad_documents, pad_id=3)


@pytest.fixture
def distance():
    """(a, b) → ‖a − b‖ / ‖b‖ over all elements."""
    return lambda a, b: ((a - b).norm() / b.norm()).item()
