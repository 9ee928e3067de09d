"""Commands about runs: train, config, prepare, calibrate."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from multipack.cli.command_options import (
    CalibrateSettings,
    Json,
    PrepareSettings,
    Settings,
    Words,
    announce,
    fail,
)


def train(words: Words = None, settings: Settings = False) -> None:
    """Train a decoder without padding.

    With no words: a small Llama-style model on the running Python's own standard library.

    [bold]Examples[/bold]

      multipack train
      multipack train data=jsonl data.path=train.jsonl model=gpt2 out=runs/a
      multipack train train.resume=true out=runs/a
      multipack train train.resume=auto out=runs/a   # begins it, or goes on: for jobs that are started again
      torchrun --nproc-per-node 4 -m multipack train plan.packs_per_step=8

    `multipack train --settings` lists every setting.
    """
    from multipack.parallel.ranks import find_ranks
    from multipack.planning.first_use import compile_planner
    from multipack.reports.console import Console
    from multipack.training.observer import RunStopped
    from multipack.training.run_config import compose_run
    from multipack.training.trainer import train as run

    wanted = compose_run(words or [])
    ranks = find_ranks(os.environ)
    wanted.check(ranks.size)
    packed, console = wanted.parallel.data_size(ranks.size), Console(ranks.rank)
    compile_planner(wanted.plan.for_ranks(packed), packed, wanted.parallel.sync, announce(console))
    try:
        result = run(wanted)
    except RunStopped as error:
        fail(str(error), 3)
    if result.stopped_by is not None:
        sys.exit(128 + int(result.stopped_by))


def config(words: Words = None, settings: Settings = False) -> None:
    """Print the configuration that the words resolve to, as YAML."""
    from multipack.run import config_yaml
    from multipack.training.run_config import compose_run

    typer.echo(config_yaml(compose_run(words or [])), nl=False)


def prepare(
    words: Words = None,
    store: Annotated[Path | None, typer.Option(help="The store's folder; default: in the cache.")] = None,
    shards: Annotated[int, typer.Option(help="Write a folder of so many stores; 0 = one store.")] = 0,
    engine: Annotated[
        str, typer.Option(help="What tokenizes: local, or ray; the result is the same.")
    ] = "local",
    report: Annotated[Path | None, typer.Option(help="Tell about this store, and prepare nothing.")] = None,
    as_json: Json = False,
    settings: PrepareSettings = False,
) -> None:
    """Tokenize documents into a token store: memory-mapped, written whole or not at all.

    All cores tokenize where there is enough to do. After an interruption, the
    same command goes on behind the parts that are finished.

    [bold]Examples[/bold]

      multipack prepare data=text data.path=books/ --store books.store
      multipack train data=store data.path=books.store
      multipack prepare data=jsonl data.path=web.jsonl --store web --shards 16
      multipack prepare --report books.store

    `multipack prepare --settings` lists every setting.
    """
    from multipack.data.corpus_report import report_corpus
    from multipack.data.prepare import prepare as run
    from multipack.reports.console import Console
    from multipack.reports.summary import tell_store
    from multipack.training.run_config import compose

    console, path = Console(stream=sys.stderr if as_json else None), report
    if path is None:
        composed = compose(words or [])
        with console.progress("tokenizing") as advance:
            options: Any = {"engine": engine, "shards": shards, "tell": console.line}
            path = run(composed.data, composed.tokenizer, store, lambda *told: advance(*told), **options)
    elif words or store or shards or engine != "local":
        raise ValueError(
            f"--report {report} prepares nothing: leave out settings, --store, --shards and --engine"
        )
    found = report_corpus(path)
    if as_json:
        typer.echo(json.dumps({"folder": str(path), **found.to_dict()}, indent=1, ensure_ascii=False))
    else:
        tell_store(console, path, found)


def calibrate(
    words: Words = None,
    save: Annotated[
        Path, typer.Option(help="File for the fitted cost; it must not exist.", show_default=True)
    ] = Path("cost.json"),
    as_json: Json = False,
    settings: CalibrateSettings = False,
) -> None:
    """Time real packs on this device, and fit the planner's cost to them.

    [bold]Examples[/bold]

      multipack calibrate data=store data.path=books model=small
      multipack plan books cost=cost.json
      multipack train data=store data.path=books model=small plan.cost=cost.json

    Half of the packs are fitted to; the others show how well times are
    predicted. Nothing else should run meanwhile.
    """
    from multipack.parallel.world import connected
    from multipack.planning.first_use import compile_planner
    from multipack.reports.console import Console
    from multipack.training.predict import calibrate_documents, calibration_rows
    from multipack.training.run_config import compose

    if save.exists():
        raise ValueError(f"--save {save} exists already: choose another name, or move it away")
    wanted, console = compose(words or []), Console(stream=sys.stderr if as_json else None)
    compile_planner(wanted.plan.for_ranks(1), 1, "step", announce(console))
    with connected(wanted.train.device, wanted.parallel.timeout_seconds) as world:
        found = calibrate_documents(wanted, world, console)
    found.model.save(save)
    if as_json:
        typer.echo(json.dumps({"saved": str(save), **found.to_dict()}, indent=1))
        return
    console.table("packs that were not fitted to", *found.table())
    console.section("calibration", calibration_rows(found, save))
