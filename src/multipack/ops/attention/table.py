"""The table of attention kernels, and the choice of one for a call."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from multipack.ops.attention import explicit, loop
from multipack.ops.attention.flex import flex
from multipack.ops.attention.kernel import Gradients
from multipack.ops.attention.masks import dense
from multipack.ops.attention.varlen import flash, flash_backward, xformers

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """The properties of a call that determine which kernels support it.

    Attributes:
        device: of q, k and v.
        dtype: of q, k and v.
        head_width: D.
        explicit: see `Limits.explicit`.
        causal: see `Limits`.
        merges: whether results merge with results over other keys.
        compiled: whether torch.compile traces the call.
    """

    device: torch.device
    dtype: torch.dtype
    head_width: int
    explicit: str = ""
    causal: bool = True
    merges: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Backend:
    """A kernel of attention, and what it supports. All take windows, and fewer key heads than query heads.

    Attributes:
        name: value of `backend=`.
        forward: (q, k, v, bounds, limits) → (out, lse), see `attention` and kernel.py. It is differentiable in `out`,
            and `lse` may be None for a `PackedBatch`, and where results do not merge.
        backward: (gradient of out, saved, bounds, limits) → gradients of q, k and v in at least float32, where results
            may be merged with results over other keys; None = its results do not merge.
        merges: device types on which results merge: `lse` is (T, H), and `bounds` may be None, which means that every
            query belongs to every key; empty = all.
        devices: device types (`"cpu"`, `"cuda"`, …); empty = all.
        dtypes: of q, k and v; empty = every floating dtype.
        explicit: whether it writes out scores, and so computes soft caps, sinks and dropout of weights.
        any_order: whether it supports attention that is not causal.
        head_widths: supported D; None = all.
        generations: first and last major compute capability of NVIDIA GPUs (Ampere 8, Hopper 9); None = all. Not
            checked on AMD GPUs, which number their architectures differently.
        compiles: device types on which it works under torch.compile; None = all in `devices`. Loops over lengths on
            the host would be compiled again for every pack.
        automatic: whether `"auto"` may choose it; kernels that waste work are chosen by name only.
        operators: prefixes of the names of the torch operators that it runs, as the dispatcher sees them. Selective
            activation checkpointing keeps their outputs, and recomputes all others.
        activates: the implementation of FlashAttention that torch runs in place of its own, for the whole process.
        needs: the module that it imports; empty = only torch.
        install: how to install that module.
        note: one line for users.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Any]]
    backward: Callable[..., Gradients] | None = None
    merges: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    explicit: bool = False
    any_order: bool = False
    head_widths: range | None = None
    generations: tuple[int, int] | None = None
    compiles: tuple[str, ...] | None = None
    automatic: bool = True
    operators: tuple[str, ...] = ()
    activates: str = ""
    needs: str = ""
    install: str = ""
    note: str = ""

    def obstacle(self, request: Request) -> str:
        """What the kernel does not support in the request, as the end of "… does not support"; empty if nothing."""
        if self.devices and request.device.type not in self.devices:
            return f"{request.device.type} tensors (it runs on {', '.join(self.devices)})"
        if self.dtypes and request.dtype not in self.dtypes:
            return f"{request.dtype} (it takes {', '.join(str(dtype) for dtype in self.dtypes)})"
        if request.explicit and not self.explicit:
            return request.explicit
        if not request.causal and not self.any_order:
            return "attention that is not causal"
        if request.merges and (
            self.backward is None or (self.merges and request.device.type not in self.merges)
        ):
            return f"results over parts of the keys on {request.device.type}"
        if self.head_widths is not None and request.head_width not in self.head_widths:
            widths, step = f"{self.head_widths[0]} … {self.head_widths[-1]}", self.head_widths.step
            multiples = f" in multiples of {step}" if step > 1 else ""
            return f"heads {request.head_width} wide (it takes {widths}{multiples})"
        if self.generations is not None:
            major, (first, last) = _generation(request.device), self.generations
            if major is not None and not first <= major <= last:
                ends = " to ".join(f"{end}.x" for end in sorted({first, last}))
                runs_on = f"{first}.0 and newer" if last == NEWEST else ends
                return f"a GPU of compute capability {major} (it runs on {runs_on})"
        if request.compiled and self.compiles is not None and request.device.type not in self.compiles:
            return f"torch.compile on {request.device.type} (it would compile again for every pack)"
        return self.missing

    @property
    def missing(self) -> str:
        """The package that is not installed, in the form of `obstacle`; empty if none is missing."""
        if self.needs and not _installed(self.needs):
            return f"this environment: the package {self.needs} is not installed ({self.install})"
        return ""


