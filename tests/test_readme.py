"""The README's code runs, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"<!-- tested -->\n```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(
    r"^(?:torchrun --nproc-per-node 4 -m )?multipack (.*?)(?:\s{2,}#.*)?$", README, re.MULTILINE
)


def test_there_is_something_to_test():
    assert len(BLOCKS) == 4
    assert len(COMMANDS) >= 9
    assert "@@" not in README


@pytest.mark.parametrize("block", BLOCKS)
def test_library_examples_run(block, tmp_path):
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_in_commands_are_legal(command):
    """Every `group.key=value` of every command composes (paths need not exist for that)."""
    from multipack.cli.plan_settings import PackCommand, PlanCommand
    from multipack.launch.advise_request import AdviseRequest
    from multipack.training.run_config import Config, compose
    from multipack.words import merge

    name, *words = command.split()
    settings = [
        word for word in words if "=" in word and not word.startswith("--") and word != "train.resume=true"
    ]
    commands = {"plan": PlanCommand, "pack": PackCommand, "advise": AdviseRequest}
    composed = merge(commands[name], settings) if name in commands else compose(settings)
    assert isinstance(composed, Config | PlanCommand | PackCommand | AdviseRequest)


def test_every_module_is_on_the_map():
    root = Path(__file__).parents[1] / "src" / "multipack"
    names = {path.name for path in root.rglob("*.py")} - {"__init__.py", "__main__.py"}
    listed = README + (root.parents[1] / "ARCHITECTURE.md").read_text()
    assert {name for name in names if name not in listed} == set()
