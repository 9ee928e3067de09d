"""The commands plan and pack, which need only the lengths of documents."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multipack.cli.command_options import Json, Source, argument, print_json, shows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multipack.cli.plan_settings import PlanCommand
    from multipack.planning.plan import Plan

SETTINGS = "multipack.cli.plan_settings"


def plan(
    source: Source,
    words: Annotated[
        list[str] | None,
        argument("SETTING", "plan.KEY=VALUE, model=PRESET, world_size=RANKS, sync=step, seed=NUMBER, …"),
    ] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Print a table of windows, budgets and grouping.")
    ] = False,
    as_json: Json = False,
    picture: Annotated[bool, typer.Option("--picture", help="Draw 24 documents and 8 packs, not 4.")] = False,
    step: Annotated[int, typer.Option(help="The global step to draw; -1 = the last.")] = 0,
    tokens_per_character: Annotated[int, typer.Option(min=0, help="Scale of the picture; 0 = fit.")] = 0,
    settings: Annotated[bool, shows("PlanCommand", module=SETTINGS)] = False,
) -> None:
    """Plan an epoch: report how well it packs and balances, and draw one step.

    [bold]Examples[/bold]

      multipack plan lengths.npy plan.capacity=8192 world_size=4
      multipack plan lengths.npy world_size=4 sync=step model=llama-70b
      multipack plan books.store model=path/config.json --explore

    The cost of a document follows from model=, a preset (default: llama-8b) or
    the path of a Hugging Face config.json, or from cost=FILE, a cost fitted to
    measured times. `multipack plan --settings` lists all settings.
    """
    from multipack.cli.plan_settings import PlanCommand, training_command
    from multipack.data.corpus_report import read_lengths
    from multipack.planning.advice import advise
    from multipack.planning.plan import plan as make_plan
    from multipack.planning.report import compile_planner, padded_share, report
    from multipack.reports.console import Console
    from multipack.reports.summary import report_rows
    from multipack.words import merge

    wanted = merge(PlanCommand, words or [])
    lengths, targets, fit = read_lengths(Path(source), wanted.plan.capacity, data=wanted.data)
    options, cost = wanted.plan.for_ranks(wanted.world_size), wanted.cost_model()
    console = Console(stream=sys.stderr if as_json else None)
    compile_planner(options, wanted.world_size, wanted.sync, console.line)
    if explore:
        _explore(source, lengths, wanted, as_json)
        return
    made = make_plan(
        lengths, targets=targets, seed=wanted.seed, epoch=wanted.epoch, cost=cost, options=options
    )
    drawn = "" if as_json else _draw(made, step, tokens_per_character, picture, console.columns)
    cut = 0 if fit is None or fit.policy == "drop" else fit.documents
    found = report(made, wanted.world_size, wanted.sync, wanted.sample or None, split_documents=cut)
    advice, share = advise(made, found), padded_share(lengths, wanted.padded_batch_size, wanted.seed)
    if as_json:
        more = {"advice": advice, "padded_share": share, "fingerprint": made.fingerprint}
        print_json(found.to_dict() | more)
        return
    rows = report_rows(found, share, wanted.padded_batch_size, wanted.world_size, wanted.plan, advice)
    fit_rows = [("too long", fit.describe())] if fit is not None and fit.describe() else []
    console.section(f"plan of {source}", [*rows, *fit_rows])
    head, _, pictures = drawn.partition("\n")
    console.paragraph(f"\n{head}")
    console.line(f"{pictures}\n")
    console.line(f"to train with this plan:\n  {training_command(Path(source), wanted)}")


def _draw(made: Plan, step: int, tokens_per_character: int, whole: bool, columns: int) -> str:
    """Return the picture of a step: about 30 lines, or more with `whole`."""
    from multipack.reports.picture import draw_step

    if not -made.num_steps <= step < made.num_steps:
        raise ValueError(
            f"--step {step}: the plan has {made.num_steps:,} steps; use 0 … {made.num_steps - 1}, or -1 for the last"
        )
    sizes = {} if whole else {"max_documents": 4, "max_packs": 4}
    columns = max(min(columns - 8, 72), 8)
    scale = tokens_per_character or None
    return draw_step(made, step, tokens_per_character=scale, columns=columns, **sizes)


def _explore(source: str, lengths: NDArray[np.int64], wanted: PlanCommand, as_json: bool) -> None:
    from multipack.planning.advice import explore
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
            options=wanted.plan.for_ranks(wanted.world_size),
        )
    if as_json:
        print_json([row.to_dict() for row in rows])
        return
    ranks = f", {wanted.world_size} ranks, sync={wanted.sync}" if wanted.world_size > 1 else ""
    console.table(f"plans of {source}{ranks}", *explore_table(rows))
    console.line()
    for note in explore_notes(rows):
        console.paragraph(note)


def pack(
    source: Source,
    words: Annotated[
        list[str] | None, argument("SETTING", "capacity=TOKENS, method=NAME, out=FILE.npz, …")
    ] = None,
    as_json: Json = False,
    settings: Annotated[bool, shows("PackCommand", module=SETTINGS)] = False,
) -> None:
    """Pack documents in any order, and prove a lower bound on the number of packs.

    [bold]Examples[/bold]

      multipack pack lengths.npy capacity=8192
      multipack pack lengths.npy capacity=8192 method=fewest out=packs.npz
      multipack pack counts.npy capacity=512 method=fewest histogram=true

    `multipack pack --settings` lists all settings.
    """
    import numpy as np

    from multipack.atomic import write_atomically
    from multipack.cli.plan_settings import PackCommand, pack_rows
    from multipack.data.corpus_report import read_lengths
    from multipack.planning.packing import pack as make_packs
    from multipack.planning.report import compile_packer
    from multipack.reports.console import Console
    from multipack.words import merge

    wanted = merge(PackCommand, words or [])
    lengths = read_lengths(Path(source), wanted.capacity, wanted.histogram).lengths
    limit = wanted.max_documents or None
    console = Console(stream=sys.stderr if as_json else None)
    compile_packer(wanted.capacity, wanted.method, limit, console.line)
    started = time.perf_counter()
    packs = make_packs(lengths, wanted.capacity, wanted.method, limit, wanted.time_budget)
    seconds = time.perf_counter() - started
    if wanted.out:
        with io.BytesIO() as buffer:
            bound = packs.lower_bound or 0
            np.savez(
                buffer, order=packs.order, offsets=packs.offsets, lower_bound=bound, capacity=wanted.capacity
            )
            write_atomically(Path(wanted.out), buffer.getvalue())
    if not as_json:
        console.section(f"packs of {source}", pack_rows(packs, lengths, wanted, seconds))
        return
    tokens = int(lengths.sum())
    shown = {
        **asdict(wanted),
        "documents": len(lengths),
        "tokens": tokens,
        "packs": len(packs),
        "lower_bound": packs.lower_bound,
        "gap": packs.gap,
        "filled": tokens / (len(packs) * wanted.capacity),
        "seconds": seconds,
    }
    print_json(shown)
