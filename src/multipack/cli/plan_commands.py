"""The commands plan and pack, which need only the lengths of documents."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from multipack.cli.command_options import (
    Json,
    Source,
    option,
    print_json,
    settings_argument,
    settings_option,
)
from multipack.data.text.skipped import counted
from multipack.machine import import_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multipack.cli.plan_settings import PackCommand, PlanCommand
    from multipack.planning.items import Items
    from multipack.planning.packing import Packs
    from multipack.planning.placement_report import ContextMeasure
    from multipack.planning.plan import Plan
    from multipack.planning.report import PlanReport
    from multipack.reports.console import Console

PICTURES = (".png", ".svg", ".html")
SETTINGS = "multipack.cli.plan_settings"
PLANNED = (
    *("plan.", "data.", "tokenizer.", "model.", "adapter."),
    *("world_size", "context", "sync", "seed", "epoch", "sample", "padded_batch_size"),
)
"""Settings that a plan and its report depend on."""
MOST_INTERPRETED, INTERPRETED_SECONDS = 4000, 0.4
"""Documents up to which Python plans, and its CPU seconds; then the compiled planner is loaded, in 0.9 s."""
CONTEXT_PACKS = 64
"""Packs on which methods of context parallelism are compared, at most."""


def plan(
    words: Annotated[
        list[str] | None,
        settings_argument(
            "[DOCUMENTS] SETTING",
            "A .npy file of lengths, a token store or a file of documents, or data=… as in training; plan.KEY=VALUE,"
            " model=PRESET, world_size=RANKS, sync=step, seed=NUMBER, …",
        ),
    ] = None,
    as_json: Json = False,
    picture: Annotated[
        Path | None, option("FILE.html for a page, FILE.png or .svg for a picture of the plan.", "--picture")
    ] = None,
    step: Annotated[int, typer.Option(help="The global step to draw; -1 = the last.")] = 0,
    settings: Annotated[bool, settings_option("PlanCommand", *PLANNED, module=SETTINGS)] = False,
) -> None:
    """Plan an epoch, report on its packs, and draw a step.

    Examples:
      multipack plan lengths.npy plan.capacity=8192 world_size=4
      multipack plan lengths.npy world_size=4 sync=step model=llama-70b
      multipack plan chats.jsonl data.overlong=truncate world_size=4
      multipack plan books.store model=path/config.json
      multipack plan lengths.npy world_size=8 --picture plan.html

    The cost of a document follows from model=, a preset (default: llama-8b) or
    the path of a Hugging Face config.json. `multipack plan --settings` lists
    all settings.
    """
    import numpy as np

    from multipack.cli.plan_settings import compose_plan
    from multipack.planning.kernels import interpreted
    from multipack.reports.console import Console
    from multipack.reports.summary import verdict

    if picture is not None and picture.suffix not in PICTURES:
        raise ValueError(f"--picture {picture} must end with {', '.join(PICTURES)}")
    if picture is not None and picture.suffix != ".html":  # before a plan that may take long
        import_extra("matplotlib", "--picture", "pictures")
    path, command, trained = compose_plan(words or [])
    console = Console(stream=sys.stderr if as_json else None)
    source = _documents(path, command, console)
    few = isinstance(source.lengths, np.ndarray) and len(source.lengths) <= MOST_INTERPRETED
    with interpreted(INTERPRETED_SECONDS if few else 0):
        made = _made(source, command, console)
        if as_json:
            print_json(_values(made, command))
            return
        drawn = _draw(made.plan, step, console.columns)
        _print(console, made, source, command, drawn if picture is None else "")
        if picture is not None:
            _write_picture(picture, made, source, command, step, trained)
            console.line(f"\npicture written: {picture}")
    console.line()
    console.paragraph(verdict(made.report, made.share, command.world_size))
    console.line(f"to train with this plan:\n  {trained}")


class Planned(NamedTuple):
    """Documents to plan."""

    name: str
    lengths: NDArray[np.int64] | Items
    """`Items`, of documents that share their beginnings, hold targets and weights themselves."""
    targets: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None
    rows: tuple[tuple[str, str], ...] = ()
    """Rows of text on the documents that are left out."""


class Made(NamedTuple):
    """A plan, and the values of its report."""

    plan: Plan
    report: PlanReport
    share: float
    """Share of real tokens in padded batches of the same documents."""
    advice: list[str]
    rows: list[tuple[str, str]]


def _documents(path: Path | None, command: PlanCommand, console: Console) -> Planned:
    """The lengths in a file; without one (None) the documents of the configuration, which are tokenized."""
    if path is not None:
        from multipack.data.views.stored_lengths import read_lengths

        return Planned(str(path), read_lengths(path, command.plan.capacity))
    from multipack.data.views.corpus import load_corpus
    from multipack.reports.summary import corpus_rows

    with console.progress("tokenizing") as advance:
        corpus = load_corpus(command.data, command.tokenizer, limit=command.plan.capacity, progress=advance)
    found = corpus.train
    name, rows = command.data.path or command.data.source, tuple(corpus_rows(corpus))
    if (share := command.data.share_prefixes) != "off":
        from multipack.data.views.shared_prefixes import SharedPrefixes

        options, least = command.plan.for_ranks(command.world_size), command.data.min_prefix
        window = command.model.window
        source = SharedPrefixes.of(found, share, options, min_prefix=least, window=window)
        return Planned(name, source.items(command.seed, command.epoch), rows=rows)
    return Planned(name, found.lengths, found.target_counts, found.weights, rows)


def _made(source: Planned, command: PlanCommand, console: Console) -> Made:
    """The plan of documents, and its report."""
    from multipack.planning.advice import advise
    from multipack.planning.cost import CostModel
    from multipack.planning.plan import plan as make_plan
    from multipack.planning.report import padded_share, report
    from multipack.reports.console import PLANNING
    from multipack.reports.summary import report_rows

    ranks, size = command.world_size, command.padded_batch_size
    with console.notice(PLANNING):
        planned = make_plan(
            source.lengths,
            targets=source.targets,
            weights=source.weights,
            seed=command.seed,
            epoch=command.epoch,
            cost=CostModel.from_shape(command.model, adapter=command.adapter),
            options=command.plan.for_ranks(ranks),
        )
        found = report(planned, ranks, command.sync, command.sample or None)
    advice, share = advise(planned, found), padded_share(planned.lengths, size, command.seed)
    rows = report_rows(found, share, size, ranks, command.plan, advice)
    return Made(planned, found, share, advice, [*rows, *source.rows])


def _values(made: Made, command: PlanCommand) -> dict[str, Any]:
    """The report as plain values."""
    methods = [each.to_dict() for each in _context(made.plan, command)]
    others = {
        "advice": made.advice,
        "padded_share": made.share,
        "fingerprint": made.plan.fingerprint,
    }
    return made.report.to_dict() | others | ({"context": methods} if methods else {})


def _print(console: Console, made: Made, source: Planned, command: PlanCommand, drawn: str) -> None:
    """Print a drawn step, the report, and methods of context parallelism."""
    from multipack.reports.summary import context_table

    if drawn:
        head, _, pictures = drawn.partition("\n")
        console.paragraph(head)
        console.line(pictures)
    console.section(f"plan of {source.name}", made.rows)
    if methods := _context(made.plan, command):
        title = f"context={command.context}: slowest rank over the mean, packs as planned (time: with what is sent)"
        console.table(title, *context_table(methods))


def _context(planned: Plan, command: PlanCommand) -> list[ContextMeasure]:
    """Methods of context parallelism on evenly spaced packs; empty for one rank, or a cost without a shape.

    Empty for documents that share their beginnings, too: only Ulysses computes them.
    """
    from multipack.planning.placement import Placing, Prices
    from multipack.planning.placement_report import measure_context
    from multipack.planning.report import evenly_spaced

    cost, ranks = planned.cost_model, command.context
    if ranks == 1 or cost.shape is None or planned.min_prefix is not None:
        return []
    numbers = evenly_spaced(planned.num_packs, CONTEXT_PACKS).tolist()
    packs = [
        planned.order[planned.pack_offsets[number] : planned.pack_offsets[number + 1]] for number in numbers
    ]
    placing = Placing(cost, ranks, Prices.of(cost.shape, ranks))
    slots = -(-planned.capacity // ranks) * ranks
    return measure_context([planned.slots[pack] for pack in packs], placing, slots, cost.shape)


def _write_picture(
    file: Path, made: Made, source: Planned, command: PlanCommand, step: int, trained: str
) -> None:
    """Write the picture of a plan, of the kind that the name of its file ends with."""
    from multipack.atomic import write_atomically
    from multipack.reports.plan_view import plan_page, plan_view

    view = plan_view(made.plan, made.report, step, command.padded_batch_size, made.share, trained)
    if file.suffix == ".html":
        write_atomically(file, plan_page(view, f"Plan of {Path(source.name).name}", made.rows))
    else:
        from multipack.reports.plan_picture import draw_plan  # imports Matplotlib

        write_atomically(file, draw_plan(view, file.suffix[1:]))


def _draw(planned: Plan, step: int, columns: int) -> str:
    """Return the picture of a step: about 30 lines."""
    from multipack.reports.picture import draw_step

    steps = planned.num_steps
    if not -steps <= step < steps:
        raise ValueError(
            f"--step {step}: the plan has {steps:,} steps; use 0 … {steps - 1}, or -1 for the last"
        )
    return draw_step(planned, step, max(min(columns - 8, 72), 8))


def pack(
    source: Source,
    words: Annotated[
        list[str] | None, settings_argument("SETTING", "plan.capacity=TOKENS, method=NAME, out=FILE.npz, …")
    ] = None,
    as_json: Json = False,
    settings: Annotated[bool, settings_option("PackCommand", module=SETTINGS)] = False,
) -> None:
    """Pack documents in any order, with a proven bound.

    Examples:
      multipack pack lengths.npy plan.capacity=8192
      multipack pack lengths.npy plan.capacity=8192 method=fewest out=packs.npz
      multipack pack counts.npy plan.capacity=512 method=fewest histogram=true

    `multipack pack --settings` lists all settings.
    """
    import numpy as np

    from multipack.atomic import write_atomically
    from multipack.cli.plan_settings import PackCommand
    from multipack.data.views.stored_lengths import read_lengths
    from multipack.planning.packing import pack as make_packs
    from multipack.reports.console import PLANNING, Console
    from multipack.training.other_names import translate
    from multipack.words import merge

    command = merge(PackCommand, words or [], translate=translate)
    capacity, limit = command.plan.capacity, command.plan.max_documents or None
    lengths = read_lengths(Path(source), capacity, command.histogram)
    console = Console(stream=sys.stderr if as_json else None)
    started = time.perf_counter()
    with console.notice(PLANNING):
        packs = make_packs(lengths, capacity, command.method, limit, command.time_budget)
    seconds = time.perf_counter() - started
    if command.out:
        with io.BytesIO() as buffer:
            bound = packs.lower_bound or 0
            np.savez(buffer, order=packs.order, offsets=packs.offsets, lower_bound=bound, capacity=capacity)
            write_atomically(Path(command.out), buffer.getvalue())
    if not as_json:
        console.section(f"packs of {source}", _pack_rows(packs, lengths, command, seconds))
        return
    tokens = int(lengths.sum())
    shown = {
        **{name: value for name, value in asdict(command).items() if name != "plan"},
        **asdict(command.plan),
        "documents": len(lengths),
        "tokens": tokens,
        "packs": len(packs),
        "lower_bound": packs.lower_bound,
        "gap": packs.gap,
        "filled": tokens / (len(packs) * capacity),
        "seconds": seconds,
    }
    print_json(shown)


def _pack_rows(
    packs: Packs, lengths: NDArray[np.int64], command: PackCommand, seconds: float
) -> list[tuple[str, str]]:
    """Return the rows of text about packs."""
    tokens, bound = int(lengths.sum()), packs.lower_bound or 0
    gap = len(packs) - bound
    proven = (
        "this is the minimum" if gap == 0 else f"at most {gap:,} more than needed ({gap / len(packs):.3%})"
    )
    return [
        ("documents", f"{len(lengths):,} of {int(lengths.min()):,} … {int(lengths.max()):,} tokens"),
        ("tokens", f"{tokens:,}"),
        ("packs", f"{len(packs):,} of at most {command.plan.capacity:,} tokens, by {command.method}"),
        ("proven bound", f"{bound:,} packs are a lower bound: {proven}"),
        ("filled", f"{tokens / (len(packs) * command.plan.capacity):.4%} of the slots hold tokens"),
        ("largest pack", counted(int(packs.sizes().max()), "documents")),
        ("packed in", f"{seconds:.3f} s"),
        *([("written to", command.out)] if command.out else []),
    ]
