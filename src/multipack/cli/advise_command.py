"""The command `multipack advise`: recommend a parallelism."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from multipack.cli.command_options import Json, print_json, settings_argument, settings_option

if TYPE_CHECKING:
    from multipack.launch.advise import Advice, Candidate
    from multipack.reports.console import Console

GIB = 2**30
COLUMNS = ["", " param", "grads", "state", "copies", "saved", " peak", " sent", "recompute", "parallelism"]
"""Numbers are aligned to the right of their column's name; spaces make room for them.

`copies` includes gathered parameters, `saved` what the loss saves, and `peak` temporary tensors, too."""


def advise(
    words: Annotated[
        list[str] | None,
        settings_argument(
            "SETTING", "model=PRESET, devices=NUMBER, memory=80GiB, link=slow, plan.capacity=TOKENS, …"
        ),
    ] = None,
    as_json: Json = False,
    settings: Annotated[
        bool, settings_option("AdviseRequest", module="multipack.launch.advise_request")
    ] = False,
) -> None:
    """Recommend a parallelism for a model and its devices.

    Examples:
      multipack advise model=llama-8b devices=16 memory=80GiB
      multipack advise model=llama-70b devices=64 link=slow plan.capacity=32768
      multipack advise model=path/config.json devices=8 dtype=fp32 --json

    Prints the reasons and the training command. Nothing is started and no device
    is needed: bytes follow from the model's widths. Assumed speeds (teraflops,
    host_bandwidth, network_bandwidth) only rank candidates.
    `multipack advise --settings` lists all settings.
    """
    from multipack.launch.advise import advise as find_advice
    from multipack.launch.advise_request import AdviseRequest
    from multipack.reports.console import Console
    from multipack.training.other_names import translate
    from multipack.words import merge

    advice = find_advice(merge(AdviseRequest, words or [], translate=translate))
    if as_json:
        print_json(advice.to_dict())
    else:
        _show(Console(stream=sys.stdout), advice)


def _show(console: Console, advice: Advice) -> None:
    from multipack.launch.advise import model_words
    from multipack.launch.held import model_parameters
    from multipack.reports.console import wrapped

    request, (flops, inside, outside) = advice.request, advice.request.speeds
    hosts = request.devices // request.devices_per_host
    model = (
        f"{' '.join(model_words(request.model))}: {model_parameters(request.model) / 1e9:,.2f} B parameters"
    )
    usable = f"{request.usable / GIB:,.1f} GiB of each used"
    speeds = f"{flops / 1e12:,.0f} TFLOP/s, {inside / 1e9:,.4g} GB/s within hosts, {outside / 1e9:,.4g} GB/s"
    rows = [
        ("model", model),
        ("devices", f"{request.devices:,} in {hosts:,} host{'s' * (hosts > 1)}; {usable}"),
        (
            "step",
            f"{request.devices * request.micro_batches:,} packs of {request.capacity:,} slots in {request.dtype}",
        ),
        ("assumed", f"{speeds} between hosts; documents of {request.document_tokens:,} tokens"),
    ]
    console.section("what is trained", rows)
    path = [
        (f"{number}.", f"{question}\n→ {answer}") for number, (question, answer) in enumerate(advice.path, 1)
    ]
    console.section("decision path", path)
    title = "GiB on a device, and sent in a step (→ recommended, × does not fit)"
    console.table(title, COLUMNS, [_cells(row, row == advice.chosen) for row in advice.rows])
    if advice.chosen is None:
        console.line("\nnothing fits: try more devices, a smaller capacity, or a smaller model", style="bold")
        return
    console.line("\nto train with it", style="bold")
    lines = wrapped(advice.command, console.columns - 2, 4).split("\n")
    console.line("  " + " \\\n".join(lines))


def _cells(row: Candidate, chosen: bool) -> list[str]:
    memory = row.memory
    copies, saved = memory.gathered + memory.copies, memory.activations + memory.loss
    sent = sum(each.sent for each in row.traffic)
    sizes = (memory.parameters, memory.gradients, memory.optimizer, copies, saved, memory.peak, sent)
    cells = [f"{size / GIB:.{0 if size >= 1000 * GIB else 1}f}" for size in sizes]
    aligned = [cell.rjust(len(column)) for cell, column in zip(cells, COLUMNS[1:], strict=False)]
    mark = "→" if chosen else " " if row.fits else "×"
    return [mark, *aligned, row.recompute, row.name]
