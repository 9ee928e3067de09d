"""Kernels that need a GPU: their arguments, by stand-ins on a CPU; their results, where there is a GPU."""

from __future__ import annotations

import math
import shutil
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from torch.nn.attention.flex_attention import flex_attention

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.ops.attention import attention, flex, table
from multipack.ops.attention.kernel import Limits
from multipack.ops.attention.table import BACKENDS, find_backend

HEADS = [(4, 4), (6, 2)]
WINDOWS = [None, 4, 100]


def plain(q, k, v, seen):
    """(T, H, D) attention over the pairs that `seen` (T, S) names, written out, with gradients."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def visible(bounds, key_bounds, left, right):
    """(T, S) visible pairs, as flash-attn's documentation has it, one document and one query at a time.

    The last query of a document has the position of its last key.
    """
    bounds, key_bounds = bounds.tolist(), key_bounds.tolist()
    seen = torch.zeros(bounds[-1], key_bounds[-1], dtype=torch.bool)
    for (start, stop), (first_key, end) in zip(pairwise(bounds), pairwise(key_bounds), strict=True):
        for i in range(start, stop):
            place = i - stop + end
            first = first_key if left < 0 else max(first_key, place - left)
            last = end if right < 0 else min(end, place + right + 1)
            seen[i, first:last] = True
    return seen


def kernel(q, k, v, bounds, key_bounds, longest, longest_key, left, right):
    """What every varlen kernel computes, and what it asks of its arguments."""
    assert bounds.dtype == key_bounds.dtype == torch.int32
    assert (len(q), len(k)) == (bounds[-1], key_bounds[-1])
    assert longest >= int(bounds.diff().max())
    assert longest_key >= int(key_bounds.diff().max())
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    return plain(q, k, v, visible(bounds, key_bounds, left, right))


def varlen_operator(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window_size=None):
    assert is_causal == (window_size == [-1, 0])  # as torch's function says
    out = kernel(q, k, v, cu_q, cu_k, max_q, max_k, *window_size)
    return out, out.new_empty(out.shape[1::-1]), None


@pytest.fixture(params=["varlen", "xformers", "flex"])
def row(request, monkeypatch):
    """The row, its kernel replaced by one that computes the same here."""
    if request.param == "varlen":
        monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", varlen_operator)
    elif request.param == "xformers":
        install_xformers(monkeypatch)
    else:
        monkeypatch.setattr(flex, "compiled", lambda: flex_by_mask)
    return find_backend(request.param)


def install_xformers(monkeypatch):
    class Mask(SimpleNamespace):
        @classmethod
        def from_seqlens(cls, lengths, key_lengths=None, *, device):
            assert all(lengths)
            assert device.type == "cpu"
            each = (torch.tensor([0, *x]).cumsum(0) for x in (lengths, key_lengths or lengths))
            return cls(left=-1, bounds=tuple(each))

        def local(self, window=0):
            return Mask(left=window - 1, bounds=self.bounds)

    class BlockDiagonalMask(Mask):
        make_causal_from_bottomright = make_local_attention_from_bottomright = Mask.local

    class BlockDiagonalCausalMask(Mask):
        make_local_attention = Mask.local

    def memory_efficient_attention(q, k, v, attn_bias):
        assert q.shape[2:] == k.shape[2:] == v.shape[2:]
        return plain(q[0], k[0], v[0], visible(*attn_bias.bounds, attn_bias.left, 0))[None]

    for name in ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["xformers.ops"].memory_efficient_attention = memory_efficient_attention
    for kind in (BlockDiagonalMask, BlockDiagonalCausalMask):
        setattr(sys.modules["xformers.ops.fmha.attn_bias"], kind.__name__, kind)


def flex_by_mask(q, k, v, block_mask, enable_gqa, kernel_options):
    """What FlexAttention computes: blocks that are whole are not asked for their pairs, others outside are skipped."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    slots, size = q.shape[2], flex.BLOCK_TOKENS
    positions = torch.arange(slots)
    asked = block_mask.mask_mod(torch.tensor(0), torch.tensor(0), positions[:, None], positions)
    seen = torch.zeros(slots, slots, dtype=torch.bool)
    for whole, prefix in ((False, "kv"), (True, "full_kv")):
        count, indices = (getattr(block_mask, f"{prefix}_{part}")[0, 0] for part in ("num_blocks", "indices"))
        for row, number in enumerate(count.tolist()):
            for column in indices[row, :number].tolist():
                here = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
                seen[here] = True if whole else asked[here]
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return plain(q, k, v, seen).transpose(0, 1)[None]


def tree(lengths, pad_to=None):
    """A pack in which each document begins with all tokens but the last three of the one before it."""
    tokens = np.arange(sum(lengths))
    made, before = [], tokens[:0]
    for length in lengths:
        before = np.concatenate([before[:-3], tokens[:length] + len(made) * len(tokens)])
        made.append(Document(before.astype(np.uint32), np.zeros((0, 2), np.int64)))
    return PackedCollator(9, 2000, pad_to=pad_to, min_prefix=1)(made)


@pytest.fixture(params=["packed", "padding document", "padded rows", "several blocks", "tree"])
def batch(request, pack, pad, documents, document):
    """Packs whose `cu_seqlens` repeats T, a padded batch, one of more tokens than a block has, and shared tokens."""
    if request.param == "tree":
        return tree([9, 4, 5, 7], 40)
    if request.param == "padded rows":
        return pad(documents)
    if request.param == "several blocks":
        return PackedCollator(5, 300)([document(150), document(3), document(90), document(40)])
    return pack(documents, pad_to=40 if request.param == "padding document" else None)


