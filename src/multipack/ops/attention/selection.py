"""Choosing a backend for a call."""

from __future__ import annotations

import torch

from multipack.ops.attention import table


def position(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_width: int,
    window: int | None,
    backward: bool,
    compiled: bool,
) -> int:
    """Index in `BACKENDS` of the backend for a `Request` with these properties.

    Args and result are plain values, which torch.compile can treat as constants (compiling.py).

    Raises:
        ValueError: an unknown backend, or one that does not support the call; the message suggests one that does.
    """
    request = table.Request(device, dtype, heads, kv_heads, head_width, window, backward, compiled)
    able = [row for row in table.BACKENDS if row.automatic and not row.obstacle(request)]
    if backend == "auto":
        if not able:
            traced = " under torch.compile" if compiled else ""
            raise ValueError(
                f"no attention backend supports {dtype} on {device.type}{traced}; there are {table.names()}"
            )
        return table.BACKENDS.index(able[0])
    row = table.find_backend(backend)
    obstacle = row.obstacle(request)
    if obstacle:
        hint = f"; the nearest that does is {able[0].name!r}" if able else ""
        raise ValueError(f"attention={backend} does not support {obstacle}{hint}")
    return table.BACKENDS.index(row)
