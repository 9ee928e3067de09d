"""The sandbox of chat templates: Jinja with the names that transformers gives to templates, in a process of its own.

A template is an untrusted program. Jinja's immutable sandbox hides everything but the messages, and the operating
system limits the processor time and the memory of the process, whatever operation needs them:

    ask    ── source, day, conversations: a line of JSON ──▶   python chat_sandbox.py
           ◀── texts or errors: a line of JSON ──              Jinja, under the limits

The process starts when the first template is used and ends with this one. A conversation that exceeds the time ends it,
and the next one starts another; then the other conversations of its request are asked alone. This file imports nothing
of multipack, so that the process starts fast.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

OPEN, CLOSE = "\U0010fffc", "\U0010fffd"
"""Characters that mark the begin and end of the output of a `{% generation %}` block."""
MOST_SECONDS, MOST_CHARACTERS, MOST_BYTES = 10.0, 1 << 27, 1 << 31
"""Processor time and output of a rendering, and memory of the process."""
REQUEST_CHARACTERS, ANSWER_CHARACTERS, ANSWER_SECONDS = 1 << 18, 1 << 20, 0.5
"""Size of a request of several conversations, and where its answer ends: the rest is asked again."""
_CODE = re.compile(r"[^\x00-\x7f]")


# --- this process -------------------------------------------------------------------------------------


def ask(source: str, day: str, conversations: Iterable[str]) -> Iterator[str | ValueError]:
    """The text that a template writes of each conversation, in order.

    Args:
        source: the template.
        day: date in ISO format, which `strftime_now` formats.
        conversations: names in the template and their values, as JSON; `null` = only compile it, and write nothing.

    Yields:
        Texts; or an error: the template is malformed, refuses the conversation, or exceeds a limit. Its message is one
        line.
    """
    for waiting in _requests(conversations):
        most = len(waiting)
        while waiting:
            answers = _process(os.getpid()).ask({"source": source, "day": day}, waiting[:most])
            if not answers:  # one of them ended the process
                most = 1
                continue
            del waiting[: len(answers)]
            yield from (answer if isinstance(answer, str) else ValueError(answer[0]) for answer in answers)


def _requests(conversations: Iterable[str]) -> Iterator[list[str]]:
    """Conversations that are asked together; a long one is asked alone, so that others keep their memory."""
    request, size = list[str](), 0
    for conversation in conversations:
        if request and size + len(conversation) > REQUEST_CHARACTERS:
            yield request
            request, size = [], 0
        request.append(conversation)
        size += len(conversation)
    yield request


class _Process:
    """The process that renders, which starts at the first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, str], conversations: list[str]) -> list[Any]:
        """Texts, or errors as lists of one text, of the first conversations; none if one of several kills it."""
        limits = (MOST_SECONDS, MOST_BYTES, MOST_CHARACTERS)
        shared = json.dumps({**request, "limits": limits})
        line = f'{shared[:-1]}, "conversations": [{", ".join(conversations)}]}}\n'.encode()
        with self._lock:
            running, self._running = self._running or self._start(), None  # kept if it answers
            assert running.stdin is not None
            assert running.stdout is not None
            try:
                running.stdin.write(line)
                running.stdin.flush()
                answer = running.stdout.readline()
            except BrokenPipeError:  # it was killed before
                answer = b""
            except BaseException:  # such as Ctrl-C: the next request would read this answer
                running.kill()
                raise
            if answer.endswith(b"\n"):
                self._running = running
                return list(json.loads(answer))
            code = running.wait()
        if len(conversations) > 1:
            return []
        return [
            [f"it takes more than {MOST_SECONDS:g} s"]
            if code == -signal.SIGPROF
            else [f"its process ended with code {code}"]
        ]

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, sys.path))  # where this process found Jinja
        return subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C does not reach it
        )


@lru_cache(1)
def _process(owner: int) -> _Process:
    """The renderer of the process `owner`, a process number: a forked process starts its own."""
    return _Process()


# --- the process that renders -------------------------------------------------------------------------


def serve() -> None:
    """Answer requests from the standard input until it ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it may be ignored where this process was started
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_answer(line) + b"\n")
        sys.stdout.buffer.flush()


def _answer(line: bytes) -> bytes:
    answers, size, several, began = list[str | list[str]](), 0, False, time.monotonic()
    try:
        request = json.loads(line)
        several = len(request["conversations"]) > 1
        seconds, memory, characters = request["limits"]
        if sys.platform == "linux":  # other systems count memory otherwise
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
        for conversation in request["conversations"]:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process
            answers.append(_written(request["source"], request["day"], conversation, characters))
            size += len(answers[-1])
            if size > ANSWER_CHARACTERS or time.monotonic() - began > ANSWER_SECONDS:
                break
        return json.dumps(answers).encode()
    except Exception as error:  # without memory for the request or the answer
        return json.dumps([] if several else [[_reason(error)[:1000]]]).encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _written(source: str, day: str, conversation: dict[str, Any] | None, characters: int) -> str | list[str]:
    """The text of a conversation, or its error as a list of one text."""
    try:
        program = _compiled(source, day)
        text = "" if conversation is None else program.render(conversation)
        if len(text) > characters:
            raise ValueError(f"it writes more than {characters:,} characters")
        return text
    except Exception as error:  # a template is a program: it can fail in any way
        return [_reason(error)[:1000]]


def _reason(error: Exception) -> str:
    """The message of an error on one line, and its kind if the message does not say it."""
    kinds = {"MemoryError": "it needs too much memory", "RecursionError": "it is nested too deeply"}
    text = " ".join(str(getattr(error, "message", None) or error).split())
    reason = kinds.get(type(error).__name__) or text or type(error).__name__
    line = getattr(error, "lineno", None)
    return f"line {line}: {reason}" if line else reason


@lru_cache(8)
def _compiled(source: str, day: str) -> jinja2.Template:
    """A template, in which `strftime_now` formats `day`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = datetime.datetime.fromisoformat(day).strftime
    return environment.from_string(source)


class _GenerationBlocks(Extension):
    """`{% generation %} … {% endgeneration %}`: puts marks around the output of the block."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Called by Jinja at the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it in templates: no HTML escapes, characters as they are."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    # Codes of protected text (Unicode's last private-use plane) stay one character, to be restored.
    return _CODE.sub(lambda c: c[0] if c[0] >= "\U00100000" else json.dumps(c[0])[1:-1], text)


if __name__ == "__main__":
    serve()
