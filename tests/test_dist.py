"""The distribution: files that publishing needs, and a wheel that plans where nothing else is installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import multipack

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere():
    """In the wheel, the citation, and the changelog's first section below what is unreleased, with one date."""
    citation = (ROOT / "CITATION.cff").read_text()
    cited = re.search(r"^version: (\S+)\ndate-released: (\S+)$", citation, re.M)
    unreleased, latest = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[:2]
    assert unreleased == "Unreleased"
    assert latest == f"{cited[1]} ({cited[2]})"
    assert cited[1] == multipack.__version__


def test_hosted_tests_run_every_version_that_is_promised():
    promised = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert re.search(r"python: \[(.*)\]", workflow)[1].replace('"', "").split(", ") == promised
    assert "run: make test" in workflow


@pytest.mark.slow
def test_the_wheel_plans_in_an_empty_environment(tmp_path):
    tree = tmp_path / "multipack"
    ignored = shutil.ignore_patterns(".git", ".venv", "dist", "build", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignored)
    done = subprocess.run(["make", "dist"], cwd=tree, capture_output=True, text=True, timeout=900)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("the packages that a wheel needs cannot be downloaded here")
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"documents +1,999\n", done.stdout)
    assert sorted(path.suffix for path in (tree / "dist").iterdir()) == [".gz", ".whl"]
