"""The table of attention backends, and the choice of one for a call."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention.flex import flex
from multipack.ops.attention.loop import loop
from multipack.ops.attention.masks import dense
from multipack.ops.attention.varlen import flash3, varlen, xformers

AttentionFunction = Callable[[Tensor, Tensor, Tensor, PackedBatch, int | None], Tensor]

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """The properties of a call of `attention` that determine which backends support it; see there."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_width: int
    window: int | None
    backward: bool
    compiled: bool = False


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and what it supports.

    Attributes:
        name: value of `backend=`.
        function: (q, k, v, batch, window) → (T, H, D).
        devices: device types (`"cpu"`, `"cuda"`, …); empty = all.
        dtypes: of q, k and v; empty = every floating dtype.
        backward: whether it has a backward pass.
        window: whether it supports a sliding window.
        gqa: whether K may be smaller than H.
        head_widths: supported D; None = all.
        generations: first and last major compute capability of NVIDIA GPUs (Ampere 8, Hopper 9); None = all. Not
            checked on AMD GPUs, which number their architectures differently.
        compiles: device types on which it works under torch.compile; None = all in `devices`. Loops over lengths on
            the host would be compiled again for every pack.
        automatic: whether `"auto"` may choose it; backends that waste work are chosen by name only.
        operators: prefixes of the names of the torch operators that it runs, as the dispatcher sees them. Selective
            activation checkpointing keeps their outputs; those of other operators are recomputed.
        needs: the module that it imports; empty = only torch.
        install: how to install that module.
        note: one line for users.
    """

    name: str
    function: AttentionFunction
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    backward: bool = True
    window: bool = True
    gqa: bool = True
    head_widths: range | None = None
    generations: tuple[int, int] | None = None
    compiles: tuple[str, ...] | None = None
    automatic: bool = True
    operators: tuple[str, ...] = ()
    needs: str = ""
    install: str = ""
    note: str = ""

    def obstacle(self, request: Request) -> str:
        """What the backend does not support in the request, as the end of "… does not support"; empty if nothing."""
        if self.devices and request.device.type not in self.devices:
            return f"{request.device.type} tensors (it runs on {', '.join(self.devices)})"
        if self.dtypes and request.dtype not in self.dtypes:
            return f"{request.dtype} (it takes {', '.join(str(dtype) for dtype in self.dtypes)})"
        if request.backward and not self.backward:
            return "tensors that require gradients (it has no backward pass)"
        if request.window is not None and not self.window:
            return f"a sliding window (window={request.window})"
        if request.kv_heads != request.heads and not self.gqa:
            return f"{request.kv_heads} key heads for {request.heads} query heads"
        if self.head_widths is not None and request.head_width not in self.head_widths:
            widths, step = f"{self.head_widths[0]} … {self.head_widths[-1]}", self.head_widths.step
            multiples = f" in multiples of {step}" if step > 1 else ""
            return f"heads {request.head_width} wide (it takes {widths}{multiples})"
        if self.generations is not None:
            major, (first, last) = _generation(request.device), self.generations
            if major is not None and not first <= major <= last:
                runs_on = f"{first}.x" if first == last else f"{first}.0 and newer"
                return f"a GPU of compute capability {major} (it runs on {runs_on})"
        if request.compiled and self.compiles is not None and request.device.type not in self.compiles:
            return f"torch.compile on {request.device.type} (it would compile again for every pack)"
        return self.missing

    @property
    def missing(self) -> str:
        """The package that is not installed, in the form of `obstacle`; empty if none is missing."""
        if not self.needs or _installed(self.needs):
            return ""
        return f"this environment: the package {self.needs} is not installed ({self.install})"


def find_backend(name: str) -> Backend:
    """The backend named `name`.

    Raises:
        ValueError: an unknown name; the message suggests the nearest.
    """
    for row in BACKENDS:
        if row.name == name:
            return row
    near = difflib.get_close_matches(name, [row.name for row in BACKENDS], n=1, cutoff=0.0)[0]
    if name.startswith("flash"):
        near = "varlen"  # FlashAttention-2 is built into torch
    raise ValueError(f"attention={name} is unknown; did you mean {near!r}? Choose auto or one of {names()}")


def names() -> str:
    """Names of all backends, separated by commas."""
    return ", ".join(row.name for row in BACKENDS)


def backend_index(backend: str, *properties: Any) -> int:
    """Index in `BACKENDS` of the backend for a call.

    Args:
        backend: a name, or `"auto"`: the first that supports the call.
        properties: the fields of the call's `Request`, in order: plain values, as compiling.py requires.

    Raises:
        ValueError: an unknown backend, or one that does not support the call; the message suggests one that does.
    """
    request = Request(*properties)
    able = [row for row in BACKENDS if row.automatic and not row.obstacle(request)]
    if backend == "auto":
        if not able:
            traced = " under torch.compile" if request.compiled else ""
            raise ValueError(
                f"no attention backend supports {request.dtype} on {request.device.type}{traced}; there are {names()}"
            )
        return BACKENDS.index(able[0])
    row = find_backend(backend)
    obstacle = row.obstacle(request)
    if obstacle:
        hint = f"; the nearest that does is {able[0].name!r}" if able else ""
        raise ValueError(f"attention={backend} does not support {obstacle}{hint}")
    return BACKENDS.index(row)


@cache
def _installed(package: str) -> bool:
    """Whether a package is there."""
    return find_spec(package) is not None


@cache
def _generation(device: torch.device) -> int | None:
    """Major compute capability of an NVIDIA GPU; None for everything else."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)[0]


