"""The table of tools. A tool is one function, and a row here.

    def mine(lengths, capacity, ranks, seed) -> Epoch: …

    lengths    (documents,) int64 tokens of each document, in the data's order
    capacity   most tokens of a pack
    ranks      packs that run at the same time
    seed       of the order; None = keep the data's order. Return None if the tool cannot.

It returns what the ranks train in an epoch with the tool's defaults: see `epoch.Epoch`. An exception is shown as a
refusal. Documents may be left out, repeated or cut: the benchmark counts them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from packing import installed, written
from packing.epoch import Epoch, Integers

WRITTEN = "written here"


@dataclass(frozen=True)
class Tool:
    """A row: its name, its function, where its algorithm is documented, and the package that runs, if one does."""

    name: str
    run: Callable[[Integers, int, int, int | None], Epoch | None]
    source: str
    package: str | None = None

    @property
    def absent(self) -> bool:
        """Whether the package is not installed."""
        return self.package is not None and importlib.util.find_spec(self.package) is None

    @property
    def how(self) -> str:
        """The package and its version, or that the tool is written here."""
        if self.package is None:
            return WRITTEN
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:  # on the path, without an installation
            return self.package


KRELL = "https://arxiv.org/abs/2107.02027"
TRAINER = "https://huggingface.co/docs/transformers/main_classes/trainer"
TRL = "https://huggingface.co/docs/trl/reducing_memory_usage#packing"
V2 = "https://github.com/imoneoi/multipack_sampler"
AXOLOTL = "https://docs.axolotl.ai/docs/multipack.html"

TOOLS = (
    Tool("multipack", installed.ours, "planning.md", "multipack"),
    Tool("multipack, window 16", installed.ours_wider, "planning.md", "multipack"),
    Tool("multipack, not grouped", installed.ours_random, "planning.md", "multipack"),
    Tool("multipack V2", written.multipack_v2, V2),
    Tool("multipack V2, linear", written.multipack_v2_linear, V2),
    Tool("Axolotl", installed.axolotl, AXOLOTL, "axolotl"),
    Tool("Axolotl, sequential", installed.axolotl_sequential, AXOLOTL, "axolotl"),
    Tool("TRL, bfd", installed.trl, TRL, "trl"),
    Tool("TRL, wrapped", installed.trl_wrapped, TRL, "trl"),
    Tool("LightBinPack, ogbfd", installed.lightbinpack, "https://github.com/TechxGenus/LightBinPack", "lightbinpack"),
    Tool("NeMo, first fit shuffle", written.nemo,
         "https://docs.nvidia.com/nemo-framework/user-guide/latest/nemotoolkit/features/optimizations/sequence_packing.html"),
    Tool("Krell, SPFHP", written.spfhp, KRELL),
    Tool("Krell, LPFHP", written.lpfhp, KRELL),
    Tool("LLaMA-Factory", written.llama_factory, "https://llamafactory.readthedocs.io"),
    Tool("torchtune", written.torchtune, "https://docs.pytorch.org/torchtune/stable/basics/packing.html"),
    Tool("verl, dynamic batches", written.verl, "https://verl.readthedocs.io/en/latest/perf/perf_tuning.html"),
    Tool("transformers, random", installed.random_rows, TRAINER, "transformers"),
    Tool("transformers, by length", installed.grouped_rows, TRAINER, "transformers"),
    Tool("transformers, rebalance", installed.rebalanced_rows, TRAINER, "transformers"),
)  # fmt: skip
