"""Attention inside documents: one function, and a table of the ways to compute it.

    documents    A A A B B          query 0  ■ · ·  · ·      every token sees its own document
    cu_seqlens   0     3   5              1  ■ ■ ·  · ·      up to itself, and nothing of another;
                                          2  ■ ■ ■  · ·      what lies outside the triangles is
                                          3  · · ·  ■ ·      never computed (except by `dense`,
                                          4  · · ·  ■ ■      the oracle of the tests)

Adding a backend is one `Backend` entry in `BACKENDS`, placed by preference, and its function
(q, k, v, batch, window) → (T, H, D). What such a function can rely on, and must beware of:

- q, k and v have one dtype that the row names: under autocast they arrive already cast, because kernels
  behind custom operators are not in autocast's lists and would see whatever the caller left.
- `batch.cu_seqlens` repeats T at its end, so kernels must take empty documents; `batch.max_seqlen` is a
  constant of the plan, so kernels specialize once; `batch.lengths` is the same on the host, for loops without
  a device sync.
- q, k and v may be strided views (the last dimension is contiguous), and so may be the result.
- Import the package named in `needs` inside the function: the table itself imports nothing.
- Kernels that hand the log-sum-exp from forward to backward want it back in the very strides in which they
  returned it: `aten::_scaled_dot_product_flash_attention_for_cpu` gives (1, H, l) stored as (1, l, H), and a
  contiguous copy gives wrong gradients without an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.batch import PackedBatch

FLOAT32_TOKENS = 512
"""On a CPU, bfloat16 documents up to this long are attended to in float32, where torch is faster and rounds less: by
2.1 × at 64 tokens, 1.3 × at 200, even at 500; beyond, its bfloat16 kernel wins (benchmarks/precision.py)."""

AttentionFunction = Callable[[Tensor, Tensor, Tensor, PackedBatch, int | None], Tensor]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and what it can take.

    Attributes:
        name: what `backend=` calls it.
        devices: device types (`"cpu"`, `"cuda"`, …) that it runs on; empty = every one.
        dtypes: of q, k and v; empty = every floating dtype.
        backward: whether gradients flow through it.
        window: whether it takes a sliding window.
        gqa: whether K may be smaller than H.
        function: (q, k, v, batch, window) → (T, H, D).
        needs: the package that it imports; empty = torch alone.
        note: one line for people who choose.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    backward: bool
    window: bool
    gqa: bool
    function: AttentionFunction
    needs: str = ""
    note: str = ""

    def obstacle(self, query: Tensor, key: Tensor, window: int | None, backward: bool) -> str:
        """Why this row cannot take these tensors, in words; empty when it can."""
        if self.devices and query.device.type not in self.devices:
            return f"{query.device.type} tensors (it runs on {', '.join(self.devices)})"
        if self.dtypes and query.dtype not in self.dtypes:
            return f"{query.dtype} (it takes {', '.join(str(dtype) for dtype in self.dtypes)})"
        if backward and not self.backward:
            return "tensors that require gradients (it has no backward pass)"
        if window is not None and not self.window:
            return f"a sliding window (window={window})"
        if key.shape[1] != query.shape[1] and not self.gqa:
            return f"{key.shape[1]} key heads for {query.shape[1]} query heads"
        if self.needs and not _installed(self.needs):
            return f"this environment: the package {self.needs} is not installed"
        return ""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    backend: str = "auto",
    window: int | None = None,
) -> Tensor:
    """Causal attention in which every token sees its own document only, scaled by 1/√D.

    Args:
        q: (T, H, D) queries.
        k: (T, K, D) keys; K divides H, and query head h reads key head h // (H / K).
        v: (T, K, D) values.
        batch: says where documents begin; T must be its number of slots.
        backend: a name in `BACKENDS`, or `"auto"`: the first row that takes these tensors.
        window: tokens that each position sees, itself included; None = the whole document before it.

    Returns:
        (T, H, D), in the dtype of the inputs (in autocast's where it is on).

    Raises:
        ValueError: shapes or dtypes that do not go together; an unknown backend, or one that cannot take
            these tensors (the message names it, what stands against it, and the row that can).
    """
    q, k, v = _in_autocast_dtype(q, k, v)
    _check(q, k, v, batch, window)
    return select(backend, q, k, v, window).function(q, k, v, batch, window)


def select(backend: str, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Backend:
    """The row that `attention` uses for these tensors.

    Raises:
        ValueError: as `attention` does for its backend.
    """
    backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if backend != "auto":
        row = find_backend(backend)
        obstacle = row.obstacle(q, k, window, backward)
        if not obstacle:
            return row
        nearest = select("auto", q, k, v, window).name
        raise ValueError(f"attention={backend} cannot take {obstacle}; the nearest that can is {nearest!r}")
    for row in BACKENDS:
        if not row.obstacle(q, k, window, backward):
            return row
    raise ValueError(f"no attention backend takes {q.dtype} on {q.device.type}; there are {_names()}")


def find_backend(name: str) -> Backend:
    """The row of that name.

    Raises:
        ValueError: there is none; the message has the nearest.
    """
    for row in BACKENDS:
        if row.name == name:
            return row
    near = difflib.get_close_matches(name, [row.name for row in BACKENDS], n=1, cutoff=0.0)
    raise ValueError(f"attention={name} is unknown; did you mean {near[0]!r}? There are auto, {_names()}")


def document_mask(batch: PackedBatch, window: int | None = None) -> Tensor:
    """The dense block-diagonal causal mask, built from `cu_seqlens` alone.

    Returns:
        (T, T) bool on the batch's device: row i, column j is True where token i sees token j. T² bytes, 1 GiB
        at T = 32,768: for tests, and for models that want a mask.
    """
    positions = torch.arange(batch.num_slots, device=batch.cu_seqlens.device, dtype=batch.cu_seqlens.dtype)
    # The tail of cu_seqlens repeats T, which no position reaches: it opens no document here.
    document = torch.bucketize(positions, batch.cu_seqlens, right=True)
    mask = document[:, None] == document[None, :]
    mask &= _causal(positions, window)
    return mask


def _causal(positions: Tensor, window: int | None) -> Tensor:
    distance = positions[:, None] - positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _loop(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """Each document by itself, in torch's own attention: no slot of any other is ever touched."""
    lengths = [length for length in batch.lengths if length]
    grouped = k.shape[1] != q.shape[1]
    if len(set(lengths)) == 1:
        # Equally long documents are a batch: (B, l, H, D) is a view, and one call does them all.
        q, k, v = (x.view(-1, lengths[0], *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return _document(q, k, v, window, grouped).transpose(1, 2).flatten(0, 1)
    # (T, H, D) → (1, H, T, D) once; splitting then gives views, and the kernel takes their strides.
    queries, keys, values = (torch.split(x.transpose(0, 1).unsqueeze(0), lengths, dim=2) for x in (q, k, v))
    # The kernel stores its result as (1, l, H, D), so the transposed parts are contiguous for cat.
    parts = [
        _document(query, key, value, window, grouped).transpose(1, 2)
        for query, key, value in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(parts, dim=1).squeeze(0)


def _document(q: Tensor, k: Tensor, v: Tensor, window: int | None, grouped: bool) -> Tensor:
    """(B, H, l, D) documents of l tokens each, all at once."""
    length = q.shape[2]
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and length <= FLOAT32_TOKENS:
        with torch.autocast("cpu", enabled=False):  # it would cast them back
            return _document(q.float(), k.float(), v.float(), window, grouped).to(q.dtype)
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    mask = _causal(torch.arange(length, device=q.device), window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _dense(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """Every pair of tokens of the pack, most of them masked: the oracle."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    mask = document_mask(batch, window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


def _in_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        # As autocast itself does: float64 is left alone.
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _check(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"attention takes q (T, H, D) and k, v (T, K, D), got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the key heads must divide the query heads, got {shapes}")
    if q.shape[0] != batch.num_slots:
        raise ValueError(f"the batch has {batch.num_slots:,} slots, but {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, or None for no window, got {window}")


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _names() -> str:
    return ", ".join(row.name for row in BACKENDS)


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="loop",
        devices=(),
        dtypes=(),
        backward=True,
        window=True,
        gqa=True,
        function=_loop,
        note="scaled_dot_product_attention, one call a document; one call in all when they are equally long",
    ),
    Backend(
        name="dense",
        devices=(),
        dtypes=(),
        backward=True,
        window=True,
        gqa=True,
        function=_dense,
        note="a T × T mask: quadratic in the pack; the oracle that the others are tested against",
    ),
)
"""Every backend, in order of preference: `auto` takes the first that can. GPU kernels go before the loop."""
