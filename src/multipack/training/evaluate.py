"""`evaluate`: the loss of trained weights on any documents, or on the validation documents of their run.

    run, checkpoint, Hugging Face folder ─▶ settings ─▶ engine ─┐
    data=… | the run's validation documents ─▶ documents ───────┴─▶ losses, by source; metrics of preferences

Nothing is written but token stores in the cache. Ranks divide the documents, under every parallel method.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multipack.atomic import read_file
from multipack.data.text.data_config import RECORDS
from multipack.data.views.corpus import Corpus, load_sets, sets_of
from multipack.hub import model_folder
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.ranks import find_ranks
from multipack.parallel.world import World
from multipack.planning.options import check_choice
from multipack.reports.console import Console
from multipack.run import STATE, is_export, weights_folder
from multipack.training.assemble import (
    Start,
    objective_of,
    open_model,
    opens_documents,
    read_documents,
    run_world,
    shape_of,
)
from multipack.training.checks import check
from multipack.training.feed import PackLoaders
from multipack.training.other_names import translate
from multipack.training.preferences import Preferences
from multipack.training.run_config import Config, compose, initial_model, resolve_weights
from multipack.training.settings import PreferenceConfig
from multipack.training.weights import Weights, adapt_weights, find_weights
from multipack.words import read_yaml, split

CHOOSING = {"data", "data.source", "data.path", "data.paths"}
"""Settings that name documents; without them the run's validation documents are evaluated."""
KEPT = ("between", "train_on_prompt", "overlong", "overlap", "repeat_prompt", "verify", "cache")
"""Settings `data.*` of a run that apply to other documents too."""


@dataclass(frozen=True)
class SetLoss:
    """The mean loss of a set of documents, weighted as in training (`train.loss_weighting`).

    Attributes:
        name: source in a mixture; empty for all documents.
        documents: number of documents; a preference pair is one.
        perplexity: e^loss; None if the loss is not a mean over tokens.
    """

    name: str
    documents: int
    targets: int
    loss: float
    perplexity: float | None


@dataclass(frozen=True)
class EvaluationResult:
    """Result of `evaluate`.

    Attributes:
        weights: folder of the weights, after `step` training steps; None = unknown.
        documents: one line about the documents.
        sets: the loss of all documents, and then of each source.
        metrics: metrics of preferences, such as `reward_accuracy` and `reward_margin`.
        note: rows of the vocabulary that the weights lacked; empty = none.
    """

    weights: str
    step: int | None
    documents: str
    sets: list[SetLoss]
    metrics: dict[str, float]
    note: str

    def table(self) -> list[list[str]]:
        """Names of columns, and a row for each set; metrics of preferences are in the row of all documents."""
        perplexity = ["perplexity"] if self.sets[0].perplexity is not None else []
        named = {name.replace("_", " "): f"{value:.4f}" for name, value in self.metrics.items()}
        rows = [["documents", "", "targets", "loss", *perplexity, *named]]
        for each in self.sets:
            row = [each.name or "all", f"{each.documents:,}", f"{each.targets:,}", f"{each.loss:.4f}"]
            row += [f"{each.perplexity:.4g}"] if each.perplexity is not None else []
            rows.append(row + ([] if each.name else [*named.values()]))
        return [row + [""] * (len(rows[0]) - len(row)) for row in rows]


def evaluate(
    path: Path | str,
    words: Sequence[str] = (),
    weights: Weights = "latest",
    console: Console | None = None,
) -> EvaluationResult:
    """Evaluate trained weights; collective, on every rank that a launcher started.

    Args:
        path: a run, one of its checkpoints, or a Hugging Face folder.
        words: settings: the documents (`data=jsonl data.path=test.jsonl`), and others such as `parallel.data=zero3`.
            Without documents, the run's validation documents are evaluated.
        weights: of a run: latest or best.
        console: shows progress.

    Raises:
        FileNotFoundError: there are no weights at `path`.
        ValueError: the documents do not suit the weights, or settings cannot be combined.
    """
    check_choice("--weights", weights, Weights)
    request = compose_evaluation(path, words)
    config = request.config
    check(config, find_ranks(os.environ).size)
    with run_world(config) as world:
        return _evaluate(request, weights, world, console or Console(rank=1))


@dataclass(frozen=True)
class EvaluationRequest:
    """A request to evaluate the weights in a folder.

    Attributes:
        checkpoint: its run's validation documents are evaluated; None = the documents of `config.data`.
        reference: model that preference pairs are compared with, unless the settings name one; empty = unknown.
    """

    path: Path
    config: Config
    checkpoint: Path | None
    reference: str


