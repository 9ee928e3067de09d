"""The commands that read documents or training settings: train, config, prepare."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multipack.cli.command_options import Json, Settings, Words, fail, option, print_json, settings_option
from multipack.data.text.skipped import counted

if TYPE_CHECKING:
    from multipack.data.views.shown import Shown
    from multipack.reports.console import Console
    from multipack.training.run_config import Config


def train(words: Words = None, settings: Settings = False) -> None:
    """Train a decoder without padding.

    Without settings: a small Llama-style model on Python's standard library,
    and then what padding would have cost.

    Examples:
      multipack train
      multipack train data=jsonl data.path=train.jsonl model=gpt2 out=runs/a
      multipack train train.resume=true out=runs/a
      multipack train train.resume=auto out=runs/a   # begin or resume
      torchrun --nproc-per-node 4 -m multipack train plan.packs_per_step=8

    `multipack train --settings` lists all settings.
    """
    from multipack.training.run_config import compose_run

    composed = compose_run(words or [])  # before torch is imported, so that mistakes are answered at once
    from multipack.training.callbacks.callback import RunStopped
    from multipack.training.train import train as run

    try:
        result = run(composed, compare_padding=composed.data.source == "stdlib")
    except RunStopped as error:
        fail(error, 3)
    if result.stopped_by is not None:
        sys.exit(128 + int(result.stopped_by))


def config(
    words: Words = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
    settings: Settings = False,
) -> None:
    """Print what the settings resolve to, as YAML."""
    from multipack.run import config_yaml
    from multipack.training.run_config import compose, compose_run

    composed = compose_run(words or [])
    typer.echo(config_yaml(composed, compose([]) if changed else None), nl=False)


def prepare(
    words: Words = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the store; default: in the cache.")] = None,
    shards: Annotated[int, typer.Option(help="Approximate number of shards; 0 = by tokens.")] = 0,
    part: Annotated[str, typer.Option(help="i/n: tokenize part i of n of one store.")] = "1/1",
    engine: Annotated[str, typer.Option(help="local, or ray: all parts as tasks of a cluster.")] = "local",
    report: Annotated[Path | None, typer.Option(help="Report on this store; prepare nothing.")] = None,
    show: Annotated[int, option("Print this many documents, with their targets marked.", min=0)] = 0,
    as_json: Json = False,
    settings: Annotated[bool, settings_option("Config", "data.", "tokenizer.")] = False,
) -> None:
    """Tokenize documents into a store of memory-mapped shards.

    The tokenizers library uses all cores. After an interruption, the same
    command continues after the finished shards. A scheduler can run the parts
    of a source of several files on several machines.

    Examples:
      multipack prepare data=text data.path=books/ --store books.store
      multipack train data=store data.path=books.store
      multipack prepare data=jsonl data.path=web.jsonl --store web --shards 16
      multipack prepare data=jsonl data.path=web/ --store web.store --part 3/16
      multipack prepare data=jsonl data.path=chats.jsonl --show 3
      multipack prepare --report books.store

    `multipack prepare --settings` lists all settings.
    """
    from multipack.data.stores.store import TokenStore
    from multipack.data.views.corpus_report import CorpusReport
    from multipack.reports.console import Console
    from multipack.reports.summary import print_store
    from multipack.training.run_config import compose, resolve_weights

    console = Console(stream=sys.stderr if as_json else None)
    composed = resolve_weights(compose(words or []))
    if report is None:
        path = _tokenize(words or [], composed, console, store, shards=shards, part=part, engine=engine)
    elif words or store or shards or part != "1/1" or engine != "local":
        raise ValueError(f"--report {report} only reports: leave out settings and all options but --json")
    else:
        path = report
    if part != "1/1" and not TokenStore(path, growing=True).is_complete:
        console.line(f"part {part} of {path} is finished, and other parts are missing")
        if as_json:
            print_json({"folder": str(path), "is_complete": False})
        return
    found = CorpusReport(path)
    shown, fit, missing = _fitted(path, composed, show) if show or report is None else ([], "", "")
    if as_json:
        more = {"shown": [each._asdict() for each in shown]} if show else {}
        print_json({"folder": str(path), **found.to_dict(), **more})
        return
    _print_shown(console, shown)
    print_store(console, path, found, fit)
    if report is None:
        training = [*_training_words(words or [], store), *([missing] if missing else [])]
        command = shlex.join(["multipack", "train", *training])
        console.line(f"\nto train on it:\n  {command}")


def _tokenize(words: list[str], config: Config, console: Console, store: Path | None, **options: Any) -> Path:
    """Write the stores of training and validation documents; return the folder of the first.

    `config` is composed of `words`, and `options` are those of `multipack.data.stores.prepare.prepare`.
    """
    from multipack.data.stores.prepare import prepare as run
    from multipack.data.text.tokenizer import TokenizerConfig
    from multipack.data.views.corpus import validation_sets
    from multipack.training.other_names import translate
    from multipack.training.run_config import check_documents_named
    from multipack.words import given_values

    check_documents_named(given_values(words, translate), config.train.init_from)
    sets = validation_sets(config.data)
    if sets and (store or options["part"] != "1/1" or options["engine"] != "local"):
        raise ValueError(
            "--store, --part and --engine are about one store: prepare the documents of data.validation_path by a"
            " command of their own, with tokenizer=STORE/tokenizer.json"
        )
    with console.progress("tokenizing") as advance:
        path = run(config.data, config.tokenizer, store, advance, report=console.line, **options)
        trained = TokenizerConfig("file", str(path))
        for each in [each for each in sets if each.source != "store"]:
            console.line(f"validation documents: {each.path}, in {run(each, trained, progress=advance)}")
    return path


def _print_shown(console: Console, documents: list[Shown]) -> None:
    """Print documents with their targets marked."""
    from multipack.data.views.shown import MOST_TOKENS

    for document in documents:
        console.line(
            f"\n{document.name}: {document.tokens:,} tokens, {document.targets:,} targets", style="bold"
        )
        console.marked(document.parts)
        if document.tokens > MOST_TOKENS:
            console.line(f"… and {document.tokens - MOST_TOKENS:,} more tokens")


def _training_words(words: list[str], store: Path | None) -> list[str]:
    """Words of a run on the store of `prepare`: with the same words, a run finds a store in the cache."""
    if store is None:
        return words
    kept = [word for word in words if word.startswith(("train.", "plan.", "model", "data.overlong="))]
    return ["data=store", f"data.path={store}", *kept]


def _fitted(path: Path, config: Config, count: int) -> tuple[list[Shown], str, str]:
    """The first `count` documents of a store as a run trains on them, and what is said of too long ones.

    The last text is the setting that the run lacks for them; it is empty where it lacks none.
    """
    from multipack.data.stores.store import TokenStore
    from multipack.data.views.documents import Documents
    from multipack.data.views.shown import show

    data, limit, store = config.data, config.document_limit, TokenStore(path)
    documents = Documents.whole(store, data.train_on_prompt)
    if store.header.split_by == "position":
        documents = documents.cut(data.block_size or limit)
    policy = store.header.overlong if data.overlong == "auto" else data.overlong
    longer, missing = int((documents.lengths > limit).sum()), ""
    if longer and policy == "error":
        longest = int(documents.lengths.max())
        fit = f"{counted(longer, 'documents')} of more than {limit:,} tokens, the longest of {longest:,}:"
        fit += " set data.overlong, or raise plan.capacity"
        missing = f"data.overlong={'drop' if store.header.pairs else 'truncate'}"
    else:
        documents, report = documents.fit(limit, policy, data.overlap, data.repeat_prompt)
        fit = report.describe()
    shown = [each for index in range(min(count, len(documents))) for each in show(documents, index)]
    return shown, fit, missing
