"""Attention to part of the keys: tiles and merging; tests/parallel/test_ring.py compares the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multipack.ops.attention.runs import merge
from multipack.ops.partial import CPU, FLASH, PLAIN, Bounds, choose_kernel


def tensors(dtype=torch.float32, kv_heads=2, slots=32, width=8):
    """(q, k, v), and a gradient of the result."""
    shapes = [(slots, heads, width) for heads in (4, kv_heads, kv_heads, 4)]
    *made, upstream = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return made, upstream


def test_plain_products_work_in_tiles(monkeypatch):
    (q, k, v), upstream = tensors()
    bounds = Bounds((3, 20, 9), torch.tensor([0, 3, 23, 32], dtype=torch.int32))
    results = []
    for scores in (2**26, 100):
        monkeypatch.setattr("multipack.ops.partial.SCORES", scores)
        out, lse = PLAIN.forward(q, k, v, bounds)
        results.append((out, lse, *PLAIN.backward(upstream, q, k, v, out, lse, bounds)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parts_merge_to_the_whole_even_with_extreme_scores():
    (q, k, v), _ = tensors(kv_heads=4)
    q, k = q * 30, k * torch.linspace(0.1, 30, 32)[:, None, None]
    whole, sums = CPU.forward(q, k, v, None)
    out, lse = CPU.forward(q, k[:5], v[:5], None)
    for rows in (slice(5, 6), slice(6, 32)):
        merge(out, lse, *CPU.forward(q, k[rows], v[rows], None))
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("documents", [(9, 9, 14), None], ids=["documents", "all"])
def test_shapes_of_flash_attention(documents):
    made, upstream = tensors(torch.bfloat16)
    q, k, v, upstream = (x.to("meta") for x in (*made, upstream))
    seen = documents and Bounds(documents, torch.empty(4, dtype=torch.int32, device="meta"))
    assert (choose_kernel(made[0]), choose_kernel(q)) == (CPU, PLAIN)
    out, lse = FLASH.forward(q, k, v, seen)
    assert (out.shape, lse.shape, out.dtype, lse.dtype) == (
        q.shape,
        q.shape[:2],
        torch.float32,
        torch.float32,
    )
    grads = FLASH.backward(upstream, q, k, v, out, lse, seen)
    assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("documents", [(9, 9, 14), None], ids=["documents", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gpu_kernels_agree_with_the_cpu_kernel(documents, dtype):
    (q, k, v), upstream = tensors(dtype)
    results = []
    for device in ("cuda", "cpu"):
        seen = None
        if documents:
            starts = torch.tensor([0, *np.cumsum(documents)], dtype=torch.int32, device=device)
            seen = Bounds(documents, starts)
        own = [x.to(device) for x in (q, k, v)]
        kernel = choose_kernel(own[0])
        out, lse = kernel.forward(*own, seen)
        results.append((out, lse, *kernel.backward(upstream.to(device), *own, out, lse, seen)))
    assert choose_kernel(q.cuda()) is (PLAIN if dtype == torch.float32 else FLASH)
    for ours, theirs in zip(*results, strict=True):
        assert (ours.cpu() - theirs).norm() < (4 * torch.finfo(dtype).eps + 1e-6) * theirs.norm()
