"""Generate text with a trained model: completions and conversations, from Python and for `multipack generate`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from multipack.data.chat import ChatTemplate
from multipack.data.shards import CHAT_TEMPLATE
from multipack.data.texts import TextPart
from multipack.data.tokenizer import Tokenizer
from multipack.models.decoder import Decoder
from multipack.models.families import build_decoder
from multipack.models.generate import Completion, Listener, generate_batch
from multipack.models.sampling import Sampling
from multipack.reports.console import HARMLESS
from multipack.run import find_run, is_export, weights_folder
from multipack.training.weights import initial_weights


def load_run(path: Path) -> tuple[Decoder, Tokenizer]:
    """Load the model and tokenizer of a run's latest checkpoint, of a checkpoint, or of an export.

    Raises:
        FileNotFoundError: there is no run, complete checkpoint or export at `path`.
        ValueError: the files do not match each other, or there is no tokenizer.
    """
    initial = initial_weights(path)
    if initial.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json: without it no text can be read or written")
    return build_decoder(initial.shape, dict(initial.state), initial.attention), initial.tokenizer


def find_template(path: Path) -> ChatTemplate | None:
    """Find the chat template of a run, a checkpoint or an export; None if there is none.

    The folder of the weights is searched first, then the run directory, then the token store in the run's settings.

    Raises:
        FileNotFoundError: there is no run, complete checkpoint or export at `path`.
        ValueError: the file of a template is damaged.
    """
    # Reading a tokenizer's configuration needs jinja, which training itself does not.
    from multipack.data.vocabularies import read_file

    folder = weights_folder(path)
    folders = [folder]
    if not is_export(path):
        folders.append(find_run(path)[0].path)
        data = OmegaConf.load(folder / "config.yaml").data
        if data.source == "store" and data.path:
            folders.append(Path(data.path).expanduser())
    for candidate in folders:
        if (candidate / CHAT_TEMPLATE).is_file():
            return ChatTemplate.from_json((candidate / CHAT_TEMPLATE).read_text(encoding="utf-8"))
    facts = read_file(str(folder))
    if facts.chat_template:
        return ChatTemplate(facts.chat_template, facts.special_tokens, facts.bos_token, facts.eos_token)
    return None


def complete_batch(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    listener: Listener | None = None,
) -> list[Completion]:
    """Continue prompts in one batch, without the global random generator; see `generate_batch`.

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
    return generate_batch(model, ids, sampling, end_ids=ends, tokenizer=tokenizer, listener=listener)


class Conversation:
    """A chat with a model. For each answer the model reads the whole conversation again, as one document.

    Args:
        model: a decoder that was trained on conversations.
        tokenizer: the model's tokenizer.
        template: the chat template of the model's training data.
        sampling: options of sampling; turn i uses a generator with seed + i.
        system: system message; empty = none.

    Attributes:
        messages: the conversation so far, as dicts with `role` and `content`.
        num_read: number of tokens of the last prompt; the model sees at most the last `context` of them.

    Raises:
        ValueError: the tokenizer lacks a special token of the template.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        sampling: Sampling,
        system: str = "",
    ) -> None:
        self._model, self._tokenizer, self._template, self._sampling = model, tokenizer, template, sampling
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.num_read = 0
        self._ends = set() if tokenizer.end_id is None else {tokenizer.end_id}
        if template.end_of_turn:
            self._ends.update(self._encode((TextPart(template.end_of_turn, False, is_special=True),)))

    def say(self, text: str, listener: Callable[[str], None] | None = None) -> Completion:
        """Generate the answer to `text`, and add both to the conversation.

        Args:
            text: message of the user.
            listener: called with each new piece of the answer's text.

        Raises:
            ValueError: the template or the tokenizer rejects the text; the conversation is unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._encode(self._template.prompt_parts(messages))
        turn = sum(message["role"] == "user" for message in self.messages)
        (answer,) = generate_batch(
            self._model,
            [ids],
            replace(self._sampling, seed=self._sampling.seed + turn),
            end_ids=self._ends,
            tokenizer=self._tokenizer,
            listener=None if listener is None else lambda _, piece: listener(piece),
        )
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.num_read = len(ids)
        return answer

    def _encode(self, parts: Sequence[TextPart]) -> list[int]:
        (encoded,) = self._tokenizer.encode_parts([parts])
        return [token for tokens, _ in encoded for token in tokens]


