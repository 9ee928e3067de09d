"""Compilation: nothing at import, and a cache folder that cannot be written to is no reason to fail."""

import ast
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from multipack.planning import kernels
from multipack.planning.jit import compiled

FOLDER = Path(kernels.__file__).parent


def double(x):
    return 2 * x


def test_without_a_cache_folder(monkeypatch):
    real, asked = numba.njit, []

    def njit(*arguments, **options):
        mine = arguments[:1] == (double,) or not arguments  # numba compiles functions of its own too
        if mine:
            asked.append(options.get("cache", False))
        if mine and options.get("cache"):
            raise RuntimeError("cannot cache function 'double': no locator available for file")  # numba's own
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", njit)
    kernel = compiled(double)
    assert kernel(4) == 8
    assert asked == [True, False]


def test_nothing_compiles_at_import():
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    code = (
        "import sys, importlib, multipack.planning.plan;"
        f"rooms = [importlib.import_module('multipack.planning.kernels.' + name) for name in {names}];"
        "kernels = [v for room in rooms for v in vars(room).values() if hasattr(v, 'signatures')];"
        "assert len(kernels) > 20 and not any(v.signatures for v in kernels);"
        "assert 'torch' not in sys.modules and 'scipy.optimize' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_kernels_call_only_kernels_of_their_own_file(path):
    """numba's cache does not notice a change in what a kernel of another file does."""
    tree = ast.parse(path.read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [module for module in modules if module.startswith("multipack.")] in (
        [],
        ["multipack.planning.jit"],
    )
