"""The commands plan and pack, which need only the lengths of documents."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from multipack.cli.command_options import (
    Json,
    Source,
    option,
    print_json,
    settings_argument,
    settings_option,
)
from multipack.data.text.skipped import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multipack.cli.plan_settings import PlanCommand
    from multipack.planning.items import Items
    from multipack.planning.placement_report import ContextMeasure
    from multipack.planning.plan import Plan
    from multipack.planning.report import PlanReport
    from multipack.reports.console import Console

SETTINGS = "multipack.cli.plan_settings"
PLANNED = (
    *("plan.", "data.", "tokenizer.", "model.", "adapter."),
    *("world_size", "sync", "epoch", "parallel.context", "train.seed"),
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
        Path | None, option("FILE.html: a page with pictures of the plan.", "--picture")
    ] = None,
    settings: Annotated[bool, settings_option("PlanCommand", *PLANNED, module=SETTINGS)] = False,
) -> None:
    """Plan an epoch, report on its packs, and draw its first step.

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
    from multipack.planning.report import PADDED_BATCH_SIZE, padded_share
    from multipack.reports.console import Console
    from multipack.reports.summary import report_rows, verdict

    if picture is not None and picture.suffix != ".html":
        raise ValueError(f"--picture {picture} must end with .html: it is a page")
    path, command, trained = compose_plan(words or [])
    console = Console(stream=sys.stderr if as_json else None)
    documents = _documents(path, command, console)
    ranks, batch = command.world_size, PADDED_BATCH_SIZE
    few = isinstance(documents.lengths, np.ndarray) and len(documents.lengths) <= MOST_INTERPRETED
    with interpreted(INTERPRETED_SECONDS if few else 0):
        made, found, advice = _planned(documents, command, console)
        share, methods = padded_share(made.lengths, batch, command.train.seed), _context(made, command)
        if as_json:
            more = {"advice": advice, "padded_share": share, "fingerprint": made.fingerprint}
            more |= {"context": [each.to_dict() for each in methods]} if methods else {}
            print_json(found.to_dict() | more)
            return
        rows = [*report_rows(found, share, batch, ranks, command.plan, advice), *documents.rows]
        if picture is not None:
            from multipack.atomic import write_atomically
            from multipack.reports.plan_page import plan_page, plan_view

            view = plan_view(made, found, batch, share, trained)
            write_atomically(picture, plan_page(view, f"Plan of {Path(documents.name).name}", rows))
        else:
            from multipack.reports.picture import draw_step

            head, _, drawn = draw_step(made, 0, max(min(console.columns - 8, 72), 8)).partition("\n")
            console.paragraph(head)
            console.line(drawn)
    console.section(f"plan of {documents.name}", rows)
    if methods:
        from multipack.reports.summary import context_table

        what = "slowest rank over the mean, packs as planned (time: with what is sent)"
        console.table(f"context={command.parallel.context}: {what}", *context_table(methods))
    if picture is not None:
        console.line(f"\npicture written: {picture}")
    console.line()
    console.paragraph(verdict(found, share, ranks))
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
        return Planned(name, source.items(command.train.seed, command.epoch), rows=rows)
    return Planned(name, found.lengths, found.target_counts, found.weights, rows)


def _planned(
    documents: Planned, command: PlanCommand, console: Console
) -> tuple[Plan, PlanReport, list[str]]:
    """The plan of documents, its report, and sentences of advice."""
    from multipack.planning.advice import advise
    from multipack.planning.cost import CostModel
    from multipack.planning.plan import plan as make_plan
    from multipack.planning.report import report
    from multipack.reports.console import PLANNING

    with console.notice(PLANNING):
        made = make_plan(
            documents.lengths,
            targets=documents.targets,
            weights=documents.weights,
            seed=command.train.seed,
            epoch=command.epoch,
            cost=CostModel.from_shape(command.model, adapter=command.adapter),
            options=command.plan.for_ranks(command.world_size),
        )
        found = report(made, command.world_size, command.sync)
    return made, found, advise(made, found)


def _context(planned: Plan, command: PlanCommand) -> list[ContextMeasure]:
    """Methods of context parallelism on evenly spaced packs; empty for one rank, or a cost without a shape.

    Empty for documents that share their beginnings, too: only Ulysses computes them.
    """
    from multipack.planning.placement import Placing, Prices
    from multipack.planning.placement_report import measure_context
    from multipack.planning.report import evenly_spaced

    cost, ranks = planned.cost_model, command.parallel.context
    if ranks == 1 or cost.shape is None or planned.min_prefix is not None:
        return []
    numbers = evenly_spaced(planned.num_packs, CONTEXT_PACKS).tolist()
    packs = [
        planned.order[planned.pack_offsets[number] : planned.pack_offsets[number + 1]] for number in numbers
    ]
    placing = Placing(cost, ranks, Prices.of(cost.shape, ranks))
    slots = -(-planned.capacity // ranks) * ranks
    return measure_context([planned.slots[pack] for pack in packs], placing, slots, cost.shape)


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
    lengths = read_lengths(Path(source), capacity)
    console = Console(stream=sys.stderr if as_json else None)
    started = time.perf_counter()
    with console.notice(PLANNING):
        packs = make_packs(lengths, capacity, command.method, limit, command.time_budget)
    seconds = time.perf_counter() - started
    tokens, bound, gap = int(lengths.sum()), packs.lower_bound or 0, packs.gap
    filled = tokens / (len(packs) * capacity)
    if command.out:
        with io.BytesIO() as buffer:
            np.savez(buffer, order=packs.order, offsets=packs.offsets, lower_bound=bound, capacity=capacity)
            write_atomically(Path(command.out), buffer.getvalue())
    if as_json:
        found = {"documents": len(lengths), "tokens": tokens, "packs": len(packs), "lower_bound": bound}
        print_json({**found, "gap": gap, "filled": filled, "seconds": seconds})
        return
    proven = f"at most {gap:,} more than needed ({gap / len(packs):.3%})" if gap else "this is the minimum"
    rows = [
        ("documents", f"{len(lengths):,} of {int(lengths.min()):,} … {int(lengths.max()):,} tokens"),
        ("tokens", f"{tokens:,}"),
        ("packs", f"{len(packs):,} of at most {capacity:,} tokens, by {command.method}"),
        ("proven bound", f"{bound:,} packs are a lower bound: {proven}"),
        ("filled", f"{filled:.4%} of the slots hold tokens"),
        ("largest pack", counted(int(packs.sizes().max()), "documents")),
        ("packed in", f"{seconds:.3f} s"),
    ]
    console.section(f"packs of {source}", rows + ([("written to", command.out)] if command.out else []))
