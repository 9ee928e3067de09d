"""The trainer of multipack: settings under every parallel method, and attention backends."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from multipack.ops.attention import table as attention_table
from multipack.parallel.mesh import build_mesh
from multipack.parallel.world import World
from multipack.training.blueprint import open_engine
from multipack.training.checks import check
from multipack.training.objective import Objective
from multipack.training.precision import DTYPES
from multipack.training.preferences import Preferences
from multipack.training.run_config import compose
from support_tables.table import Table, answer, unless_run
from support_tables.tested import is_run_alone, runs

MODEL = ["model.layers=4", "model.heads=4", "model.kv_heads=4", "model.d_model=64", "model.d_ff=128"]
COMMON = [
    *MODEL,
    "model.vocabulary_size=264",
    "plan.capacity=1024",
    "plan.packs_per_step=8",
    "train.dtype=fp32",
]

METHODS: dict[str, tuple[int, str]] = {
    "one process": (1, ""),
    "DDP": (2, ""),
    "ZeRO 1": (2, "parallel.data=zero1"),
    "ZeRO 2": (2, "parallel.data=zero2"),
    "ZeRO 3": (2, "parallel.data=zero3"),
    "HSDP": (4, "parallel.data=hsdp"),
    "tensor": (2, "parallel.tensor=2"),
    "Ulysses": (2, "parallel.context=2 parallel.context_method=ulysses"),
    "planned": (2, "parallel.context=2 parallel.context_method=planned"),
    "pipeline": (2, "parallel.pipeline=2"),
    "interleaved": (2, "parallel.pipeline=2 parallel.schedule=interleaved"),
    "3-D": (8, "parallel.data=zero3 parallel.tensor=2 parallel.pipeline=2"),
}
"""Column → number of processes, and settings."""

PAIRS, LABELS = "preference pairs (DPO)", "labeled answers (KTO)"
SETTINGS = (
    "",
    "train.dtype=bf16",
    "train.dtype=fp16",
    "parallel.offload=cpu",
    "train.compile=true",
    "train.recompute=full",
    "train.recompute=selective",
    "model.attention=loop",
    "model.window=128",
    "model.kv_heads=1",
    "model.d_ff=129",
    "model.layers=2",
    "plan.capacity=1022",
    "plan.packs_per_step=1",
    "model.attention_cap=50",
    "optimizer.name=muon",
    "optimizer.name=adamw_bf16",
    "optimizer.name=adamw_8bit",
    "parallel.offload=disk parallel.offload_folder=.",
    "adapter=lora adapter.base=FOLDER",
    "adapter=qlora adapter.base=FOLDER",
    "'optimizer.rules=[embedding freeze]'",
    "train.loss_weighting=document",
    "log.gradient_noise=true",
    "data=huggingface data.path=fineweb data.stream=true train.steps=9",
    "data.readers=1",
    PAIRS,
    f"{PAIRS} train.label_smoothing=0.1",
    f"{PAIRS} preference.loss=reward",
    LABELS,
)


def build(processes: int, words: list[str], items: str = "") -> None:
    """Do what a run does before its first step: compose, check, and build rank 0's part of the model.

    The process group is torch's fake one, whose collectives send nothing, so that no process is started.

    Raises:
        ValueError: the configuration is refused.
    """
    config = compose(words)
    check(config, processes)
    store = SimpleNamespace(kind="labels" if items == LABELS else "pairs")
    corpus: Any = SimpleNamespace(train=SimpleNamespace(store=store), arriving=None)
    objective = (Preferences if items else Objective)(config, corpus)
    if processes > 1 or config.parallel.offload != "none":
        dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        mesh = build_mesh(config.parallel, World(size=processes))
        shape = objective.shape(config.shape_with(config.model.vocabulary_size))
        dtype = DTYPES[config.train.dtype]
        open_engine(config, objective, shape, None, mesh, dtype)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def ask_own_trainer(row: str, methods: Iterable[str] = METHODS) -> list[str]:
    """The answers of a row."""
    items = next((kind for kind in (PAIRS, LABELS) if row.startswith(kind)), "")
    words = shlex.split(row.removeprefix(items))
    found = []
    for count, given in (METHODS[name] for name in methods):
        is_run = runs(row, given) if count > 1 else is_run_alone(row)
        found.append(unless_run(answer(build, count, [*COMMON, *given.split(), *words], items), is_run))
    return found


def own_trainer() -> Table:
    """Every setting under every parallel method."""
    text = (
        "Rows: settings of `multipack train`, in addition to the column's (a model of 4 layers and 4 heads, 8 packs of"
        " 1,024 tokens per step). ✓: a test of `tests/distributed` runs the setting under the method, and compares"
        " losses and weights with one process. ○: the settings pass every check, and the model is built on the first"
        " rank; `test_runs.py` draws some of these at random."
    )
    columns = [f"{name} ({count})" if count > 1 else name for name, (count, _) in METHODS.items()]
    rows = {row: ask_own_trainer(row) for row in SETTINGS}
    return Table("multipack train", text, ["settings (processes)", *columns], rows)


REQUESTS: dict[str, dict[str, Any]] = {
    "CPU fp32": {"device": "cpu", "dtype": torch.float32},
    "CPU bf16": {"device": "cpu"},
    "V100 fp16": {"generation": 7, "dtype": torch.float16},
    "A100 bf16": {},
    "A100 fp32": {"dtype": torch.float32},
    "H100 bf16": {"generation": 9},
    "soft cap": {"explicit": "a soft cap"},
    "parts of keys": {"merges": True},
    "heads 20 wide": {"head_width": 20},
    "torch.compile": {"compiled": True},
}
"""Column → what differs from an A100 in bf16 with heads that are 64 wide."""


def ask_backend(name: str, request: dict[str, Any], installed: bool) -> str:
    """The name of the backend that is used.

    Raises:
        ValueError: the backend does not support the request.
    """
    usual = {"device": "cuda", "dtype": torch.bfloat16, "head_width": 64, "explicit": ""}
    usual |= {"causal": True, "merges": False, "compiled": False, "generation": 8}
    given = usual | request
    given["device"], generation = torch.device(given["device"]), given.pop("generation")
    is_gpu = given["device"].type == "cuda"
    with (
        patch.object(attention_table, "_generation", lambda device: generation if is_gpu else None),
        patch.object(attention_table, "_installed", lambda package: installed),
    ):
        return attention_table.BACKENDS[attention_table.backend_index(name, *given.values())].name


def attention() -> Table:
    """Every backend for every kind of call."""
    text = (
        "Rows: values of `model.attention`, which all take windows, and fewer key heads than query heads. Columns: an"
        " A100 in bf16 with heads 64 wide, and what differs from it; parts of keys: results that merge, as context"
        " ranks need them (`parallel.context_method=planned`)."
        " `auto` is the first backend that takes the call, with torch alone and with the packages of all rows; … is"
        " the row's name. ✓: `tests/ops` compare it with explicit attention. ○: the table says so; no test of this"
        " repository's own runs has a GPU."
    )
    made = Table("Attention of multipack train", text, ["attention", *REQUESTS])
    for name, installed in {"auto, torch alone": False, "auto, with all packages": True}.items():
        made.rows[name] = [f"*{ask_backend('auto', request, installed)}*" for request in REQUESTS.values()]
    for row in attention_table.BACKENDS:
        package = f" (`{row.install}`)" if row.install.startswith("pip") else ""
        made.rows[f"`{row.name}`{package}"] = [
            unless_run(
                answer(ask_backend, row.name, request, True).replace(f"attention={row.name}", "attention=…"),
                request.get("device") == "cpu",
            )
            for request in REQUESTS.values()
        ]
    return made
