"""What a run refuses while it is assembled, and what it settles by itself."""

import pytest
import torch

from multipack.data.corpus import load_corpus
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console
from multipack.training.assemble import _sampler, _validation, assemble
from multipack.training.header import header_rows
from multipack.training.objective import objective_of
from multipack.training.precision import resolve_dtype
from multipack.training.run_config import compose


@pytest.fixture
def few(tmp_path):
    """Three documents."""
    path = tmp_path / "few.jsonl"
    path.write_text('{"text": "one two"}\n{"text": "three"}\n{"text": "four five six"}\n')
    return [f"data.path={path}", "data=jsonl", "tokenizer=byte", "model=tiny", "plan.packs_per_step=8"]


def _corpus(config):
    return load_corpus(config.data, config.tokenizer, limit=config.plan.capacity)


def test_fewer_documents_than_ranks_are_refused(few):
    config = compose([*few, "data.validation=0"])
    documents = _corpus(config).train
    assert (
        _sampler(
            config, Mesh.plain(World(size=3)), documents, CostModel.from_shape(), "training"
        ).micro_batches
        == 3
    )
    with pytest.raises(ValueError, match="3 training documents for 4 data-parallel ranks"):
        _sampler(config, Mesh.plain(World(size=4)), documents, CostModel.from_shape(), "training")


def test_a_validation_without_targets_is_refused(few):
    config = compose([*few, "data.validation=0"])
    corpus = _corpus(config)
    objective = objective_of(config, corpus)
    with pytest.raises(ValueError, match=r"train\.eval_every=0"):
        _validation(config, Mesh.plain(World()), objective, corpus.validation, CostModel.from_shape())


def test_the_header_says_what_is_in_effect(words, tmp_path):
    session = assemble(compose([*words, f"out={tmp_path / 'run'}"]), World(), Console(rank=1))
    rows = dict(header_rows(session))
    session.close()
    assert rows["backend"] == "none, attention loop"  # auto, resolved
    assert rows["parallel"] == "none: one process"
    assert rows["parameters"].endswith("(fp32)")
    assert len(rows["corpus hash"]) == 16
    assert set(rows) >= {
        "device",
        "world size",
        "hosts",
        "launcher",
        "versions",
        "model",
        "seed",
        "run directory",
    }


def test_auto_precision_is_what_the_device_has_instructions_for(monkeypatch):
    cpu = torch.device("cpu")
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert resolve_dtype("auto", cpu) == expected
    assert resolve_dtype("bf16", cpu) == torch.bfloat16
    assert resolve_dtype("fp32", cpu) == torch.float32