def compose_evaluation(path: Path | str, words: Sequence[str]) -> EvaluationRequest:
    """The settings of an evaluation: the run's settings that determine a loss, and `words`.

    Raises:
        FileNotFoundError: there are no weights at `path`.
        ValueError: a word is invalid; the weights come without documents, and no word names some.
    """
    given = dict(translate(*split(word)) for word in words)
    for name in ("out", "train.resume", "train.init_from"):
        if name in given:
            raise ValueError(f"{name}={given[name]}: `multipack evaluate RUN` writes no run; leave it out")
    place = model_folder(str(path), "RUN")
    folder = weights_folder(place)
    saved = {} if is_export(folder) else read_yaml(folder / "config.yaml")
    chosen = bool(CHOOSING & given.keys()) or "config" in given
    if not (saved or chosen):
        raise ValueError(
            f"{path} comes without documents: name some, such as data=jsonl data.path=test.jsonl"
        )
    data, train, preference = (saved.get(group) or {} for group in ("data", "train", "preference"))
    base = initial_model({**given, "train.init_from": str(folder)}) or {"model": {"kv_heads": 0}}
    base["plan"] = _some(saved.get("plan", {}), "capacity") | {"micro_batches": 1}
    base["train"] = _some(train, "loss_weighting", "dtype", "deterministic", "seed")
    base["preference"] = {name: value for name, value in preference.items() if name != "reference"}
    base["data"] = _other_documents(data, given) if chosen else data
    config = resolve_weights(compose([f"train.init_from={folder}", *words], base))
    reference = preference.get("reference") or train.get("init_from") or ""
    return EvaluationRequest(place, config, None if chosen else folder, reference)


def _other_documents(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Settings `data.*` of a run, as far as they apply to the documents that `given` names."""
    own = {"validation_path": [], "validation_part": "", "validation": 0.0}
    if not {"data", "data.source"} & given.keys():  # the same source
        return saved | own
    records = given.get("data.source", given.get("data")) in RECORDS and saved.get("source") in RECORDS
    return _some(saved, *KEPT, *(["as_chat", "template_date"] if records else [])) | own


def _some(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _evaluate(
    request: EvaluationRequest, weights: Weights, world: World, console: Console
) -> EvaluationResult:
    mesh, folder = build_mesh(request.config.parallel, world), request.checkpoint
    found = find_weights(request.path, weights, world, foreign=bool(request.config.model.architecture))
    corpus = _documents(request, mesh, console)
    config = _with_preference(request, corpus)
    shape = objective_of(config, corpus).shape(shape_of(config, corpus.tokenizer, found))
    read, note = adapt_weights(found, shape, corpus.tokenizer, "RUN")
    start = Start(shape, read, found.folder, "", [note])
    model = open_model(config, corpus, start, mesh)
    objective, engine = model.objective, model.engine
    with console.progress("computing reference values") as advance:
        views, _ = objective.views(engine, advance, folder.parent.parent if folder is not None else None)
    validation = PackLoaders(model.config, objective, engine, model.cost_model).validation(views[1])
    try:
        losses = validation.losses()
    finally:
        validation.close()
    metrics = objective.metrics(engine, training=False)
    return EvaluationResult(
        weights=str(found.folder),
        step=found.step,
        documents=corpus.validation_files
        or f"{'' if folder is None else 'validation documents of '}{corpus.description}",
        sets=_sets(corpus, losses, tokens=not objective.legend),
        metrics={name.removeprefix("val_"): value for name, value in metrics.items()},
        note=note.partition("; ")[2],
    )


def _documents(request: EvaluationRequest, mesh: Mesh, console: Console) -> Corpus:
    """The documents to evaluate, as the validation documents of a corpus."""
    config, folder = request.config, request.checkpoint
    if folder is None:
        sets, reads = sets_of(config.data), opens_documents(config, mesh)
        with console.progress("reading documents") as advance:
            return load_sets(
                sets, config.tokenizer, limit=config.document_limit, progress=advance, reads=reads
            )
    corpus = read_documents(config, mesh, console)
    if not len(corpus.validation):
        raise ValueError(
            f"{request.path} keeps no validation documents: name others, such as data.path=test.jsonl"
        )
    state = json.loads(read_file(folder / STATE, sys.maxsize))
    before = state["progress"].get("corpus", {}).get("documents")
    if before != (corpus.arriving or corpus.train).fingerprint:
        raise ValueError(
            f"the documents of {request.path} have changed since its training: name those to evaluate it on, such as"
            " data=jsonl data.path=test.jsonl"
        )
    return corpus


def _with_preference(request: EvaluationRequest, corpus: Corpus) -> Config:
    """The settings: for pairs with their reference model, for other documents without preferences."""
    config = request.config
    if corpus.validation.size == 1:
        return replace(config, preference=PreferenceConfig())
    objective = objective_of(config, corpus)
    needed = isinstance(objective, Preferences) and objective.loss.uses_reference
    if needed and request.checkpoint is None and not config.preference.reference:
        if not request.reference:
            raise ValueError(
                f"{request.path} names no reference model, with which preference.loss={config.preference.loss} compares"
                " pairs: set preference.reference=MODEL"
            )
        return replace(config, preference=replace(config.preference, reference=request.reference))
    return config


def _sets(corpus: Corpus, losses: dict[str, float], tokens: bool) -> list[SetLoss]:
    """The losses with the numbers of their documents and targets; `tokens`: they are means over tokens."""
    first, parts, targets = 0, {"": (0, len(corpus.validation))}, corpus.validation.target_counts
    for name, count in corpus.sources:
        parts[f"/{name}"] = (first, first + count)
        first += count
    found = []
    for key, (start, stop) in parts.items():
        if (loss := losses.get(key)) is not None:
            perplexity = math.exp(min(loss, 700.0)) if tokens else None
            own = int(targets[start:stop].sum())
            found.append(SetLoss(key.removeprefix("/"), stop - start, own, loss, perplexity))
    return found