def inputs_of(batch, heads, kv_heads, width=8, dtype=torch.float64, device="cpu"):
    """Gradients views of one tensor, as a fused projection gives them."""
    fused = torch.randn(batch.num_slots, heads + 2 * kv_heads, width, dtype=dtype, device=device)
    return [x.requires_grad_() for x in fused.split([heads, kv_heads, kv_heads], dim=1)]


def test_kernels_are_called_for_the_same_attention(row, batch):
    for heads, kv_heads in HEADS:
        inputs = inputs_of(batch, heads, kv_heads)
        upstream = torch.randn_like(inputs[0])
        for window in WINDOWS:
            asked = row.forward(*inputs, batch, Limits(window))[0]
            ours = attention(*inputs, batch, "loop", window)
            torch.testing.assert_close(asked, ours, rtol=0, atol=1e-13)
            grads = (torch.autograd.grad(out, inputs, upstream) for out in (asked, ours))
            for got, expected in zip(*grads, strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, 4, 140])
def test_blocks_of_shared_tokens_are_those_of_the_dense_mask(monkeypatch, window):
    monkeypatch.setattr(flex, "compiled", lambda: flex_by_mask)
    batch = tree([150, 130, 4, 200])
    inputs = inputs_of(batch, 2, 1)
    ours, dense = (
        find_backend(name).forward(*inputs, batch, Limits(window))[0] for name in ("flex", "dense")
    )
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, 4])
def test_layers_share_the_block_mask(monkeypatch, pack, documents, window):
    made = []
    monkeypatch.setattr(
        flex, "compiled", lambda: lambda q, k, v, block_mask, **rest: made.append(block_mask) or q
    )
    batch = pack(documents)
    inputs = inputs_of(batch, 4, 4)
    for _ in range(3):
        find_backend("flex").forward(*inputs, batch, Limits(window))[0]
    assert len({id(mask) for mask in made}) == 1


@pytest.mark.slow
def test_flex_is_compiled_once_for_all_layouts(monkeypatch, document):
    graphs = []
    compiled = torch.compile(flex_attention, backend=lambda graph, _: graphs.append(graph) or graph)
    monkeypatch.setattr(flex, "compiled", lambda: compiled)
    torch.compiler.reset()
    expected = iter([1, 1, 1, 2, 2, 2])  # one number of slots, then any
    for lengths in ([100, 50, 106], [256], [1, 255], [30, 400], [300, 9, 2], [520]):
        batch = PackedCollator(4, 600)([document(length) for length in lengths])
        for window in (None, 7):
            inputs = [x.detach().float() for x in inputs_of(batch, 4, 2, 16)]
            with torch.no_grad():
                asked = find_backend("flex").forward(*inputs, batch, Limits(window))[0]
            torch.testing.assert_close(asked, attention(*inputs, batch, "loop", window), rtol=0, atol=1e-6)
        assert len(graphs) == next(expected)


GPU_ROWS = [row.name for row in BACKENDS if not row.devices or "cuda" in row.devices]


@pytest.mark.cuda
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 8, 64), (8, 2, 128), (6, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", GPU_ROWS)
def test_rows_on_a_gpu(document, distance, name, dtype, heads, kv_heads, width, window, shares):
    """Each row against the loop in float32, forward and backward, to the noise of its dtype."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if name == "flex" and not any(map(shutil.which, ("gcc", "cc", "clang"))):
        pytest.skip("flex attention is compiled, and there is no C compiler to build its launchers")
    device = torch.device("cuda", 0)
    torch.compiler.reset()  # torch gives up on compiling one function after a few kinds of calls
    request = table.Request(device, dtype, width)
    obstacle = find_backend(name).obstacle(request)
    if obstacle:
        pytest.skip(f"{name} does not support {obstacle}")
    lengths = [700, 1, 33, 128, 300, 2]
    collate = PackedCollator(9, 1000, pad_to=1300)
    batch = collate([document(length) for length in lengths])
    batch = (tree([700, 33, 130, 290], 1300) if shares else batch).to(device)
    inputs = inputs_of(batch, heads, kv_heads, width, dtype, device)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    upstream = torch.randn_like(inputs[0])
    out, expected = attention(*inputs, batch, name, window), attention(*exact, batch, "loop", window)
    assert out.dtype == dtype
    noise = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 2e-3}[dtype]  # TF32 may be on
    assert distance(out.float(), expected) < noise
    ours = torch.autograd.grad(out, inputs, upstream)
    theirs = torch.autograd.grad(expected, exact, upstream.float())
    for got, wanted in zip(ours, theirs, strict=True):
        # A window of one token has gradients of exactly zero for queries and keys.
        assert (got.float() - wanted).norm() < 2 * noise * max(wanted.norm(), math.sqrt(wanted.numel()) * 0.1)
    if shares:
        return
    before = out.detach().clone()
    for x in inputs:
        x.data[701:734] = 9 * torch.randn_like(x[701:734])  # the third document
    after = attention(*inputs, batch, name, window).detach()
    assert torch.equal(before[:701], after[:701])
    assert torch.equal(before[734:], after[734:])
