"""The command that helps to choose: advise."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from multipack.cli.command_options import AdviseSettings, Json

if TYPE_CHECKING:
    from multipack.launch.advise import Advice
    from multipack.launch.candidates import Candidate
    from multipack.reports.console import Console

GIB = 2**30


def advise(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING",
            help="model=PRESET, devices=NUMBER, memory=80GiB, link=fast|slow, capacity=TOKENS, …",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    settings: AdviseSettings = False,
) -> None:
    """Say which parallel methods a model needs on some devices, why, and what to type.

    [bold]Examples[/bold]

      multipack advise model=llama-8b devices=16 memory=80GiB
      multipack advise model=llama-70b devices=64 link=slow capacity=32768
      multipack advise model=path/config.json devices=8 dtype=fp32 --json

    Nothing is started, and no device is needed: bytes follow from the model's
    widths, seconds from assumed speeds that settings change (teraflops,
    host_bandwidth, network_bandwidth). `multipack advise --settings` lists all.
    """
    from multipack.launch.advise import advise as find_advice
    from multipack.launch.advise_request import AdviseRequest
    from multipack.reports.console import Console
    from multipack.words import merge

    advice = find_advice(merge(AdviseRequest, words or []))
    if as_json:
        typer.echo(json.dumps(advice.to_dict(), indent=1))
        return
    _show(Console(stream=sys.stdout), advice)


def _show(console: Console, advice: Advice) -> None:
    from multipack.launch.advise_request import model_words
    from multipack.launch.memory_model import logits_chunk, parameters_of
    from multipack.reports.console import wrapped

    setting = advice.setting
    hosts = setting.devices // setting.devices_per_host
    chunk = logits_chunk(setting.shape, setting.capacity, 1, setting.dtype)
    rows = [
        (
            "model",
            f"{' '.join(model_words(setting.shape))}: {parameters_of(setting.shape) / 1e9:,.2f} B parameters",
        ),
        (
            "devices",
            f"{setting.devices:,} in {hosts:,} host{'s' * (hosts > 1)};"
            f" {setting.usable / GIB:,.1f} GiB each are planned for",
        ),
        (
            "step",
            f"{setting.packs:,} packs of {setting.capacity:,} slots; products in {setting.dtype}; weights, gradients"
            f" and moments in float32; logits a chunk at a time ({chunk / GIB:,.2f} GiB)",
        ),
        (
            "assumed",
            f"{setting.flops / 1e12:,.0f} TFLOP/s a device, {setting.host_bandwidth / 1e9:,.4g} GB/s to its own host's,"
            f" {setting.network_bandwidth / 1e9:,.4g} GB/s to others; documents of {setting.document_tokens:,} tokens",
        ),
    ]
    console.section("what is trained", rows)
    console.section(
        "path",
        [(f"{number}.", f"{step.question}\n→ {step.answer}") for number, step in enumerate(advice.path, 1)],
    )
    console.table(
        "ways to train: GiB on a device, GiB sent in a step (→ recommended, × does not fit)",
        COLUMNS,
        [_cells(row, row == advice.chosen) for row in advice.rows],
    )
    console.paragraph(LEGEND)
    if advice.recompute:
        rows = [(each.recompute, _recomputed(each)) for each in advice.recompute]
        console.section(f"train.recompute with {advice.recompute[0].name}", rows)
    if advice.chosen is not None and advice.chosen.traffic:
        console.section(f"sent in a step with {advice.chosen.name}", _exchanged(advice.chosen))
    if advice.refused:
        console.section("refused", list(advice.refused.items()))
    if advice.chosen is None:
        console.section("nothing fits; what would help", [("→", remedy) for remedy in advice.remedies])
    else:
        console.line("\nto train so", style="bold")
        lines = wrapped(advice.command, console.columns - 2, 4).split("\n")
        console.line("  " + " \\\n".join(lines))


COLUMNS = ["", "again", "param", "grads", "AdamW", " copy", "saved", " peak", " sent", "ktok/s"]
LEGEND = (
    "again: train.recompute (sel. = selective); copy: parameters as products take them, cast or gathered; saved: for"
    " the backward pass; ktok/s: 1,000 slots a second, all devices. tp tensor, cp context (ulysses), ring context"
    " (ring), pp pipeline (pp=4×2: interleaved, 2 stages a rank), hsdp/2: 2 groups, +cpu: offload"
)


def _cells(row: Candidate, chosen: bool) -> list[str]:
    held = row.memory
    sizes = (
        held.parameters,
        held.gradients,
        held.optimizer,
        held.weights,
        held.activations + held.loss,
        held.peak,
    )
    mark = "→" if chosen else " " if row.fits else "×"
    cells = [f"{size / GIB:.{0 if size >= 1000 * GIB else 1}f}" for size in (*sizes, row.sent)]
    cells.append(f"{row.tokens_per_second / 1000:.1f}")
    aligned = [cell.rjust(len(column)) for cell, column in zip(cells, COLUMNS[2:], strict=True)]
    again = row.recompute.replace("selective", "sel.")
    return [f"{mark} {row.name}", again, *aligned]


def _exchanged(chosen: Candidate) -> list[tuple[str, str]]:
    """What a rank sends, by purpose and collective."""
    return [
        (
            f"{each.method} {each.kind}",
            f"{each.sent / GIB:,.1f} GiB in {each.count:,} calls among {each.ranks} ranks:"
            f" {each.sent / chosen.setting.bandwidth(each):,.2f} s",
        )
        for each in chosen.traffic
    ]


def _recomputed(each: Candidate) -> str:
    held = each.memory
    instant = max(held.instants, key=lambda name: held.instants[name])
    return (
        f"{held.activations / GIB:.1f} GiB of activations, peak {held.peak / GIB:.1f} GiB ({instant}),"
        f" {each.tokens_per_second:,.0f} tokens/s{'' if each.fits else ': does not fit'}"
    )
