"""Loops with a sampler and a collator, Axolotl's YAML, and functions that divide rollouts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

import multipack
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.integrations import openrlhf, verl
from multipack.integrations.collator import PackedDataCollator, document_lengths
from support_tables.table import ABSENT, Table, answer, unless_run
from support_tables.trainers import ROWS, stream

LENGTHS = [len(row["input_ids"]) for row in ROWS]


# --- loops ------------------------------------------------------------------------------------------


def sampler(lengths: Any = LENGTHS, ranks: int = 1, packs: int = 2) -> PackedBatchSampler:
    """The packs of the first rank."""
    return PackedBatchSampler(lengths, capacity=16, packs_per_step=packs, rank=0, world_size=ranks)


def loader(ranks: int = 1, **named: Any) -> DataLoader[Any]:
    """A loader of them."""
    data: Any = ROWS
    return DataLoader(data, batch_sampler=sampler(ranks=ranks), collate_fn=PackedDataCollator(), **named)


def prepared(ranks: int, dispatch: bool = False) -> None:
    """Read a loader that accelerate has prepared."""
    from accelerate.data_loader import prepare_data_loader

    named = {"even_batches": False, "put_on_device": dispatch, "dispatch_batches": dispatch}
    made = prepare_data_loader(loader(ranks), num_processes=ranks, process_index=0, **named)
    if dispatch:
        made.state = SimpleNamespace(num_processes=ranks, process_index=0)
    list(made)


def distributed_sampler() -> None:
    """Read a sampler that Lightning divides among ranks."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    list(DistributedSamplerWrapper(sampler(ranks=2), num_replicas=2, rank=0))


def stateful(workers: int) -> None:
    """Read torchdata's loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data: Any = ROWS
    named = {"batch_sampler": sampler(), "collate_fn": PackedDataCollator(), "num_workers": workers}
    list(StatefulDataLoader(data, **named))


def collate(**columns: Any) -> None:
    """Collate a document with these columns."""
    PackedDataCollator()([{"input_ids": [5, 6, 7]} | columns])


def resume(ranks: int, lengths: Any = LENGTHS) -> None:
    """Continue from the state of two ranks."""
    sampler(lengths, ranks).load_state_dict(sampler(ranks=2).state_dict())


LOOPS: dict[str, Callable[[], Any]] = {
    "`DataLoader`": lambda: list(loader()),
    "`StatefulDataLoader`": lambda: stateful(0),
    "`StatefulDataLoader(num_workers=2)`": lambda: stateful(2),
    "`accelerator.prepare(loader)`, 1 process": lambda: prepared(1),
    "`accelerator.prepare(loader)`, 2 processes": lambda: prepared(2),
    "the same with `dispatch_batches=True`": lambda: prepared(2, dispatch=True),
    "Lightning, `use_distributed_sampler=True`, 2 processes": distributed_sampler,
    "more ranks than packs of a step": lambda: sampler(ranks=4),
    "a document longer than a pack": lambda: sampler([5, 40]),
    "an `IterableDataset`": lambda: document_lengths(stream()),
    "documents that are not tokenized": lambda: document_lengths([{"text": "a"}]),
    "a document without tokens": lambda: collate(input_ids=[]),
    "rows that are packed already": lambda: collate(seq_lengths=[1, 2]),
    "`attention_mask` with numbers of documents": lambda: collate(attention_mask=[1, 1, 2]),
    "state of 2 ranks on 1": lambda: resume(1),
    "state of other documents": lambda: resume(2, LENGTHS[::-1]),
}


def loops() -> Table:
    """What loops do with the sampler and the collator."""
    text = (
        "`PackedBatchSampler` and `PackedDataCollator` in a loop of Accelerate, Lightning or PyTorch. Models and their"
        " parallelism are the loop's; [examples](../examples/pytorch_loop.py) are compared with every document alone by"
        " `tests/distributed/test_loops.py`."
    )
    made = Table("Accelerate, Lightning, PyTorch", text, ["loop", "answer"])
    made.rows = {name: [answer(function)] for name, function in LOOPS.items()}
    return made


# --- Axolotl ----------------------------------------------------------------------------------------

PACKING = {"sample_packing": True}
YAML: dict[str, dict[str, Any]] = {
    "`sample_packing: true`": PACKING,
    "`sample_packing: false`": {"sample_packing": False},
    "`multipack: false` (Axolotl's own sampler)": {"multipack": False},
    "`multipack_overlong: drop`": PACKING | {"multipack_overlong": "drop"},
    "`batch_flattening: true` without `sample_packing`": {"batch_flattening": True},
    "`batch_flattening: true`": PACKING | {"batch_flattening": True},
    "`multipack_probe: false`": PACKING | {"multipack_probe": False},
    "`use_pose: true`": PACKING | {"use_pose": True},
    "`dataloader_drop_last: true` with `batch_flattening`": {
        "batch_flattening": True,
        "dataloader_drop_last": True,
    },
    "`sample_packing_eff_est: 0.9`": PACKING | {"sample_packing_eff_est": 0.9},
    "`dataloader_drop_last: true`": PACKING | {"dataloader_drop_last": True},
    "`accelerator_config: {split_batches: true}`": PACKING | {"accelerator_config": {"split_batches": True}},
    "`accelerator_config: {dispatch_batches: true}`": PACKING
    | {"accelerator_config": {"dispatch_batches": True}},
    "`accelerator_config: {use_seedable_sampler: false}`": PACKING
    | {"accelerator_config": {"use_seedable_sampler": False}},
    "`multipack_overlng: drop`": PACKING | {"multipack_overlng": "drop"},
}


TRAINED = ("`sample_packing: true`", "`batch_flattening: true` without `sample_packing`")
"""Rows with which tests/integrations/test_axolotl_trainer.py trains."""


@contextmanager
def stand_in_for_axolotl() -> Iterator[None]:
    """What the plugin's module imports of Axolotl, where it is not installed."""
    names = ["axolotl", "axolotl.integrations", "axolotl.integrations.base"]
    if importlib.util.find_spec("axolotl"):
        names = []
    for name in names:
        sys.modules[name] = ModuleType(name)
    if names:
        sys.modules[names[-1]].__dict__.update(BasePlugin=object, PluginManager=object)
    try:
        yield
    finally:
        for name in [*names, *(["multipack.integrations.axolotl_plugin"] if names else [])]:
            sys.modules.pop(name, None)


