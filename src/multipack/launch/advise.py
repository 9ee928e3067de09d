"""Recommend a parallelism for a model and its devices.

The `QUESTIONS` and their order, the smallest change to a model first, follow Sam Foreman's talk Parallel Training
Methods. The recommendation is the simplest candidate that fits and whose estimated time is close to the fastest.
These times only rank candidates; they do not predict the time of a step.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, get_args

from multipack.launch.advise_request import AdviseRequest, PackSize
from multipack.launch.context_choice import measured, pack_of, with_link
from multipack.launch.held import decoder_of, model_parameters
from multipack.launch.memory_model import (
    Memory,
    Recompute,
    Workload,
    memory_of_stages,
)
from multipack.launch.traffic import Traffic, communication
from multipack.ops.lora import check_adapters
from multipack.parallel.optimizers import (
    DEFAULT_OPTIMIZER,
    SMALLER_STATES,
    OptimizerName,
    check_optimizer,
)
from multipack.parallel.parallel_config import (
    DATA_STRATEGIES,
    Data,
    Offload,
    ParallelConfig,
    Schedule,
)
from multipack.parallel.stages import bubble, fit_micro_batches, stage_imbalance
from multipack.planning.cost import CostModel
from multipack.planning.placement_report import ContextMeasure
from multipack.shapes import SHAPES, ModelShape
from multipack.shapes.adapter import ADAPTER_PRESETS, AdapterConfig
from multipack.words import changed_words

GIB = 2**30
CLOSE = 0.9
"""A simpler candidate is preferred if it reaches this share of the fastest candidate's estimated speed."""
MIN_SLOTS_PER_RANK = 512
"""Least slots of a pack on a context rank, and of a smaller pack."""
QUESTIONS = {
    "ddp": "Does the model fit on one device?",
    "packs": "Do smaller packs fit (the longest document must fit into one)?",
    "zero": "Do shards of its state fit (ZeRO), and are links fast enough to gather them?",
    "context": "Are packs too long for one device?",
    "tensor": "Is a layer too large, or the link within a host fast enough to divide every matrix?",
    "pipeline": "Are links slow? The stages of a pipeline send least.",
    "together": "Does it take several of these together?",
    "states": "Do smaller optimizer states fit (moments in bfloat16, or in 8 bits)?",
    "adapters": "Do adapters beside trained weights of 4 bits fit (adapter=qlora)?",
    "offload": "Does it fit with the memory of hosts (offload)?",
}
"""Family of parallelism, or another way to less memory → question that it answers; the smallest change first."""
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
"""Values of `parallel.offload`, fastest first."""


def _adapter_words(adapter: AdapterConfig) -> list[str]:
    """Words of adapters, which need initial weights; none without adapters."""
    if adapter.name == "none":
        return []
    presets = {name: AdapterConfig(**values) for name, values in ADAPTER_PRESETS.items()}
    return [*_preset_words("adapter", adapter, presets), "train.init_from=…"]


def model_words(shape: ModelShape) -> list[str]:
    """Return the nearest preset and the fields that differ from it; the vocabulary is left to the tokenizer."""
    presets = {name: replace(preset, vocabulary_size=0) for name, preset in SHAPES.items()}
    return _preset_words("model", replace(shape, vocabulary_size=0), presets)


def _preset_words(group: str, value: Any, presets: Mapping[str, Any]) -> list[str]:
    """The preset of a group with the fewest fields that differ from `value`, and these fields."""
    words = {name: changed_words(group, value, preset) for name, preset in presets.items()}
    nearest = min(words, key=lambda name: len(words[name]))
    return [f"{group}={nearest}", *words[nearest]]


