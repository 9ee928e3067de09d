"""This package inside transformers, beside transformers alone.

    python benchmarks/integrations.py            a minute
    python benchmarks/integrations.py --quick    shorter rows, for a look

Attention: forward and backward pass of tiny decoders on one packed row of 8 documents, with the attention function
"multipack" and with sdpa (eager where sdpa has no soft cap), whose mask transformers makes. Both alternate in one run;
CPU seconds of one thread, the least of several passes, and the bytes of the largest tensor that an operator returns.
Results go to results/integrations.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: CPU seconds of one thread

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.integrations.attention_interface import register
from planning_tables.command import Suite
from planning_tables.table import Table

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


SUITE = Suite(
    "integrations",
    {"attention": attention_table},
    lambda machine: f"Measured on {machine['cpu']}, one thread.",
)

if __name__ == "__main__":
    SUITE.main(__doc__)
