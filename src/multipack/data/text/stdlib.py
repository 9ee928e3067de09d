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
from pathlib import Path

from multipack.data.text.texts import files_below

SKIPPED_FOLDERS = (
    *("site-packages", "dist-packages", "idle_test", "lib2to3"),
    *("ensurepip", "turtledemo", "lib-dynload", "__pycache__"),
)
"""Folders of tests, generated files or other packages; folders named `test…` or `config-…` are skipped too."""


Pair = tuple[str, str, str]
"""A documented function: its qualified name, such as `OrderedDict.popitem`, prompt and completion, both unindented."""


def library_files() -> tuple[Path, list[str]]:
    """The standard library's folder and the `.py` files in it, relative and sorted."""

    def is_skipped(name: str) -> bool:
        return name in SKIPPED_FOLDERS or name.startswith(("test", "config-"))

    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [name for name in files_below(folder, is_skipped) if name.endswith(".py")]
    if not files:
        raise ValueError(
            f"data.source=stdlib: this Python has no standard library sources in {folder} (byte code "
            "only, or zipped); use a Python that has them, or other text: data.source=text data.path=…"
        )
    return folder, files


@functools.cache
def parse_file(path: Path) -> list[Pair] | None:
    """The documented functions and methods of a file in the order in which they begin, parsed once in a process.

    None if the file is not Python of this version.
    """
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources hold escapes that newer Pythons warn about
            text = file.read()
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return None
    lines = text.split("\n")
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
    last = node.body[0].end_lineno or 0
    if ast.get_docstring(node, clean=False) is None or len(node.body) < 2:
        return None
    if node.body[1].lineno <= last:  # `"docstring"; return 1` on one line cannot be divided by lines
        return None
    indent = lines[node.lineno - 1][: node.col_offset]
    body = [line.removeprefix(indent) for line in lines[node.lineno - 1 : node.end_lineno]]
    split = last - node.lineno + 1
    return name, "\n".join(body[:split]) + "\n", "\n".join(body[split:]) + "\n"
