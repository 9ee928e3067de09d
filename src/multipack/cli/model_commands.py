"""Commands about what a run has learned: generate, export; and the version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run, one of its checkpoints, or an export.", show_default=False
        ),
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="What a text begins with; any number.")] = None,
    prompts: Annotated[str, typer.Option(help="File of prompts, one a line; - = standard input.")] = "",
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 = always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many likeliest tokens; 0 = all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest with this probability.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the writing; any number.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws; prompt i has a seed of its own.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Answer standard input line by line.")] = False,
    system: Annotated[str, typer.Option(help="The system's message of a chat.")] = "",
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Say how many tokens a second it wrote.")] = False,
) -> None:
    """Write text with a trained model.

    [bold]Examples[/bold]

      multipack generate runs/a --prompt "def mean(" --stop "def "
      multipack generate runs/a --prompts questions.txt --top-p 0.9 --json
      multipack generate runs/chat --chat --system "You are terse."

    Prompts are read together, without padding. A text that outgrows the model's
    context is read again for each token, which is slow.
    """
    from multipack.models.sampling import Sampling
    from multipack.training.inference import GenerateOptions, converse, print_completions, read_prompts

    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    options = GenerateOptions(device, as_json, timing)
    if chat:
        if prompt or prompts or as_json:
            raise ValueError("--chat talks on standard input and output: omit --prompt, --prompts and --json")
        converse(run, system, sampling, options)
        return
    if system:
        raise ValueError("--system opens a conversation: give --chat too, or write it into the prompt")
    print_completions(run, read_prompts(prompt or (), prompts), sampling, options)


def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run directory, or one of its checkpoints.", show_default=False),
    ],
    folder: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="What to write; out=FOLDER says the same.", show_default=False),
    ],
    weights: Annotated[
        str, typer.Option(help="latest, best (lowest validation loss) or ema (their moving average).")
    ] = "latest",
    dtype: Annotated[str, typer.Option(help="Type of the weights: fp32, bf16 or fp16.")] = "fp32",
) -> None:
    """Write a trained model as a folder that transformers and other tools load, whole or not at all.

    [bold]Examples[/bold]

      multipack export runs/a exported
      multipack export runs/a exported --weights best --dtype bf16

    A run has best weights if it was validated, and ema with train.ema_decay.
    """
    from multipack.reports.console import Console
    from multipack.training.export import export as write

    made = write(run, Path(folder.removeprefix("out=")), weights, dtype)
    console = Console()
    console.section("exported", made.rows)
    console.line(f"\nto load it:\n{made.loading}")


def version() -> None:
    """Print the version."""
    import multipack

    typer.echo(multipack.__version__)
