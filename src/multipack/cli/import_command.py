"""The command `multipack import-config`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from multipack.cli.command_options import Json, argument, print_json
from multipack.untrusted import printable


def import_config(
    file: Annotated[Path, argument("FILE", "A configuration of Axolotl, as YAML.")],
    as_json: Json = False,
) -> None:
    """Print our configuration for one of another tool (Axolotl).

    Examples:
      multipack import-config axolotl.yml > ours.yaml
      multipack train config=ours.yaml

    Comments name every key that is honored in another way, and every key that
    cannot be honored; the exit code is 1 where that changes what is trained.
    """
    from dataclasses import asdict

    from multipack.imports.imported import translate_keys
    from multipack.words import read_yaml

    found = translate_keys(read_yaml(file))
    if as_json:
        print_json(asdict(found))
    else:
        lines = found.to_yaml().split("\n")  # keys of the file are in comments; YAML has escaped its values
        typer.echo("\n".join(printable(each) if each.startswith("#") else each for each in lines), nl=False)
    if found.lacking:
        sys.exit(1)
