"""The rules of ARCHITECTURE.md, held by reading the code's own imports."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import multipack

ROOT = Path(multipack.__file__).parent
LEFT_OF = {
    "untrusted": "",
    "ranges": "",
    "words": "atomic ranges",
    "atomic": "untrusted",
    "checksums": "atomic",
    "machine": "untrusted",
    "hub": "untrusted machine atomic checksums",
    "shapes": "words atomic ranges",
    "run": "words atomic",
    "planning": "ranges words atomic shapes",
    "data": "untrusted ranges words machine atomic checksums shapes planning",
    "ops": "words machine shapes planning data",
    "models": "untrusted words hub machine atomic shapes planning data ops",
    "parallel": "untrusted ranges words machine atomic shapes planning data ops",
    "integrations": "untrusted words machine shapes planning data ops models",
    "launch": "ranges words machine atomic shapes run planning data ops models parallel",
    "reports": "untrusted words machine atomic checksums shapes run planning data",
    "imports": "untrusted words shapes data models parallel training",
    "training": "untrusted ranges words hub machine atomic checksums shapes run planning data ops"
    " models parallel reports",
    "cli": "untrusted ranges words machine atomic shapes run planning data ops models parallel reports training launch"
    " imports",
}
"""Rooms that a room may import, beside itself."""
TORCH_FREE = [
    "planning",
    "shapes",
    "words.py",
    "ranges.py",
    "run.py",
    "atomic.py",
    "checksums.py",
    "machine.py",
    "hub.py",
    "untrusted.py",
]
FLOORS = {"planning": 7, "data": 6}
"""Most modules of a room in one chain of imports."""


@cache
def _modules():
    """Module name → path, without `__main__`."""
    paths = sorted(path for path in ROOT.rglob("*.py") if path.name != "__main__.py")
    return {_name(path): path for path in paths}


def _name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("multipack", *parts)).removesuffix(".__init__")


@cache
def _tree(path):
    return ast.parse(path.read_text())


def _imports(path):
    """Modules that a file imports, inside functions and for types too."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in _modules() else node.module for name in names)


@cache
def _arrows():
    """Module → modules of multipack that it imports; the public names of the package itself are not followed."""
    modules = _modules()
    arrows = defaultdict(set)
    for name, path in modules.items():
        if name != "multipack":
            arrows[name] = {other for other in _imports(path) if other in modules} - {name, "multipack"}
    return arrows


DATA = ("text", "stores", "views", "packs")
"""Folders of data/: each imports itself and those before it."""


def _room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_point_left():
    wrong = []
    for name, path in _modules().items():
        if name == "multipack":
            continue
        allowed = {_room(path), *LEFT_OF[_room(path)].split()}
        wrong += [
            f"{name} imports {other}" for other in _arrows()[name] if other.split(".")[1] not in allowed
        ]
    assert not wrong, "\n".join(wrong)


def test_imports_between_the_folders_of_data_point_left():
    wrong = []
    for name, others in _arrows().items():
        for other in others:
            folders = [each.removeprefix("multipack.data.").partition(".")[0] for each in (name, other)]
            if {*folders} <= {*DATA} and DATA.index(folders[0]) < DATA.index(folders[1]):
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports():
    """Imports inside functions and under TYPE_CHECKING count."""
    done, path = set(), []

    def visit(name):
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for other in sorted(_arrows()[name]):
                visit(other)
            path.pop()
            done.add(name)

    for name in _modules():
        visit(name)


@pytest.mark.parametrize("room", FLOORS)
def test_chains_of_imports_are_short(room):
    @cache
    def floors(name):
        inside = [other for other in _arrows()[name] if other.startswith(f"multipack.{room}.")]
        return 1 + max(map(floors, inside), default=0)

    highest = max((name for name in _modules() if name.startswith(f"multipack.{room}.")), key=floors)
    assert floors(highest) <= FLOORS[room], highest


def test_planning_imports_no_torch():
    wrong = [
        str(path.relative_to(ROOT))
        for path in _modules().values()
        if path.relative_to(ROOT).parts[0] in TORCH_FREE
        and any(module.split(".")[0] == "torch" for module in _imports(path))
    ]
    assert not wrong, wrong


def test_names_of_public_classes_are_unique():
    places = defaultdict(list)
    for name, path in _modules().items():
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_files_are_short():
    long = {name: lines for name, path in _modules().items() if (lines := path.read_text().count("\n")) > 700}
    assert not long


def test_nothing_unpickles():
    for path in _modules().values():
        text = path.read_text()
        assert "pickle" not in {module.split(".")[0] for module in _imports(path)}, path
        assert "torch.load(" not in text, path
        assert "allow_pickle=True" not in text, path
        # torch's collectives of objects: all_gather_object, broadcast_object_list and others
        assert not re.search(r"(gather|broadcast|scatter|send|recv)_object", text), path


def test_importing_multipack_is_light():
    code = (
        "import sys, multipack; dir(multipack);"
        "heavy = {'torch', 'numpy', 'numba', 'transformers', 'tokenizers', 'omegaconf', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy; import multipack.planning.plan; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


PUBLIC = """
    CostModel Decoder Document Documents ModelShape PackStream PackedBatch PackedBatchSampler PackedCollator
    PackedLoader PackedStreamDataset Packs Plan PlanOptions PlanReport RankBatches SHAPES TokenStore __version__
    attention balance generate isolation_probe linear_cross_entropy load_model pack plan report
"""
"""Every name that was ever in `multipack.__all__`: none is removed from here."""


def test_type_checkers_know_the_list_of_public_names():
    assert "\n__all__: list[str]\n" in Path(multipack.__file__).with_suffix(".pyi").read_text()


def test_every_public_name_exists_or_says_what_to_use():
    assert set(multipack.__all__) <= set(PUBLIC.split()), "new public names are added to PUBLIC"
    for name in multipack.__all__:
        assert getattr(multipack, name) is not None
    for name in set(PUBLIC.split()) - set(multipack.__all__):
        with pytest.raises(AttributeError, match=f"{name} is no longer there: "):
            getattr(multipack, name)
    with pytest.raises(AttributeError, match="no attribute 'pakc'"):
        getattr(multipack, "pakc")  # noqa: B009
