"""Rows of text about settings, a plan and a token store, for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multipack.planning.explore import Row
from multipack.planning.options import PlanOptions
from multipack.planning.report import PlanReport
from multipack.reports.console import Console, wrapped

if TYPE_CHECKING:
    from multipack.data.corpus_report import CorpusReport

Rows = list[tuple[str, str]]


def settings_text(
    rows: Sequence[tuple[str, str, str, str]], presets: Mapping[str, Sequence[str]], columns: int
) -> str:
    """A table of settings, a group after the other.

    Args:
        rows: (key, type, default, meaning) of each.
        presets: names that `group=NAME` understands.
        columns: most columns of a line.
    """
    width, last = max(len(key) for key, *_ in rows), None
    lines: list[str] = []
    for key, kind, default, meaning in rows:
        group = key.split(".")[0] if "." in key else ""
        if group != last:
            names = "|".join(presets.get(group, ()))
            lines += (
                ["", _wrapped_choices(f"{group}={names}", columns, 2) if names else group] if group else [""]
            )
        last = group
        shown = f" [{default}]".replace("\n", "\\n") if default not in ("", "[]") else ""
        told = _wrapped_choices(f"{meaning} ({kind}){shown}", columns, width + 4)
        lines.append(f"  {key:<{width}}  {told}")
    return "\n".join(lines).strip("\n")


def _wrapped_choices(text: str, columns: int, indent: int) -> str:
    """Text wrapped, also behind the bars between choices where these fill a line."""
    whole = wrapped(text, columns, indent)
    if max(map(len, f"{' ' * indent}{whole}".split("\n"))) <= columns:
        return whole
    return wrapped(text.replace("|", "| "), columns, indent).replace("| ", "|")


def report_rows(report: PlanReport, share: float, batch_size: int, ranks: int, full: bool = True) -> Rows:
    """A plan in words.

    Args:
        report: of the plan, dealt to `ranks`.
        share: real-token share of padding random batches of `batch_size` documents.
        batch_size: see `share`.
        ranks: data-parallel ranks.
        full: packs shall be full; else a budget below the capacity keeps room, and bounds for full packs do not
            say how good the plan is.
    """
    least = "no packing could have fewer than" if full else "full ones would be at least"
    fewest = "no plan could have fewer than" if full else "of full packs there would be at least"
    return [
        ("documents", f"{report.documents:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("packs", f"{report.packs:,} ({least} {report.minimum_packs:,})"),
        ("global steps", f"{report.steps:,} ({fewest} {report.minimum_steps:,})"),
        (
            "packing efficiency",
            f"{report.efficiency:.2%} of the slots of all steps hold tokens;"
            f" {report.efficiency_but_last:.2%} without the last step",
        ),
        *(_balance_rows(report, ranks) if ranks > 1 else []),
        *_order_rows(report),
        ("dropped", f"{report.dropped_documents:,} documents, {report.dropped_tokens:,} tokens"),
        *_some("carried", report.carried_documents, "documents open the next epoch"),
        *_some("split", report.split_documents, "documents were longer than a pack, and cut or split"),
        ("padding", f"{report.padding:.2%} of the slots, were every pack padded to the capacity"),
        (
            "padding instead",
            f"{share:.1%} real tokens in random batches of {batch_size} padded to their longest",
        ),
        *([] if report.step_seconds is None else [("predicted", _step_time(report))]),
        ("planned in", _time(report.seconds)),
        *[("advice" if index == 0 else "", sentence) for index, sentence in enumerate(report.advice)],
    ]


def _balance_rows(report: PlanReport, ranks: int) -> Rows:
    """How alike ranks are; a single one waits for nobody, so that all of this would say nothing."""
    sampled = report.measured_steps < report.steps
    return [
        (
            "utilization",
            f"{report.utilization:.2%} (tokens of the mean rank over the fullest, {ranks} ranks)",
        ),
        (
            "cost utilization",
            f"{report.cost_utilization:.2%} (cost of the mean rank over the dearest, {ranks} ranks);"
            f" no arrangement of these steps could exceed {report.cost_utilization_ceiling:.2%}",
        ),
        ("of the ceiling", f"{report.ceiling_reached:.2%} is reached"),
        (
            "κ",
            f"a token of the longest document costs {report.kappa:.3f} times the mean token; full packs can cost the"
            " same where this is near 1",
        ),
        (
            "imbalance",
            f"the dearest rank costs {report.imbalance_mean:.4f} times the mean;"
            f" {report.imbalance_max:.4f} times where ranks meet at their worst",
        ),
        (
            "L² lag",
            f"{report.l2_lag_mean:,.0f} mean, {report.l2_lag_max:,.0f} max (√ of what ranks differ in Σ l², in tokens)",
        ),
        *([("measured", f"{report.measured_steps:,} steps, evenly apart")] if sampled else []),
    ]


def _order_rows(report: PlanReport) -> Rows:
    late = f"; {report.late_share:.2%} moved further than the window"
    rows = [
        (
            "displacement",
            f"{report.displacement_median:.1f} steps from the place in the order for half of the documents,"
            f" {report.displacement_p99:.1f} for 99 %, {report.displacement_max:.1f} at most{late}",
        )
    ]
    if report.mean_length_spread is not None:
        rows.append(
            (
                "mean length",
                f"spreads {report.mean_length_spread:.2f} times as far over the steps as over random ones",
            )
        )
    return rows


def _step_time(report: PlanReport) -> str:
    return f"{report.step_seconds:.4g} s of forward and backward passes a step, by the cost's measured times"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _some(name: str, count: int, what: str) -> Rows:
    """A row for what seldom happens; none where it did not."""
    return [(name, f"{count:,} {what}")] if count else []


def fills_packs(config: PlanOptions) -> bool:
    """Whether packs shall be as full as can be: no budget below the capacity keeps room in them."""
    return config.budget in (0, config.capacity)


def explore_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of `explore`, the chosen row marked by an arrow."""
    columns = ["window", "budget", "group", "steps", "filled", "cost util.", "ceiling", "moved", "spread"]
    cells = [
        [
            f"{'→ ' if row.chosen else ''}{row.window}",
            str(row.budget),
            "yes" if row.group else "no",
            f"{row.steps:,}",
            f"{row.efficiency:.2%}",
            f"{row.cost_utilization:.2%}",
            f"{row.cost_utilization_ceiling:.2%}",
            f"{row.displacement_p99:.1f}",
            "–" if row.mean_length_spread is None else f"{row.mean_length_spread:.2f}",
        ]
        for row in rows
    ]
    return columns, cells


