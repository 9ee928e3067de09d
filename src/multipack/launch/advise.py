"""Which parallel methods a model, its devices and their links ask for: a short path of questions, with numbers.

    Does all of it fit on one device? ─ yes ─▶ ddp
      │ no
    Do shards of its state fit, and are links fast enough to gather them? ─ yes ─▶ zero1, zero2, zero3, hsdp
      │ no
    Are packs too long for a device? ─ yes ─▶ context          Are devices of a host close? ─ yes ─▶ tensor
      │ no                                                       │ no
    Are links slow? ─ yes ─▶ pipeline, which sends least         all of these together
      │ nothing fits
    the host's memory (offload), shorter packs, more devices

The order is that of a talk by Sam Foreman, Parallel Training Methods: what changes a model least comes first. Every way
that a run would take is computed, and the simplest is recommended whose speed is within a tenth of the fastest's.
Bytes follow memory_model.py, what is sent traffic.py, and seconds candidates.py, on assumptions that are printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from multipack.launch.advise_request import AdviseRequest, model_words
from multipack.launch.candidates import (
    RECOMPUTE,
    SHORTEST_SHARE,
    Candidate,
    Setting,
    check,
    configurations,
    leanest_that_fits,
)
from multipack.launch.memory_model import (
    logits_chunk,
    parameters_around,
    parameters_of,
    parameters_of_block,
    product_bytes,
)
from multipack.parallel.parallel_config import ParallelConfig

GIB = 2**30
WITHIN = 0.9
"""A simpler way is recommended if its speed is this share of the fastest's."""


@dataclass(frozen=True)
class Question:
    """A question on the path, and how it was answered."""

    question: str
    answer: str


