"""Choice of a kernel under torch.compile: evaluated while tracing, and a constant of the compiled code.

Imported only while tracing: the decorator imports torch's compiler, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from multipack.ops.attention import table

activated_index: Callable[..., int] = torch.compiler.assume_constant_result(table.activated_index)  # type: ignore[no-untyped-call]
