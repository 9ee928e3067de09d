"""Settings of low-rank adapters (group `adapter`), and which modules of a decoder they apply to. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from multipack.ranges import Positive, Range, Share, check_ranges
from multipack.shapes.families import LLAMA, PHI
from multipack.shapes.formats import FORMATS, FormatName, FrozenFormat
from multipack.shapes.shape import ModelShape

ALIASES: dict[str, tuple[str, ...]] = {
    "all-linear": ("blocks",),
    **{
        theirs.rpartition(".")[2]: ours
        for tensors in (LLAMA, PHI)
        for theirs, ours in tensors.inner.items()
        if theirs.endswith("_proj")
    },
    "embed_tokens": ("embedding",),
    "lm_head": ("head",),
}
"""Names of Hugging Face's models and of peft → names in the decoder."""
ADAPTER_PRESETS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "lora": {"name": "lora"},
    "dora": {"name": "dora"},
    "qlora": {"name": "lora", "quantize": "nf4"},
}
"""`adapter=NAME` → its values."""


@dataclass
class AdapterConfig:
    """Adapters: small matrices, trained beside frozen weights; checkpoints hold only what is trained."""

    name: Literal["none", "lora", "dora"] = "none"
    """none = train all weights; lora = low-rank updates of frozen matrices; dora = also the lengths of their rows."""
    rank: Positive = 16
    """Rows of the first matrix of an adapter, columns of the second."""
    alpha: Annotated[float, Range(above=0)] = 32.0
    """Updates are multiplied by alpha / rank."""
    dropout: Share = 0.0
    """Share of the inputs of adapters that is dropped in training."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Adapted matrices: all-linear (all in blocks), names such as attention.query or q_proj, or globs."""
    train: list[str] = field(default_factory=list)
    """Modules that are trained whole and saved, by names or globs: embedding, head, norm, blocks.0."""
    rank_stabilized: bool = False
    """Multiply updates by alpha / √rank, so that larger ranks learn as fast as small ones."""
    quantize: Literal["none", FormatName] = "none"
    """Format of frozen matrices of blocks: nf4 = 4 bits (QLoRA: adapter=qlora); int8; none = train.dtype."""
    double_quantize: bool = True
    """Quantize the scales of nf4 too: 4.13 instead of 4.5 bits a number."""
    base: str = ""
    """Folder, run or checkpoint with the frozen weights, which resumed runs read again; empty = train.init_from."""
    base_hash: str = ""
    """Hash of weights and config.json in adapter.base, set by the run: others are refused; empty = not compared."""

    PRESET_HINT: ClassVar[str] = ""

    @staticmethod
    def preset_names() -> list[str]:
        """The names that `adapter=` accepts."""
        return list(ADAPTER_PRESETS)

    @classmethod
    def preset(cls, name: str) -> dict[str, Any] | None:
        """The values of `adapter=NAME`."""
        return ADAPTER_PRESETS.get(name)

    def __post_init__(self) -> None:
        """Check ranges."""
        check_ranges(self, "adapter.")
        if self.name == "none" and self.quantize != "none":
            raise ValueError(
                f"adapter.quantize={self.quantize} quantizes frozen weights, and adapter.name=none trains all of them:"
                " use adapter=qlora"
            )
        if self.name != "none" and not self.targets:
            raise ValueError(
                "adapter.targets must not be empty: all-linear adapts the matrices of all blocks"
            )

    def __hash__(self) -> int:
        """Hash of most fields, for caches."""
        return hash((self.name, self.rank, self.quantize, *self.targets, *self.train))

    @property
    def format(self) -> FrozenFormat | None:
        """The format of frozen matrices; None = train.dtype."""
        return FORMATS.get(self.quantize)

    @property
    def scale(self) -> float:
        """Factor of updates: alpha / rank, or alpha / √rank if stabilized."""
        return self.scale_of(self.rank, self.alpha)

    def scale_of(self, rank: int, alpha: float) -> float:
        """`scale` of a matrix with a rank and an alpha of its own."""
        return alpha / (rank**0.5 if self.rank_stabilized else rank)

    def with_head(self, name: str) -> AdapterConfig:
        """The same settings, with a new head that is trained whole beside adapters."""
        return self if self.trains(name) else replace(self, train=[*self.train, name])

    def adapts(self, matrix: str) -> bool:
        """Whether the matrix of a block gets an adapter, by the name of its module."""
        return self.name != "none" and any(_matches(matrix, pattern) for pattern in self.targets)

    def trains(self, module: str) -> bool:
        """Whether a module is trained whole: without adapters, or by a pattern on it or on a module that holds it."""
        return self.name == "none" or any(_begins(module, pattern) for pattern in self.train)

    def check(self, matrices: Collection[str], modules: Collection[str]) -> None:
        """Check that every pattern matches something in the whole model.

        Args:
            matrices: names of the linear modules of blocks.
            modules: names of modules with parameters.

        Raises:
            ValueError: one does not; the message has the nearest names.
        """
        parts = {".".join(name.split(".")[2:]): None for name in matrices}
        for setting, kind, patterns, matches, names, known in (
            ("targets", "matrix of a block", self.targets, _matches, matrices, [*parts, *ALIASES]),
            ("train", "module", self.train, _begins, modules, [*modules]),
        ):
            for pattern in patterns:
                if not any(matches(name, pattern) for name in names):
                    near = difflib.get_close_matches(pattern, known, 3, 0.5) or known[:4]
                    raise ValueError(
                        f"adapter.{setting}: {pattern} is no {kind} of this model; there are {', '.join(near)}, …"
                    )

    def check_blocks(self, shape: ModelShape, ranks: int) -> None:
        """Check that a decoder's rows have whole blocks of the format, also where tensor-parallel ranks divide them.

        Raises:
            ValueError: they have not; the message names the nearest legal choice.
        """
        if self.format is None or self.format.block == 1 or shape.architecture:
            return
        block = self.format.block
        rows = {
            "d_model": shape.d_model,
            "heads × head_dim": shape.heads * shape.head_width,
            "d_ff": shape.d_ff,
        }

        def cut(ranks: int) -> list[str]:
            """The rows without whole blocks on so many ranks, which divide all but the residual stream."""
            sizes = {name: size / (1 if name == "d_model" else ranks) for name, size in rows.items()}
            return [f"model.{name}={rows[name]}" for name, size in sizes.items() if size % block]

        if names := cut(ranks):
            other = next(name for name, row in FORMATS.items() if row.block == 1)
            fitting = [each for each in range(1, ranks) if ranks % each == 0 and not cut(each)]
            advice = f"parallel.tensor={fitting[-1]}, or " if fitting else ""
            raise ValueError(
                f"adapter.quantize={self.quantize} has blocks of {block} numbers, and parallel.tensor={ranks} no"
                f" whole ones in rows of {' and '.join(names)}: use {advice}adapter.quantize={other}"
            )


def _names(pattern: str) -> Iterable[str]:
    """The decoder's names that a pattern stands for, and the pattern itself, for models of transformers."""
    return (*ALIASES.get(pattern, ()), pattern)


def _matches(name: str, pattern: str) -> bool:
    """Whether consecutive parts of a dotted name match a glob."""
    return any(fnmatchcase(f".{name}.", f"*.{each}.*") for each in _names(pattern))


def _begins(name: str, pattern: str) -> bool:
    """Whether the first parts of a dotted name match a glob."""
    return any(fnmatchcase(f"{name}.", f"{each}.*") for each in _names(pattern))
