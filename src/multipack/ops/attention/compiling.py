"""Backend selection under torch.compile: evaluated once while tracing, and a constant of the compiled code.

Imported only while tracing: the decorator imports torch's compiler, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from multipack.ops.attention.table import position as uncompiled

position: Callable[..., int] = torch.compiler.assume_constant_result(uncompiled)  # type: ignore[no-untyped-call]
