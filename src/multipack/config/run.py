"""The configuration of a run: every room's dataclass put together, new or over what a saved run has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from multipack.config.words import ConfigError, flatten, merge, read_yaml, rename, split
from multipack.data.data_config import DataConfig
from multipack.data.tokenizer import TokenizerConfig
from multipack.models.preference import PreferenceConfig
from multipack.ops.attention import find_backend
from multipack.parallel.parallel_config import ParallelConfig, check_readers
from multipack.parallel.stages import fit_micro_batches
from multipack.planning.plan import PlanConfig
from multipack.run import RunDirectory, find_run
from multipack.shapes import ModelShape
from multipack.training.initial import initial_folder, initial_shape
from multipack.training.optimizer import OptimizerConfig
from multipack.training.settings import LogConfig, TrainConfig
from multipack.training.trackers import TrackConfig


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """The decoder's shape and how it attends."""

    attention: str = "auto"
    """Attention backend: `auto` takes the first that supports device, dtype and shape."""


@dataclass
class Config:
    """Everything that a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    out: str = ""
    """Run directory; empty = runs/<date>_<time>."""

    def __post_init__(self) -> None:
        """Refuse what each room can tell by itself, before any work is done."""
        self.data.check()
        self.tokenizer.check()
        if self.model.attention != "auto":
            find_backend(self.model.attention)
        if self.train.seed < 0:
            raise ValueError(
                f"train.seed must not be negative, got {self.train.seed}: torch's generators take none"
            )

    def check(self, processes: int) -> None:
        """Refuse what so many processes cannot run. To be called before any of them joins the others.

        Raises:
            ValueError: settings that do not go together, the nearest legal choice named.
        """
        parallel, train = self.parallel, self.train
        parallel.check(self.model, processes, self.plan.capacity)
        check_readers(self.data.readers, parallel.data_size(processes))
        self._check_packs(processes)
        self._check_slots()
        parallel.check_dtype(train.dtype, processes)
        if parallel.tensor > 1 and train.tiles > 1:
            raise ValueError(
                f"train.tiles={train.tiles} and parallel.tensor={parallel.tensor} both cut the feed-forward layers and"
                " the vocabulary: use one of them"
            )
        if parallel.context > 1 and parallel.context_method == "ring" and self.model.attention != "auto":
            raise ValueError(
                f"model.attention={self.model.attention}: a ring has kernels of its own; use model.attention=auto, or"
                " parallel.context_method=ulysses"
            )
        if self.log.gradient_noise and not parallel.keeps_own_gradients:
            raise ValueError(
                "log.gradient_noise=true looks at the gradient of a rank's first micro-batch, which only"
                " parallel.data=ddp and zero1 without parallel.tensor, context and pipeline keep whole: leave it out"
            )

    def _check_slots(self) -> None:
        """Packs of one shape end where aligned documents do, and ranks that divide their slots get equally many."""
        align, multiple = self.plan.align, self.parallel.token_multiple
        one_shape = self.train.fixed_shape or self.parallel.pipeline > 1
        slots = self.plan.capacity // align * align
        if one_shape and slots % multiple:
            both = math.lcm(align, multiple)
            raise ValueError(
                f"plan.align={align} leaves {slots} slots of plan.capacity={self.plan.capacity}, which parallel.context"
                f" and parallel.tensor divide by {multiple}: use plan.capacity={max(slots // both, 1) * both}, or"
                f" plan.align={multiple}"
            )

    def _check_packs(self, processes: int) -> None:
        """Every data-parallel rank has a pack of each step; a new run's pipeline gets as many as it needs."""
        parallel, ranks = self.parallel, self.parallel.data_size(processes)
        packs = int(self.plan.keywords(ranks)["packs_per_step"])
        if parallel.pipeline == 1 and ranks > packs:
            raise ValueError(
                f"{ranks} data-parallel ranks cannot share plan.packs_per_step={packs} packs: set it to at least"
                f" {ranks} (a multiple of {ranks} keeps all of them busy)"
            )
        each = -(-packs // ranks)
        needed = fit_micro_batches(parallel, each)
        if self.train.resume != "false" and needed > each:
            raise ValueError(
                f"parallel.pipeline={parallel.pipeline} ({parallel.schedule}) needs {needed} packs a step of every"
                f" data-parallel rank, and the run that goes on has {each}: use parallel.pipeline="
                f"{_shorter_pipeline(parallel, processes, packs)}"
            )


def _shorter_pipeline(parallel: ParallelConfig, processes: int, packs: int) -> int:
    """The most ranks of a pipeline, fewer than there are, for which a step has packs enough."""

    def enough(pipeline: int) -> bool:
        other = replace(parallel, pipeline=pipeline)
        if processes % other.model_ranks:
            return False
        each = -(-packs // other.data_size(processes))
        return fit_micro_batches(other, each) == each

    return max(ranks for ranks in range(1, parallel.pipeline) if enough(ranks))


def compose(words: Iterable[str], base: dict[str, Any] | None = None) -> Config:
    """Build the configuration of a run from command-line words.

    Args:
        words: `group=preset`, `group.key=value`, `out=DIR` or `config=FILE`, in any order.
        base: values that a saved run has, under the words.

    Raises:
        ConfigError: with the field and the nearest legal name or value.
    """
    return merge(Config, words, base)


def compose_run(words: Iterable[str]) -> Config:
    """The configuration of `multipack train`: a new run's, or a saved run's with `words` over it.

    With `train.resume=auto` the same words begin a run in out= and, whenever they are given again, continue it: what a
    launcher or a scheduler needs that starts the same command again.

    Raises:
        ConfigError: also when `train.resume` and `out` do not name one run.
    """
    given = list(words)
    said = dict(rename(*split(word)) for word in given)
    resume, out = said.get("train.resume", "false"), said.get("out", "")
    if resume.lower() == "auto":
        return compose_run(_begun_or_not(given, out))
    if resume.lower() in ("false", ""):
        return _begin(compose(given, _initial_model(said)))
    asked = out if resume.lower() == "true" else resume
    if not asked:
        raise ConfigError("train.resume=true needs out=RUN_DIR (or write train.resume=RUN_DIR)")
    try:
        run, checkpoint = find_run(asked)
        checkpoint = checkpoint or (run.latest_checkpoint() if run.latest.is_file() else None)
    except FileNotFoundError as error:
        raise ConfigError(f"train.resume={resume}: {error}") from error
    if out and Path(out).resolve() != run.path.resolve():
        raise ConfigError(
            f"out={out} is not the run of train.resume={resume}; a run continues in its own"
            f" directory: leave out= away, or copy {run.path} first"
        )
    # A checkpoint goes on with the settings that it was trained with, whatever the run's file says by now.
    before = saved(checkpoint / "config.yaml" if checkpoint else run.config)
    config = compose(given, before)
    _refuse_another_run(before, said)
    config.out = str(run.path)
    return config


SETTLED = ("train.init_from", "preference.reference", "plan.packs_per_step", "plan.micro_batches")
"""Words that a run settles for good when it begins: which checkpoints they name, and packs for so many ranks."""


def _begun_or_not(words: list[str], out: str) -> list[str]:
    """The words of `train.resume=auto`, which are the same each time a run is started, as those of this time."""
    if not out:
        raise ConfigError("train.resume=auto needs out=RUN_DIR: a run that is started again must find itself")
    begun = RunDirectory.at(out).config.is_file()
    known = ("train.resume", *(SETTLED if begun else ()))
    left = [word for word in words if rename(*split(word))[0] not in known]
    return [*left, f"train.resume={str(begun).lower()}"]


def _initial_model(said: dict[str, str]) -> dict[str, Any] | None:
    """The shape of the weights that a run begins with, where its words say none; its vocabulary may still grow."""
    path = said.get("train.init_from", "")
    free = {"model.attention", "model.dropout"}
    if not path or any(key == "model" or (key.startswith("model.") and key not in free) for key in said):
        return None
    shape = initial_shape(_weights(path, "train.init_from"))
    return {"model": {**shape.to_dict(), "vocabulary_size": 0}}


def _begin(config: Config) -> Config:
    """A new run that names the very checkpoints it begins with: a run's latest would be another one tomorrow.

    Where neither words nor token stores say which tokenizer, it is that of the weights.
    """
    train, preference = config.train, config.preference
    if preference.reference:
        preference.reference = str(_weights(preference.reference, "preference.reference"))
    if train.init_from:
        train.init_from = str(_weights(train.init_from, "train.init_from"))
        file = Path(train.init_from) / "tokenizer.json"
        if (
            config.tokenizer.kind == "auto"
            and config.data.source not in ("store", "mixture")
            and file.is_file()
        ):
            config.tokenizer = TokenizerConfig("file", str(file))
    return config


def _weights(path: str, setting: str) -> Path:
    """The folder of the weights that a setting names."""
    try:
        return initial_folder(Path(path).expanduser())
    except FileNotFoundError as error:
        raise ConfigError(f"{setting}={path}: {error}") from error


def _refuse_another_run(before: dict[str, Any], said: dict[str, str]) -> None:
    """Name a setting of plan or model that would make the resumed run another one."""
    free = {"plan.packs_per_step", "plan.micro_batches", "model.attention", "model.dropout"}
    old = flatten(before)
    for key, value in said.items():
        fixed = key.startswith(("plan.", "model.")) and key not in free
        if fixed and key in old and value not in (str(old[key]), str(old[key]).lower(), "0"):
            raise ConfigError(
                f"{key} was {old[key]} in that run and cannot become {value}: the saved weights and documents depend"
                " on it; leave it away, or start a new run with another out="
            )


def saved(path: str | Path) -> dict[str, Any]:
    """The values of a config.yaml, to be a `base`."""
    return read_yaml(str(path))
