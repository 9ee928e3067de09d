"""The table of attention backends: what each takes, which one is used, and why another cannot be."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.ops.attention.flex import flex
from multipack.ops.attention.loop import loop
from multipack.ops.attention.reference import dense, padded
from multipack.ops.attention.varlen import flash, flash3, varlen, xformers

AttentionFunction = Callable[[Tensor, Tensor, Tensor, PackedBatch, int | None], Tensor]

HALF = (torch.float16, torch.bfloat16)
MULTIPLES_OF_8 = range(8, 257, 8)


@dataclass(frozen=True)
class Request:
    """What of a call decides who can answer it.

    Attributes:
        device: of q, k and v.
        dtype: likewise.
        heads: query heads.
        kv_heads: key heads.
        head_width: of one head.
        window: tokens that each position sees; None = all of its document.
        backward: whether gradients are wanted.
        compiled: whether torch.compile is tracing.
    """

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
    """One way to compute attention, and what it can take.

    Attributes:
        name: what `backend=` calls it.
        function: (q, k, v, batch, window) → (T, H, D).
        devices: device types (`"cpu"`, `"cuda"`, …) that it runs on; empty = every one.
        dtypes: of q, k and v; empty = every floating dtype.
        backward: whether gradients flow through it.
        window: whether it takes a sliding window.
        gqa: whether K may be smaller than H.
        head_widths: the D that it takes; None = every one.
        generations: first and last major compute capability of the NVIDIA GPUs that it runs on (Ampere is 8,
            Hopper 9); None = all. Not asked of AMD's GPUs, which count otherwise.
        compiles: device types on which torch.compile takes it; None = all of its own. Loops over lengths on the
            host would be compiled anew for every pack.
        automatic: whether `"auto"` may choose it; those that waste work are asked for by name.
        needs: the module that it imports; empty = torch alone.
        install: how people get that module.
        note: one line for people who choose.
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
    needs: str = ""
    install: str = ""
    note: str = ""

    def obstacle(self, request: Request) -> str:
        """Why this row cannot answer, in words; empty when it can."""
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
            return f"heads {request.head_width} wide (it takes {_widths(self.head_widths)})"
        if self.generations is not None:
            major = _generation(request.device)
            if major is not None and not self.generations[0] <= major <= self.generations[1]:
                return f"a GPU of compute capability {major} (it runs on {_span(self.generations)})"
        if request.compiled and self.compiles is not None and request.device.type not in self.compiles:
            return f"torch.compile on {request.device.type} (it would compile anew for every pack)"
        return self.missing

    @property
    def missing(self) -> str:
        """What would have to be installed, in words; empty when nothing."""
        if not self.needs or _installed(self.needs):
            return ""
        return f"this environment: the package {self.needs} is not installed ({self.install})"


