"""The command line: each command parses, calls one function and prints."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import click
import typer

app = typer.Typer(
    name="multipack",
    help="Train language models without padding: documents packed exactly, on one core or many ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[GROUP=PRESET | GROUP.KEY=VALUE | config=FILE | out=DIR]…", show_default=False),
]


def main() -> None:
    """Run the command line; errors that the user can mend are one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a sample must not end a run where the locale lacks a letter
    # Threads that spin for long while they wait make a step many times as long when something else wants a core too;
    # a short spin costs a quiet machine nothing. Read by the OpenMP runtime when torch is loaded, so set before any
    # command imports it. Whoever sets one of these variables keeps what they chose.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # oneDNN keeps compiled bfloat16 products for 1,024 shapes, and packs differ in shape: gigabytes for nothing.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        code = app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ValueError, OSError) as error:
        _fail(str(error), 2)
    except (click.Abort, KeyboardInterrupt):
        code = 130
    if code == 130:  # what Typer makes of Ctrl-C
        _fail("interrupted; what was saved before is whole", code)
    sys.exit(code or 0)


def _fail(message: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK")
    where = f"[rank {rank}] " if rank not in (None, "0") else ""
    print(f"{where}error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _settings_help(*groups: str) -> str:
    """A table of settings for --help, made from the dataclasses when it is asked for."""
    from multipack.config import Config, describe, preset_names

    rows = [row for row in describe(Config) if not groups or row[0].split(".")[0] in groups]
    width = max(len(row[0]) for row in rows)
    lines, last = [], ""
    for key, kind, default, meaning in rows:
        group = key.split(".")[0] if "." in key else ""
        if group != last and group:
            names = preset_names(group)
            lines.append(f"\n{group}" + (f"={'|'.join(names)}" if names else ""))
        last = group
        shown = f" [{default}]" if default not in ("", "[]") else ""
        lines.append(f"  {key:<{width}}  {meaning} ({kind}){shown}")
    return "\n".join(lines)


def _show_settings(value: bool) -> None:
    if value:
        typer.echo(_settings_help())
        raise typer.Exit


Settings = Annotated[
    bool,
    typer.Option(
        "--settings",
        help="Print every setting with its meaning and default.",
        callback=_show_settings,
        is_eager=True,
    ),
]


@app.command()
def train(words: Words = None, settings: Settings = False) -> None:
    """Train a decoder without padding.

    With no words: a small Llama-style model on the running Python's own standard library.

    [bold]Examples[/bold]

      multipack train
      multipack train data=jsonl data.path=train.jsonl model=gpt2 plan.capacity=8192 out=runs/sft
      multipack train train.resume=true out=runs/sft
      torchrun --nproc-per-node 4 -m multipack train plan.packs_per_step=8

    `multipack train --settings` lists every setting.
    """
    from multipack.config import compose_run
    from multipack.training.session import NonFiniteLoss
    from multipack.training.trainer import train as run

    try:
        result = run(compose_run(words or []))
    except NonFiniteLoss as error:
        _fail(str(error), 3)
    if result.stopped_by is not None:
        sys.exit(128 + int(result.stopped_by))


@app.command()
def config(words: Words = None, settings: Settings = False) -> None:
    """Print the configuration that the words resolve to, as YAML."""
    from multipack.config import compose_run
    from multipack.run import config_yaml

    typer.echo(config_yaml(compose_run(words or [])), nl=False)


@app.command()
def prepare(
    words: Words = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder of the token store; default: in the cache.")
    ] = None,
) -> None:
    """Tokenize documents into a token store: memory-mapped, written whole or not at all.

    [bold]Example[/bold]

      multipack prepare data=text data.path=books/ tokenizer=bpe --store books.store
      multipack train data=store data.path=books.store
    """
    from multipack.config import compose
    from multipack.data.prepare import prepare as run
    from multipack.reports.console import Console
    from multipack.reports.summary import store_rows

    composed, console = compose(words or []), Console()
    with console.progress("tokenizing") as advance:
        path = run(
            composed.data, composed.tokenizer, store, lambda done, total, unit: advance(done, total, unit)
        )
    console.section("token store", store_rows(path))


@app.command()
def plan(
    source: Annotated[
        str, typer.Argument(help="LENGTHS.npy (whole numbers) or a token store's folder.", show_default=False)
    ],
    words: Words = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")
    ] = False,
    step: Annotated[int, typer.Option(help="The global step to draw.")] = 0,
    tokens_per_character: Annotated[int, typer.Option(help="Scale of the picture; 0 = so that it fits.")] = 0,
) -> None:
    """Plan an epoch: report how well it packs and balances, and draw one step.

    [bold]Example[/bold]

      multipack plan lengths.npy plan.capacity=8192 plan.packs_per_step=8 world_size=4
    """
    from multipack.config import PlanCommand, merge
    from multipack.data.lengths import read_lengths
    from multipack.planning.measure import padded_share
    from multipack.planning.plan import plan as make_plan
    from multipack.reports.console import Console
    from multipack.reports.picture import draw_step
    from multipack.reports.summary import report_rows

    wanted = merge(PlanCommand, words or [])
    lengths, targets = read_lengths(Path(source), wanted.plan.capacity)
    keywords = wanted.plan.keywords(wanted.world_size)
    made = make_plan(lengths, targets=targets, seed=wanted.seed, epoch=wanted.epoch, **keywords)
    report = made.report(wanted.world_size, wanted.sync)
    share = padded_share(lengths, wanted.padded_batch_size, wanted.seed)
    if as_json:
        typer.echo(
            json.dumps({**report.to_dict(), "padded_share": share, "fingerprint": made.fingerprint}, indent=1)
        )
        return
    console = Console()
    console.section(
        f"plan of {source}", report_rows(report, share, wanted.padded_batch_size, wanted.world_size)
    )
    console.line()
    console.line(draw_step(made, step, tokens_per_character=tokens_per_character or None))


@app.command()
def generate(
    run: Annotated[
        Path, typer.Argument(help="A run directory, or one of its checkpoints.", show_default=False)
    ],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 = always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0 = all.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Write text with a trained model."""
    from multipack.training.inference import complete, load_run

    model, tokenizer = load_run(run)
    text = complete(
        model, tokenizer, prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    typer.echo(prompt + text)


@app.command()
def version() -> None:
    """Print the version."""
    import multipack

    typer.echo(multipack.__version__)
