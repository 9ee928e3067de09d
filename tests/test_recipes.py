"""`multipack recipe`: files of settings that `config=FILE` reads."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.cli.recipe_command import FOLDER
from multipack.training.run_config import compose
from multipack.words import flatten, read_yaml

RECIPES = sorted(FOLDER.glob("*.yaml"))


def call(*arguments):
    return CliRunner().invoke(app, ["recipe", *map(str, arguments)], catch_exceptions=False)


def test_all_are_listed_with_the_commands_that_use_them():
    shown = call("list").stdout
    assert len(RECIPES) >= 5
    for file in RECIPES:
        assert f"\n{file.stem}\n" in f"\n{shown}"
        assert f"config={file.name}" in shown


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_copy_sets_what_it_says(file, tmp_path):
    copied = tmp_path / "mine.yaml"
    shown = call("copy", file.stem, copied).stdout
    assert f" train config={copied} " in shown
    for prepared in re.findall("multipack prepare .*", shown):  # a store for this model has its tokens
        assert "train.init_from=FOLDER" in prepared
    (words,) = re.findall(rf"^#.* train (config={file.name} .*)$", copied.read_text(), re.M)
    config = compose([f"config={copied}", *shlex.split(words)[1:]])
    for name, value in flatten(read_yaml(copied)).items():
        group, field = name.split(".")
        assert getattr(getattr(config, group), field) == value


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "chat.yaml").write_text("mine")
    with pytest.raises(ValueError, match=r"chat\.yaml exists: give another FILE"):
        call("copy", "chat", tmp_path / "chat.yaml")
    assert (tmp_path / "chat.yaml").read_text() == "mine"
    with pytest.raises(ValueError, match=r"there is no recipe 'chats': .* did you mean chat"):
        call("copy", "chats")