@dataclass(frozen=True)
class Candidate:
    """A parallelism and a kind of activation checkpointing, for a model and devices.

    Attributes:
        question: a key of `QUESTIONS`, for candidates with smaller packs; empty = it follows from the parallelism.
    """

    request: AdviseRequest
    config: ParallelConfig
    recompute: Recompute
    question: str = ""

    @property
    def optimizer(self) -> OptimizerName:
        """`optimizer.name`."""
        return DEFAULT_OPTIMIZER if self.request.optimizer == "auto" else self.request.optimizer

    @cached_property
    def work(self) -> Workload:
        """The workload of a step; a pipeline may need more micro-batches than requested."""
        request, config = self.request, self.config
        micro_batches = fit_micro_batches(config, request.micro_batches * config.model_ranks)
        step = (request.devices, request.capacity, request.dtype, self.recompute, micro_batches)
        options: dict[str, Any] = {"adapter": request.adapter, "placed": self.placed}
        return Workload(request.model, config, *step, optimizer=self.optimizer, **options)

    @cached_property
    def placed(self) -> ContextMeasure | None:
        """Exchanged bytes and balance of context ranks; None without context parallelism."""
        return measured(self.request, self.config) if self.config.context > 1 else None

    @property
    def packs(self) -> int:
        """Number of packs of a step."""
        return self.work.micro_batches * self.config.data_size(self.request.devices)

    @cached_property
    def memory(self) -> Memory:
        """Memory of the rank with the highest peak."""
        return max(memory_of_stages(self.work), key=lambda each: each.peak)

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the usable memory of a device, and offloaded state into a host's."""
        request, memory = self.request, self.memory
        return (
            memory.peak <= request.usable and memory.host * request.devices_per_host <= request.usable_on_host
        )

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Communication per step of the rank that sends most."""
        return communication(self.work)

    @cached_property
    def seconds_per_pack(self) -> float:
        """Estimated seconds of a step over its packs, to rank candidates.

        Data-parallel and pipeline communication overlaps with computation, except broadcasts. The FLOPs of a
        pack, recomputation included, are divided evenly over a replica's ranks, and raised by their waits.
        """
        request, work = self.request, self.work
        flops, within_host, between_hosts = request.speeds
        recompute: Any = "full" if self.recompute == "full" else "flash"
        cost = CostModel.from_shape(request.model, recompute=recompute, adapter=request.adapter)
        pack = cost.flops(pack_of(request.capacity, request.document_tokens), executed=True)
        compute = work.micro_batches * pack / (self.config.model_ranks * flops)
        compute *= self.placed.step_mean if self.placed else 1
        compute *= 1 + stage_imbalance(request.model, self.config)
        compute /= 1 - bubble(self.config, work.micro_batches)
        overlapped = exposed = 0.0
        for each in self.traffic:
            inside = request.devices_per_host % each.reach == 0 or request.devices == request.devices_per_host
            seconds = each.sent / (within_host if inside else between_hosts)
            if each.method in ("data", "pipeline") and each.kind != "broadcast":
                overlapped += seconds
            else:
                exposed += seconds
        return (max(compute, overlapped) + exposed) / self.packs

    @property
    def family(self) -> str:
        """A key of `QUESTIONS`."""
        axes = [name for name in ("tensor", "context", "pipeline") if getattr(self.config, name) > 1]
        if self.question:
            return self.question
        if not axes:
            return "ddp" if self.config.data == "ddp" else "zero"
        return axes[0] if len(axes) == 1 else "together"

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key, simplest first: family, offload, axes, row in `DATA_STRATEGIES`, whether interleaved."""
        config = self.config
        axes = sum(ranks > 1 for ranks in (config.tensor, config.context, config.pipeline))
        stage = list(DATA_STRATEGIES).index(config.data)
        unusual = config.schedule == "interleaved"
        return (list(QUESTIONS).index(self.family), OFFLOADS.index(config.offload), axes, stage, unusual)

    @property
    def name(self) -> str:
        """The parallelism as text, as in the header of a run."""
        packs = f", {self.packs} packs of {self.request.capacity:,}" if self.request.devices == 1 else ""
        optimizer = f", {self.optimizer}" if self.optimizer != DEFAULT_OPTIMIZER else ""
        adapter = "".join(f", {word}" for word in _adapter_words(self.request.adapter)[:1])
        return self.config.text(self.request.devices) + packs + optimizer + adapter

    @property
    def words(self) -> list[str]:
        """Words for `multipack train`."""
        request = self.request
        parallel = changed_words("parallel", self.config, ParallelConfig()) or ["parallel.data=ddp"]
        plan = [f"plan.capacity={request.capacity}", f"plan.packs_per_step={self.packs}"]
        train = [f"train.dtype={request.dtype}", f"train.recompute={self.recompute}"]
        train += _adapter_words(request.adapter)
        train += [f"optimizer.name={self.optimizer}"] if self.optimizer != DEFAULT_OPTIMIZER else []
        return [*model_words(request.model), *plan, *parallel, *train]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; memory and traffic are in bytes."""
        values = {name: getattr(self, name) for name in ("name", "words", "recompute", "packs", "fits")}
        traffic = [{**vars(row), "sent": row.sent} for row in self.traffic]
        return values | {"memory": {**vars(self.memory), "peak": self.memory.peak}, "traffic": traffic}


@dataclass(frozen=True)
class Advice:
    """A recommendation with its reasons.

    Attributes:
        request: the model and the devices.
        path: (question, answer) pairs; the last answer names the recommendation.
        chosen: the recommended candidate; None if nothing fits.
        rows: candidates to compare: all of ddp and zero, and the best one of each other family; on one device
            also all with offload.
    """

    request: AdviseRequest
    path: list[tuple[str, str]]
    chosen: Candidate | None
    rows: list[Candidate]

    @property
    def command(self) -> str:
        """The training command, without documents; empty if nothing fits."""
        if self.chosen is None:
            return ""
        devices, per_host = self.request.devices, self.request.devices_per_host
        start = f"multipack launch -n {devices} --ppn {per_host} --" if devices > 1 else "multipack"
        # The user replaces …, which is not quoted.
        words = (word if "…" in word else shlex.quote(word) for word in self.chosen.words)
        return f"{start} train data=… {' '.join(words)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "request": asdict(self.request),
            "parameters": model_parameters(self.request.model),
            "path": [{"question": question, "answer": answer} for question, answer in self.path],
            "recommended": self.chosen.to_dict() if self.chosen else None,
            "rows": [row.to_dict() for row in self.rows],
            "command": self.command,
        }


def check_model(request: AdviseRequest) -> None:
    """Check that the model can be trained and that its vocabulary is known."""
    if not request.model.vocabulary_size:
        raise ValueError(
            "model.vocabulary_size=0 is the tokenizer's size, but embedding and logits need memory: set it, for"
            " example model.vocabulary_size=50257"
        )
    check_adapters(decoder_of(request.model), request.adapter)
    request.adapter.check_blocks(request.model, 1)


def advise(request: AdviseRequest) -> Advice:
    """Compare all candidates and recommend one; raises a ValueError for a model that cannot be trained."""
    check_model(request)
    everything = list(candidates(request))
    resident, offloaded = (
        _resident(everything),
        [each for each in everything if each.config.offload != "none"],
    )
    if request.devices == 1 and not any(each.fits for each in resident):
        resident += smaller_packs(request)
    tries = {question: [each for each in resident if each.family == question] for question in QUESTIONS}
    chosen = _simplest(resident)
    for question, made in (("states", smaller_states), ("adapters", quantized)):
        if chosen is None:
            tries[question] = list(made(request))
            chosen = _simplest(tries[question])
    # Offload waits for transfers to the host, which estimated times omit: compared if no candidate trains all
    # weights on the device, recommended only if nothing else fits.
    if chosen is None or tries["adapters"]:
        tries["offload"] = offloaded
        chosen = chosen or _simplest(offloaded)
    path: list[tuple[str, str]] = []
    rows: list[Candidate] = []
    for question, members in tries.items():
        if not members:
            continue
        best = chosen if chosen in members else _simplest(members)
        best = best or min(members, key=lambda each: each.memory.peak)
        if chosen not in rows:
            path.append((QUESTIONS[question], _answer(best, chosen)))
        shows_all = question in ("ddp", "zero") or (question == "offload" and request.devices == 1)
        rows += [row for row in (members if shows_all else [best]) if row not in rows]
    return Advice(request, path, chosen, rows)


def smaller_states(request: AdviseRequest) -> Iterator[Candidate]:
    """Yield candidates without offload and with the first of `SMALLER_STATES` that fits."""
    for kind in SMALLER_STATES if request.optimizer == "auto" else ():
        made = _resident(candidates(replace(request, optimizer=kind)))
        yield from made
        if any(each.fits for each in made):
            return


def quantized(request: AdviseRequest) -> Iterator[Candidate]:
    """Yield candidates without offload that train adapters of frozen 4-bit weights instead of all weights.

    Yields nothing if the request has adapters, or memory of hosts for the state of all weights.
    """
    other = replace(request, adapter=AdapterConfig(**ADAPTER_PRESETS["qlora"]))
    try:
        check_model(other)
    except ValueError:  # its rows cannot be divided into blocks
        return
    if request.adapter.name == "none" and not request.host_memory:
        made = _resident(candidates(other))
        yield from made
        if request.devices == 1 and not any(each.fits for each in made):
            yield from smaller_packs(other)


def smaller_packs(request: AdviseRequest) -> Iterator[Candidate]:
    """Yield steps of one device with as many tokens in more, smaller packs, until one fits; all are recomputed."""
    capacity, packs = request.capacity // 2, 2 * request.micro_batches
    while capacity >= MIN_SLOTS_PER_RANK:
        smaller = replace(request, plan=PackSize(capacity), micro_batches=packs)
        made = Candidate(smaller, ParallelConfig(), "full", "packs")
        yield made
        if made.fits:
            return
        capacity, packs = capacity // 2, 2 * packs


def candidates(request: AdviseRequest) -> Iterator[Candidate]:
    """Yield every legal parallelism with the least activation checkpointing that fits, or `full`.

    For one device each kind of activation checkpointing is a candidate.
    """
    for config in _parallelisms(request):
        tried = [Candidate(request, config, kind) for kind in get_args(Recompute)]
        if _is_legal(tried[0]):
            yield from tried if request.devices == 1 else [next((c for c in tried if c.fits), tried[-1])]


def _parallelisms(request: AdviseRequest) -> Iterator[ParallelConfig]:
    """Yield divisions of the devices, also with offload to their hosts."""
    devices, host = request.devices, request.devices_per_host
    offloads = OFFLOADS[1 : 3 if request.host_memory else 2]
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for tensor, context, pipeline in product([size for size in sizes if host % size == 0], sizes, sizes):
        data, remainder = divmod(devices, tensor * context * pipeline)
        if remainder or (context > 1 and request.capacity // context < MIN_SLOTS_PER_RANK):
            continue
        schedules: list[Schedule] = ["1f1b", "interleaved"] if pipeline > 1 else ["1f1b"]
        stages: list[Data] = ["ddp", "zero1", "zero2", "zero3"] if data * context > 1 else ["ddp"]
        for schedule, stage in product(schedules, stages):
            axes: dict[str, Any] = {"tensor": tensor, "context": context, "pipeline": pipeline}
            config = ParallelConfig(stage, **axes, schedule=schedule)
            config = with_link(config, request) if context > 1 else config
            yield config
            if stage == "zero3" or devices == 1:  # a single device has one shard
                for kind in offloads:
                    folder = "FOLDER" if kind == "disk" else ""
                    yield replace(config, data="zero3", offload=kind, offload_folder=folder)
            shards = host // (tensor * context)
            if stage == "zero3" and 1 < shards < data and data % shards == 0:
                yield replace(config, data="hsdp", replicate=data // shards)


def _resident(among: Iterable[Candidate]) -> list[Candidate]:
    """Candidates whose state stays on the device."""
    return [each for each in among if each.config.offload == "none"]


def _is_legal(candidate: Candidate) -> bool:
    """Whether `multipack train` takes the parallelism with this model, its adapters and its optimizer."""
    request, config = candidate.request, candidate.config
    try:
        config.check(request.model, request.devices, request.capacity, request.dtype)
        request.adapter.check_blocks(request.model, config.tensor)
        check_optimizer(candidate.optimizer, config)
    except ValueError:
        return False
    return True


def _simplest(among: list[Candidate]) -> Candidate | None:
    """The simplest candidate that fits and is close to the fastest; None if none fits."""
    fitting = [each for each in among if each.fits]
    limit = min((each.seconds_per_pack for each in fitting), default=0.0) / CLOSE
    fast = [each for each in fitting if each.seconds_per_pack <= limit]
    return min(fast, key=lambda each: (each.complexity, each.seconds_per_pack), default=None)


def _answer(best: Candidate, chosen: Candidate | None) -> str:
    """The answer to the question of a family; `best` is the family's best candidate."""
    needs = f"{best.memory.peak / GIB:,.1f} GiB with {best.name} and train.recompute={best.recompute}"
    if not best.fits:
        return f"no: at least {needs}"
    if best is not chosen:
        sent = sum(row.sent for row in best.traffic) / GIB
        return f"it fits ({needs}), but is slower: links or idle ranks; a rank sends {sent:,.1f} GiB per step"
    host, disk = (size * best.request.devices_per_host / GIB for size in (best.memory.host, best.memory.disk))
    files = f", {disk:,.0f} GiB in files" if disk else ""
    offloaded = f"; {host:,.0f} GiB in the memory of each host{files}, and steps wait"
    return f"yes: {needs}" + (offloaded if host else "")