NEWEST = 99
"""As the last of `generations`: no upper limit."""

SDPA = (
    "aten::_scaled_dot_product_flash_attention",  # `…_for_cpu` too
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_attention_math_for_mps",
)
"""Operators behind `torch.nn.functional.scaled_dot_product_attention`."""

_half_kernel = partial(
    Backend, devices=("cuda",), dtypes=HALF, head_widths=range(8, 257, 8), generations=(8, NEWEST)
)
"""A row of a kernel with the limits of FlashAttention-2."""
BACKENDS: tuple[Backend, ...] = (
    _half_kernel(
        name="flash3",
        function=flash3,
        generations=(9, 9),
        operators=("flash_attn_3::",),
        needs="flash_attn_interface",
        install="the folder hopper/ of github.com/Dao-AILab/flash-attention",
        note="FlashAttention-3, for Hopper GPUs",
    ),
    _half_kernel(
        name="varlen",
        function=varlen,
        operators=("torch_attn::_varlen_attn", "aten::_flash_attention_forward"),
        note="FlashAttention-2 as built into torch",
    ),
    Backend(
        name="flex",
        function=flex,
        devices=("cuda",),
        dtypes=(*HALF, torch.float32),
        head_widths=range(16, 257),
        generations=(7, NEWEST),
        operators=("flex_attention",),
        note="FlexAttention with the document mask's blocks, compiled when first used; not on a CPU, where it has no"
        " backward pass and is slower than the loop",
    ),
    _half_kernel(
        name="xformers",
        function=xformers,
        compiles=(),
        operators=("xformers",),
        needs="xformers",
        install="pip install xformers",
        note="block-diagonal causal mask; key heads are repeated for grouped queries",
    ),
    Backend(
        name="loop",
        function=loop,
        compiles=("cpu",),
        operators=("multipack::document_attention", *SDPA),
        note="torch's attention, one call per run of equally long documents; on a CPU one operator for all",
    ),
    Backend(
        name="dense",
        function=dense,
        automatic=False,
        operators=SDPA,
        note="a T × T mask, quadratic in the pack: the reference of the tests",
    ),
)
"""All backends, in order of preference: `auto` takes the first that supports the call."""
