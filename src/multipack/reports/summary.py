"""Rows of text about settings, plans, token stores and audits, for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from multipack.data.text.skipped import counted
from multipack.reports.console import Console, wrapped

if TYPE_CHECKING:
    from multipack.data.views.corpus import Corpus
    from multipack.data.views.corpus_report import CorpusReport
    from multipack.planning.options import PlanOptions
    from multipack.planning.placement_report import ContextMeasure
    from multipack.planning.report import PlanReport
    from multipack.reports.audit import Audit

Rows = list[tuple[str, str]]
"""(name, value) of each row."""


def settings_text(
    rows: Sequence[tuple[str, str, str, str]], presets: Mapping[str, Sequence[str]], columns: int
) -> str:
    """Return a table of settings by group, as text, from their key, type, default and meaning, and groups' presets."""
    width = max(len(key) for key, *_ in rows)
    lines: list[str] = []
    for group, several in groupby(rows, lambda row: row[0].split(".")[0] if "." in row[0] else ""):
        names = "|".join(presets.get(group, ()))
        heading = f"{group}={names}" if names else group
        lines += ["", _wrapped_choices(heading, columns, 2)] if group else [""]
        for key, kind, default, meaning in several:
            shown = f" [{default}]".replace("\n", "\\n") if default not in ("", "[]") else ""
            lines.append(
                f"  {key:<{width}}  {_wrapped_choices(f'{meaning} ({kind}){shown}', columns, width + 4)}"
            )
    return "\n".join(lines).strip("\n")


def _wrapped_choices(text: str, columns: int, indent: int) -> str:
    """Wrap text, also after the | between choices if they do not fit in a line."""
    whole = wrapped(text, columns, indent)
    if max(map(len, f"{' ' * indent}{whole}".split("\n"))) <= columns:
        return whole
    return wrapped(text.replace("|", "| "), columns, indent).replace("| ", "|")