def select(backend: str, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Backend:
    """The row that `attention` uses for these tensors.

    Args:
        backend: a name in `BACKENDS`, or `"auto"`.
        q: (T, H, D).
        k: (T, K, D).
        v: (T, K, D).
        window: tokens that each position sees; None = its whole document.

    Raises:
        ValueError: an unknown backend, or one that cannot take these tensors: the message names it, what stands
            against it, and the row that can.
    """
    backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    compiled = torch.compiler.is_compiling()
    words = q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window, backward, compiled
    if compiled:
        from multipack.ops.attention import compiling

        return BACKENDS[compiling.place(backend, *words)]
    return BACKENDS[place(backend, *words)]


def place(
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
    """Where the row stands in the table that answers a `Request` of these words.

    Raises:
        ValueError: as `select` does.
    """
    request = Request(device, dtype, heads, kv_heads, head_width, window, backward, compiled)
    able = [row for row in BACKENDS if row.automatic and not row.obstacle(request)]
    if backend == "auto":
        if not able:
            traced = " under torch.compile" if compiled else ""
            raise ValueError(
                f"no attention backend takes {dtype} on {device.type}{traced}; there are {_names()}"
            )
        return BACKENDS.index(able[0])
    row = find_backend(backend)
    obstacle = row.obstacle(request)
    if obstacle:
        hint = f"; the nearest that can is {able[0].name!r}" if able else ""
        raise ValueError(f"attention={backend} cannot take {obstacle}{hint}")
    return BACKENDS.index(row)


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


def table_rows() -> list[dict[str, str]]:
    """The table in words: a dictionary of column → text for each row, in order of preference."""
    return [
        {
            "backend": row.name,
            "devices": _devices(row),
            "dtypes": ", ".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes) or "all",
            "backward": _yes(row.backward),
            "window": _yes(row.window),
            "grouped queries": _yes(row.gqa),
            "torch.compile": "yes" if row.compiles is None else ", ".join(row.compiles) or "no",
            "head width": _widths(row.head_widths) if row.head_widths else "any",
            "needs": f"{row.needs}: {row.install}" if row.needs else "torch",
            "here": "no" if row.missing else "yes",
            "note": row.note,
        }
        for row in BACKENDS
    ]


def _devices(row: Backend) -> str:
    generations = f" ({_span(row.generations)})" if row.generations else ""
    return (", ".join(row.devices) or "all") + generations


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _span(generations: tuple[int, int]) -> str:
    first, last = generations
    return f"{first}.x" if first == last else f"{first}.0 and newer"


def _widths(widths: range) -> str:
    multiples = "" if widths.step == 1 else f" in multiples of {widths.step}"
    return f"{widths[0]} … {widths[-1]}{multiples}"


def _names() -> str:
    return ", ".join(row.name for row in BACKENDS)


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def _generation(device: torch.device) -> int | None:
    """Major compute capability of an NVIDIA GPU; None for everything else."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)[0]


NEWEST = 1000
"""A last generation that never comes."""

BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="flash3",
        function=flash3,
        devices=("cuda",),
        dtypes=HALF,
        head_widths=MULTIPLES_OF_8,
        generations=(9, 9),
        needs="flash_attn_interface",
        install="the folder hopper/ of github.com/Dao-AILab/flash-attention",
        note="FlashAttention-3, for Hopper GPUs",
    ),
    Backend(
        name="flash",
        function=flash,
        devices=("cuda",),
        dtypes=HALF,
        head_widths=MULTIPLES_OF_8,
        generations=(8, NEWEST),
        needs="flash_attn",
        install="pip install flash-attn --no-build-isolation",
        note="FlashAttention-2",
    ),
    Backend(
        name="varlen",
        function=varlen,
        devices=("cuda",),
        dtypes=HALF,
        head_widths=MULTIPLES_OF_8,
        generations=(8, NEWEST),
        note="FlashAttention-2 as torch ships it",
    ),
    Backend(
        name="flex",
        function=flex,
        devices=("cuda",),
        dtypes=(*HALF, torch.float32),
        head_widths=range(16, 257),
        generations=(7, NEWEST),
        note="FlexAttention with the blocks of the document mask, compiled when first used; none on a CPU, where"
        " it has no backward pass and is slower than the loop",
    ),
    Backend(
        name="xformers",
        function=xformers,
        devices=("cuda",),
        dtypes=HALF,
        head_widths=MULTIPLES_OF_8,
        generations=(8, NEWEST),
        compiles=(),
        needs="xformers",
        install="pip install xformers",
        note="a block-diagonal causal mask; grouped keys are repeated",
    ),
    Backend(
        name="loop",
        function=loop,
        compiles=("cpu",),
        note="torch's attention, one call for each run of equally long documents; on a CPU one operator for them all",
    ),
    Backend(
        name="padded",
        function=padded,
        compiles=(),
        automatic=False,
        note="documents padded to the longest of the pack: what padding costs, to compare",
    ),
    Backend(
        name="dense",
        function=dense,
        automatic=False,
        note="a T × T mask: quadratic in the pack; the oracle that the others are tested against",
    ),
)
"""Every backend, in order of preference: `auto` takes the first that can."""
