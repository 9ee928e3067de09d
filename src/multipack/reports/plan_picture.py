"""`draw_plan`: a plan as a picture (PNG or SVG), by Matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = "viridis"
"""Color map of lengths and costs: lightness rises evenly, so that it can be read without hue."""
FREE, INK, ACCENT, MARK = "#dfe2e7", "#1c2330", "#0067a8", "#c2570c"
"""Colors of free slots, of text, of values, and of bounds and marks."""


def draw_plan(view: dict[str, Any], kind: str) -> bytes:
    """A picture of a plan.

    Args:
        view: values of `plan_view`.
        kind: `png` or `svg`.
    """
    parts = [(1.5, _draw_blocks)]
    parts += [(1.1, _draw_trees)] if view["trees"] else []
    parts += [(1.25, _draw_heat)] if view["ranks"] > 1 else []
    parts += [(1.0, _draw_measures)]
    figure = Figure(figsize=(12, 3.4 * len(parts) + 0.9), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(view["headline"], x=0.012, ha="left", fontsize=13, color=INK, weight="bold")
    places: Any = figure.subfigures(len(parts), 1, height_ratios=[height for height, _ in parts])
    for place, (_, draw) in zip(places, parts, strict=True):
        draw(place, view)
    with io.BytesIO() as buffer:
        figure.savefig(buffer, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
        return buffer.getvalue()


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors="#5d6675")


def _draw_blocks(figure: Any, view: dict[str, Any]) -> None:
    """Padded batches above the packs of the same documents: a document is a block, in the color of its length."""
    blocks, capacity = view["blocks"], view["capacity"]
    above, below = figure.subplots(2, 1)
    count, packs = len(blocks["length"]), blocks["packs"]
    tokens, used = sum(blocks["length"]), sum(blocks["added"])
    lengths = np.log(blocks["length"])
    paint = colormaps[COLORS]((lengths - lengths.min()) / max(np.ptp(lengths), 1e-9))
    padded = np.repeat(blocks["longest"], view["batch_size"])[:count]
    above.bar(np.arange(count), padded, width=1, align="edge", color=FREE)
    above.bar(blocks["place"], blocks["length"], width=1, align="edge", color=paint)
    below.bar(np.arange(packs), capacity, width=0.95, align="edge", color=FREE)
    sizes = {"width": 0.95, "align": "edge", "edgecolor": "white", "lw": 0.3}
    below.bar(blocks["pack"], blocks["added"], bottom=blocks["below"], color=paint, **sizes)
    _plain(
        above,
        f"before: {count:,} documents in padded batches of {view['batch_size']};"
        f" {1 - tokens / blocks['padded_slots']:.1%} padding (gray)",
    )
    some = "" if packs == blocks["all_packs"] else f", evenly spaced of {blocks['all_packs']:,}"
    once = (
        f"; {tokens - used:,} of {tokens:,} tokens are computed in another document" if used < tokens else ""
    )
    free = f"{1 - used / (packs * capacity):.2%} free{once}"
    _plain(below, f"after: the same in {packs:,} packs{some} ({_steps(blocks)}); {free}")
    for axes, things, columns in ((above, "documents", count), (below, "packs", packs)):
        axes.set_xlim(0, columns)
        axes.set_xlabel(f"{things}; color: length of the document", fontsize=8)
        axes.set_ylabel("tokens", fontsize=8)


def _steps(blocks: dict[str, Any]) -> str:
    first, last = blocks["first_step"], blocks["last_step"]
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _draw_trees(figure: Any, view: dict[str, Any]) -> None:
    """The nodes of some packs: documents side by side, and below each node the nodes that continue it."""
    trees = view["trees"]
    most = math.log(max(max(rows for _, rows, *_ in tree["nodes"]) for tree in trees)) or 1.0
    first = view["blocks"]["first_step"]
    figure.suptitle(
        f"beginnings computed once, in step {first:,}: a column is a document; the lighter a node, the more share it",
        x=0.012,
        ha="left",
        fontsize=10,
        color=INK,
    )
    for axes, tree in zip(np.atleast_1d(figure.subplots(1, len(trees))), trees, strict=True):
        left, rows, start, length = np.array(tree["nodes"]).T
        paint = colormaps[COLORS](np.log(rows) / most)
        axes.bar(left, -length, rows, -start, align="edge", color=paint, edgecolor="white", lw=0.5)
        axes.set(xlim=(0, tree["rows"]), ylim=(-tree["deepest"], 0))
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
        axes.set_xticks([])
        _plain(axes, tree_title(tree))
        axes.spines["bottom"].set_visible(False)
    figure.axes[0].set_ylabel("place in the document", fontsize=8)


def tree_title(tree: dict[str, Any]) -> str:
    """The numbers of a pack whose documents share their beginnings, and how many of them are drawn."""
    some = f", the first {tree['rows']} are drawn" if tree["rows"] < tree["documents"] else ""
    return f"{tree['documents']:,} documents, {tree['tokens']:,} tokens in {tree['slots']:,} slots{some}"


def _draw_heat(figure: Any, view: dict[str, Any]) -> None:
    """Cost over ranks and steps, with the slowest rank of each step, above what each step waits for."""
    heat, ranks, all_steps = view["heat"], view["ranks"], view["steps"]
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    cost = np.asarray(heat["cost"])  # (steps, micro-batches, ranks)
    steps, micro_batches = cost.shape[:2]
    drawn = above.imshow(
        cost.transpose(2, 0, 1).reshape(ranks, -1),
        aspect="auto",
        cmap=COLORS,
        extent=(0, steps, ranks, 0),
        interpolation="nearest",
    )
    size = min(max(220 / ranks, 3), 40, (900 / steps) ** 2)
    above.scatter(
        np.arange(steps) + 0.5,
        np.asarray(heat["slowest_rank"]) + 0.5,
        s=size,
        facecolors="none",
        edgecolors=MARK,
    )
    above.set_ylabel("rank", fontsize=8)
    named = np.linspace(0, ranks - 1, min(ranks, 5)).astype(int)
    above.set_yticks(named + 0.5, named)
    each = f", {micro_batches} micro-batches each" if micro_batches > 1 else ""
    shown = f"{steps} of {all_steps:,} steps" if steps < all_steps else f"{steps} steps"
    _plain(above, f"cost of a pack over the mean: ranks × {shown}{each}; circle: slowest rank of the step")
    figure.colorbar(drawn, ax=above, pad=0.01, fraction=0.03).ax.tick_params(labelsize=8)
    middle = np.arange(steps) + 0.5
    below.plot(middle, 100 * (np.asarray(heat["slowest"]) - 1), color=ACCENT, lw=1.4, label="this plan")
    below.plot(
        middle, 100 * (np.asarray(heat["least"]) - 1), color=MARK, lw=1.2, ls="--", label="proven lower bound"
    )
    below.set_ylabel("%", fontsize=8)
    below.set_ylim(0, 1.35 * below.get_ylim()[1])  # room for the legend
    below.set_xlabel("step", fontsize=8)
    ticks = np.linspace(0, steps - 1, min(steps, 9)).astype(int)
    below.set_xticks(ticks + 0.5, [f"{heat['steps'][tick]:,}" for tick in ticks])
    _plain(below, "imbalance: what a step waits for over the mean of its ranks, minus 1")
    below.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")


def _draw_measures(figure: Any, view: dict[str, Any]) -> None:
    """The histogram of lengths, and a dial for each measure."""
    axes = figure.subplots(1, 1 + len(view["dials"]), width_ratios=[2.2] + [1] * len(view["dials"]))
    edges, counts = view["histogram"]["edges"], view["histogram"]["counts"]
    axes[0].bar(
        edges[:-1], counts, width=np.diff(edges), align="edge", color=ACCENT, edgecolor="white", lw=0.4
    )
    axes[0].set_xscale("log")
    axes[0].axvline(view["capacity"], color=MARK, ls="--", lw=1.2)
    axes[0].set_xlabel("tokens", fontsize=8)
    _plain(axes[0], "documents by length; line: capacity")
    for dial, place in zip(view["dials"], axes[1:], strict=True):
        _draw_dial(place, dial)


def _draw_dial(axes: Any, dial: dict[str, Any]) -> None:
    """A half circle from 0 (left) to 1, filled to the value, with a line at the ceiling."""

    def arc(start: float, stop: float) -> tuple[Any, Any]:
        angles = np.pi * (1 - np.linspace(start, stop, 60))
        return np.cos(angles), np.sin(angles)

    axes.plot(*arc(0, 1), color=FREE, lw=11, solid_capstyle="butt")
    axes.plot(*arc(0, max(dial["value"], 1e-3)), color=ACCENT, lw=11, solid_capstyle="butt")
    angle = math.pi * (1 - dial["ceiling"])
    axes.plot(
        [0.86 * math.cos(angle), 1.14 * math.cos(angle)],
        [0.86 * math.sin(angle), 1.14 * math.sin(angle)],
        color=MARK,
        lw=2,
    )
    for at, text in dial["marks"]:
        angle = math.pi * (1 - at)
        axes.text(
            1.28 * math.cos(angle),
            1.28 * math.sin(angle),
            text,
            fontsize=7.5,
            color="#5d6675",
            ha="center",
            va="center",
        )
    axes.text(0, 0.1, dial["shown"], ha="center", fontsize=13, weight="bold", color=INK)
    axes.text(0, -0.12, dial["name"], ha="center", fontsize=10, color=INK)
    axes.text(
        0,
        -0.3,
        "\n".join(textwrap.wrap(dial["text"], 36)),
        ha="center",
        va="top",
        fontsize=7.5,
        color="#5d6675",
    )
    axes.set(xlim=(-1.5, 1.5), ylim=(-0.85, 1.45), aspect="equal")
    axes.axis("off")
