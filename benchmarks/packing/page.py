"""The page and the picture of the packing benchmark, from its figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packing.tools import WRITTEN
from planning_tables.table import markdown
from result import DOCS, write_between

PAGE, PICTURE = DOCS / "packing-benchmark.md", DOCS / "packing-benchmark.png"

OURS, THEIRS = "#0b6e4f", "#5b6470"

Figures = dict[str, Any]


def excess(found: Figures) -> float:
    """Steps above the proven least, over the least."""
    return found["steps"] / max(found["least_steps"], 1) - 1


def inexact(found: Figures, documents: int) -> float:
    """Share of documents not trained exactly once and whole. A document may count for two reasons."""
    return (found["lost"] + found["repeated"] + found["cut"]) / documents


def number(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "–" if value is None else format(value, form)


def set_rows(figures: Figures) -> list[list[str]]:
    """The table of one set, headings first."""
    rows = [
        ["tool", "packs", "steps", "fill", "slowest / mean", "time", "lost", "repeated", "cut", "over", "empty",
         "moved", "random", "CPU s"]
    ]  # fmt: skip
    for name, found in figures["tools"].items():
        if "refused" in found:
            rows.append([name, "refused", *("–" for _ in rows[0][2:])])
            continue
        packs = found["steps"] * (figures.get("ranks") or 8)
        rows.append([
            name, f"{packs:,}", f"{found['steps']:,}", f"{found['fill']:.2%}", f"{found['balance']:.4f}",
            f"{found['work']:.4f}", *(f"{found[key]:,}" for key in ("lost", "repeated", "cut", "over", "empty")),
            number(found["moved"], ".1%"), number(found["spread"], ".2f"), f"{found['seconds']:.4f}",
        ])  # fmt: skip
    return rows


def title(name: str, figures: Figures) -> str:
    """A set in a line."""
    return (
        f"{name}: {figures['documents']:,} documents, {figures['tokens']:,} tokens, capacity {figures['capacity']:,};"
        f" at least {figures['bound']:,} packs"
        + (" (reached)" if figures["fewest"] == figures["bound"] else f", {figures['fewest']:,} found")
    )


def too_long_rows(figures: Figures) -> list[list[str]]:
    """What each tool does with a document longer than a pack."""
    rows = [["tool", "with one document of 2,100 tokens and packs of 2,048"]]
    for name, found in figures["tools"].items():
        rows.append([name, _fate(found)])
    return rows


def _fate(found: Figures) -> str:
    if "refused" in found:
        return f"refuses: {found['refused'].split(';')[0]}"
    names = {"lost": "document{} lost", "cut": "document{} cut", "over": "pack{} over the capacity"}
    counts = [
        f"{found[key]:,} {name.format('s' * (found[key] > 1))}" for key, name in names.items() if found[key]
    ]
    return ", ".join(counts)


def summary_rows(figures: Figures) -> list[list[str]]:
    """A row a tool: the median over the sets, and the worst set in parentheses."""
    rows = [
        ["tool", "run", "steps over the least", "fill", "slowest / mean", "time", "lost", "repeated", "cut", "moved",
         "random", "CPU µs a document"]
    ]  # fmt: skip
    for name, tool in figures["tools"].items():
        found = [(each["tools"][name], each["documents"]) for each in figures["sets"].values()]
        found = [(values, documents) for values, documents in found if "refused" not in values]

        def both(
            value: Callable[[Figures], float], form: str, worst: Callable[..., float] = max, of=found
        ) -> str:
            values = [value(each) for each, _ in of]
            return f"{statistics.median(values):{form}} ({worst(values):{form}})"

        shares = [
            f"{statistics.mean(each[key] / documents for each, documents in found):.2%}"
            for key in ("lost", "repeated", "cut")
        ]
        moved = [each["moved"] for each, _ in found if each["moved"] is not None]
        random = [each["spread"] for each, _ in found if each["spread"] is not None]
        seconds = sum(each["seconds"] for each, _ in found) / sum(documents for _, documents in found)
        written = tool["how"] == WRITTEN
        rows.append([
            f"[{name}]({tool['source']})", tool["how"], both(excess, ".1%"),
            both(lambda each: each["fill"], ".1%", min), both(lambda each: each["balance"], ".3f"),
            both(lambda each: each["work"], ".3f"), *shares,
            f"{statistics.median(moved):.1%}" if moved else "–", f"{statistics.median(random):.1f}",
            f"({1e6 * seconds:.2g})" if written else f"{1e6 * seconds:.2g}",
        ])  # fmt: skip
    return rows


def write(figures: Figures) -> None:
    """Put the tables between the marks of the page, and draw the picture."""
    write_between(PAGE, "tables", tables(figures))
    draw(figures, PICTURE)
    print(f"wrote {PICTURE}")


def tables(figures: Figures) -> str:
    """Every table in Markdown; those of single sets are folded."""
    machine = figures["machine"]
    parts = [
        f"{figures['ranks']} ranks, {len(figures['sets'])} sets; measured on {machine['cpu']}, one thread,"
        f" Python {machine['python']}, numpy {machine['numpy']}."
        + f" Not installed: {', '.join(figures['absent'])}."
        * bool(figures["absent"]),
        markdown(summary_rows(figures)),
        "### One document is too long",
        markdown(
            [[cell.replace("|", "/") for cell in row] for row in too_long_rows(figures["one too long"])]
        ),
        "### Each set",
    ]
    for name, each in figures["sets"].items():
        rows = markdown(set_rows(each))
        parts.append(f"<details><summary>{title(name, each)}</summary>\n\n{rows}\n\n</details>")
    return "\n\n".join(parts)


def draw(figures: Figures, path: Path) -> None:
    """A row a tool, a dot a set, a bar at the median: steps, time, documents, CPU time.

    Raises:
        SystemExit: Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("the picture needs Matplotlib: pip install 'multipack[bench]'") from None
    panels: list[tuple[str, Callable[[Figures, int], float], float]] = [
        ("steps above the proven least", lambda each, _: excess(each), 1e-3),
        ("time above perfect balance without padding", lambda each, _: each["work"] - 1, 1e-4),
        ("documents lost, repeated or cut", inexact, 1e-4),
        ("CPU seconds a million documents", lambda each, documents: 1e6 * each["seconds"] / documents, 0),
    ]
    names = list(figures["tools"])
    picture = Figure(figsize=(13, 0.27 * len(names) + 1.2), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(1, len(panels), sharey=True)
    for axis, (label, value, least) in zip(axes, panels, strict=True):
        for row, name in enumerate(names):
            found = [(each["tools"][name], each["documents"]) for each in figures["sets"].values()]
            values = [
                max(value(each, documents), least) for each, documents in found if "refused" not in each
            ]
            if not least and figures["tools"][name]["how"] == WRITTEN:
                axis.text(0.5, row, "(written here)", transform=axis.get_yaxis_transform(), color="#8a929c",
                          ha="center", va="center", size=8)  # fmt: skip
                continue
            color = OURS if _is_ours(name) else THEIRS
            axis.plot(values, [row] * len(values), "o", ms=4.5, mew=0, alpha=0.45, color=color)
            axis.plot([statistics.median(values)], [row], "|", ms=11, mew=2.2, color=color)
        _style(axis, label, least)
    axes[0].set_yticks(range(len(names)), names, size=9)
    axes[0].invert_yaxis()
    for text in axes[0].get_yticklabels():
        text.set_fontweight("bold" if _is_ours(text.get_text()) else "normal")
    picture.supxlabel(
        "a dot is a set of lengths, a bar the median; logarithmic, further left is better", size=9
    )
    picture.savefig(path, dpi=100)


def _is_ours(name: str) -> bool:
    return name.startswith("multipack") and not name.startswith("multipack V2")


def _style(axis: Any, label: str, least: float) -> None:
    """A logarithmic axis in powers of ten, percent from `least`, which stands for everything below it, 0 included."""
    axis.set_xscale("log")
    axis.set_title(label, size=9.5)
    axis.grid(axis="x", color="#e4e7eb", lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    low, high = axis.get_xlim()
    powers = [10.0**power for power in range(-4, 4)]
    ticks = [power for power in powers if max(least, low) <= power <= high]
    ticks = ticks[:: 1 + (len(ticks) > 5)]
    names = [f"{100 * tick:,g}%" if least else f"{tick:g}" for tick in ticks]
    axis.set_xticks(ticks, [f"≤{names[0]}" if least else names[0], *names[1:]], size=8.5)
    axis.set_xticks([], minor=True)
    axis.tick_params(length=0)
    axis.set_xlim(least * 0.7 or low, high)
