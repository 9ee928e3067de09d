"""Reports of runs: one HTML page, or text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any, NamedTuple

import multipack
from multipack.atomic import write_atomically
from multipack.data.text.skipped import counted
from multipack.reports.curve import text_curve
from multipack.reports.recorded import MOST_TEXT, finite, pairs, texts
from multipack.reports.run_data import Columns, RunData, communication
from multipack.reports.summary import Rows
from multipack.reports.web_page import web_page
from multipack.run import RunDirectory

MOST_POINTS = 1000
"""Points of a curve on the page; longer runs are shown by means of neighboring steps."""
MOST_SAMPLES = 60
"""Samples on the page, evenly spaced."""
PARTS = {
    "waiting for data": "data_time",
    "forward": "dtf",
    "backward": "dtb",
    "communication": "dtc",
    "optimizer": "dto",
    "other": "other",
}
"""Part of a step's time → its column."""
PARTS_NOTE = "Seconds of the process that writes the log. Optimizer includes clipping and callbacks."


class Chart(NamedTuple):
    """A small chart of the page."""

    key: str  # column of the metrics
    title: str
    percent: bool = False  # whether values are shown in percent
    zero: bool = True  # whether the axis begins at 0


CHARTS = [
    Chart("lr", "learning rate"),
    Chart("grad_norm", "norm of the gradient, before clipping"),
    Chart("tps", "tokens per second, without padding"),
    Chart("mfu", "model FLOPs over the devices' peak, %"),
    Chart("padding", "padding: slots without a token", percent=True),
    Chart("cost_spread", "planned imbalance: slowest rank over mean, minus 1", percent=True),
    Chart(
        "time_spread",
        "measured imbalance: slowest rank's forward seconds over mean, minus 1",
        percent=True,
    ),
    Chart("memory", "peak memory, GiB"),
    Chart("target_tokens", "targets of a step"),
]
"""Charts in their order; charts of other metrics follow."""
_SHOWN = {"step", "loss", "dt", *PARTS.values(), *(chart.key for chart in CHARTS)}
"""Metrics that have a place of their own on the page."""
_HIDDEN = {"sps", "sps_per_device", "tps_per_device"}
"""Rates that the page leaves out, as it shows tokens per second."""


def write_page(run: RunDirectory) -> str:
    """Write the page of a run into its directory; returns its path, or why it was not written."""
    try:
        write_atomically(run.page, run_page([RunData(run.path)]))
    except (OSError, ValueError) as error:
        return f"not written: {error}"
    return str(run.page)


def check_records(found: Sequence[RunData]) -> None:
    """Check that there is something to report.

    Raises:
        ValueError: a run has no record yet.
    """
    for each in found:
        if not (len(each.steps) or len(each.evaluations)):
            raise ValueError(
                f"{each.run.path} has no records in {each.run.metrics.name}: it has not taken a step, or they are of"
                " another version"
            )


