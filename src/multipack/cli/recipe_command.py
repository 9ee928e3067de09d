"""`multipack recipe`: settings of common jobs as files to copy and change, in `recipes/`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from multipack.cli.command_options import add_commands, argument, nearest

FOLDER = Path(__file__).parent / "recipes"

recipe = typer.Typer(
    help="Settings of common jobs, as files to copy.", no_args_is_help=True, rich_markup_mode=None
)


def list_recipes() -> None:
    """List the recipes, with the commands that use them."""
    for file in sorted(FOLDER.glob("*.yaml")):
        first, *others = (line for line in file.read_text().splitlines() if line.startswith("#"))
        typer.echo(f"{file.stem}\n  {first.removeprefix('# ')}")
        typer.echo("".join(f"  {line.removeprefix('#   ')}\n" for line in others))


def copy(
    name: Annotated[str, argument("NAME", "A recipe, as `multipack recipe list` names it.")],
    file: Annotated[Path | None, argument("FILE", "The file to write; default: NAME.yaml.")] = None,
) -> None:
    """Copy a recipe to a file, for `multipack train config=FILE`."""
    names = sorted(each.stem for each in FOLDER.glob("*.yaml"))
    if name not in names:
        raise ValueError(
            f"there is no recipe {name!r}: choose one of {', '.join(names)}{nearest(name, names)}"
        )
    made = file or Path(f"{name}.yaml")
    if made.exists():
        raise ValueError(f"{made} exists: give another FILE, or move it away")
    shutil.copyfile(FOLDER / f"{name}.yaml", made)
    typer.echo(f"{made} written; words after config={made} change its values")


list_recipes.__name__ = "list"
add_commands(recipe, list_recipes, copy)
