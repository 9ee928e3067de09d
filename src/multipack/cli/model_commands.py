"""Commands on trained models: evaluate, generate, export."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from multipack.cli.command_options import Json, Words, argument, print_json, settings_option

WhichWeights = Annotated[str, typer.Option(help="latest or best (lowest validation loss).")]


def evaluate(
    run: Annotated[Path, argument("RUN", "A run, one of its checkpoints, or a Hugging Face folder.")],
    words: Words = None,
    weights: WhichWeights = "latest",
    as_json: Json = False,
    settings: Annotated[
        bool, settings_option("Config", "data.", "tokenizer.", "plan.", "train.", "parallel.")
    ] = False,
) -> None:
    """Compute the loss of a trained model on documents.

    Without data= these are the validation documents of the run. Preference
    pairs also give the accuracy and the margin of rewards, mixtures the loss
    of each source. Nothing is written in the run.

    Examples:
      multipack evaluate runs/a
      multipack evaluate runs/a data=jsonl data.path=test.jsonl --weights best
      multipack evaluate hf/llama data=text data.path=book.txt --json
      multipack launch -n 2 -- evaluate runs/a parallel.data=zero3
    """
    import os
    import sys
    from dataclasses import asdict
    from typing import cast

    from multipack.parallel.ranks import find_ranks
    from multipack.reports.console import Console
    from multipack.training.evaluate import evaluate as run_evaluation

    console = Console(find_ranks(os.environ).rank, stream=sys.stderr if as_json else None)
    found = run_evaluation(run, words or [], cast("Any", weights), console)
    if not console.enabled:
        return
    if as_json:
        print_json(asdict(found))
        return
    step = f", step {found.step:,}" if found.step is not None else ""
    columns, *rows = found.table()
    console.table(f"{found.weights}{step}, on {found.documents}", columns, rows)
    if found.note:
        console.paragraph(f"note: {found.note}")


def generate(
    run: Annotated[Path, argument("RUN", "A run, one of its checkpoints, or an export.")],
    texts: Annotated[list[str] | None, argument("[PROMPT]…", "Beginnings of texts; as --prompt.")] = None,
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
) -> None:
    """Generate text with a trained model.

    Examples:
      multipack generate runs/a "def mean(" --stop "def "
      multipack generate runs/a --prompts questions.txt --top-p 0.9 --json
      multipack generate runs/chat --chat --system "You are terse."

    Prompts are processed together, without padding. Texts longer than the
    model's context are processed again for each token, which is slow.
    """
    from multipack.models.sampling import Sampling
    from multipack.training.inference import converse, print_completions, read_prompts

    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    prompt = [*(texts or ()), *(prompt or ())]
    if chat:
        if prompt or prompts or as_json:
            raise ValueError("--chat uses standard input and output: omit prompts and --json")
        converse(run, system, sampling, device)
        return
    if system:
        raise ValueError("--system needs --chat; without a chat, write it into the prompt")
    print_completions(run, read_prompts(prompt, prompts), sampling, device, as_json)


def export(
    run: Annotated[Path, argument("RUN", "A run directory or one of its checkpoints.")],
    folder: Annotated[str, argument("FOLDER", "Folder to write; also out=FOLDER.")],
    weights: WhichWeights = "latest",
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16; auto = the dtype of train.init_from, else fp32.")
    ] = "auto",
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the weights.")] = False,
) -> None:
    """Write a trained model as a folder that transformers loads.

    Examples:
      multipack export runs/a exported
      multipack export runs/a exported --weights best --dtype bf16

    best needs a validation. Of a run with adapters the folder is peft's
    adapter, or with --merge the whole model.
    """
    from multipack.reports.console import Console
    from multipack.training.export import export as write
    from multipack.training.export import loading_code

    made = Path(folder.removeprefix("out="))
    rows = write(run, made, weights, dtype, merge)
    console = Console()
    console.section("exported", rows)
    console.line(
        f"\nto load it:\n{loading_code(made)}\n\nto publish it:\n  hf upload OWNER/NAME {shlex.quote(str(made))}"
    )
