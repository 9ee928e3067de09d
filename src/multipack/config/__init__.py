"""The configuration of every command, from YAML, presets and `key=value` words.

    multipack train  data=jsonl data.path=train.jsonl  model=gpt2 model.layers=6  plan.capacity=16384  out=runs/a
                     └ preset ┘                        └ preset ┘ └ one field ┘

words.py reads words, commands.py holds what `plan` and `pack` depend on, run.py all that a run does. The names
below are loaded when they are first used: planning and packing import no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "ALIASES": "multipack.config.words",
    "HINTS": "multipack.config.words",
    "ConfigError": "multipack.config.words",
    "describe": "multipack.config.words",
    "merge": "multipack.config.words",
    "preset_names": "multipack.config.words",
    "PackCommand": "multipack.config.commands",
    "PlanCommand": "multipack.config.commands",
    "Config": "multipack.config.run",
    "ModelConfig": "multipack.config.run",
    "compose": "multipack.config.run",
    "compose_run": "multipack.config.run",
    "saved": "multipack.config.run",
}

__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from multipack.config.commands import PackCommand as PackCommand
    from multipack.config.commands import PlanCommand as PlanCommand
    from multipack.config.run import Config as Config
    from multipack.config.run import ModelConfig as ModelConfig
    from multipack.config.run import compose as compose
    from multipack.config.run import compose_run as compose_run
    from multipack.config.run import saved as saved
    from multipack.config.words import ALIASES as ALIASES
    from multipack.config.words import HINTS as HINTS
    from multipack.config.words import ConfigError as ConfigError
    from multipack.config.words import describe as describe
    from multipack.config.words import merge as merge
    from multipack.config.words import preset_names as preset_names


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'multipack.config' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
