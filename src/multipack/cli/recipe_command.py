"""`multipack recipe`: settings of common jobs as files to copy and change, in `recipes/`."""

from __future__ import annotations

import shlex
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
        first, *commands = _head(file)
        typer.echo(f"{file.stem}\n  {first}")
        typer.echo("".join(f"  {command}\n" for command in commands))


def _head(file: Path) -> list[str]:
    """The comments at the beginning of a recipe: its purpose, and the commands that use it."""
    return [line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#")]


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
    for command in _head(made)[1:]:
        typer.echo(f"  {command.replace(f'config={name}.yaml', shlex.quote(f'config={made}'))}")


list_recipes.__name__ = "list"
add_commands(recipe, list_recipes, copy)
