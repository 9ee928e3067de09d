"""The cost model that a run plans with."""

from __future__ import annotations

from dataclasses import replace

from multipack.planning.cost import CostModel
from multipack.shapes import ModelShape
from multipack.training.checkpoint import Checkpoint
from multipack.training.run_config import Config


def run_cost(config: Config, shape: ModelShape, checkpoint: Checkpoint | None = None) -> CostModel:
    """FLOPs of a run's shape and of what is trained.

    Runs with adapters of earlier versions were planned as if all matrices were trained: resumed ones keep that plan.
    """
    adapter = config.adapter if config.adapter.name != "none" else None
    cost, whole = CostModel.from_shape(shape, adapter=adapter), CostModel.from_shape(shape)
    saved = checkpoint.progress.get("data") if checkpoint else None
    options = saved.get("options") if isinstance(saved, dict) else None
    was_whole = isinstance(options, dict) and options.get("cost") == whole.key()
    return replace(whole, adapter=adapter) if was_whole else cost