def report_rows(
    report: PlanReport,
    padded_share: float,
    batch_size: int,
    ranks: int,
    options: PlanOptions,
    advice: Sequence[str],
) -> Rows:
    """Return the rows of a plan's report, and sentences that recommend other settings.

    `padded_share` is the share of real tokens in padded random batches of `batch_size` documents.
    """
    # With a budget below the capacity, lower bounds hold for full packs only.
    full = options.budget in (0, options.capacity)
    bound = "lower bound" if full else "lower bound for full packs"
    dropped = counted(report.dropped_documents, "documents"), counted(report.dropped_tokens, "tokens")
    carried = report.carried_documents
    milliseconds = f"{1000 * report.seconds:.1f} ms"
    return _rows(
        ("documents", f"{report.documents:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("packs", f"{report.packs:,} ({bound} {report.minimum_packs:,})"),
        ("global steps", f"{report.steps:,} ({bound} {report.minimum_steps:,})"),
        (
            "packing efficiency",
            f"{report.efficiency:.2%} {_filled(report)};"
            f" {report.efficiency_but_last:.2%} without the last step",
        ),
        ("shared", _shared_text(report)),
        *(_balance_rows(report, ranks) if ranks > 1 else []),
        (
            "displacement",
            "steps between a document's place in the order and its step: median"
            f" {report.displacement_median:.1f}, 99 % {report.displacement_p99:.1f}, maximum"
            f" {report.displacement_max:.1f}; longest wait {counted(report.longest_wait, 'steps')}",
        ),
        (
            "mean length",
            f"standard deviation over steps: {report.mean_length_spread:.2f} × that of random steps"
            if report.mean_length_spread is not None
            else "",
        ),
        ("dropped", ", ".join(dropped)),
        ("carried", f"{carried:,} documents, trained first in the next epoch" if carried else ""),
        ("padding", f"{report.padding:.2%} of the slots, if every pack is padded to the capacity"),
        (
            "padding instead",
            f"{padded_share:.1%} real tokens in random batches of {batch_size} padded to the longest document",
        ),
        ("planned in", f"{report.seconds:.2f} s" if report.seconds >= 0.1 else milliseconds),
        *(("" if index else "advice", sentence) for index, sentence in enumerate(advice)),
    )


def _rows(*rows: tuple[str, str]) -> Rows:
    """The rows that have a text."""
    return [(name, text) for name, text in rows if text]


def _filled(report: PlanReport) -> str:
    """Return the words after the efficiency, which is above 1, and no share, where documents share tokens."""
    return "real tokens over slots" if report.slots < report.tokens else "of the slots hold tokens"


def _shared_text(report: PlanReport) -> str:
    """Return what documents that share their beginnings save; empty if they do not."""
    if report.slots >= report.tokens:
        return ""
    bound = f"no packs of these documents have fewer than {report.minimum_slots:,}"
    most = f"at most {report.tokens / report.minimum_slots:.1%}"
    return f"{report.tokens:,} tokens in {report.slots:,} slots; {bound}: {most}"


def verdict(report: PlanReport, padded_share: float, ranks: int) -> str:
    """Return the results of a plan in one line."""
    found = f"{report.efficiency:.1%} {_filled(report)} ({padded_share:.1%} in padded batches)"
    if ranks == 1:
        return found
    ceiling = f"no arrangement exceeds {report.cost_utilization_ceiling:.2%}"
    return f"{found}; {ranks} ranks compute {report.cost_utilization:.2%} of the time ({ceiling})"


def corpus_rows(corpus: Corpus) -> Rows:
    """Return rows about documents that are not in the plan, or changed."""
    held = len(corpus.validation)
    return _rows(
        ("validation", f"{counted(held, 'documents')} kept for it" if held else ""),
        ("too long", corpus.train_fit.describe()),
        *(("left out", line) for line in corpus.skipped),
        *(("warning", text) for text in corpus.train.store.warnings),
    )


def _balance_rows(report: PlanReport, ranks: int) -> Rows:
    """Return the rows about balance between ranks, for more than one rank."""
    sampled = report.measured_steps < report.steps
    return _rows(
        (
            "utilization",
            f"{report.utilization:.2%} (mean tokens of a rank / maximum, {ranks} ranks)",
        ),
        (
            "cost utilization",
            f"{report.cost_utilization:.2%} (mean cost of a rank / maximum, {ranks} ranks);"
            f" upper bound for these steps: {report.cost_utilization_ceiling:.2%}",
        ),
        ("of the ceiling", f"{report.ceiling_reached:.2%} of the upper bound"),
        (
            "κ",
            f"{report.kappa:.3f} = cost of a token in the longest document / mean cost of a token; near 1, full packs"
            " cost the same",
        ),
        (
            "imbalance",
            f"maximum cost of a rank / mean: {report.imbalance_mean:.4f}, at the worst sync point"
            f" {report.imbalance_max:.4f}",
        ),
        (
            "L² lag",
            f"{report.l2_lag_mean:,.0f} mean, {report.l2_lag_max:,.0f} max (√ of the ranks' difference in Σ l²)",
        ),
        ("measured", f"{report.measured_steps:,} evenly spaced steps" if sampled else ""),
    )


def context_table(methods: Sequence[ContextMeasure]) -> tuple[list[str], list[list[str]]]:
    """Return names of columns, and rows of cells, that compare methods of context parallelism; → marks `auto`."""
    columns = ["", "attention", "worst", "step", "worst", "sent, MiB a pack", "time"]
    cells = [
        [
            f"{'→ ' if each.method == 'auto' else ''}{each.method}",
            *(f"{value:.3f}" for value in (each.attention_mean, each.attention_max)),
            *(f"{value:.3f}" for value in (each.step_mean, each.step_max)),
            f"{each.payload / 2**20:,.1f}",
            f"{each.time:.3f}",
        ]
        for each in methods
    ]
    return columns, cells


def store_rows(path: Path, report: CorpusReport) -> Rows:
    """Return the rows about a token store, complete or not."""
    documents = f"{report.documents:,}{' preference pairs' if report.pairs else ''}"
    shards = f"{report.shards:,}{'' if report.is_complete else ' so far'}"
    return _rows(
        ("folder", str(path)),
        ("shards", shards if report.shards > 1 or not report.is_complete else ""),
        ("corpus", report.description),
        ("documents", "one stream, which training cuts into blocks" if report.is_stream else documents),
        ("tokens", f"{report.tokens:,}"),
        ("vocabulary", f"{report.vocabulary_size:,}"),
        ("targets", f"{report.targets:,} ({report.target_share:.1%} of the tokens)"),
        *(_length_rows(report) if not report.is_stream else []),
        *(("left out", line) for line in report.noted.lines()),
        *(("warning", text) for text in report.warnings),
        ("size", f"{report.bytes / 2**20:,.1f} MiB"),
    )


def _length_rows(report: CorpusReport) -> Rows:
    spread = f"{report.mean:,.1f} mean, {report.median:,.0f} median"
    excess = [
        f"for packs of {entry.capacity:,}: {entry.documents / report.documents:.2%} of the documents, by"
        f" {entry.tokens / report.tokens:.2%} of the tokens"
        for entry in report.excess
    ]
    return [
        ("lengths", f"{spread}; 99 % have at most {report.p99:,.0f} tokens"),
        ("longest", f"{report.longest:,} tokens: {report.longest_name}"),
        *(("" if number else "too long", text) for number, text in enumerate(excess)),
    ]


def print_store(console: Console, path: Path, report: CorpusReport, fit: str = "") -> None:
    """Print the rows of a token store, the policy for long documents, and a histogram of document lengths."""
    console.section("token store", [*store_rows(path, report), *_rows(("too long", fit))])
    if not report.is_stream:
        console.line("\ndocuments by length in tokens")
        console.line("\n".join(histogram_lines(report, console.columns)))


def histogram_lines(report: CorpusReport, columns: int) -> list[str]:
    """Return a bar chart of document lengths, one line per power of two."""
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


def audit_rows(found: Audit) -> Rows:
    """Return rows about the documents of each epoch of a run, and problems."""
    rows = []
    for each in found.epochs:
        whole = f" of {each.planned:,}" if each.planned is not None else ""
        total = f" of {each.total:,}" if each.total is not None else ""
        parts = [f"{counted(each.trained, 'documents')} trained{total} in {each.steps:,}{whole} steps"]
        counts = {
            "carried in": each.carried_in,
            "carried into the next": each.carried,
            "dropped": each.dropped,
            "repeated": each.repeated,
            "lost": each.lost,
        }
        parts += [f"{count:,} {name}" for name, count in counts.items() if count]
        state = "each exactly once" if each.is_complete else "none twice so far"
        rows.append(
            (
                f"epoch {each.epoch}",
                f"{'; '.join(parts)}: {'not exact' if each.repeated or each.lost else state}",
            )
        )
    rows += [("note", note) for note in found.notes]
    return rows + [("problem", problem) for problem in found.problems]
