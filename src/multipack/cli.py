"""The command line: each command parses, calls one function and prints."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multipack.config import PlanCommand
    from multipack.planning.packing import Packs
    from multipack.planning.plan import Plan
    from multipack.reports.console import Console

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
    typer.Argument(
        metavar="SETTING", help="GROUP=PRESET, GROUP.KEY=VALUE, config=FILE or out=DIR.", show_default=False
    ),
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
    except (ValueError, OSError) as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if type(error).__name__ != "Abort":
            _tell_usage(error)
            raise
        code = 130
    if code == 130:  # what Typer makes of Ctrl-C
        _fail("interrupted; what was saved before is whole", code)
    sys.exit(code or 0)


def _tell_usage(error: Exception) -> None:
    """End with what is wrong with a command's words; return if the exception is about anything else.

    Typer brings its own click or uses the installed one, by its version: what an exception offers says what it is.
    """
    told, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if told is None or code is None:
        return
    message, context = str(told()).strip(), getattr(error, "ctx", None)
    if "\n" in message:  # no command at all: the help
        print(message, file=sys.stderr)
        sys.exit(code)
    command = context.command_path if context is not None else "multipack"
    _fail(f"{message.rstrip('.')} (`{command} --help` tells more)", code)


def _fail(message: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK")
    where = f"[rank {rank}] " if rank not in (None, "0") else ""
    print(f"{where}error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _shows(schema: str, *groups: str) -> Any:
    """The option --settings of a command: prints the fields of a dataclass of config, or some groups of them."""

    def show(value: bool) -> None:
        if not value:
            return
        from multipack import config
        from multipack.reports.console import Console
        from multipack.reports.summary import settings_text

        rows = [
            row
            for row in config.describe(getattr(config, schema))
            if not groups or row[0].startswith(tuple(f"{group}." for group in groups))
        ]
        presets = {group: config.preset_names(group) for group in {row[0].split(".")[0] for row in rows}}
        typer.echo(settings_text(rows, presets, Console().columns))
        raise typer.Exit

    return typer.Option(
        "--settings", help="Print every setting with its meaning and default.", callback=show, is_eager=True
    )


Settings = Annotated[bool, _shows("Config")]
PlanSettings = Annotated[bool, _shows("PlanCommand")]
PackSettings = Annotated[bool, _shows("PackCommand")]
PrepareSettings = Annotated[bool, _shows("Config", "data", "tokenizer")]


def _announce(console: Console) -> Callable[[], None]:
    """Says, where the planner's loops have to be compiled, why nothing happens for a while."""
    return lambda: console.line("compiling the planner's loops, once: this takes some seconds …")


