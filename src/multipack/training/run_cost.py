"""The cost model of a run: FLOPs, or times that `multipack calibrate` measured. A resumed run plans with a copy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from multipack.planning.cost import CostModel
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.training.checkpoint import Checkpoint
from multipack.training.run_config import Config

COST_FILE = "cost.json"
"""File of a run directory with the measured cost that the run plans with."""
NOISY = 0.2
"""Relative error of a fit above which reports warn; 0.04 to 0.10 are typical."""


def run_cost(
    config: Config, shape: ModelShape, run: RunDirectory, checkpoint: Checkpoint | None = None
) -> CostModel:
    """The cost model that a run plans with: FLOPs of its shape and of what is trained, or a calibrated file.

    Runs with adapters of earlier versions were planned as if all matrices were trained: resumed ones keep that plan.

    Raises:
        ValueError: the file is missing or damaged.
    """
    adapter = config.adapter if config.adapter.name != "none" else None
    if config.plan.cost == "flops":
        cost, whole = CostModel.from_shape(shape, adapter=adapter), CostModel.from_shape(shape)
        saved = checkpoint.progress.get("data") if checkpoint else None
        options = saved.get("options") if isinstance(saved, dict) else None
        was_whole = isinstance(options, dict) and options.get("cost") == whole.key()
        return replace(whole, adapter=adapter) if was_whole else cost
    return replace(_measured(config, run), adapter=adapter)


def _measured(config: Config, run: RunDirectory) -> CostModel:
    """The cost model in a file; see `run_cost`."""
    if config.train.resume == "false":
        return CostModel.load(config.plan.cost)
    file = run.path / COST_FILE
    if not file.is_file() and not run.has_checkpoints and Path(config.plan.cost).is_file():
        return CostModel.load(config.plan.cost)  # the run was killed while its directory was created
    if not file.is_file():
        raise ValueError(
            f"{file} is missing: the run was planned with plan.cost={config.plan.cost}, and without its copy the plan"
            " cannot be made again; restore it, or start a new run with another out="
        )
    return CostModel.load(file)


def cost_files(model: CostModel) -> dict[str, bytes]:
    """File name → content, of the run directory of a run with a measured cost; none for FLOPs."""
    return {COST_FILE: json.dumps(model.to_dict(), indent=1).encode()} if model.timed else {}


def cost_rows(model: CostModel) -> list[tuple[str, str]]:
    """Report rows (name, text): measured coefficients and the resulting cost; none for FLOPs."""
    timed = model.timed
    if timed is None:
        return []
    flops = CostModel.from_shape(model.shape, adapter=model.adapter)
    return [
        (
            "measured times",
            f"{1e3 * timed.micro_batch:.3g} ms per micro-batch, {1e6 * timed.token:.4g} µs per token,"
            f" {1e9 * timed.pair:.4g} ns per l(l+1), {1e6 * timed.document:.4g} µs per document"
            f" (error {100 * timed.error:.1f} %{noise_warning(timed.error)})",
        ),
        ("cost of l tokens", f"{model.formula}; by FLOPs alone {flops.formula}"),
    ]


def noise_warning(error: float) -> str:
    """Text to append to the relative error of a fit: a warning if the error is large, else empty."""
    return "; was the machine busy?" if error > NOISY else ""