def read_prompts(given: Sequence[str], file: str) -> list[str]:
    """The given prompts, followed by those of a file, one per line; `-` is standard input.

    Raises:
        ValueError: there are no prompts, or a line is empty.
        FileNotFoundError: there is no such file.
    """
    prompts = list(given)
    if file:
        where = "standard input" if file == "-" else file
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not text in UTF-8: {error}") from error
        for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
            if not line.strip():
                raise ValueError(f"{where}, line {number} is empty: every line is a prompt")
            prompts.append(line.removesuffix("\r"))
    if not prompts:
        raise ValueError(
            'nothing to continue: give --prompt "TEXT" (any number of them), --prompts FILE or --chat'
        )
    return prompts


def print_completions(
    path: Path,
    prompts: Sequence[str],
    sampling: Sampling,
    device: str = "auto",
    as_json: bool = False,
    timing: bool = False,
) -> None:
    """Complete prompts and print them; a single completion is streamed if standard output is a terminal.

    Args:
        path: path of a run, a checkpoint or an export.
        prompts: the prompts, at least one.
        sampling: options of sampling.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or another name of a torch device.
        as_json: print only one JSON object.
        timing: print the number of generated tokens per second.

    Raises:
        ValueError: see `load_run` and `complete_batch`; the device is not available.
        FileNotFoundError: see `load_run`.
    """
    model, tokenizer = _load(path, device)
    streaming = len(prompts) == 1 and not as_json and sys.stdout.isatty()
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
            if len(prompts) > 1:
                _print(f"=== {number} of {len(prompts)}", end="\n")
            _print(prompt + completion.text, end="\n")
    for number, size in enumerate(sizes, start=1):
        _note_context(f"prompt {number}", size, model)
    if timing:
        _note_speed(sum(sizes), completions, seconds)


def converse(path: Path, system: str, sampling: Sampling, device: str = "auto", timing: bool = False) -> None:
    """Answer each line of standard input, as one conversation, until its end; see `print_completions`.

    Raises:
        ValueError: there is no chat template; see also `load_run` and `Conversation`.
        FileNotFoundError: see `load_run`.
    """
    template = find_template(path)
    if template is None:
        raise ValueError(
            f"{path} has no chat template ({CHAT_TEMPLATE}): it was not trained on conversations. Train on records with"
            " `messages` (data.format=chat; data.chat_template says how they are written), or omit --chat"
        )
    model, tokenizer = _load(path, device)
    conversation = Conversation(model, tokenizer, template, sampling, system)
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            break
        if not line.strip():
            continue
        start = time.perf_counter()
        answer = conversation.say(line, _print)
        seconds = time.perf_counter() - start
        _print("", end="\n")
        _note_context("the conversation", conversation.num_read, model)
        if answer.reason == "length":
            _note(f"cut after {sampling.max_tokens:,} tokens: --max-tokens allows more")
        if timing:
            _note_speed(conversation.num_read, [answer], seconds)
    if is_terminal:
        _print("", end="\n")


def _load(path: Path, name: str) -> tuple[Decoder, Tokenizer]:
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(automatic if name == "auto" else name)
        # Fails here, before anything is loaded, if the device is not available.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--device {name} cannot be used here ({reason}); --device cpu can") from error
    model, tokenizer = load_run(path)
    return model.to(device), tokenizer


def _note_context(what: str, tokens: int, model: Decoder) -> None:
    context = model.shape.context
    if tokens > context:
        _note(f"{what} has {tokens:,} tokens: the model sees the last {context:,} of them (model.context)")


def _note_speed(read: int, completions: Sequence[Completion], seconds: float) -> None:
    new = sum(len(completion.tokens) for completion in completions)
    _note(f"{new:,} tokens after {read:,} of prompts in {seconds:.2f} s: {new / seconds:,.1f} tokens/s")


def _print(text: str, end: str = "") -> None:
    """Print to standard output; to a terminal without control characters, which a model may generate."""
    sys.stdout.write((text.translate(HARMLESS) if sys.stdout.isatty() else text) + end)
    sys.stdout.flush()


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