def find_backend(name: str) -> Backend:
    """The backend named `name`.

    Raises:
        ValueError: an unknown name; the message suggests the nearest.
    """
    for row in BACKENDS:
        if row.name == name:
            return row
    names = [row.name for row in BACKENDS]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    if name.startswith("flash"):
        near = "varlen"  # FlashAttention-2 is built into torch
    raise ValueError(
        f"attention={name} is unknown; did you mean {near!r}? Choose auto or one of {', '.join(names)}"
    )


def backend_index(backend: str, *properties: Any) -> int:
    """Index in `BACKENDS` of the kernel for a call.

    Args:
        backend: a name, or `"auto"`: the first that supports the call.
        properties: the fields of the call's `Request`, in order: plain values, as compiling.py requires.

    Raises:
        ValueError: an unknown name, or a kernel that does not support the call; the message suggests one that does.
    """
    request = Request(*properties)
    able = next(row for row in BACKENDS if row.automatic and not row.obstacle(request))
    row = able if backend == "auto" else find_backend(backend)
    if obstacle := row.obstacle(request):
        raise ValueError(
            f"attention={backend} does not support {obstacle}; the nearest that does is {able.name!r}"
        )
    return BACKENDS.index(row)


def activated_index(backend: str, *properties: Any) -> int:
    """`backend_index`, after torch has activated the FlashAttention that the kernel needs."""
    from torch.nn import attention

    index = backend_index(backend, *properties)
    name = BACKENDS[index].activates
    if name and attention.current_flash_attention_impl() != name:
        attention.activate_flash_attention_impl(name)
    return index


@cache
def _installed(package: str) -> bool:
    """Whether a package, or a module of one, is installed."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is not
        return False


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
_flash = partial(
    _half_kernel,
    forward=flash,
    # AMD's kernels were never seen to return the same log-sum-exps.
    backward=None if torch.version.hip else flash_backward,
    any_order=True,
    operators=("torch_attn::_varlen_attn", "aten::_flash_attention_forward"),
)
"""A version of FlashAttention that torch calls."""
BACKENDS: tuple[Backend, ...] = (
    _flash(
        name="flash3",
        generations=(9, 9),
        activates="FA3",
        needs="flash_attn_interface",
        install="the folder hopper/ of github.com/Dao-AILab/flash-attention",
        note="FlashAttention-3, for Hopper GPUs; torch then calls it for all flash attention of the process",
    ),
    _flash(
        name="flash4",
        generations=(9, 10),
        activates="FA4",
        automatic=False,
        head_widths=range(8, 129, 8),
        needs="flash_attn.cute",
        install="pip install flash-attn-4",
        note="FlashAttention-4, for Hopper and Blackwell GPUs; torch then calls it for all flash attention of the"
        " process",
    ),
    _flash(name="varlen", note="FlashAttention-2 as built into torch"),
    Backend(
        name="flex",
        forward=flex,
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
        forward=xformers,
        compiles=(),
        operators=("xformers",),
        needs="xformers",
        install="pip install xformers",
        note="block-diagonal causal mask; key heads are repeated for grouped queries",
    ),
    Backend(
        name="loop",
        forward=loop.forward,
        backward=loop.backward,
        merges=("cpu",),
        any_order=True,
        compiles=("cpu",),
        operators=("multipack::document_attention", *SDPA),
        note="torch's attention, one call per run of equally long documents; on a CPU one operator for all",
    ),
    Backend(
        name="explicit",
        forward=explicit.forward,
        backward=explicit.backward,
        explicit=True,
        any_order=True,
        note="soft caps, sinks and dropout, on any device: scores are written out, in tiles of 128 queries",
    ),
    Backend(
        name="dense",
        forward=dense,
        any_order=True,
        automatic=False,
        operators=SDPA,
        note="a T × T mask, quadratic in the pack: the reference of the tests",
    ),
)
"""All kernels, in order of preference: `auto` takes the first that supports the call."""
