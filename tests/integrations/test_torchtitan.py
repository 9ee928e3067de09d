"""torchtitan's protocol of data loaders on planned packs, and its own Trainer where it is installed."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

INSTALLED = importlib.util.find_spec("torchtitan") is not None
LENGTHS = np.random.default_rng(0).integers(2, 60, 150)
RUN = Path(__file__).with_name("titan_run.py")


def stand_ins():
    """The parts of torchtitan that the loader reads."""

    class BaseDataLoader:
        @dataclass(kw_only=True, slots=True)
        class Config:
            dataset: str = ""
            dataset_path: str | None = None

    attention = {
        name: SimpleNamespace(Config=type(f"{name}.Config", (), {}))
        for name in ("FlexAttention", "VarlenAttention")
    }
    found = {
        "torchtitan": {},
        "torchtitan.components": {},
        "torchtitan.components.dataloader": {"BaseDataLoader": BaseDataLoader},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.attention": attention,
    }
    for name, values in found.items():
        module = ModuleType(name)
        vars(module).update(values)
        yield name, module


@pytest.fixture(scope="module")
def titan():
    """The module, with stand-ins where torchtitan is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in () if INSTALLED else stand_ins():
            patch.setitem(sys.modules, name, module)
        from multipack.integrations import torchtitan

        yield torchtitan
    if not INSTALLED:
        del sys.modules["multipack.integrations.torchtitan"]


def documents(_tokenizer):
    """Documents whose tokens are their number; of every third, the first tokens are a prompt."""
    rows = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS)]
    for row in rows[::3]:
        row["labels"] = [-100, -100, *row["input_ids"][2:]]
    return rows


def loader(titan, rank=0, ranks=2, **settings):
    config = titan.PackedDataLoader.Config(documents=documents, **settings)
    host = {"tokenizer": None, "seq_len": 64, "local_batch_size": 3, "snapshot_every_n_steps": 1}
    return titan.PackedDataLoader(config, dp_world_size=ranks, dp_rank=rank, **host)


def read(batches):
    """Numbers of the documents of each batch; batches are checked."""
    found = []
    for inputs, labels in batches:
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (3, 64)
        found.append([])
        rows = zip(inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True)
        for tokens, positions, targets in rows:
            place = 0
            while place < 64 and tokens[place]:
                number = tokens[place] - 1
                length = int(LENGTHS[number])
                expected = [*documents(None)[number].get("labels", [number + 1] * length)[1:], -100]
                assert tokens[place : place + length] == [number + 1] * length
                assert positions[place : place + length] == list(range(length))
                assert targets[place : place + length] == expected
                found[-1].append(number)
                place += length
            assert positions[place:] == list(range(64 - place))
            assert set(targets[place:]) <= {-100}
    return found


def test_every_document_once_an_epoch_in_another_order(titan):
    ranks = [read(loader(titan, rank, epochs=2)) for rank in range(2)]
    batches = len(loader(titan))
    assert {len(found) for found in ranks} == {2 * batches}
    first, second = ([found[part] for found in ranks] for part in (slice(batches), slice(batches, None)))
    for epoch in (first, second):
        assert sorted(n for found in epoch for batch in found for n in batch) == list(range(len(LENGTHS)))
    assert first != second
    assert read(loader(titan, seed=5, epochs=1)) != first[0]


def test_a_state_in_the_middle_of_an_epoch_is_continued(titan):
    for rank in range(2):
        whole = loader(titan, rank, epochs=3)
        batches, middle = iter(whole), len(whole) * 3 // 2
        for _ in range(middle):
            next(batches)
        state = whole.state_dict()
        resumed = loader(titan, rank, epochs=3)
        resumed.load_state_dict({})
        resumed.load_state_dict(state)
        assert resumed.sampler.epoch == 1
        for (one, labels), (two, more) in zip(batches, resumed, strict=True):
            assert all(one[name].equal(two[name]) for name in one)
            assert labels.equal(more)
    assert state == loader(titan, 0, epochs=3).state_dict() | state
    with pytest.raises(ValueError, match="seed"):
        loader(titan, seed=4).load_state_dict(state)


def test_mistakes_are_named(titan):
    with pytest.raises(ValueError, match=r"packed\(config, documents=function\)"):
        titan.PackedDataLoader(
            titan.PackedDataLoader.Config(),
            dp_world_size=1,
            dp_rank=0,
            tokenizer=None,
            seq_len=64,
            local_batch_size=1,
        )
    with pytest.raises(
        ValueError, match=r"document \d+ has \d+ tokens.*training\.seq_len=40; use training\.seq_len=59"
    ):
        titan.PackedDataLoader(
            titan.PackedDataLoader.Config(documents=documents),
            dp_world_size=1,
            dp_rank=0,
            tokenizer=None,
            seq_len=40,
            local_batch_size=1,
        )


def test_attention_without_masks_is_refused(titan):
    attention = importlib.import_module("torchtitan.models.common.attention")

    def config(inner):
        model = SimpleNamespace(first_attention=SimpleNamespace(inner_attention=inner))
        return SimpleNamespace(model_spec=SimpleNamespace(name="llama3", model=model), dataloader=None)

    for inner in (attention.FlexAttention.Config(), attention.VarlenAttention.Config()):
        made = titan.packed(config(inner), documents, epochs=2)
        assert made.dataloader.documents is documents
        assert made.dataloader.epochs == 2
    with pytest.raises(ValueError, match=r"llama3 has SimpleNamespace.*attn_backend='flex' or 'varlen'"):
        titan.packed(config(SimpleNamespace()), documents)


def run(ranks, *words):
    """Run torchtitan on this many processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    source = Path(__file__).parents[2] / "src"
    shared = os.environ | {
        "PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "TORCH_COMPILE_DISABLE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, RUN, *map(str, words)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="torchtitan is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_equals_every_document_alone(tmp_path, ranks, accumulation):
    run(ranks, tmp_path, accumulation, "train")
    found = [json.loads((tmp_path / f"rows.{rank}.json").read_text()) for rank in range(ranks)]
    for report in found:
        assert report["cut"] == 1
        assert report["resumed"] == report["whole"]
        assert report["steps"] * accumulation == len(report["whole"]) == 2 * report["epoch"]
    epochs = [
        sorted(n for report in found for batch in report["whole"][part] for n in batch)
        for part in (slice(found[0]["epoch"]), slice(found[0]["epoch"], None))
    ]
    assert epochs == [list(range(40))] * 2
    steps = [
        sorted(
            n for report in found for batch in report["whole"][first : first + accumulation] for n in batch
        )
        for first in range(0, len(found[0]["whole"]), accumulation)
    ]
    assert steps[: len(steps) // 2] != steps[len(steps) // 2 :]
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    run(1, tmp_path, accumulation, "alone")
    before, alone = np.load(tmp_path / "before.npy"), np.load(tmp_path / "alone.npy")
    assert np.abs(alone - before).max() > 1e-2
    for rank in range(ranks):
        whole = np.load(tmp_path / f"whole.{rank}.npy")
        assert np.abs(whole - alone).max() <= 1e-6
        assert np.array_equal(np.load(tmp_path / f"resumed.{rank}.npy"), whole)
