"""The site of docs/."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_has_all_pages_and_no_dead_link(tmp_path):
    pytest.importorskip("mkdocstrings", reason="needs pip install 'multipack[docs]'")
    pytest.importorskip("material", reason="needs pip install 'multipack[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=quiet)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix("")
        assert (
            tmp_path / "site" / (place.parent if place.name == "index" else place) / "index.html"
        ).is_file()


def test_every_public_name_is_in_the_reference():
    import multipack

    reference = (ROOT / "docs" / "reference.md").read_text()
    missing = [
        name
        for name in multipack.__all__
        if f".{name}\n" not in reference and name not in ("SHAPES", "__version__")
    ]
    assert not missing


def test_every_name_of_a_host_in_the_pages_is_in_the_reference():
    reference = (ROOT / "docs" / "reference.md").read_text()
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {
        name.strip()
        for page in pages
        for names in re.findall(r"from multipack\.integrations\.\w+ import ([\w, ]+)", page.read_text())
        for name in names.split(",")
    }
    assert len(found) >= 10
    assert not [name for name in found if f".{name}\n" not in reference]


def test_the_reference_describes_one_argument_a_line():
    """mkdocstrings warns of others, and the site is built without warnings."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    wrong, checked = [], 0
    for module in {name.rpartition(".")[0] for name in re.findall(r"^::: (multipack\..+)$", reference, re.M)}:
        file = ROOT / "src" / (module.replace(".", "/") + ".py")
        text = file.read_text() if file.is_file() else ""
        for indent, items in re.findall(r'^( +)Args:\n(.+?)(?=\n\n|\n *""")', text, re.M | re.S):
            names = re.findall(rf"^{indent}    (\S[^:\n]*):", items, re.M)
            wrong += [f"{module}: {name}" for name in names if "," in name]
            checked += len(names)
    assert checked > 100
    assert not wrong
