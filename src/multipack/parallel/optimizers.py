"""Optimizers: the bytes of their states, and the units that a rank must hold whole. No torch.

An optimizer is a name, a row in `OPTIMIZERS`, and a function of that name in training/, from groups of parameters and
`OptimizerConfig` to an optimizer of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multipack.parallel.parallel_config import ParallelConfig

OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"]
"""Values of `optimizer.name`."""
DEFAULT_OPTIMIZER: OptimizerName = "adamw"
SMALLER_STATES: tuple[OptimizerName, ...] = ("adamw_bf16", "adamw_8bit")
"""Optimizers that `multipack advise` tries where the default's state does not fit, largest state first."""


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer.

    Attributes:
        title: the algorithm, in the header of a run.
        module: module in training/ with its function.
        state_bytes: bytes of the moments of an element, with their scales.
        matrix_bytes: the same in matrices of blocks, if it updates only these and AdamW all others.
        needs: the unit that a rank must hold whole, on the device, to update an element.
        has_fused: whether `optimizer.fused` applies.
    """

    title: str
    module: str
    state_bytes: float
    matrix_bytes: float | None = None
    needs: Literal["element", "row", "matrix"] = "element"
    has_fused: bool = False

    @property
    def for_matrices(self) -> bool:
        """Whether it updates matrices of blocks only."""
        return self.matrix_bytes is not None


OPTIMIZERS: dict[OptimizerName, OptimizerRow] = {
    "adamw": OptimizerRow("AdamW", "optimizer", 8, has_fused=True),
    "adamw_bf16": OptimizerRow("AdamW with bfloat16 moments", "compact_adamw", 4),
    "adamw_8bit": OptimizerRow("AdamW with 8-bit moments", "compact_adamw", 2 + 8 / 256, needs="row"),
    "muon": OptimizerRow("Muon", "optimizer", 8, matrix_bytes=4, needs="matrix", has_fused=True),
}


def check_optimizer(name: OptimizerName, parallel: ParallelConfig) -> None:
    """Check that ranks and offload do not divide the units that an optimizer needs whole.

    Raises:
        ValueError: they do not; the message names the settings and the nearest legal choices.
    """
    needs = OPTIMIZERS[name].needs
    if needs == "matrix" and parallel.offloads_parameters:
        raise ValueError(
            f"optimizer.name={name} multiplies whole matrices, which parallel.offload={parallel.offload} keeps on the"
            f" host: use parallel.offload=none, or optimizer.name={DEFAULT_OPTIMIZER}"
        )
    if needs == "row" and parallel.tensor > 1:
        raise ValueError(
            f"optimizer.name={name} has scales of 256 neighboring columns, which parallel.tensor={parallel.tensor}"
            " divides: use optimizer.name=adamw_bf16, or parallel.tensor=1"
        )