def run_page(found: Sequence[RunData]) -> bytes:
    """The HTML page of some runs."""
    names = run_names(found)
    # Steps of each run whose mean is a point of its curves.
    step_of = [max(-(-len(each.steps) // MOST_POINTS), 1) for each in found]
    validation = sorted(
        {name for each in found for name in each.evaluations.values if name.startswith("val_loss")}
    )
    own = sorted({name for each in found for name in each.steps.values} - _SHOWN - _HIDDEN)
    single = found[0] if len(found) == 1 else None
    title = f"Run {names[0]}" if single else f"{len(found)} runs"
    rows = dict(pairs(single.start.get("run"))) if single else {}
    labels = {"model": "", "parameters": "parameters: ", "device": ""}
    facts = [f"{label}{rows[name]}" for name, label in labels.items() if name in rows]
    data = {
        "title": title,
        "subtitle": " · ".join(facts) or ", ".join(names),
        "made": f"multipack {multipack.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "mean_of": max(step_of),
        "validation": validation,
        "charts": [
            chart._asdict()
            for chart in [*CHARTS, *(Chart(key, key.replace("_", " "), zero=False) for key in own)]
        ],
        "evaluated": sorted(
            {name for each in found for name in each.evaluations.values} - {*validation, "step", "train_loss"}
        ),
        "parts_note": " ".join(dict.fromkeys([PARTS_NOTE, *filter(None, map(communication, found))])),
        "config": config_rows(found),
        "runs": [_run(each, name, width) for each, name, width in zip(found, names, step_of, strict=True)],
    }
    return web_page(f"{title} · multipack", "run_page.js", data)


def _run(found: RunData, name: str, mean_of: int) -> dict[str, Any]:
    """The data of a run for its page."""
    steps = dict(found.steps.values)
    shares = time_shares(found.steps)
    if shares:
        known = [key for key in PARTS.values() if key != "other" and key in steps]
        parts = zip(steps["dt"], *(steps[key] for key in known), strict=True)
        steps["other"] = [max(dt - sum(filter(math.isfinite, rest)), 0.0) for dt, *rest in parts]
    every = max(-(-len(found.samples) // MOST_SAMPLES), 1)
    samples = found.samples[::-1][::every][::-1]  # with the last one
    bars, note = padding_cost(found)
    return {
        "name": name,
        "tiles": key_figures(found),
        "steps": {key: means(values, mean_of, key == "step") for key, values in steps.items()},
        "evals": found.evaluations.values,
        "parts": [(part, PARTS[part], share) for part, share in shares.items()],
        "padding": bars,
        "padding_note": note,
        "plan": pairs(found.start.get("plan")),
        "samples": [(step, text[:MOST_TEXT]) for step, text in samples],
        "checkpoints": [(name, *about) for name, about in found.checkpoints().items()],
        "sessions": sessions(found),
        "warnings": warnings(found),
        "facts": [
            *pairs(found.start.get("run")),
            *(("note", text) for text in texts(found.start.get("details"))),
        ],
    }


def run_names(found: Sequence[RunData]) -> list[str]:
    """A name for each run: its folder, with as many of its parents as make the names differ."""
    paths = [each.run.path.resolve() for each in found]
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def means(values: list[float], width: int, last: bool) -> list[float]:
    """Means of groups of `width` values, without NaN; with `last`, the last value of each group."""
    if width == 1:
        return values
    groups = [values[start : start + width] for start in range(0, len(values), width)]
    if last:
        return [group[-1] for group in groups]
    known = [[value for value in group if not math.isnan(value)] for group in groups]
    return [fmean(group) if group else math.nan for group in known]


def tokens_and_seconds(steps: Columns) -> tuple[float, float]:
    """Tokens of all recorded steps, without padding, and their seconds."""
    seconds = steps.column("dt")
    products = [rate * dt for rate, dt in zip(steps.column("tps"), seconds, strict=True)]
    return sum(filter(math.isfinite, products)), sum(filter(math.isfinite, seconds))


def key_figures(found: RunData) -> Rows:
    """(name, value) of the most important numbers of a run."""
    steps, evaluations = found.steps, found.evaluations
    tokens, seconds = tokens_and_seconds(steps)
    loss = evaluations.last("val_loss")
    # Preferences, which have further metrics, have no perplexity.
    others = [name for name in evaluations.values if name.startswith("val_") and "val_loss" not in name]
    imbalance = _of(median, steps.known("time_spread"))
    perplexity = math.exp(loss) if loss < 50 and not others else math.nan
    known: dict[str, tuple[float, Callable[[float], str]]] = {
        "training loss of the last step": (steps.last("loss"), "{:.4f}".format),
        "validation loss": (loss, "{:.4f}".format),
        "perplexity on validation documents": (perplexity, "{:,.4g}".format),
        "tokens/s without padding, median": (_of(median, steps.known("tps")), "{:,.0f}".format),
        "MFU, median": (_of(median, filter(None, steps.known("mfu"))), "{:.1f} %".format),
        "padding, mean": (100 * _of(fmean, steps.known("padding")), "{:.2f} %".format),
        "tokens trained": (tokens if seconds else math.nan, _large),
        "time in steps": (seconds or math.nan, duration),
        "measured imbalance of ranks, median": (100 * imbalance, "{:.1f} %".format),
        "peak memory": (_of(max, steps.known("memory")), "{:.2f} GiB".format),
    }
    done, total = int(steps.last("step")) if len(steps) else 0, found.total_steps
    rows = [("steps", f"{done:,} of {total:,}" if total else f"{done:,}")]
    return rows + [(name, shown(value)) for name, (value, shown) in known.items() if math.isfinite(value)]


def _of(statistic: Callable[[list[float]], float], values: Iterable[float]) -> float:
    """A statistic of values; NaN if there are none."""
    found = list(values)
    return statistic(found) if found else math.nan


def duration(seconds: float) -> str:
    """Seconds as `42 s`, `3 min 5 s`, `2 h 10 min` or `4 d 3 h`."""
    total = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if total >= size:
            return f"{total // size} {unit} {total % size // part} {smaller}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _large(number: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:.0f}"


def time_shares(steps: Columns) -> dict[str, float]:
    """Part of a step's time → its share of all steps' time; empty if the run did not record it."""
    total = tokens_and_seconds(steps)[1]
    sums = {part: sum(steps.known(key)) for part, key in PARTS.items() if key in steps}
    if not total or not sums:
        return {}
    return {part: value / total for part, value in sums.items()} | {
        "other": max(1 - sum(sums.values()) / total, 0.0)
    }


def padding_cost(found: RunData) -> tuple[list[dict[str, Any]], str]:
    """What padding would have cost: bars (packed, padded), and a sentence; both may be empty."""
    share, size = finite(found.start.get("padded_share")), finite(found.start.get("padded_batch_size"))
    tokens, seconds = tokens_and_seconds(found.steps)
    filled = 1 - fmean(found.steps.known("padding") or [0.0])
    if not (0 < share <= 1 and size >= 1 and tokens and filled > 0):
        return [], ""
    bars = []
    for name, part in (("packed", filled), (f"padded, batches of {size:.0f}", share)):
        slots = tokens / part
        text = f"{name}: {_large(slots)} slots for {_large(tokens)} tokens ({100 * part:.1f} % filled)"
        bars.append({"text": text, "slots": slots, "tokens": tokens})
    measured = next((event["comparison"] for event in reversed(found.history) if "comparison" in event), None)
    ratio = finite(measured.get("ratio")) if isinstance(measured, dict) else math.nan
    if ratio > 0:
        reason = "At the speeds of packed and padded steps measured in this run"
    else:
        ratio, reason = filled / share, "If every slot cost the same"
    return bars, (
        f"{reason}, the {duration(seconds)} in steps would have been {duration(seconds * ratio)} with padding"
        f" ({ratio:.2f} times)."
    )


def sessions(found: RunData) -> list[dict[str, Any]]:
    """Starts and ends of processes, for people."""
    events = []
    for event in found.history:
        step, count = finite(event.get("step")), finite(event.get("world_size"))
        text = str(event.get("reason", ""))
        if event.get("event") == "start":
            processes = counted(round(count), "processes") if math.isfinite(count) else ""
            parallel = str(event.get("parallel", "")).removeprefix("none: one process").removeprefix(", ")
            text = ", ".join(filter(None, (processes, parallel)))
        events.append(
            {
                "event": str(event.get("event"))[:20],
                "step": 0 if math.isnan(step) else int(step),
                "time": str(event.get("time"))[:19].replace("T", " "),
                "text": text[:MOST_TEXT] or "after the last step",
            }
        )
    return events


def warnings(found: RunData) -> list[str]:
    """Warnings about a run: damage, skipped steps, documents left out, notes of the last start."""
    lines = [*found.problems, *texts(found.start.get("left_out")), *texts(found.start.get("notes"))]
    if skipped := sum(found.steps.known("skipped")):
        lines.append(f"{skipped:.0f} steps were skipped: fp16 overflow, or a spike of loss or gradient")
    done, end = found.steps.last("step"), found.end
    if found.history and end is None and not math.isnan(done):
        lines.append(f"the last process recorded no end: it is running, or was killed after step {done:,.0f}")
    elif end is not None and end.get("reason"):
        lines.append(f"the last process ended after step {end.get('step')}: {str(end['reason'])[:MOST_TEXT]}")
    return lines


def config_rows(found: Sequence[RunData]) -> list[list[Any]]:
    """[name, whether the runs differ, value of each run…] of every setting; differing settings first."""
    names = {name: None for each in found for name in each.config}
    rows = [[name, *(str(each.config.get(name, "–"))[:MOST_TEXT] for each in found)] for name in names]
    marked = [[name, len(set(values)) > 1, *values] for name, *values in rows]
    return sorted(marked, key=lambda row: not row[1])


def differences(found: Sequence[RunData]) -> list[list[str]]:
    """[name, value of each run…] of the settings in which runs differ."""
    return [[name, *values] for name, differs, *values in config_rows(found) if differs]


def summary_rows(found: RunData) -> Rows:
    """The report of a run as rows of text."""
    shares = ", ".join(f"{part} {share:.1%}" for part, share in time_shares(found.steps).items())
    facts = dict(pairs(found.start.get("run")))
    named = ("model", "parameters", "device", "parallel", "corpus")
    rows: Rows = [(name, facts[name]) for name in named if name in facts]
    rows += key_figures(found) + pairs(found.start.get("plan"))
    if shares:
        rows += [("time of a step", shares)]
        rows += [("communication", note)] if (note := communication(found)) else []
    rows += [("padding instead", note)] if (note := padding_cost(found)[1]) else []
    if checkpoints := found.checkpoints():
        kept = [f"{name} ({remark})" if remark else name for name, (_, remark) in checkpoints.items()]
        rows.append(("checkpoints", ", ".join(kept[-4:])))
    return rows + [("note", text) for text in warnings(found)]


def loss_curve(found: RunData, columns: int) -> list[str]:
    """The training loss as text; the validation loss, if only that is known."""
    table, name = (found.steps, "loss") if found.steps.known("loss") else (found.evaluations, "val_loss")
    return text_curve(table.values["step"], table.column(name), columns)
