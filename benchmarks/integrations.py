"""This package inside transformers, beside transformers alone.

    python benchmarks/integrations.py            about eight minutes
    python benchmarks/integrations.py --quick    less of everything, for a look

attention   forward and backward pass of tiny decoders on one packed row of 8 documents, with the attention function
            "multipack" and with sdpa (eager where sdpa has no soft cap), whose mask transformers makes; the least of
            several passes, and the bytes of the largest tensor that an operator returns
hosts       real tokens per second of an epoch of the same documents: `PackedTrainer`, TRL's SFTTrainer with packing
            "bfd", transformers' Trainer on padded rows, random ones and those of group_by_length; rows of padded
            batches are as many as fill the slots of a pack. Medians of the rounds, after the first step of each run.
            The documents are whole batches of group_by_length over the set, so that it pads no more than there
capacities  packed rows of other capacities, with our attention and with that of transformers
collation   `PackedDataCollator` beside transformers' `DataCollatorWithFlattening`, the least of many calls
start-up    fresh processes: wall seconds, median of several

Ways alternate in one run. All but the last are CPU seconds of one thread. Results go to results/integrations.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: CPU seconds of one thread

import logging
import subprocess
import sys
import time
import warnings
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from host_runs import capacities_table, hosts_table
from multipack.integrations.attention_interface import register
from multipack.integrations.collator import PackedDataCollator
from planning_tables.command import Suite
from planning_tables.table import Table, cpu_seconds, markdown, missing

DOCUMENTS = 8
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
MODELS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Llama", "llama", "sdpa", {}),
    ("Mistral, window 64", "mistral", "sdpa", {"sliding_window": 64}),
    ("Gemma 2, soft cap, window 64", "gemma2", "eager", {"sliding_window": 64, "head_dim": 32}),
)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for found in tree_leaves(result):
            if isinstance(found, Tensor):
                self.bytes = max(self.bytes, found.numel() * found.element_size())
        return result


def packed_row(length: int) -> dict[str, Any]:
    """A packed row of `DOCUMENTS` documents of `length` tokens, as collators give it to models."""
    generator = torch.Generator().manual_seed(0)
    bounds = torch.arange(DOCUMENTS + 1, dtype=torch.int32) * length
    return {
        "input_ids": torch.randint(3, 512, (1, DOCUMENTS * length), generator=generator),
        "position_ids": torch.arange(length).repeat(DOCUMENTS)[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": length,
        "max_length_k": length,
        "use_cache": False,
    }


def seconds(model: nn.Module, row: dict[str, Any]) -> float:
    """CPU seconds of a forward and backward pass."""
    start = time.process_time()
    model(**row).logits.logsumexp(-1).sum().backward()
    return time.process_time() - start


def attention_table(quick: bool) -> Table:
    """Passes over a packed row with this package's attention function, and with that of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    columns = {"model": "", "beside": "", "tokens": ",", "multipack s": ".3f", "times faster": ".2f"}
    columns |= {"largest tensor, MB": ".1f", "beside, MB": ".1f"}
    table = Table("attention", f"A packed row of {DOCUMENTS} documents, forward and backward", columns)
    register()
    for title, name, peer, fields in MODELS:
        config = AutoConfig.for_model(name, **{**SHAPE, **fields})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for length in (32,) if quick else (128, 256):
            row = packed_row(length)
            least, largest = {}, {}
            for _ in range(1 if quick else 3):
                for way in ("multipack", peer):
                    model.set_attn_implementation(way)
                    least[way] = min(least.get(way, torch.inf), seconds(model, row))
            for way in ("multipack", peer):
                model.set_attn_implementation(way)
                with LargestTensor() as mode:
                    seconds(model, row)
                largest[way] = mode.bytes / 1e6
            ours = least["multipack"]
            figures = ours, least[peer] / ours, largest["multipack"], largest[peer]
            table.row(title, peer, DOCUMENTS * length, *figures)
    return table


def collation_table(quick: bool) -> Table:
    """Documents of a data set made a row by either collator."""
    columns = {"documents": "", "features": "", "labels": "", "transformers ms": ".2f", "multipack ms": ".2f"}
    table = Table("collation", "lists of documents made a row", columns | {"times faster": ".1f"})
    if note := missing("transformers"):
        table.notes.append(note)
        return table
    from transformers import DataCollatorWithFlattening

    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    makers = {"lists": np.ndarray.tolist, "numpy": np.ndarray.copy, "torch": torch.tensor}
    for count, mean in ((100, 80), (8, 1000)):
        draw = np.random.default_rng(0)
        documents = [draw.integers(2, 30_000, draw.integers(mean // 2, 3 * mean // 2)) for _ in range(count)]
        for (kind, make), labeled in product(makers.items(), (False, True)):
            names = ("input_ids", "labels") if labeled else ("input_ids",)
            features = [{name: make(tokens) for name in names} for tokens in documents]
            least = {}
            for _ in range(3 if quick else 50):
                for way, collate in (("transformers", theirs), ("multipack", PackedDataCollator())):
                    spent, _ = cpu_seconds(lambda: collate(features), 1)  # noqa: B023
                    least[way] = min(least.get(way, torch.inf), 1e3 * spent)
            times = least["transformers"], least["multipack"]
            given = "given" if labeled else "–"
            table.row(f"{count} of about {mean:,}", kind, given, *times, times[0] / times[1])
    table.at_least("collation, times faster", min(row[-1] for row in table.rows), 2, ".1f")
    return table


COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "import multipack": ("-c", "import multipack"),
    "multipack --help": ("-m", "multipack", "--help"),
    "import torch": ("-c", "import torch"),
}


def start_up_table(quick: bool) -> Table:
    """Fresh processes, by turns."""
    table = Table("start-up", "fresh processes", {"command": "", "wall s": ".3f", "CPU s": ".3f"})
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(1 if quick else 9):
        for name, words in COMMANDS.items():
            spent, began = os.times(), time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            wall, now = time.perf_counter() - began, os.times()
            cpu = now.children_user + now.children_system - spent.children_user - spent.children_system
            found[name].append((wall, cpu))
    medians = {name: np.median(figures, axis=0).tolist() for name, figures in found.items()}
    for name, figures in medians.items():
        table.row(name, *figures)
    for name, most in (("import multipack", 0.25), ("multipack --help", 0.5)):
        table.at_most(f"{name}, wall s", medians[name][0], most, ".3f")
    return table


class HostsPage(Suite):
    """Writes the short table of docs/hosts.md."""

    def page(self, saved: dict[str, Any]) -> str:
        """How often as many real tokens per second as in the other hosts, a row a set."""
        (table,) = (Table.from_dict(table) for table in saved["tables"] if table["name"] == "hosts")
        rows: dict[str, list[str]] = {}
        for row in table.rows:
            figures = dict(zip(table.columns, row, strict=True))
            if figures["way"] != "multipack":
                rows.setdefault(figures["documents"], []).append(f"{figures['multipack over it']:.2f} ×")
        heads = ["documents", "TRL, packing_strategy=bfd", "Trainer, padded", "Trainer, group_by_length"]
        return markdown([heads, *([name, *ratios] for name, ratios in rows.items())])


SUITE = HostsPage(
    "integrations",
    {
        "attention": attention_table,
        "hosts": hosts_table,
        "capacities": capacities_table,
        "collation": collation_table,
        "start-up": start_up_table,
    },
    lambda machine: f"Measured on {machine['cpu']}, one thread.",
    document="hosts",
)

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    SUITE.main(__doc__)
