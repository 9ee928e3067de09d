"""What the scripts that draw the pictures of docs/ share: colors, axes, boxes, and SVG files that are small."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

RANK = ["#4c78a8", "#f58518", "#54a24b", "#b279a2"]
"""Colors of ranks 0 to 3, in every picture."""
DOCUMENT = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b"]
BY_RANK = {f"rank {rank}": color for rank, color in enumerate(RANK)}
INK, PALE = "#333333", "#e4e7ec"


@contextmanager
def picture(name: str, folder: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Axes to draw on, saved as a small SVG without dates."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    yield figure.subplots(rows, columns, squeeze=False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(folder / name, format="svg", metadata={"Date": None})
    (folder / name).write_text(smaller((folder / name).read_text()))


def smaller(svg: str) -> str:
    """The same picture in half of the bytes: a tenth of a point is exact enough, and nothing is cut off."""
    svg = re.sub(
        r' clip-path="[^"]*"| id="(patch|text)_\d+"|; stroke-linejoin: miter| *<!-- .* -->\n', "", svg
    )
    svg = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r"(\d\.\d)\d+", r"\1", svg)
    return re.sub(r"\n *(?=[LzC\"]|<path|</g>)", " ", svg)


def plain(axes: Any, title: str, x: str = "", y: str = "", ticks: bool = True) -> None:
    """A title on the left, names of the axes, and no more lines than needed."""
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel(x, fontsize=8, color=INK)
    axes.set_ylabel(y, fontsize=8, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    if not ticks:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)


def legend(axes: Any, colors: Mapping[str, str], below: float | None = None, **more: Any) -> None:
    """Names of colors: inside the axes, or in one row at a distance below them."""
    if below is not None:
        more |= {"loc": "upper left", "bbox_to_anchor": (0, -below), "frameon": False, "ncols": len(colors)}
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    axes.legend(handles=handles, fontsize=7, **more)


def rank_rows(axes: Any) -> None:
    """A row of height 1 for each rank, from above."""
    axes.set_ylim(len(RANK), -0.1)
    axes.set_yticks(np.arange(len(RANK)) + 0.4, BY_RANK)
    axes.set_xticks([])


def box(axes: Any, place: tuple[float, float], size: tuple[float, float], color: str, text: str = "") -> None:
    """A filled box with a text in its middle."""
    axes.add_patch(Rectangle(place, *size, facecolor=color, edgecolor="white", linewidth=0.6))
    if text:
        middle = (place[0] + size[0] / 2, place[1] + size[1] / 2)
        axes.text(
            *middle, text, ha="center", va="center", fontsize=7, color="white" if color != PALE else INK
        )


def link(axes: Any, start: tuple[float, float], end: tuple[float, float], word: str, color: str) -> None:
    """An arrow in both directions between two ranks, with a word."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "<->", "color": color, "linewidth": 1.2})
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    axes.text(
        *middle, word, fontsize=7, color=color, ha="center", va="bottom", backgroundcolor=(1, 1, 1, 0.7)
    )
