"""Commands on trained models: generate, export; and version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multipack.cli.command_options import argument


def generate(
    run: Annotated[Path, argument("RUN", "A run, one of its checkpoints, or an export.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Beginning of a text; repeatable.")] = None,
    prompts: Annotated[str, typer.Option(help="File of prompts, one per line; - = standard input.")] = "",
    max_tokens: Annotated[int, typer.Option(min=0, help="Maximum number of new tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 = always the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0 = all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Sample from tokens with this total probability.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends generation; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed; every prompt has its own generator.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Chat on standard input and output.")] = False,
    system: Annotated[str, typer.Option(help="System message of the chat.")] = "",
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Print tokens per second.")] = False,
) -> None:
    """Generate text with a trained model.

    Examples:
      multipack generate runs/a --prompt "def mean(" --stop "def "
      multipack generate runs/a --prompts questions.txt --top-p 0.9 --json
      multipack generate runs/chat --chat --system "You are terse."

    Prompts are processed together, without padding. Texts longer than the
    model's context are processed again for each token, which is slow.
    """
    from multipack.models.sampling import Sampling
    from multipack.training.inference import converse, print_completions, read_prompts

    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    if chat:
        if prompt or prompts or as_json:
            raise ValueError("--chat uses standard input and output: omit --prompt, --prompts and --json")
        converse(run, system, sampling, device, timing)
        return
    if system:
        raise ValueError("--system needs --chat; without a chat, write it into the prompt")
    print_completions(run, read_prompts(prompt or (), prompts), sampling, device, as_json, timing)


def export(
    run: Annotated[Path, argument("RUN", "A run directory or one of its checkpoints.")],
    folder: Annotated[str, argument("FOLDER", "Folder to write; also out=FOLDER.")],
    weights: Annotated[
        str, typer.Option(help="latest, best (lowest validation loss) or ema (moving average).")
    ] = "latest",
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16; auto = that of train.init_from, else fp32.")
    ] = "auto",
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the weights.")] = False,
) -> None:
    """Write a trained model as a folder that transformers loads.

    Examples:
      multipack export runs/a exported
      multipack export runs/a exported --weights best --dtype bf16

    best needs a validation, ema needs train.ema_decay. Of a run with adapters
    the folder is peft's adapter, or with --merge the whole model.
    """
    from multipack.reports.console import Console
    from multipack.training.export import export as write
    from multipack.training.export import loading_code

    made = Path(folder.removeprefix("out="))
    rows = write(run, made, weights, dtype, merge)
    console = Console()
    console.section("exported", rows)
    console.line(f"\nto load it:\n{loading_code(made)}")


def version() -> None:
    """Print the version."""
    import multipack

    typer.echo(multipack.__version__)
