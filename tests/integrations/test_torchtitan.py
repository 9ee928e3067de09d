"""torchtitan's protocol of data loaders on planned packs, and its own Trainer where it is installed."""

import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

INSTALLED = importlib.util.find_spec("torchtitan") is not None
LENGTHS = np.random.default_rng(0).integers(2, 60, 150)
RUN = Path(__file__).with_name("titan_run.py")


HOST = {
    "0.3": {"seq_len": 64, "local_batch_size": 3, "snapshot_every_n_steps": 1},
    "pairs": {"max_context_length": 64, "num_tokens_per_batch": 192},
    "dictionaries": {"max_context_length": 64, "num_tokens_per_batch": 192},
}
"""Version of the protocol → what the host gives. After 0.3 batches are pairs, and later dictionaries."""


def stand_ins(version):
    """The parts of torchtitan that the loader reads.

    After 0.3: components/data/loader.py (5b1a6e4), and collators.py and trainer.py of the commits after it, which give
    max_context_length and num_tokens_per_batch and take flat batches with the number of their targets.
    """

    class BaseDataLoader:
        @dataclass(kw_only=True, slots=True)
        class Config:
            dataset: str = ""
            dataset_path: str | None = None

        def close(self):
            raise NotImplementedError

    attention = {
        name: SimpleNamespace(Config=type(f"{name}.Config", (), {}))
        for name in ("FlexAttention", "VarlenAttention")
    }
    batch = {"pairs": tuple[dict[str, Any], torch.Tensor], "dictionaries": dict[str, Any]}
    found = {
        "torchtitan": {},
        "torchtitan.components": {},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.attention": attention,
    }
    if version == "0.3":
        found["torchtitan.components.dataloader"] = {"BaseDataLoader": BaseDataLoader}
    else:
        found["torchtitan.components.data"] = {}
        found["torchtitan.components.data.loader"] = {"BaseDataLoader": BaseDataLoader}
        found["torchtitan.components.data.collators"] = {"TrainerBatch": batch[version]}
    for name, values in found.items():
        module = ModuleType(name)
        vars(module).update(values)
        yield name, module


@pytest.fixture(scope="module", params=HOST)
def titan(request):
    """The module, with stand-ins for other versions of torchtitan than the installed one."""
    version, own = request.param, "multipack.integrations.torchtitan"
    sys.modules.pop(own, None)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in () if INSTALLED and version == "0.3" else stand_ins(version):
            patch.setitem(sys.modules, name, module)
        module = importlib.import_module(own)
        module.version = version
        yield module
    del sys.modules[own]


def documents(_tokenizer):
    """Documents whose tokens are their number; of every third, the first tokens are a prompt."""
    rows = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS)]
    for row in rows[::3]:
        row["labels"] = [-100, -100, *row["input_ids"][2:]]
    return rows


def loader(titan, rank=0, ranks=2, **settings):
    config = titan.PackedDataLoader.Config(documents=documents, **settings)
    host = {"tokenizer": None, **HOST[titan.version]}
    return titan.PackedDataLoader(config, dp_world_size=ranks, dp_rank=rank, **host)


def taken(batch):
    """Inputs and labels as the model gets them; the number of targets is what trainers after 0.3 pop."""
    if isinstance(batch, dict):
        batch = dict(batch)
        inputs, labels = batch, batch.pop("labels")
    else:
        inputs, labels = batch
    if labels.dim() == 1:
        assert inputs.pop("num_valid_tokens") == (labels != -100).sum()
    assert inputs.keys() == {"input", "positions"}
    return inputs, labels


def read(batches):
    """Numbers of the documents of each batch; batches are checked."""
    found = []
    for batch in batches:
        inputs, labels = taken(batch)
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape
        assert labels.shape in ((3, 64), (192,))
        found.append([])
        three = (inputs["input"], inputs["positions"], labels)
        for tokens, positions, targets in zip(
            *(torch.atleast_2d(each).tolist() for each in three), strict=True
        ):
            place = 0
            while place < len(tokens) and tokens[place]:
                number = tokens[place] - 1
                length = int(LENGTHS[number])
                expected = [*documents(None)[number].get("labels", [number + 1] * length)[1:], -100]
                assert tokens[place : place + length] == [number + 1] * length
                assert positions[place : place + length] == list(range(length))
                assert targets[place : place + length] == expected
                found[-1].append(number)
                place += length
            assert positions[place:] == [number % 64 for number in range(len(tokens) - place)]
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
        for (one, labels), (two, more) in zip(map(taken, batches), map(taken, resumed), strict=True):
            assert all(one[name].equal(two[name]) for name in one)
            assert labels.equal(more)
        resumed.close()
    assert state == loader(titan, 0, epochs=3).state_dict() | state
    with pytest.raises(ValueError, match="seed"):
        loader(titan, seed=4).load_state_dict(state)


def test_mistakes_are_named(titan):
    given = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": None}
    with pytest.raises(ValueError, match=r"packed\(config, documents=function\)"):
        titan.PackedDataLoader(titan.PackedDataLoader.Config(), **given, **HOST[titan.version])
    name = "seq_len" if titan.version == "0.3" else "max_context_length"
    with pytest.raises(ValueError, match=rf"document \d+ has \d+ tokens.*training\.{name}=40 .*{name}=59"):
        titan.PackedDataLoader(
            titan.PackedDataLoader.Config(documents=documents), **given, **HOST[titan.version] | {name: 40}
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
