"""The house's rules, kept by walking the code's own imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import multipack

ROOT = Path(multipack.__file__).parent
ORDER = ["atomic", "shapes", "planning", "data", "models", "training", "config", "cli"]
"""A room may import itself and what stands left of it."""
BESIDE = {
    "parallel": {"shapes", "planning", "data", "parallel"},
    "integrations": {"shapes", "planning", "data", "integrations"},
    "launch": {"atomic", "shapes", "planning", "data", "models", "parallel", "run", "launch"},
    "run": {"atomic", "run"},
    "reports": {"shapes", "planning", "data", "run", "reports"},
    "training": {*ORDER[:6], "parallel", "reports", "run"},
    "config": {*ORDER[:7], "parallel", "reports", "run"},
    "cli": {*ORDER, "launch", "parallel", "reports", "run"},
}
TORCH_FREE = ["planning", "shapes", "run.py", "atomic.py"]


def _files():
    return sorted(ROOT.rglob("*.py"))


def _room(path):
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def _imports(path):
    """Modules that a file imports when it runs; what stands under TYPE_CHECKING is not among them."""
    tree = ast.parse(path.read_text())
    hidden = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_left(path):
    room = _room(path)
    if room in ("__init__", "__main__"):
        return
    allowed = BESIDE.get(room) or set(ORDER[: ORDER.index(room) + 1])
    for module in _imports(path):
        if module.startswith("multipack."):
            assert module.split(".")[1] in allowed, f"{room} must not import {module}"


@pytest.mark.parametrize("room", TORCH_FREE)
def test_planning_knows_no_torch(room):
    paths = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    assert paths
    for path in paths:
        assert not [module for module in _imports(path) if module.split(".")[0] == "torch"], path


def test_nothing_unpickles():
    for path in _files():
        text = path.read_text()
        assert "pickle" not in {module.split(".")[0] for module in _imports(path)}, path
        assert "torch.load(" not in text, path
        assert "allow_pickle=True" not in text, path


def test_importing_multipack_is_light():
    code = (
        "import sys, multipack; dir(multipack);"
        "heavy = {'torch', 'numpy', 'numba', 'transformers', 'tokenizers', 'omegaconf', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy; import multipack.planning.plan; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in multipack.__all__:
        assert getattr(multipack, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'pakc'"):
        getattr(multipack, "pakc")  # noqa: B009


def test_files_can_be_read_in_one_sitting():
    for path in _files():
        assert path.read_text().count("\n") <= 500, path