def explore_notes(rows: Sequence[Row]) -> list[str]:
    """How to read the table of `explore`, and how few steps there can be."""
    sampled = [row.measured_steps for row in rows if row.measured_steps < row.steps]
    measured = f" Measured over at most {max(sampled):,} steps of each plan, evenly apart." if sampled else ""
    return [
        "Fill: fewer steps and more filled slots are better;"
        f" no plan of these documents could have fewer than {min(row.minimum_steps for row in rows):,} steps.",
        f"Balance: cost util. is the mean rank's cost over the dearest's, and cannot exceed the ceiling.{measured}",
        "Randomness: 99 % of the documents are trained within so many steps of their place in the order as moved says;"
        " a spread of 1 is that of random steps, and above it documents of like length share steps.",
        "The arrow marks the given settings.",
    ]


def store_rows(path: Path, report: CorpusReport) -> Rows:
    """A token store, or a folder of shards, in words."""
    shards = f"{report.shards:,} shards{'' if report.is_complete else ' so far'}"
    left_out = [row for reason, count in report.skipped.items() for row in _some("left out", count, reason)]
    return [
        ("folder", str(path)),
        *([("stores", shards)] if report.shards > 1 or not report.is_complete else []),
        ("corpus", report.description),
        ("documents", "one stream, cut into blocks by training" if report.is_stream else _documents(report)),
        ("tokens", f"{report.tokens:,}"),
        ("vocabulary", f"{report.vocabulary_size:,}"),
        ("targets", f"{report.targets:,} ({report.target_share:.1%} of the tokens)"),
        *(_length_rows(report) if not report.is_stream else []),
        *left_out,
        ("size", f"{report.bytes / 2**20:,.1f} MiB"),
    ]


def _documents(report: CorpusReport) -> str:
    return f"{report.documents:,}{' preference pairs' if report.pairs else ''}"


def _length_rows(report: CorpusReport) -> Rows:
    return [
        (
            "lengths",
            f"{report.mean:,.1f} mean, {report.median:,.0f} median; 99 % have at most {report.p99:,.0f} tokens",
        ),
        ("longest", f"{report.longest:,} tokens: {report.longest_name}"),
        *[
            (
                "" if number else "too long",
                f"for packs of {entry.capacity:,}: {entry.documents / report.documents:.2%} of the documents, with"
                f" {entry.tokens / report.tokens:.2%} of the tokens beyond",
            )
            for number, entry in enumerate(report.excess)
        ],
    ]


def tell_store(console: Console, path: Path, report: CorpusReport) -> None:
    """Print a token store, or a folder of shards: its figures, and its documents by length."""
    console.section("token store", store_rows(path, report))
    if report.is_stream:  # of one document, which training cuts, its length says nothing
        return
    console.line("\ndocuments by length in tokens")
    for line in histogram_lines(report, console.columns):
        console.line(line)


def histogram_lines(report: CorpusReport, columns: int) -> list[str]:
    """Documents by length as bars, a line for each power of two."""
    most = max(bar.documents for bar in report.histogram)
    names = [
        f"{bar.first:,}" if bar.first == bar.last else f"{bar.first:,} … {bar.last:,}"
        for bar in report.histogram
    ]
    width = max(map(len, names))
    counts = [f"{bar.documents:,} ({bar.documents / report.documents:.1%})" for bar in report.histogram]
    room = max(columns - width - max(map(len, counts)) - 6, 8)
    lines = []
    for name, count, bar in zip(names, counts, report.histogram, strict=True):
        eighths = max(round(8 * room * bar.documents / most), 1 if bar.documents else 0)
        drawn = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
        lines.append(f"  {name:>{width}}  {drawn}{' ' if drawn else ''}{count}")
    return lines
