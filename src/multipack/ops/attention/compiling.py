"""What torch.compile asks once, when it traces, and compiles the answer in.

Imported when something is traced, because the decorator imports what torch.compile is made of, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from multipack.ops.attention import table

place: Callable[..., int] = torch.compiler.assume_constant_result(table.place)  # type: ignore[no-untyped-call]
