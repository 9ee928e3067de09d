"""Results over parts of the keys merge to the result over all, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multipack.ops.attention import select
from multipack.ops.attention.kernel import KeyBlock, Limits, Pieces, Saved, add_gradients, merge_blocks
from multipack.ops.attention.table import find_backend

ALL = Limits(causal=False)
KERNELS = ["loop", "explicit"]


def drawn(dtype=torch.float32, kv_heads=2, slots=32, width=8):
    """(q, k, v), and a gradient of the result."""
    shapes = [(slots, heads, width) for heads in (4, kv_heads, kv_heads, 4)]
    *made, upstream = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return made, upstream


def results(kernel, tensors, upstream, bounds, limits):
    """out, lse, and the gradients of q, k and v."""
    found = kernel.forward(*tensors, bounds, limits)
    return *found, *kernel.backward(upstream, Saved(*tensors, *found), bounds, limits)


@pytest.mark.parametrize("name", KERNELS)
def test_parts_merge_to_the_whole_even_with_extreme_scores(name):
    (q, k, v), upstream = drawn(torch.float64)
    q, k = q * 30, k * torch.linspace(0.1, 30, 32, dtype=torch.float64)[:, None, None]
    kernel = find_backend(name)
    whole = results(kernel, (q, k, v), upstream, None, ALL)
    parts = [KeyBlock(slice(0, 32), slice(*ends), 0) for ends in ((5, 6), (6, 32))]
    out, lse = kernel.forward(q, k[:5], v[:5], None, ALL)
    saved = Saved(q, k, v, out, lse)
    merge_blocks(lambda *own: kernel.forward(*own[:-1], None, ALL), parts, saved)
    dq, dk, dv = kernel.backward(upstream, Saved(q, k[:5], v[:5], out, lse), None, ALL)
    totals = dq, *(torch.cat([x, x.new_zeros(27, *x.shape[1:])]) for x in (dk, dv))
    add_gradients(lambda *own: kernel.backward(*own[:-1], None, ALL), parts, upstream, saved, totals)
    for ours, expected in zip((out, lse, *totals), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("limits", [Limits(), Limits(cap=2.0), ALL], ids=["causal", "cap", "all"])
def test_explicit_scores_in_tiles(monkeypatch, limits):
    tensors, upstream = drawn(torch.float64)
    bounds = Pieces((3, 20, 9), torch.tensor([0, 3, 23, 32], dtype=torch.int32), 20)
    found = []
    for tile in (128, 5):
        monkeypatch.setattr("multipack.ops.attention.explicit.TILE_TOKENS", tile)
        found.append(results(find_backend("explicit"), tensors, upstream, bounds, limits))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("documents", [(9, 9, 14), None], ids=["documents", "all"])
def test_shapes_of_flash_attention(documents):
    tensors, upstream = drawn(torch.bfloat16)
    assert select("auto", tensors[0], merges=True).name == "loop"
    q, k, v, upstream = (x.to("meta") for x in (*tensors, upstream))
    assert select("auto", q, merges=True).name == "explicit"
    bounds = documents and Pieces(documents, torch.empty(4, dtype=torch.int32, device="meta"), 14)
    out, lse, *gradients = results(
        find_backend("varlen"), (q, k, v), upstream, bounds, Limits(causal=bounds is not None)
    )
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:2], torch.float32)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    assert {x.dtype for x in gradients} == {torch.float32}


@pytest.mark.parametrize("name", ["flex", "xformers", "dense"])
def test_kernels_whose_results_do_not_merge_are_refused(name):
    (q, *_), _ = drawn()
    with pytest.raises(ValueError, match=rf"attention={name} .*'loop'"):
        select(name, q, merges=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("documents", [(9, 9, 14), None], ids=["documents", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gpu_kernels_agree_with_the_cpu_kernel(documents, dtype):
    tensors, upstream = drawn(dtype)
    found = []
    for device in ("cuda", "cpu"):
        bounds = None
        if documents:
            starts = torch.tensor([0, *np.cumsum(documents)], dtype=torch.int32, device=device)
            bounds = Pieces(documents, starts, max(documents))
        own = [x.to(device) for x in tensors]
        kernel, limits = select("auto", own[0], merges=True), Limits(causal=bounds is not None)
        assert kernel.name == (
            "loop" if device == "cpu" else "explicit" if dtype == torch.float32 else "varlen"
        )
        found.append(results(kernel, own, upstream.to(device), bounds, limits))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.cpu() - theirs).norm() < (4 * torch.finfo(dtype).eps + 1e-6) * theirs.norm()
