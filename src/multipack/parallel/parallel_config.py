"""`ParallelConfig`: the settings `parallel.*`, what each strategy divides, and legal combinations. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from multipack.planning.matrix_flops import FLOPS_PER_BYTE
from multipack.ranges import Amount, Count, Positive, Range, check_ranges
from multipack.shapes import ModelShape

if TYPE_CHECKING:
    from multipack.planning.cost import CostModel
    from multipack.planning.placement import Placing

Data = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
ContextMethod = Literal["auto", "planned", "ulysses"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
Offload = Literal["none", "cpu", "disk"]
Device = Literal["auto", "cpu", "cuda"]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the mesh of ranks, outermost first."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes along which ranks have different packs; the others divide one model replica."""
STAGES_PER_RANK = 2
"""Stages on each rank of an interleaved pipeline."""


@dataclass(frozen=True)
class DataStrategy:
    """A value of `parallel.data`: the state that it divides among data-parallel ranks, in addition to packs.

    Attributes:
        shards_parameters: FSDP2 shards parameters, gradients and optimizer state.
        divides_optimizer: ranks divide the optimizer state by whole tensors; parameters and gradients stay whole.
        keeps_gathered: parameters stay gathered from a step's first forward pass to its last backward pass.
        in_groups: each group of ranks holds one full set of shards; groups are replicas of each other.
    """

    shards_parameters: bool = False
    divides_optimizer: bool = False
    keeps_gathered: bool = False
    in_groups: bool = False


DATA_STRATEGIES: Mapping[Data, DataStrategy] = {
    "ddp": DataStrategy(),
    "zero1": DataStrategy(divides_optimizer=True),
    "zero2": DataStrategy(shards_parameters=True, keeps_gathered=True),
    "zero3": DataStrategy(shards_parameters=True),
    "hsdp": DataStrategy(shards_parameters=True, in_groups=True),
}


