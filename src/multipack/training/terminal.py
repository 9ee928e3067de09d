"""What `multipack generate` reads and prints: prompts and their completions, or a conversation line by line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from multipack.data.tokenizer import Tokenizer
from multipack.models.decoder import Decoder
from multipack.models.generate import Completion
from multipack.models.sampling import Sampling
from multipack.reports.console import HARMLESS
from multipack.training.inference import Conversation, complete_batch, encode_prompts, load_run, load_template


@dataclass(frozen=True)
class Manner:
    """How `multipack generate` runs and prints.

    Attributes:
        device: `auto` (a GPU where there is one), `cpu`, `cuda` or any other name that torch knows.
        as_json: print one JSON object and nothing else.
        timing: say how many tokens a second were written.
    """

    device: str = "auto"
    as_json: bool = False
    timing: bool = False


def read_prompts(given: Sequence[str], file: str) -> list[str]:
    """The prompts that were given, then those of a file, one a line; `-` is the standard input.

    Raises:
        ValueError: there is none, or an empty one.
        FileNotFoundError: there is no such file.
    """
    prompts = list(given)
    if file:
        where = "standard input" if file == "-" else file
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not text in UTF-8: {error}") from error
        lines = text.removesuffix("\n").split("\n") if text else []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                raise ValueError(f"{where}, line {number} is empty: every line is a prompt; remove it")
            prompts.append(line.removesuffix("\r"))
        if not lines:
            raise ValueError(f"{where} holds no prompts: write one a line")
    if not prompts:
        raise ValueError(
            'nothing to go on from: give --prompt "TEXT" (any number of them), --prompts FILE or --chat'
        )
    return prompts


def write(path: Path, prompts: Sequence[str], sampling: Sampling, manner: Manner) -> None:
    """Complete prompts and print them; one alone is shown as it is written, where there is a terminal.

    Raises:
        ValueError: see `load_run` and `complete_batch`; a device that is not there.
        FileNotFoundError: see `load_run`.
    """
    model, tokenizer = _load(path, manner)
    sizes = [len(ids) for ids in encode_prompts(tokenizer, prompts)]
    for number, size in enumerate(sizes, start=1):
        _tell_of_context(f"prompt {number}", size, model)
    streaming = len(prompts) == 1 and not manner.as_json and sys.stdout.isatty()
    if streaming:
        _print(prompts[0])
    began = time.perf_counter()
    completions = complete_batch(
        model, tokenizer, prompts, sampling, (lambda _, piece: _print(piece)) if streaming else None
    )
    seconds = time.perf_counter() - began
    if manner.as_json:
        _print(_as_json(prompts, sizes, completions, seconds), end="\n")
    elif streaming:
        _print("", end="\n")
    else:
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start=1):
            if len(prompts) > 1:
                _print(f"=== {number} of {len(prompts)}", end="\n")
            _print(prompt + completion.text, end="\n")
    if manner.timing:
        _tell_speed(sum(sizes), completions, seconds)


def converse(path: Path, system: str, sampling: Sampling, manner: Manner) -> None:
    """Answer the lines of the standard input, one conversation, until it ends.

    Raises:
        ValueError: see `load_run`, `load_template` and `Conversation`.
        FileNotFoundError: see `load_run`.
    """
    model, tokenizer = _load(path, manner)
    conversation = Conversation(model, tokenizer, load_template(path), sampling, system)
    asks = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(asks)
        except EOFError:
            if asks:
                _print("", end="\n")
            return
        if not line.strip():
            continue
        began = time.perf_counter()
        answer = conversation.say(line, _print)
        seconds = time.perf_counter() - began
        _print("", end="\n")
        _tell_of_context("the conversation", conversation.num_read, model)
        if answer.reason == "length":
            _tell(f"cut after {sampling.max_tokens:,} tokens: --max-tokens allows more")
        if manner.timing:
            _tell_speed(conversation.num_read, [answer], seconds)


def _load(path: Path, manner: Manner) -> tuple[Decoder, Tokenizer]:
    name = manner.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)  # says whether it is there, before anything is loaded
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--device {manner.device} cannot be used here ({reason}); --device cpu can"
        ) from error
    model, tokenizer = load_run(path)
    return model.to(device), tokenizer


def _as_json(
    prompts: Sequence[str], sizes: Sequence[int], completions: Sequence[Completion], seconds: float
) -> str:
    told = [
        {
            "prompt": prompt,
            "text": completion.text,
            "reason": completion.reason,
            "prompt_tokens": size,
            "new_tokens": len(completion.tokens),
        }
        for prompt, size, completion in zip(prompts, sizes, completions, strict=True)
    ]
    return json.dumps({"completions": told, "seconds": seconds}, indent=1, ensure_ascii=False)


def _tell_of_context(what: str, tokens: int, model: Decoder) -> None:
    context = model.shape.context
    if tokens > context:
        _tell(f"{what} has {tokens:,} tokens: the model sees the last {context:,} of them (model.context)")


def _tell_speed(read: int, completions: Sequence[Completion], seconds: float) -> None:
    new = sum(len(completion.tokens) for completion in completions)
    _tell(f"{new:,} tokens after {read:,} of prompts in {seconds:.2f} s: {new / seconds:,.1f} tokens/s")


def _print(text: str, end: str = "") -> None:
    """To standard output; what a model writes must not steer a terminal, but files get it as it is."""
    sys.stdout.write((text.translate(HARMLESS) if sys.stdout.isatty() else text) + end)
    sys.stdout.flush()


def _tell(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)
