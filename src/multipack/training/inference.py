"""Generate text with a trained model: completions and conversations, from Python and for `multipack generate`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from multipack.data.text.chat import ChatTemplate
from multipack.data.text.texts import CHAT_TEMPLATE, Message, TextPart
from multipack.data.text.tokenizer import Tokenizer
from multipack.hub import model_folder
from multipack.models.decoder import Decoder
from multipack.models.generate import Completion, Listener, generate
from multipack.models.huggingface import build_decoder
from multipack.models.sampling import Sampling
from multipack.training.source_files import find_template
from multipack.training.weights import find_weights
from multipack.untrusted import one_line, printable


def load_model(path: Path | str, device: str = "cpu") -> Decoder:
    """Load a decoder, in evaluation mode and float32.

    Args:
        path: a folder of a Hugging Face model whose family the decoder computes (config.json and safetensors), its
            name on the hub, an export, a run (its latest checkpoint), a checkpoint, or an adapter of peft, which is
            merged into the weights of its base.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or another name of a torch device.

    Raises:
        FileNotFoundError: there is no model, run or complete checkpoint at `path`.
        ValueError: the family or a setting is not supported, the files are damaged or do not match each other, or the
            device is not available.
    """
    return _load(path, device, "load_model")[0]


def load_run(path: Path, device: str = "cpu") -> tuple[Decoder, Tokenizer]:
    """Load a model, as `load_model` does, and its tokenizer; `ValueError` if there is none."""
    model, tokenizer = _load(path, device, "RUN")
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json: without it no text can be read or written")
    return model, tokenizer


def _load(path: Path | str, device: str, setting: str) -> tuple[Decoder, Tokenizer | None]:
    where = _device(device)  # checked before anything is read
    trained = find_weights(model_folder(str(path), setting))
    return build_decoder(trained.shape, trained.state()).to(where), trained.tokenizer


def _device(device: str) -> torch.device:
    """The device of this name; `ValueError` if it cannot be used here."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(1, device=automatic if device == "auto" else device).device
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # torch raises any of these for a device that it lacks
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--device {device} cannot be used here ({reason}); --device cpu can") from error


def complete_batch(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    listener: Listener | None = None,
) -> list[Completion]:
    """Continue prompts in one batch; see `generate`.

    Raises:
        ValueError: a prompt has no tokens, or characters that the tokenizer does not know; with several prompts the
            message gives its number.
    """
    ids = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids.append(tokenizer.encode(prompt))
            if not ids[-1]:
                raise ValueError(f"the prompt {prompt!r} has no tokens; give some text to continue")
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from error
    ends = [] if tokenizer.end_id is None else [tokenizer.end_id]
    return generate(model, ids, sampling, end_ids=ends, tokenizer=tokenizer, listener=listener)


def answer(
    model: Decoder,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    sampling: Sampling,
    listener: Callable[[str], None] | None = None,
) -> tuple[Completion, int]:
    """Generate the answer to a conversation, which the model reads as one document.

    Args:
        model: a decoder that was trained on conversations.
        tokenizer: the model's.
        template: the chat template of the model's training data.
        messages: dicts with `role` and `content`; the last one has the role `user`.
        sampling: the i-th answer of the conversation uses `seed + i`, from i = 0.
        listener: called with each new piece of the answer's text.

    Returns:
        The answer, and the number of tokens of the conversation; the model sees at most the last `context` of them.

    Raises:
        ValueError: the template or the tokenizer rejects the text, or the tokenizer lacks a special token of the
            template.
    """

    def encode(parts: Sequence[TextPart]) -> list[int]:
        (encoded,) = tokenizer.encode_parts([parts])
        return [token for tokens, _ in encoded for token in tokens]

    ids = encode(template.parts(messages, add_generation_prompt=True))
    ends = [] if tokenizer.end_id is None else [tokenizer.end_id]
    if template.end_of_turn:
        ends += encode((TextPart(template.end_of_turn, False, is_special=True),))
    answers = sum(message["role"] == "assistant" for message in messages)
    (completion,) = generate(
        model,
        [ids],
        replace(sampling, seed=sampling.seed + answers),
        end_ids=ends,
        tokenizer=tokenizer,
        listener=None if listener is None else lambda _, piece: listener(piece),
    )
    return completion, len(ids)