@dataclass
class ParallelConfig:
    """How the ranks of a run divide the work.

    World size = pipeline × data-parallel ranks × context × tensor; the number of data-parallel ranks follows from it.
    """

    RETIRED: ClassVar[dict[str, Any]] = {"context_slack": 0.0}
    """Settings that saved runs may have and that are gone."""

    data: Data = "ddp"
    """What data-parallel ranks divide: nothing, optimizer state, also gradients, also parameters, or all in groups."""
    replicate: Count = 0
    """Groups of data-parallel ranks that hold the same shards, for parallel.data=hsdp; 0 = 2."""
    tensor: Positive = 1
    """Ranks that divide every matrix and the vocabulary; neighbors, best within one host."""
    context: Positive = 1
    """Ranks that divide the tokens of every pack."""
    context_method: ContextMethod = "auto"
    """planned: documents on as many ranks as their cost asks for; ulysses: heads for tokens; auto: the cheaper one."""
    context_flops_per_byte: Amount = FLOPS_PER_BYTE
    """FLOPs of a device while it sends a byte to a context rank, which weigh bytes against balance (planned)."""
    pipeline: Positive = 1
    """Ranks that divide the layers."""
    schedule: Schedule = "1f1b"
    """Order in which a pipeline's micro-batches run."""
    offload: Offload = "none"
    """cpu: parameters, gradients and optimizer state in host memory (with zero2, zero3, hsdp); disk: state in files."""
    offload_folder: str = ""
    """Folder on a local drive for offload=disk: optimizer state and, with zero3 and hsdp, shards of parameters."""
    timeout_seconds: Annotated[float, Range(above=0)] = 600.0
    """Seconds that a collective waits for a missing rank before it raises."""

    def __post_init__(self) -> None:
        """Check settings and combinations that do not depend on the number of ranks."""
        check_ranges(self, "parallel.")
        if self.replicate and self.data != "hsdp":
            raise ValueError(
                f"parallel.replicate={self.replicate} is the number of groups of parallel.data=hsdp, and"
                f" parallel.data={self.data} has none: use parallel.data=hsdp, or parallel.replicate=0"
            )
        if (self.offload == "disk") != bool(self.offload_folder):
            raise ValueError(
                f"parallel.offload={self.offload} with parallel.offload_folder={self.offload_folder or 'none'}: set a"
                " folder on a local drive with parallel.offload=disk, and only then"
            )
        if self.offload == "cpu" and not self.shards_parameters:
            raise ValueError(
                f"parallel.offload={self.offload} moves shards of parameters, and parallel.data={self.data} has none:"
                " use parallel.data=zero3 (or zero2, hsdp), or parallel.offload=none"
            )

    @property
    def sync(self) -> Literal["step", "micro"]:
        """When data-parallel ranks synchronize, which determines what the planner balances.

        Shards are gathered, and stages of a pipeline wait, for every micro-batch; other ranks synchronize once a step.
        """
        return "micro" if self.shards_parameters or self.pipeline > 1 else "step"

    @property
    def strategy(self) -> DataStrategy:
        """The properties of `data`."""
        return DATA_STRATEGIES[self.data]

    @property
    def shards_parameters(self) -> bool:
        """Whether data-parallel ranks hold shards of parameters, gradients and optimizer state."""
        return self.strategy.shards_parameters

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters and gradients are in host memory, or parameters in files."""
        return self.offload == "cpu" or (
            self.offload == "disk" and self.shards_parameters and not self.strategy.keeps_gathered
        )

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 synchronizes data-parallel ranks instead of DDP.

        With tensor or pipeline parallelism, which DDP does not support, FSDP2 is used even without sharding, with
        shard groups of one rank.
        """
        return self.shards_parameters or self.tensor > 1 or self.pipeline > 1

    @property
    def model_ranks(self) -> int:
        """Number of ranks that hold one model replica and get the same packs."""
        return self.pipeline * self.context * self.tensor

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        is_interleaved = self.schedule == "interleaved" and self.pipeline > 1
        return self.pipeline * (STAGES_PER_RANK if is_interleaved else 1)

    @property
    def token_multiple(self) -> int:
        """Number that must divide the slots of every pack, of which ranks compute equal parts."""
        return self.context * self.tensor

    def resolved(self, shape: ModelShape, limited: bool = False) -> ParallelConfig:
        """The same settings, with ulysses in place of auto where the kernels of planned are not exact.

        `limited`: the settings choose a backend, which only ulysses calls, or documents share tokens.
        """
        is_auto = self.context_method == "auto"
        return replace(self, context_method="ulysses") if is_auto and (limited or _unplanned(shape)) else self

    def placing(self, cost: CostModel, size: int) -> Placing | None:
        """How context ranks place packs, with elements of `size` bytes; None: ulysses, or cost without shape."""
        if self.context_method == "ulysses" or cost.shape is None:
            return None
        from multipack.planning.placement import Placing, Prices  # imports numba: settings are read without

        prices = Prices.of(cost.shape, self.context, self.tensor, self.context_flops_per_byte, size)
        if self.context_method == "planned":
            prices = replace(prices, token=None)  # then no pack exchanges heads for tokens
        return Placing(cost, self.context, prices, self.tensor)

    def data_size(self, world_size: int) -> int:
        """Number of data-parallel ranks among `world_size` ranks, a multiple of the ranks of one model replica."""
        if world_size % self.model_ranks:
            axes = {name: n for name in ("pipeline", "context", "tensor") if (n := getattr(self, name)) > 1}
            count = max(1, round(world_size / self.model_ranks)) * self.model_ranks
            # Changes of one axis after which the model ranks divide the processes, and how far they go.
            changes = {
                f", or use parallel.{name}={n}": abs(n - given)
                for name, given in axes.items()
                for n in _divisors(world_size)
                if world_size % (self.model_ranks // given * n) == 0
            }
            words = " x ".join(f"parallel.{name}={n}" for name, n in axes.items())
            raise ValueError(
                f"{words}: {self.model_ranks} ranks hold one model, and {world_size}"
                f" process{'es' if world_size > 1 else ''} cannot be divided by them: start {count} (multipack launch"
                f" -n {count}){min(changes, key=changes.__getitem__, default='')}"
            )
        return world_size // self.model_ranks

    def divisions(self, world_size: int) -> dict[str, int]:
        """Number of parts into which data-parallel and context ranks divide a model's state.

        Returns:
            Parts of the "parameters" (and of gradients between steps); parts of the state of the "optimizer"; and
            "replicas", the number of ranks that hold, and all-reduce, the same shards.
        """
        axes = self.axes(world_size)
        data = axes["dp_replicate"] * axes["dp_shard"] * axes["cp"]
        shards = axes["dp_shard"] * axes["cp"] if self.shards_parameters else 1
        optimizer = data if self.strategy.divides_optimizer else shards
        return {"parameters": shards, "optimizer": optimizer, "replicas": data // shards}

    def axes(self, world_size: int) -> dict[str, int]:
        """Number of ranks along every axis of the mesh, outermost first.

        Raises:
            ValueError: `world_size` is not divisible by the model ranks, or the data-parallel ranks not by the groups.
        """
        data = self.data_size(world_size)
        groups = data
        if self.shards_parameters:
            groups = (self.replicate or 2) if self.strategy.in_groups else 1
        if data % groups:
            given = "" if self.replicate else " (the default)"
            raise ValueError(
                f"parallel.replicate={groups}{given}: the groups of parallel.data=hsdp do not divide the {data}"
                f" data-parallel rank{'s' if data > 1 else ''} of this run: use"
                f" parallel.replicate={_nearest(_divisors(data), groups)}"
            )
        return {
            "pp": self.pipeline,
            "dp_replicate": groups,
            "dp_shard": data // groups,
            "cp": self.context,
            "tp": self.tensor,
        }

    def text(self, world_size: int) -> str:
        """The strategies in effect as one line of text, outermost first."""
        offloaded = {"none": "", "cpu": ", offloaded to the host", "disk": ", offloaded to files"}[
            self.offload
        ]
        if world_size == 1:
            return f"none: one process{offloaded}"
        axes = self.axes(world_size)
        stages = f" ({self.schedule}, {self.stages} stages)"
        named = [f"pipeline {self.pipeline}{stages}"] if self.pipeline > 1 else []
        data = self.data_size(world_size)
        groups = f" in {axes['dp_replicate']} groups" if self.strategy.in_groups else ""
        named.append(f"{self.data} {data}{groups}{offloaded}")
        if self.context > 1:
            named.append(f"context {self.context} ({self.context_method})")
        if self.tensor > 1:
            named.append(f"tensor {self.tensor}")
        return " x ".join(named)

    def check(
        self, shape: ModelShape, world_size: int, capacity: int, dtype: str = "fp32", resumed: bool = False
    ) -> None:
        """Check that these settings suit a model, a number of processes and a capacity. Needs no process group.

        A vocabulary of 0 is not known yet and not checked. The shape of a run that is `resumed` cannot change.

        Raises:
            ValueError: a setting is invalid; the message names it and the nearest legal choice.
        """
        self.axes(world_size)  # checks the number of processes
        problems = chain(
            self._undivided(shape, world_size, resumed), self._unsuitable(shape, world_size, capacity, dtype)
        )
        if problem := next(problems, ""):
            raise ValueError(problem)

    def _undivided(self, shape: ModelShape, world_size: int, resumed: bool) -> Iterator[str]:
        """Problems of axes that divide heads, matrices and the vocabulary of a model."""
        tensor, context, method = self.tensor, self.context, self.resolved(shape).context_method
        divided = {name: getattr(shape, name) for name in ("kv_heads", "heads", "d_ff", "vocabulary_size")}

        def divides(ranks: int, name: str) -> bool:
            # Several ranks may have the same key head, but a norm over all heads counts each once.
            shared = name == "kv_heads" and ranks % divided[name] == 0 and shape.head_norm != "all"
            return divided[name] % ranks == 0 or shared

        for name, size in divided.items():
            if not divides(tensor, name):
                near = self._nearest_ranks(
                    "tensor", world_size, lambda ranks: all(divides(ranks, each) for each in divided)
                )
                above = -(-size // tensor) * tensor
                wider = "" if resumed or name.endswith("heads") else f"model.{name}={above}, or "
                yield (
                    f"parallel.tensor={tensor} does not divide model.{name}={size}: use {wider}parallel.tensor={near}"
                )
        near = self._nearest_ranks("context", world_size, lambda ranks: shape.heads % (tensor * ranks) == 0)
        fewer = f" parallel.context={near}" if near != context else ""
        unplanned = _unplanned(shape)
        if context > 1 and method == "planned" and unplanned:
            yield (
                "parallel.context_method=planned has its own attention kernels, without windows and soft caps, and"
                f" this model has {unplanned}: use parallel.context_method=ulysses{fewer}"
            )
        if context > 1 and method == "ulysses" and near != context:
            beside = f" x parallel.tensor={tensor}" if tensor > 1 else ""
            other = "" if unplanned else ", or parallel.context_method=planned"
            yield (
                f"parallel.context={context} (ulysses){beside} divides heads among {tensor * context} ranks, and"
                f" model.heads={shape.heads} is no multiple of that: use parallel.context={near}{other}"
            )

    def _unsuitable(self, shape: ModelShape, world_size: int, capacity: int, dtype: str) -> Iterator[str]:
        """Problems with the number of processes, of slots or of layers, or with the precision."""
        multiple = self.token_multiple
        if capacity % multiple:
            yield (
                f"plan.capacity={capacity} must be a multiple of {multiple}, so that parallel.context={self.context}"
                f" and parallel.tensor={self.tensor} can divide its slots: use"
                f" plan.capacity={capacity // multiple * multiple or multiple}"
            )
        if self.stages > shape.layers:
            each = self.stages // self.pipeline
            near = self._nearest_ranks(
                "pipeline", world_size, lambda ranks: ranks == 1 or ranks * each <= shape.layers
            )
            one_each = ", or parallel.schedule=1f1b" if each > 1 and self.pipeline <= shape.layers else ""
            yield (
                f"parallel.pipeline={self.pipeline} with parallel.schedule={self.schedule} has {self.stages} stages,"
                f" and model.layers={shape.layers} are fewer: use parallel.pipeline={near}{one_each}"
            )
        sharded = self.shards_parameters and (world_size > 1 or self.offload != "none")
        if sharded and dtype == "fp16":
            yield (
                f"train.dtype=fp16 with parallel.data={self.data}: scaled gradients would overflow unnoticed where they"
                " are reduced; use train.dtype=bf16, or parallel.data=ddp or zero1"
            )

    def _nearest_ranks(self, name: str, world_size: int, legal: Callable[[int], bool]) -> int:
        """The legal number of ranks of an axis nearest to the current one, with the other axes unchanged."""
        given = int(getattr(self, name))
        available = world_size // (self.model_ranks // given)
        return _nearest((ranks for ranks in _divisors(available) if legal(ranks)), given)


def _unplanned(shape: ModelShape) -> str:
    """What the attention of a model has and `planned` does not compute; empty = nothing."""
    if shape.architecture:
        return f"the attention of transformers (model=hf:{shape.architecture})"
    name = "window" if shape.window else shape.explicit_scores
    return f"model.{name}={getattr(shape, name):g}" if name else ""


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


def _nearest(legal: Iterable[int], wanted: int) -> int:
    return min(legal, key=lambda n: abs(n - wanted))
