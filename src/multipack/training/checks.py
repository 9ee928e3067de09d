"""Rules on the settings of a run: one table of settings that cannot be combined. Imports no torch but for `model=hf:`.

A row says when it applies, and what to do instead. A group of settings (`ParallelConfig`, `OptimizerConfig`, …) checks
its ranges and its own combinations when it is made; `check` checks everything else that is known before the ranks of
the run meet, and `check_kind` the settings that depend on the kind of documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from multipack.data.text.data_config import ItemKind
from multipack.data.text.skipped import counted
from multipack.parallel.optimizers import check_optimizer
from multipack.parallel.stages import fit_micro_batches
from multipack.planning.options import check_item_options
from multipack.training.run_config import Config
from multipack.training.settings import PreferenceConfig


class Refusal(NamedTuple):
    """Settings that cannot be combined.

    Attributes:
        applies: the groups of settings and the `_facts` about them → whether they are refused.
        message: the setting, its value and the nearest legal choice; names in braces are settings and facts.
    """

    applies: Callable[[Any], Any]
    message: str


def _each(names: Sequence[str], applies: Callable[[Any, str], Any], message: str) -> list[Refusal]:
    """The same rule on several settings, each of which is NAME in the message."""

    def of(name: str) -> Refusal:
        return Refusal(lambda run: applies(run, name), message.replace("NAME", name))

    return [of(name) for name in names]


def _of_foreign(name: str, instead: Any) -> Refusal:
    """A setting of which the code of transformers supports one value only."""
    group, _, leaf = name.partition(".")
    return Refusal(
        lambda run: run.foreign and getattr(getattr(run, group), leaf) not in (instead, "auto"),
        f"{name}={{{name}}} is not supported {{foreign}}: use {name}={instead}",
    )


RULES = (
    *_each(
        ("tensor", "context", "pipeline"),
        lambda run, name: run.foreign and getattr(run.parallel, name) > 1,
        "parallel.NAME={parallel.NAME} is not supported {foreign}: use parallel.data=zero3, which divides its weights",
    ),
    _of_foreign("train.tiles", 1),
    _of_foreign("train.compile", "false"),
    _of_foreign("model.attention", "auto"),
    _of_foreign("model.kernels", "torch"),
    Refusal(
        lambda run: run.foreign and run.preference.loss == "reward",
        "preference.loss=reward needs a head of scores, which is not supported {foreign}",
    ),
    Refusal(
        lambda run: run.adapter.name != "none" and not run.adapter.base,
        "adapter.name={adapter.name} trains beside frozen weights: set train.init_from to a folder of a Hugging Face"
        " model, a run or a checkpoint",
    ),
    Refusal(
        lambda run: run.data.stream and not run.train.steps,
        "data.stream=true: the number of documents is unknown; set train.steps",
    ),
    Refusal(
        lambda run: run.train.patience and not run.validates,
        "train.patience={train.patience} counts evaluations, and data.validation=0 keeps no documents for them: set"
        " data.validation=0.1, or leave train.patience out",
    ),
    Refusal(
        lambda run: (
            run.parallel.context > 1
            and run.parallel.context_method == "planned"
            and run.model.attention != "auto"
        ),
        "model.attention={model.attention}: parallel.context_method=planned chooses its kernel; use"
        " model.attention=auto, or parallel.context_method=ulysses",
    ),
    Refusal(
        lambda run: run.shares and run.parallel.context > 1 and run.parallel.context_method == "planned",
        "parallel.context_method=planned divides documents, which data.share_prefixes={data.share_prefixes} lets share"
        " tokens: use parallel.context_method=ulysses",
    ),
    Refusal(
        lambda run: (
            run.shares and run.model.rotation_limit and run.plan.capacity > run.model.rotation_limit.tokens
        ),
        "model.{model.rotation_limit}, and shared tokens are of several: use"
        " plan.capacity={model.rotation_limit.tokens} with data.share_prefixes={data.share_prefixes}",
    ),
    Refusal(
        lambda run: (
            run.log.gradient_noise and (run.parallel.shards_parameters or run.parallel.model_ranks > 1)
        ),
        "log.gradient_noise=true needs the whole gradient of a rank's first micro-batch, which only parallel.data=ddp"
        " and zero1 without parallel.tensor, context and pipeline keep: leave it out",
    ),
)
"""Rules on settings alone."""

OF_RANKS = (
    Refusal(
        lambda run: run.data.readers > run.ranks,
        "data.readers={data.readers} of {ranks} data-parallel ranks: at most data.readers={ranks}, or 0: every rank"
        " reads its own",
    ),
    Refusal(
        lambda run: run.resumes and run.plan.micro_batches and run.packs not in (run.given, run.fitting),
        "plan.micro_batches={plan.micro_batches} on {named_ranks} makes {named_given} a step, and the steps of the"
        " resumed run have {packs}: leave it out",
    ),
    Refusal(
        lambda run: run.resumes and run.parallel.pipeline == 1 and run.ranks > run.packs,
        "{ranks} data-parallel ranks cannot share the {named_packs} of a step of the resumed run: start at most {packs}"
        " data-parallel ranks, or a new run with train.init_from=",
    ),
    Refusal(
        lambda run: run.parallel.pipeline == 1 and run.ranks > run.packs,
        "{ranks} data-parallel ranks cannot share plan.packs_per_step={packs} packs: set it to at least {ranks} (a"
        " multiple of {ranks} keeps all of them busy)",
    ),
    Refusal(
        lambda run: run.resumes and run.needed > run.per_rank,
        "parallel.pipeline={parallel.pipeline} ({parallel.schedule}) needs {needed} packs per step on every"
        " data-parallel rank, and the resumed run has {per_rank}: use parallel.pipeline=1, or"
        " one of at most {per_rank}",
    ),
    Refusal(
        lambda run: run.log.gradient_noise and run.per_rank < 2,
        "log.gradient_noise=true compares a micro-batch with its step, but each rank has {per_rank} per step: set"
        " plan.packs_per_step to at least twice the number of processes",
    ),
)
"""Rules that need the number of processes; see `_facts_of_ranks`."""

OF_KINDS = (
    Refusal(
        lambda run: run.kind == "documents" and run.data.share_prefixes == "pairs",
        "data.share_prefixes=pairs is about preference pairs, which these documents are not: use all",
    ),
    Refusal(
        lambda run: run.kind == "documents" and run.preference != PreferenceConfig(),
        "preference.* is about pairs (chosen, rejected) and labeled answers (label), which these documents are not:"
        " omit it",
    ),
    *_each(
        ("pipeline", "context"),
        lambda run, name: run.kind != "documents" and getattr(run.parallel, name) > 1,
        "parallel.NAME={parallel.NAME} splits documents or layers, and the loss of preference pairs needs both answers"
        " on one rank: use parallel.data=zero3 or parallel.tensor",
    ),
    Refusal(
        lambda run: run.reads_values and run.parallel.tensor > 1,
        "parallel.tensor={parallel.tensor} divides the head by rows, and preference.loss={preference.loss} has a head"
        " of one: use parallel.data=zero3",
    ),
    *_each(
        ("label_smoothing", "z_loss"),
        lambda run, name: run.kind != "documents" and getattr(run.train, name),
        "train.NAME={train.NAME} is about the loss of tokens, and these documents are preference pairs: omit it"
        " (preference.label_smoothing smooths preferences)",
    ),
)
"""Rules on the kind of documents, which is known when they are read."""


def check(config: Config, processes: int) -> None:
    """Check combinations of settings for a number of processes. Needs no process group.

    Raises:
        ValueError: settings cannot be combined; the message names the nearest legal choice.
    """
    run, parallel, resumes = _facts(config), config.parallel, config.train.resume != "false"
    _raise_first(RULES, run)
    if run.foreign and not resumes:  # a resumed run has the checkpoint's model
        from multipack.training.foreign_checks import check_shape  # imports torch

        check_shape(config, run.foreign)
    parallel.check(config.model, processes, config.plan.capacity, config.train.dtype, resumes)
    config.adapter.check_blocks(config.model, parallel.tensor)
    if run.shares:
        check_item_options(config.plan, f"data.share_prefixes={config.data.share_prefixes}")
    check_optimizer(config.optimizer.name, parallel)
    _raise_first(OF_RANKS, _facts(config, **_facts_of_ranks(config, processes)))


def check_kind(config: Config, kind: ItemKind, reads_values: bool = False) -> None:
    """Check settings against the kind of documents; `reads_values`: the objective trains a head of scores.

    Raises:
        ValueError: a setting does not apply to them.
    """
    _raise_first(OF_KINDS, _facts(config, kind=kind, reads_values=reads_values))


def _raise_first(rules: tuple[Refusal, ...], run: SimpleNamespace) -> None:
    for rule in rules:
        if rule.applies(run):
            raise ValueError(rule.message.format_map(vars(run)))


def _facts(config: Config, **more: Any) -> SimpleNamespace:
    """The groups of settings, and what follows from them, by the names that rules use."""
    folder = config.model.architecture
    return SimpleNamespace(
        **vars(config),
        **more,
        resumes=config.train.resume != "false",
        foreign=f"with model=hf:{folder}, whose code is that of transformers" if folder else "",
        shares=config.data.share_prefixes != "off",
        validates=bool(config.data.validation or config.data.validation_sets),
    )


def _facts_of_ranks(config: Config, processes: int) -> dict[str, Any]:
    """Facts that follow from the number of processes. A step's packs are of all data-parallel ranks."""
    parallel, plan = config.parallel, config.plan
    ranks, saved = parallel.data_size(processes), plan.packs_per_step
    given = plan.for_ranks(ranks).packs_per_step
    packs = given if config.train.resume == "false" else saved  # a resumed run keeps its packs
    return {
        "ranks": ranks,  # data-parallel
        "packs": packs,  # of a step
        "per_rank": -(-packs // ranks),
        "needed": fit_micro_batches(parallel, -(-packs // ranks)),  # per rank, by a pipeline
        "given": given,  # packs of a step by plan.packs_per_step or plan.micro_batches
        "fitting": fit_micro_batches(parallel, -(-given // ranks)) * ranks,  # of a step, by a pipeline
        "named_ranks": counted(ranks, "data-parallel ranks"),
        "named_given": counted(given, "packs"),
        "named_packs": counted(packs, "packs"),
    }
