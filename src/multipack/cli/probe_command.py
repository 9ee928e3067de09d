"""The command probe: checks that a model keeps the documents of a packed batch apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from multipack.cli.command_options import Json, argument, print_json


def probe(
    model: Annotated[
        str,
        argument("MODEL", "A run, an export, a Hugging Face folder or cached name, an architecture."),
    ],
    attention: Annotated[str, typer.Option(help="Attention of transformers: eager, sdpa, multipack …")] = "",
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Probe a tiny model of transformers' architecture, with random weights."),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or another torch device.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Check that packed documents do not change each other.

    Examples:
      multipack probe models/my-llama
      multipack probe models/my-llama --attention eager --tiny
      multipack probe gpt_oss

    Changes one document of a small packed batch and watches the others,
    compares each document with itself alone, and names the first module
    that differs and what to change. Exit code 1 if something is wrong. Folders
    without weights are probed with random ones. Nothing is downloaded.
    """
    from multipack.models.probe import isolation_probe
    from multipack.reports.console import Console

    built, description = _load(model, attention or None, tiny)
    report = isolation_probe(built.to(device))
    if as_json:
        leaks = [{"from": a, "into": b, "size": size} for (a, b), size in report.leaks.items()]
        findings = [vars(finding) for finding in report.findings]
        differences = list(report.differences)
        print_json({"ok": report.ok, "leaks": leaks, "differences": differences, "findings": findings})
    else:
        console = Console()
        console.section("probe", [("model", description)])
        console.line(str(report))
    if not report.ok:
        raise typer.Exit(1)


def _load(source: str, attention: str | None, tiny: bool) -> tuple[Any, str]:
    """The model, and its description."""
    from multipack.models.huggingface import build_decoder
    from multipack.models.tiny_models import load_causal_model
    from multipack.run import is_export
    from multipack.training.weights import find_weights

    path = Path(source)
    if not path.exists() or is_export(path):
        return load_causal_model(source, attention, tiny)
    if attention or tiny:
        raise ValueError(f"--attention and --tiny are for models of transformers, and {source} is a run")
    trained = find_weights(path)
    return build_decoder(trained.shape, trained.state()), f"{source}, Decoder"
