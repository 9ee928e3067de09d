"""This package inside transformers, beside transformers alone.

    python benchmarks/integrations.py            about seven minutes
    python benchmarks/integrations.py --quick    less of everything, for a look

attention   forward and backward pass of tiny decoders on one packed row of 8 documents, with the attention function
            "multipack" and with sdpa (eager where sdpa has no soft cap), whose mask transformers makes; the least of
            several passes, and the bytes of the largest tensor that an operator returns
hosts       real tokens per second of an epoch of the same documents: `PackedTrainer`, TRL's SFTTrainer with packing
            "bfd", transformers' Trainer on padded rows, random ones and those of group_by_length; rows of padded
            batches are as many as fill the slots of a pack. Medians of the rounds, after the first step of each run.
            The documents are whole batches of group_by_length over the set, so that it pads no more than there

Ways alternate in one run. All are CPU seconds of one thread. Results go to results/integrations.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: CPU seconds of one thread

import logging
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from host_runs import hosts_table
from multipack.integrations.attention_interface import register
from planning_tables.command import Suite
from planning_tables.table import Table, markdown

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
    },
    lambda machine: f"Measured on {machine['cpu']}, one thread.",
    document="hosts",
)

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    SUITE.main(__doc__)
