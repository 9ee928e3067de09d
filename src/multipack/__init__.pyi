"""The public names, for type checkers and for `__init__.py`, which loads each when it is first used."""

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

__version__: str
__all__: list[str]
