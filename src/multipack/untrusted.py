"""Guards against untrusted input: text on a terminal, errors of libraries, regular expressions, loaders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MOST_REASON = 400
"""Characters of the reason that another library states for an error."""
_REASONS = {"MemoryError": "it needs too much memory", "RecursionError": "it is nested too deeply"}
_UNSHOWN = re.compile(
    # Control characters but tab and line feed; Unicode's line ends; characters that reverse the order of a line, which
    # then reads otherwise than it is; halves of surrogate pairs, which no stream can encode.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

MOST_SECONDS = 5.0
"""Time for regular expressions: repeats in repeats, such as `((a+)+)!`, would run for years."""
_MATCH = """
import json, re, sys
patterns, names, match = json.load(sys.stdin)
for pattern in patterns:
    try:
        print(json.dumps([bool(getattr(re, match)(pattern, name)) for name in names]), flush=True)
    except Exception as error:
        sys.exit(f"{pattern!r:.60} is no regular expression: {error}")
"""


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters become �; tabs and line feeds stay."""
    return _UNSHOWN.sub("�", text)


def one_line(text: object) -> str:
    """`printable` text without line ends."""
    return printable(" ".join(str(text).splitlines()))


def printable_json(text: str) -> str:
    """JSON with the same values, in which control characters are escaped."""
    return _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@contextmanager
def foreign_errors(where: str) -> Iterator[None]:
    """Context in which another library reads a file that may be damaged or hostile, and so may fail in any way.

    Raises:
        ValueError: the library raised anything but an interrupt; one line that begins with `where`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is not an `Exception`
        raise ValueError(f"{where}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The message of an error on one line, with its type unless it is a ValueError, OSError or RuntimeError."""
    kind, text = type(error).__name__, one_line(" ".join(str(error).split()))
    text = text if len(text) <= MOST_REASON else f"{text[:MOST_REASON]}…"
    is_plain = text and isinstance(error, ValueError | OSError | RuntimeError)
    return _REASONS.get(kind) or (text if is_plain else f"{kind} {text}".rstrip())


def matching(patterns: Sequence[str], names: Sequence[str], whole: bool = False) -> list[list[bool]]:
    """(patterns, names) whether a regular expression matches the beginning of a name, or the `whole` name.

    Another process matches, which can be ended.

    Raises:
        ValueError: one is not a regular expression, or takes too long.
    """
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([[*map(str, patterns)], [*names], "fullmatch" if whole else "match"]),
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"regular expressions that take more than {MOST_SECONDS:g} s to match") from None
    if ended.returncode:
        raise ValueError(one_line(ended.stderr.strip().rpartition("\n")[2]))
    return [json.loads(line) for line in ended.stdout.splitlines()]


def from_folder(kind: Any, source: Any, **options: Any) -> Any:
    """The object that a class of transformers reads from a folder or by a name, without running the folder's code.

    Raises:
        ValueError: it needs such code; or any error of transformers.
    """
    try:
        return kind.from_pretrained(source, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{source} brings code of its own, which is not run; save it again in a format that transformers knows"
        ) from None


def config_from_folder(transformers: Any, source: Any, **options: Any) -> Any:
    """The configuration that `AutoConfig` reads; see `from_folder`.

    Implementations that its config.json names are left out: for some names transformers would fetch code from the hub.
    """
    config = from_folder(transformers.AutoConfig, source, **options)
    config._attn_implementation = None
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = None
    return config
