"""Drop-in for Axolotl: its `MultipackBatchSampler`, its documented packing functions, and a plugin that installs them.

One line of Axolotl's YAML replaces the sampler wherever Axolotl makes one:

    plugins: [multipack.integrations.axolotl.MultipackPlugin]

In other code that uses Axolotl's sampler:

    - from axolotl.utils.samplers.multipack import MultipackBatchSampler
    + from multipack.integrations.axolotl import MultipackBatchSampler
"""

from typing import Any

from multipack.integrations.axolotl_sampler import MultipackBatchSampler
from multipack.integrations.packing_functions import (
    allocate_sequentially,
    ffd_check,
    pack_group,
    pack_parallel,
)
from multipack.machine import import_extra

__all__ = ["MultipackBatchSampler", "allocate_sequentially", "ffd_check", "pack_group", "pack_parallel"]


def __getattr__(name: str) -> Any:
    if name != "MultipackPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_extra("axolotl", "MultipackPlugin", "axolotl")
    from multipack.integrations.axolotl_plugin import MultipackPlugin

    return MultipackPlugin
