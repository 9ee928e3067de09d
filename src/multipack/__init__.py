"""multipack: padding-free training of language models.

The names below are loaded when they are first used: importing multipack imports neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "pack": "multipack.planning.packing",
    "Packs": "multipack.planning.packing",
    "plan": "multipack.planning.plan",
    "Plan": "multipack.planning.plan",
    "PackStream": "multipack.planning.stream",
    "PlanReport": "multipack.planning.report",
    "report": "multipack.planning.report",
    "balance": "multipack.planning.balance",
    "RankBatches": "multipack.planning.balance",
    "PlanOptions": "multipack.planning.options",
    "CostModel": "multipack.planning.cost",
    "ModelShape": "multipack.shapes",
    "SHAPES": "multipack.shapes",
    "TokenStore": "multipack.data.stores.store",
    "Document": "multipack.data.views.documents",
    "Documents": "multipack.data.views.documents",
    "PackedBatch": "multipack.data.packs.batch",
    "PackedBatchSampler": "multipack.data.packs.sampler",
    "PackedCollator": "multipack.data.packs.collate",
    "PackedLoader": "multipack.data.packs.loader",
    "attention": "multipack.ops.attention",
    "Decoder": "multipack.models.decoder",
    "linear_cross_entropy": "multipack.ops.loss",
    "generate": "multipack.models.generate",
    "load_model": "multipack.training.inference",
    "isolation_probe": "multipack.models.probe",
}

__all__ = ["__version__", *_PUBLIC]

_LEFT = {"PackedStreamDataset": "iterate PackStream, and give each rank its packs with step.deal(world_size)"}
"""Names that were public once → what to use."""

if TYPE_CHECKING:
    from multipack.data.packs.batch import PackedBatch as PackedBatch
    from multipack.data.packs.collate import PackedCollator as PackedCollator
    from multipack.data.packs.loader import PackedLoader as PackedLoader
    from multipack.data.packs.sampler import PackedBatchSampler as PackedBatchSampler
    from multipack.data.stores.store import TokenStore as TokenStore
    from multipack.data.views.documents import Document as Document
    from multipack.data.views.documents import Documents as Documents
    from multipack.models.decoder import Decoder as Decoder
    from multipack.models.generate import generate as generate
    from multipack.models.probe import isolation_probe as isolation_probe
    from multipack.ops.attention import attention as attention
    from multipack.ops.loss import linear_cross_entropy as linear_cross_entropy
    from multipack.planning.balance import RankBatches as RankBatches
    from multipack.planning.balance import balance as balance
    from multipack.planning.cost import CostModel as CostModel
    from multipack.planning.options import PlanOptions as PlanOptions
    from multipack.planning.packing import Packs as Packs
    from multipack.planning.packing import pack as pack
    from multipack.planning.plan import Plan as Plan
    from multipack.planning.plan import plan as plan
    from multipack.planning.report import PlanReport as PlanReport
    from multipack.planning.report import report as report
    from multipack.planning.stream import PackStream as PackStream
    from multipack.shapes import SHAPES as SHAPES
    from multipack.shapes import ModelShape as ModelShape
    from multipack.training.inference import load_model as load_model


def __getattr__(name: str) -> Any:
    if name in _LEFT:
        raise AttributeError(f"multipack.{name} is no longer there: {_LEFT[name]}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'multipack' has no attribute {name!r}")
    try:
        return getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        from multipack.machine import explain_missing

        raise explain_missing(error, f"multipack.{name}") from error


def __dir__() -> list[str]:
    return sorted(__all__)
