"""The house's rules, kept by walking the code's own imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import multipack

ROOT = Path(multipack.__file__).parent
LEFT_OF = {
    "words": "",
    "atomic": "",
    "shapes": "words shapes_huggingface",
    "shapes_huggingface": "",
    "run": "words atomic",
    "planning": "words atomic shapes",
    "data": "words atomic shapes planning",
    "ops": "words shapes planning data",
    "models": "words atomic shapes planning data ops",
    "parallel": "words atomic shapes planning data ops",
    "integrations": "words shapes planning data",
    "launch": "words atomic shapes run planning data ops models parallel",
    "reports": "words atomic shapes run planning data",
    "training": "words atomic shapes run planning data ops models parallel reports",
    "config": "words atomic shapes run planning data ops models parallel reports training",
    "cli": "words atomic shapes run planning data ops models parallel reports training config launch",
}
"""Rooms that a room may import, beside itself."""
TORCH_FREE = ["planning", "shapes.py", "shapes_huggingface.py", "words.py", "run.py", "atomic.py"]


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


def test_imports_point_left():
    wrong = []
    for path in _files():
        room = _room(path)
        if room in ("__init__", "__main__"):
            continue
        allowed = {room, *LEFT_OF[room].split()}
        for module in _imports(path):
            if module.startswith("multipack.") and module.split(".")[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_planning_knows_no_torch():
    wrong = [
        str(path.relative_to(ROOT))
        for path in _files()
        if path.relative_to(ROOT).parts[0] in TORCH_FREE
        and any(module.split(".")[0] == "torch" for module in _imports(path))
    ]
    assert not wrong, wrong


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