@app.command()
def train(words: Words = None, settings: Settings = False) -> None:
    """Train a decoder without padding.

    With no words: a small Llama-style model on the running Python's own standard library.

    [bold]Examples[/bold]

      multipack train
      multipack train data=jsonl data.path=train.jsonl model=gpt2 out=runs/a
      multipack train train.resume=true out=runs/a
      torchrun --nproc-per-node 4 -m multipack train plan.packs_per_step=8

    `multipack train --settings` lists every setting.
    """
    from multipack.config import compose_run
    from multipack.planning.first_use import compile_planner
    from multipack.reports.console import Console
    from multipack.training.session import NonFiniteLoss
    from multipack.training.trainer import train as run

    wanted = compose_run(words or [])
    rank, ranks = (int(os.environ.get(name) or default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    keywords, console = wanted.plan.keywords(ranks), Console(rank)
    compile_planner(keywords, ranks, wanted.parallel.sync, _announce(console))
    try:
        result = run(wanted)
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
    settings: PrepareSettings = False,
) -> None:
    """Tokenize documents into a token store: memory-mapped, written whole or not at all.

    [bold]Example[/bold]

      multipack prepare data=text data.path=books/ tokenizer=bpe --store books.store
      multipack train data=store data.path=books.store

    `multipack prepare --settings` lists every setting.
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


Source = Annotated[
    str,
    typer.Argument(
        metavar="LENGTHS", help="A .npy file of whole numbers, or a token store's folder.", show_default=False
    ),
]


@app.command()
def plan(
    source: Source,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING",
            help="plan.KEY=VALUE, model=PRESET, world_size=RANKS, sync=step, seed=NUMBER, …",
            show_default=False,
        ),
    ] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Compare windows, budgets and grouping in a table instead.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report (or the table) as JSON, and nothing else.")
    ] = False,
    picture: Annotated[
        bool, typer.Option("--picture", help="Draw more of the step: 24 documents and 8 packs.")
    ] = False,
    step: Annotated[int, typer.Option(help="The global step to draw; -1 = the last.")] = 0,
    tokens_per_character: Annotated[
        int, typer.Option(min=0, help="Scale of the picture; 0 = so that it fits.")
    ] = 0,
    settings: PlanSettings = False,
) -> None:
    """Plan an epoch: report how well it packs and balances, and draw one step.

    [bold]Examples[/bold]

      multipack plan lengths.npy plan.capacity=8192 world_size=4
      multipack plan lengths.npy world_size=4 sync=step model=llama-70b
      multipack plan books.store model=path/config.json --explore

    Documents cost what model= makes them cost: a preset (llama-8b if nothing
    is said) or the path of a Hugging Face config.json; or what cost=FILE says,
    a fit to measured times. `multipack plan --settings` lists every setting.
    """
    from multipack.config import PlanCommand, merge
    from multipack.data.lengths import read_lengths
    from multipack.planning.first_use import compile_planner
    from multipack.planning.measure import padded_share, report
    from multipack.planning.plan import plan as make_plan
    from multipack.reports.console import Console
    from multipack.reports.summary import fills_packs, report_rows, training_command

    wanted = merge(PlanCommand, words or [])
    lengths, targets, fit = read_lengths(Path(source), wanted.plan.capacity)
    keywords, cost = wanted.plan.keywords(wanted.world_size), wanted.cost_model()
    console = Console(stream=sys.stderr if as_json else None)
    compile_planner(keywords, wanted.world_size, wanted.sync, _announce(console))
    if explore:
        _explore(source, lengths, wanted, as_json)
        return
    made = make_plan(lengths, targets=targets, seed=wanted.seed, epoch=wanted.epoch, cost=cost, **keywords)
    drawn = "" if as_json else _draw(made, step, tokens_per_character, picture, console.columns)
    found = report(
        made,
        wanted.world_size,
        wanted.sync,
        sample=wanted.sample or None,
        window=wanted.plan.window,
        split_documents=0 if fit is None else fit.split_documents + fit.truncated_documents,
    )
    share = padded_share(lengths, wanted.padded_batch_size, wanted.seed)
    if as_json:
        told = {**found.to_dict(), "padded_share": share, "fingerprint": made.fingerprint}
        typer.echo(json.dumps(told, indent=1, ensure_ascii=False))
        return
    rows = report_rows(found, share, wanted.padded_batch_size, wanted.world_size, fills_packs(wanted.plan))
    told_fit = [("too long", fit.describe())] if fit is not None and fit.describe() else []
    console.section(f"plan of {source}", [*rows, *told_fit])
    head, _, pictures = drawn.partition("\n")
    console.paragraph(f"\n{head}")
    console.line(f"{pictures}\n")
    console.line(f"to train with these settings:\n  {training_command(Path(source), wanted)}")


def _draw(made: Plan, step: int, tokens_per_character: int, whole: bool, columns: int) -> str:
    """The picture of a step: some 30 lines, or more where the whole is asked for."""
    from multipack.reports.picture import draw_step

    if not -made.num_steps <= step < made.num_steps:
        raise ValueError(
            f"--step {step} is none of the plan's {made.num_steps:,} steps: draw one of 0 … {made.num_steps - 1},"
            " or -1 for the last"
        )
    sizes = {
        "columns": max(min(columns - 8, 72), 8),
        **({} if whole else {"max_documents": 4, "max_packs": 4}),
    }
    return draw_step(made, step, tokens_per_character=tokens_per_character or None, **sizes)


def _explore(source: str, lengths: NDArray[np.int64], wanted: PlanCommand, as_json: bool) -> None:
    from multipack.planning.explore import explore
    from multipack.reports.console import Console
    from multipack.reports.summary import explore_notes, explore_table

    console = Console()
    with console.progress("exploring") as advance:
        rows = explore(
            lengths,
            world_size=wanted.world_size,
            sync=wanted.sync,
            sample=-(-wanted.sample // 3) or None,
            progress=(lambda *done: None) if as_json else advance,
            seed=wanted.seed,
            epoch=wanted.epoch,
            cost=wanted.cost_model(),
            **wanted.plan.keywords(wanted.world_size),
        )
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=1))
        return
    ranks = f", {wanted.world_size} ranks, sync={wanted.sync}" if wanted.world_size > 1 else ""
    console.table(f"plans of {source}{ranks}", *explore_table(rows))
    console.line()
    for note in explore_notes(rows):
        console.paragraph(note)


@app.command()
def pack(
    source: Source,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING", help="capacity=TOKENS, method=NAME, out=FILE.npz, …", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")
    ] = False,
    settings: PackSettings = False,
) -> None:
    """Pack documents, whatever their order, and prove how few packs there could be.

    [bold]Examples[/bold]

      multipack pack lengths.npy capacity=8192
      multipack pack lengths.npy capacity=8192 method=fewest out=packs.npz
      multipack pack counts.npy capacity=512 method=fewest histogram=true

    `multipack pack --settings` lists every setting.
    """
    from multipack.config import PackCommand, merge
    from multipack.data.lengths import read_lengths
    from multipack.planning.first_use import compile_packer
    from multipack.planning.packing import pack as make_packs
    from multipack.reports.console import Console
    from multipack.reports.summary import pack_rows

    wanted = merge(PackCommand, words or [])
    lengths = read_lengths(Path(source), wanted.capacity, wanted.histogram).lengths
    limit = wanted.max_documents or None
    console = Console(stream=sys.stderr if as_json else None)
    compile_packer(wanted.capacity, wanted.method, limit, _announce(console))
    started = time.perf_counter()
    packs = make_packs(lengths, wanted.capacity, wanted.method, limit, wanted.time_budget)
    seconds = time.perf_counter() - started
    if wanted.out:
        _save_packs(Path(wanted.out), packs, wanted.capacity)
    if as_json:
        tokens = int(lengths.sum())
        told = {
            **asdict(wanted),
            "documents": len(lengths),
            "tokens": tokens,
            "packs": len(packs),
            "lower_bound": packs.lower_bound,
            "gap": packs.gap,
            "filled": tokens / (len(packs) * wanted.capacity),
            "seconds": seconds,
        }
        typer.echo(json.dumps(told, indent=1))
        return
    console.section(f"packs of {source}", pack_rows(packs, lengths, wanted, seconds))


def _save_packs(path: Path, packs: Packs, capacity: int) -> None:
    import numpy as np

    from multipack.atomic import write_atomically

    buffer = io.BytesIO()
    bound = packs.lower_bound if packs.lower_bound is not None else 0
    np.savez(buffer, order=packs.order, offsets=packs.offsets, lower_bound=bound, capacity=capacity)
    write_atomically(path, buffer.getvalue())


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