@dataclass(frozen=True)
class Advice:
    """What is recommended, and why.

    Attributes:
        setting: what on what.
        path: questions and answers; the last one says what is recommended.
        chosen: the recommended way; None = nothing fits.
        rows: ways compared: each method alone, and the fastest combinations.
        recompute: the recommended way with each kind of recomputation.
        refused: setting → why a run would not take it.
        remedies: where nothing fits, what would.
    """

    setting: Setting
    path: list[Question]
    chosen: Candidate | None
    rows: list[Candidate]
    recompute: list[Candidate]
    refused: dict[str, str]
    remedies: list[str]

    @property
    def command(self) -> str:
        """What trains so; documents are left open. Empty where nothing fits."""
        if self.chosen is None:
            return ""
        setting = self.setting
        launch = f"multipack launch -n {setting.devices} --ppn {setting.devices_per_host} -- "
        return f"{launch if setting.devices > 1 else 'multipack '}train data=… {' '.join(self.words)}"

    @property
    def words(self) -> list[str]:
        """Of `multipack train`, as far as they follow; none where nothing fits."""
        if self.chosen is None:
            return []
        setting = self.setting
        plan = [f"plan.capacity={setting.capacity}", f"plan.packs_per_step={self.chosen.packs}"]
        return [*model_words(setting.shape), *plan, f"train.dtype={setting.dtype}", *self.chosen.words]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: bytes, seconds and words."""
        setting = asdict(self.setting)
        return {
            "setting": setting,
            "parameters": parameters_of(self.setting.shape),
            "path": [asdict(each) for each in self.path],
            "recommended": self.chosen.to_dict() if self.chosen else None,
            "rows": [row.to_dict() for row in self.rows],
            "refused": self.refused,
            "remedies": self.remedies,
            "logits_chunk": logits_chunk(self.setting.shape, self.setting.capacity, 1, self.setting.dtype),
            "command": self.command,
        }


def advise(request: AdviseRequest) -> Advice:
    """Compare all ways to train, and recommend one.

    Raises:
        ValueError: a model that cannot be trained here; the message says what to say instead.
    """
    setting = request.setting()
    every = [leanest_that_fits(setting, config) for config in configurations(setting)]
    if not every:
        check(setting, ParallelConfig())
    fitting = [each for each in every if each.fits]
    # What offloads is slow for the host's sake, not the links': it is for what fits in no other way.
    usual = [each for each in fitting if each.config.offload == "none"] or fitting
    chosen = _simplest(usual)
    path = _path(setting, every, usual, chosen)
    tried = [Candidate(setting, chosen.config, kind) for kind in RECOMPUTE] if chosen else []
    rows = _rows(every, usual, chosen)
    return Advice(setting, path, chosen, rows, tried, _refused(setting), [] if chosen else _remedies(setting))


def _simplest(fitting: list[Candidate]) -> Candidate | None:
    """The simplest that is nearly as fast as the fastest: of the first family that has one."""
    if not fitting:
        return None
    least = WITHIN * max(each.tokens_per_second for each in fitting)
    fast = [each for each in fitting if each.tokens_per_second >= least]
    nearest = next(belongs for belongs in FAMILIES.values() if any(map(belongs, fast)))
    return min(filter(nearest, fast), key=lambda each: (each.complexity, -each.tokens_per_second))


# --- the path -----------------------------------------------------------------------------------------


def _axes(each: Candidate) -> list[str]:
    return [name for name in ("tensor", "context", "pipeline") if getattr(each.config, name) > 1]


FAMILIES: dict[str, Callable[[Candidate], bool]] = {
    "ddp": lambda each: not _axes(each) and each.config.data == "ddp",
    "zero": lambda each: not _axes(each) and each.config.data != "ddp",
    "context": lambda each: _axes(each) == ["context"],
    "tensor": lambda each: _axes(each) == ["tensor"],
    "pipeline": lambda each: _axes(each) == ["pipeline"],
    "together": lambda each: len(_axes(each)) > 1,
}
"""Groups of ways, what changes a model least first."""


def _path(
    setting: Setting, every: list[Candidate], fitting: list[Candidate], chosen: Candidate | None
) -> list[Question]:
    path = []
    for family, belongs in FAMILIES.items():
        there = [each for each in every if belongs(each) and each.config.offload == "none"]
        if not there:
            continue
        inside = [each for each in there if each.fits]
        path.append(Question(_question(setting, family, there), _answer(there, inside, fitting, chosen)))
        if chosen is not None and belongs(chosen) and chosen.config.offload == "none":
            break
    offloaded = [each for each in every if each.config.offload == "cpu"]
    if offloaded and (chosen is None or chosen.config.offload == "cpu"):
        nearest = min(offloaded, key=lambda each: each.memory.peak)
        answer = f"no: it takes {_told(nearest)} at the least"
        if chosen is not None:
            host = chosen.memory.host * setting.devices_per_host / GIB
            answer = (
                f"yes: {_told(chosen)}; shards take {host:,.0f} GiB of each host, and steps wait for them"
            )
        path.append(Question("Does it fit with the memory of hosts?", answer))
    return path


def _question(setting: Setting, family: str, there: list[Candidate]) -> str:
    shape = setting.shape
    if family == "ddp":
        return (
            f"Does all of it fit on one device? {parameters_of(shape) / 1e9:,.2f} B parameters × 16 bytes (weights, "
            f"gradients, AdamW) are {16 * parameters_of(shape) / GIB:,.1f} GiB, of {setting.usable / GIB:,.1f}"
        )
    if family == "zero":
        return "Do shards of that state fit (ZeRO), and can they be gathered fast enough?"
    if family == "context":
        least = min(each.memory.activations + each.memory.loss for each in there if each.config.context > 1)
        one = Candidate(setting, ParallelConfig(), "full").memory
        return (
            f"Are packs too long for one device? {setting.capacity:,} slots save"
            f" {(one.activations + one.loss) / GIB:,.1f} GiB with full recomputation; divided,"
            f" {least / GIB:,.1f} at the least"
        )
    if family == "tensor":
        unit = max(parameters_of_block(shape), parameters_around(shape)) * product_bytes(setting.dtype)
        return (
            f"Is the largest layer too large ({unit / GIB:,.1f} GiB gathered), or a host's link fast enough to"
            " divide every matrix?"
        )
    if family == "pipeline":
        return "Are links slow? Stages of a pipeline send least"
    return "Does it take several of these together?"


def _told(each: Candidate) -> str:
    return f"{each.memory.peak / GIB:,.1f} GiB with {each.name} and train.recompute={each.recompute}"


def _answer(
    there: list[Candidate], inside: list[Candidate], fitting: list[Candidate], chosen: Candidate | None
) -> str:
    """What becomes of a family: those that are there, and those of them that fit."""
    best = chosen if chosen in inside else _simplest(inside)
    if best is None:
        nearest = min(there, key=lambda each: each.memory.peak)
        return f"no: it takes {_told(nearest)} at the least"
    fastest = max(fitting, key=lambda each: each.tokens_per_second)
    share = best.tokens_per_second / fastest.tokens_per_second
    if best is chosen:
        more = f"; {fastest.name}, the fastest, would be {1 / share - 1:.0%} faster" if share < 1 else ""
        return f"yes: {_told(best)}{_others(there, best)}{more}"
    seconds = max(best.exchange_seconds.values(), default=0.0)
    links = f" ({seconds:,.1f} s on links for {best.compute_seconds:,.1f} s of products)" if seconds else ""
    return f"it would fit ({_told(best)}), but at {share:.0%} of the speed of {fastest.name}{links}"


def _others(there: list[Candidate], best: Candidate) -> str:
    """How other stages of ZeRO would do in the place of the best one."""
    if best.config.data == "ddp" or _axes(best):
        return ""
    others = [each for each in there if each is not best]
    told = [f"{each.name} does not fit" for each in others if not each.fits]
    told += [
        f"{each.name} has {each.tokens_per_second / best.tokens_per_second:.0%} of its speed"
        for each in others
        if each.fits
    ]
    return f" ({', '.join(told)})" if told else ""


# --- what is compared, refused, and would help --------------------------------------------------------


def _rows(every: list[Candidate], fitting: list[Candidate], chosen: Candidate | None) -> list[Candidate]:
    """Each method alone, then the fastest combinations; each way once."""
    plain = [each for each in every if not _axes(each)]
    alone = []
    for axis in ("tensor", "context", "pipeline"):
        one = [each for each in every if _axes(each) == [axis] and each.config.data == "ddp"]
        sizes = sorted({getattr(each.config, axis) for each in one})[:3]
        for size in sizes:
            same = [each for each in one if getattr(each.config, axis) == size]
            alone.append(max(same, key=lambda each: (each.fits, each.tokens_per_second)))
    mixed = [each for each in fitting if _axes(each) and each not in alone]
    fastest: dict[tuple[str, ...], Candidate] = {}
    for each in sorted(mixed, key=lambda each: -each.tokens_per_second):
        fastest.setdefault(tuple(_axes(each)), each)
    found = [*plain, *alone, *fastest.values()]
    if chosen is not None and chosen not in found:
        found.append(chosen)
    return found


def _refused(setting: Setting) -> dict[str, str]:
    """Settings of one method that a run would refuse, in its own words; of each message the first."""
    powers: Iterable[tuple[str, dict[str, Any]]] = (
        (axis, {axis: 2**power, **more})
        for axis, others in (
            ("tensor", [{}]),
            ("context", [{}, {"context_method": "ring"}]),
            ("pipeline", [{}, {"schedule": "interleaved"}]),
        )
        for more in others
        for power in range(1, setting.devices.bit_length())
    )
    refused: dict[str, str] = {}
    seen: set[tuple[str, ...]] = set()
    for axis, words in (("data", {"data": "zero3"}), *powers):
        try:
            check(setting, ParallelConfig(**words))
        except ValueError as error:
            kind = (axis, *list(words)[1:], re.sub(r"\d[\d,]*", "", str(error)))
            if kind not in seen:
                seen.add(kind)
                refused[" ".join(f"parallel.{name}={value}" for name, value in words.items())] = str(error)
    return refused


def _remedies(setting: Setting) -> list[str]:
    """What would make it fit: shorter packs, or more devices."""

    def way(other: Setting) -> str:
        found = [leanest_that_fits(other, config) for config in configurations(other)]
        best = _simplest([each for each in found if each.fits])
        return f" with {best.name} and train.recompute={best.recompute}" if best else ""

    found = []
    for capacity in (setting.capacity >> times for times in range(1, 20)):
        if capacity < SHORTEST_SHARE:
            break
        if told := way(replace(setting, capacity=capacity)):
            found.append(
                f"shorter packs: capacity={capacity}{told} (data.overlong: what of longer documents)"
            )
            break
    for times in (2, 4, 8, 16, 32, 64):
        larger = replace(setting, devices=times * setting.devices, packs=times * setting.packs)
        if told := way(larger):
            found.append(f"more devices: devices={larger.devices}{told}")
            break
    return found or [
        "neither shorter packs nor 64 times the devices: a smaller model, or devices with more memory"
    ]