def axolotl() -> Table:
    """Keys of Axolotl's YAML with the plugin."""
    text = (
        "Keys of the YAML beside `plugins: [multipack.integrations.axolotl.MultipackPlugin]`. Methods and models are"
        " Axolotl's; it validates them itself. ✓: Axolotl's trainer runs with it in"
        " `tests/integrations/test_axolotl_trainer.py`. ○: the plugin accepts it; no test trains with it."
    )
    made = Table("Axolotl", text, ["YAML", "answer"])
    with stand_in_for_axolotl():
        from multipack.integrations.axolotl_plugin import check_settings

        made.rows = {
            name: [unless_run(answer(check_settings, data), name in TRAINED)] for name, data in YAML.items()
        }
    return made


# --- rollouts ---------------------------------------------------------------------------------------


def verl_batches(lengths: list[int], budget: int, least: int = 1) -> Any:
    """Micro-batches of verl."""

    class Batch(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(key) if isinstance(key, str) else self

    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batch = Batch(input_ids=mask, attention_mask=mask)
    return verl.rearrange_micro_batches(batch, budget, min_num_micro_batch=least)


def openrlhf_batches(lengths: list[int], budget: int) -> Any:
    """Micro-batches of OpenRLHF."""
    number = openrlhf.get_minimum_num_micro_batch_size(lengths, budget, 1, 1)
    return openrlhf.get_seqlen_balanced_partitions(lengths, number, False, max_tokens=budget)


def trl_batches(lengths: list[int], budget: int, ranks: int = 2) -> Any:
    """Micro-batches of TRL's AsyncGRPO."""
    from multipack.integrations.trl_batchers import TokenBudgetBatcher

    rollouts = [
        {"input_ids": torch.arange(length), "completion_mask": torch.ones(length), "group_id": number}
        for number, length in enumerate(lengths)
    ]
    return list(TokenBudgetBatcher(rollouts, ranks, budget, {}))


def rollouts() -> Table:
    """What is divided, and what is refused, in place of the balancers of RL tools."""
    text = (
        "`multipack.balance`, and the functions of verl, OpenRLHF and TRL's AsyncGRPO with it inside. ✓: nothing is"
        " dropped, no rank or micro-batch is empty, none holds more than the budget."
    )
    made = Table("Rollouts", text, ["rollouts", "`balance`", "verl", "OpenRLHF", "TRL"])
    partition = verl.get_seqlen_balanced_partitions
    made.rows = {
        "lengths 3, 5, 4, 2 on 2 ranks": [
            answer(multipack.balance, [3, 5, 4, 2], 2, budget=8),
            answer(verl_batches, [3, 5, 4, 2], 8),
            answer(openrlhf_batches, [3, 5, 4, 2], 8),
            answer(trl_batches, [3, 5, 4, 2], 8),
        ],
        "lengths 3, 3, 3, 0 on 4 ranks": [
            answer(multipack.balance, [3, 3, 3, 0], 4, budget=8),
            answer(partition, [3, 3, 3, 0], 4, False),
            answer(openrlhf.get_seqlen_balanced_partitions, [3, 3, 3, 0], 4, False),
            ABSENT,
        ],
        "a rollout longer than the budget": [
            answer(multipack.balance, [3, 9], 2, budget=8),
            answer(verl_batches, [3, 9], 8),
            answer(openrlhf_batches, [3, 9], 8),
            answer(trl_batches, [3, 9], 8),
        ],
        "fewer rollouts than ranks": [
            answer(multipack.balance, [3, 4], 4, budget=8),
            answer(partition, [3, 4], 4, False),
            answer(openrlhf.get_seqlen_balanced_partitions, [3, 4], 4, False),
            ABSENT,
        ],
        "5 rollouts in 2 parts of equal size": [
            ABSENT,
            answer(partition, [3, 4, 5, 6, 7], 2, True),
            answer(openrlhf.get_seqlen_balanced_partitions, [3, 4, 5, 6, 7], 2, True),
            ABSENT,
        ],
        "a group longer than the budget, kept together": [
            answer(multipack.balance, [3, 4, 5, 6], 2, budget=8, groups=[0, 0, 1, 1], together="micro_batch"),
            ABSENT,
            ABSENT,
            ABSENT,
        ],
    }
    return made