def read_prompts(given: Sequence[str], file: str) -> list[str]:
    """The prompts of `given`, followed by the lines of `file`; `-` is standard input.

    Raises:
        ValueError: there are no prompts, or a line is empty.
    """
    prompts = list(given)
    if file:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not text in UTF-8: {error}") from error
        for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
            if not line.strip():
                raise ValueError(f"{file}, line {number} is empty: every line is a prompt")
            prompts.append(line.removesuffix("\r"))
    if not prompts:
        raise ValueError('nothing to continue: give "TEXT" (any number of them), --prompts FILE or --chat')
    return prompts


def print_completions(
    path: Path, prompts: Sequence[str], sampling: Sampling, device: str = "auto", as_json: bool = False
) -> None:
    """Complete prompts and print them, as `multipack generate`; a single completion is streamed."""
    model, tokenizer = load_run(path, device)
    if find_template(path) is not None:
        _print_note(
            "this model has a chat template, and the prompt is continued as plain text: --chat writes turns"
        )
    streaming = len(prompts) == 1 and not as_json
    if streaming:
        _print(prompts[0])
    start = time.perf_counter()
    completions = complete_batch(
        model, tokenizer, prompts, sampling, (lambda _, piece: _print(piece)) if streaming else None
    )
    seconds = time.perf_counter() - start
    sizes = [len(tokenizer.encode(prompt)) for prompt in prompts]
    if as_json:
        entries = [
            {
                "prompt": prompt,
                "text": completion.text,
                "reason": completion.reason,
                "prompt_tokens": size,
                "new_tokens": len(completion.tokens),
            }
            for prompt, size, completion in zip(prompts, sizes, completions, strict=True)
        ]
        found = {"completions": entries, "seconds": seconds}
        _print(json.dumps(found, indent=1, ensure_ascii=False), end="\n")
    elif streaming:
        _print("", end="\n")
    else:
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start=1):
            _print(f"=== {number} of {len(prompts)}\n{prompt}{completion.text}", end="\n")
    _note_cut(model, max(sizes))


def converse(path: Path, system: str, sampling: Sampling, device: str = "auto") -> None:
    """Chat on standard input and output: a line is a question, the text after it the answer."""
    template = find_template(path)
    if template is None:
        raise ValueError(
            f"{path} has no chat template ({CHAT_TEMPLATE}): it was not trained on conversations. Train on records with"
            " `messages` (data.format=chat; data.chat_template says how they are written), or omit --chat"
        )
    model, tokenizer = load_run(path, device)
    messages = [{"role": "system", "content": system}] if system else []
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            break
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        completion, read = answer(model, tokenizer, template, messages, sampling, _print)
        messages.append({"role": "assistant", "content": completion.text})
        _print("", end="\n")
        if completion.reason == "length":
            _print_note(f"cut after {sampling.max_tokens:,} tokens: --max-tokens allows more")
        _note_cut(model, read)
    if is_terminal:
        _print("", end="\n")


def _note_cut(model: Decoder, size: int) -> None:
    """Note that a text of `size` tokens is longer than the context."""
    if size > (context := model.shape.context):
        _print_note(f"{size:,} tokens were read: the model sees the last {context:,} of them (model.context)")


def _print(text: str, end: str = "") -> None:
    """Print to standard output; to a terminal without control characters, which a model may generate."""
    sys.stdout.write((printable(text) if sys.stdout.isatty() else text) + end)
    sys.stdout.flush()


def _print_note(text: str) -> None:
    print(f"note: {one_line(text)}", file=sys.stderr)
