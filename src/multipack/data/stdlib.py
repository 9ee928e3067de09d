"""The embedded corpus: the running Python's own standard library as (signature + docstring → source) pairs.

    def mean(data):                           ┐
        \"\"\"Return the sample mean.\"\"\"         ┘ prompt: read, never a target
        total, count = _sum(data)             ┐
        return _convert(total / count)        ┘ completion: what the model learns to write

Nothing is shipped or downloaded. The content differs between versions of Python, so every run records its identity.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from multipack.data.texts import files_below

SKIPPED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "idle_test",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "lib-dynload",
    "__pycache__",
)
"""Folders of tests, generated files or other packages; folders named `test…` or `config-…` are skipped too."""


class Pair(NamedTuple):
    """One documented function.

    Attributes:
        name: qualified name within its file, like `OrderedDict.popitem`.
        prompt: the `def` lines up to the end of the docstring, unindented.
        completion: the rest of the function, unindented as well.
    """

    name: str
    prompt: str
    completion: str


def library_files() -> tuple[Path, list[str]]:
    """The standard library's folder and the `.py` files in it, relative and sorted."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [name for name in files_below(folder, _is_skipped) if name.endswith(".py")]
    if not files:
        raise ValueError(
            f"data.source=stdlib: this Python has no standard library sources in {folder} (byte code "
            "only, or zipped); use a Python that has them, or other text: data.source=text data.path=…"
        )
    return folder, files


def _is_skipped(folder: str) -> bool:
    return folder in SKIPPED_FOLDERS or folder.startswith(("test", "config-"))


@functools.cache
def parse_file(path: Path) -> list[Pair] | None:
    """The documented functions of a file, parsed once in a process; None if it is not Python of this version."""
    try:
        return parse_pairs(path.read_bytes())
    except (SyntaxError, UnicodeDecodeError):
        return None


def parse_pairs(source: bytes) -> list[Pair]:
    """The documented functions and methods of one Python file, in the order in which they begin.

    Raises `SyntaxError` or `UnicodeDecodeError` if it is not Python of this version.
    """
    encoding, _ = tokenize.detect_encoding(BytesIO(source).readline)
    text = source.decode(encoding)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources hold escapes that newer Pythons warn about
        tree = ast.parse(text)
    lines = text.replace("\r\n", "\n").split("\n")
    return [pair for name, node in _functions(tree, "") if (pair := _pair(name, node, lines)) is not None]


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    for node in ast.iter_child_nodes(parent):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}" if prefix else node.name
            if not isinstance(node, ast.ClassDef):
                yield name, node
        yield from _functions(node, name)


def _pair(name: str, node: _Function, lines: list[str]) -> Pair | None:
    if ast.get_docstring(node, clean=False) is None or len(node.body) < 2:
        return None
    last = node.body[0].end_lineno or 0
    if node.body[1].lineno <= last:  # `"docstring"; return 1` on one line cannot be divided by lines
        return None
    indent = lines[node.lineno - 1][: node.col_offset]
    body = [line.removeprefix(indent) for line in lines[node.lineno - 1 : node.end_lineno]]
    split = last - node.lineno + 1
    return Pair(name, "\n".join(body[:split]) + "\n", "\n".join(body[split:]) + "\n")
