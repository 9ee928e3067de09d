from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.ops.attention import attention, select, table
from multipack.ops.attention import loop as loop_module
from multipack.ops.attention.kernel import Limits
from multipack.ops.attention.loop import FLOAT32_TOKENS
from multipack.ops.attention.table import BACKENDS, Backend, find_backend

HEADS = [(4, 4), (4, 2), (4, 1)]


def numpy_attention(q, k, v, lengths, window=None, cap=None, causal=True):
    """Float64, one query at a time."""
    q, k, v = (x.detach().double().numpy() for x in (q, k, v))
    out = np.zeros_like(q)
    group, start = q.shape[1] // k.shape[1], 0
    for length in lengths:
        for i in range(start, start + length):
            first = start if window is None else max(start, i + 1 - window)
            for head in range(q.shape[1]):
                seen = slice(first, i + 1 if causal else start + length)
                scores = k[seen, head // group] @ q[i, head] / np.sqrt(q.shape[2])
                scores = scores if cap is None else cap * np.tanh(scores / cap)
                weights = np.exp(scores - scores.max())
                out[i, head] = weights / weights.sum() @ v[seen, head // group]
        start += length
    return out


def tensors(batch, heads, kv_heads, dtype=torch.float32, width=8, grad=True):
    sizes = (heads, kv_heads, kv_heads)
    return tuple(torch.randn(batch.num_slots, n, width, dtype=dtype, requires_grad=grad) for n in sizes)


def assert_equal(ours, theirs, inputs, tolerance):
    """Results and gradients agree in norm."""
    upstream = torch.randn(theirs.shape, dtype=theirs.dtype)
    pairs = [torch.autograd.grad(out, inputs, upstream, retain_graph=True) for out in (ours, theirs)]
    for mine, other in ((ours, theirs), *zip(*pairs, strict=True)):
        # Where gradients are 0, as of queries and keys in a window of one token, only those of results round.
        assert (mine - other).norm() <= tolerance * torch.maximum(other.norm(), upstream.norm())


@pytest.mark.parametrize(
    "limits", [*({"window": n} for n in (None, 1, 4, 100)), {"causal": False}], ids=lambda each: str(each)
)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_equals_numpy_and_has_the_gradients_of_dense(pack, documents, heads, kv_heads, limits):
    batch = pack(documents, pad_to=40)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        inputs = tensors(batch, heads, kv_heads, dtype)
        dense = attention(*inputs, batch, "dense", **limits)
        for name in ("loop", "explicit"):
            assert_equal(attention(*inputs, batch, name, **limits), dense, inputs, tolerance)
    expected = numpy_attention(*inputs, batch.lengths, **limits)
    np.testing.assert_allclose(dense.detach(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("window", [None, 4])
def test_a_soft_cap_of_scores_is_computed_by_the_kernel_that_has_one(pack, documents, window):
    batch = pack(documents, pad_to=40)
    inputs = tensors(batch, 4, 2, torch.float64)
    found = attention(*inputs, batch, window=window, cap=0.5)
    expected = numpy_attention(*inputs, batch.lengths, window, 0.5)
    np.testing.assert_allclose(found.detach(), expected, rtol=0, atol=1e-14)
    assert select("auto", inputs[0], Limits(cap=0.5)).name == "explicit"


@pytest.mark.parametrize("backend", [row.name for row in BACKENDS if not row.devices])
@pytest.mark.parametrize("window", [None, 3])
def test_padded_rows_are_documents_of_equal_length(pad, documents, document, pack, backend, window):
    batch = pad(documents)
    inputs = tensors(batch, 4, 2)
    rows = attention(*inputs, batch, backend, window)
    alone = pack([document(batch.lengths[0])])
    pieces = zip(*(x.split(alone.num_slots) for x in inputs), strict=True)
    looped = torch.cat([attention(*piece, alone, window=window) for piece in pieces])
    assert_equal(rows, looped, inputs, 1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("window", [None, 2, 100, 128, 129, 300])
def test_long_documents_and_windows_of_several_tiles(document, window, heads, kv_heads):
    batch = PackedCollator(4, 1000)([document(300), document(129), document(300, 1), document(300, 2)])
    inputs = tensors(batch, heads, kv_heads, torch.float64)
    ours, dense = (attention(*inputs, batch, name, window) for name in ("loop", "dense"))
    assert_equal(ours, dense, inputs, 1e-13)


@pytest.mark.parametrize("window", [None, 5, 200])
def test_long_nodes_behind_others_in_several_tiles(window, monkeypatch):
    monkeypatch.setattr(loop_module, "PATH_TILE_TOKENS", 128)
    rng, none = np.random.default_rng(0), np.zeros((0, 2), np.int64)
    begin = rng.integers(0, 99, 152)
    tokens = [np.append(begin, rng.integers(0, 99, size)) for size in (300, 300, 40, 0)]
    documents = [Document(each.astype(np.uint16), none) for each in tokens]
    batch = PackedCollator(4, 1000, min_prefix=4)(documents)
    assert batch.lengths == (152, 300, 300, 40)
    inputs = tensors(batch, 4, 2, torch.float64)
    dense, *others = (attention(*inputs, batch, name, window) for name in ("dense", "loop", "explicit"))
    # The last one on other devices.
    for ours in (*others, loop_module._by_sdpa(*inputs, batch, Limits(window))[0]):
        assert_equal(ours, dense, inputs, 1e-13)
    with pytest.raises(ValueError, match="not causal"):
        attention(*inputs, batch, causal=False)


def test_older_kernels_get_repeated_key_heads(pack, documents, monkeypatch):
    def taking_no_groups(q, k, v, *rest):
        assert q.shape == k.shape == v.shape
        return operator(q, k, v, *rest)

    batch, operator = pack(documents), loop_module.document_attention
    inputs = tensors(batch, 6, 2)
    grouped = attention(*inputs, batch, "loop", 4)
    monkeypatch.setattr(loop_module, "GROUPED_KERNELS", False)
    monkeypatch.setattr(loop_module, "document_attention", taking_no_groups)
    assert_equal(attention(*inputs, batch, "loop", 4), grouped, inputs, 1e-6)


def test_bfloat16_is_close_and_autocast_casts_all_three(pack, documents):
    batch = pack(documents)
    q, k, v = tensors(batch, 4, 2)
    exact = attention(q, k, v, batch)
    low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), batch)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attention(q, k.bfloat16(), v, batch)  # as rotation and projection may leave them
        wide = attention(q.double(), k.double(), v.double(), batch)
    assert torch.equal(mixed, low)
    assert wide.dtype == torch.float64


def test_a_backend_that_does_not_support_a_call_is_skipped_or_refused(pack, documents, monkeypatch):
    batch = pack(documents)
    row = Backend("picky", find_backend("loop").forward, devices=("cpu",), dtypes=(torch.bfloat16,))
    q, k, v = tensors(batch, 4, 4, torch.bfloat16, grad=False)
    for change, named in (
        ({"devices": ("cuda",)}, "cpu tensors"),
        ({"dtypes": (torch.float16,)}, "torch.bfloat16"),
        ({"needs": "no_such_package", "install": "pip it"}, "no_such_package .*pip it"),
        ({"needs": "no_such_package.of_it"}, "no_such_package.of_it"),
        ({"head_widths": range(16, 65, 16)}, "heads 8 wide .*16 … 64 in multiples of 16"),
    ):
        monkeypatch.setattr(table, "BACKENDS", (dataclasses.replace(row, **change), *BACKENDS))
        assert select("auto", q).name == "loop"
        with pytest.raises(ValueError, match=rf"attention=picky .*{named}.*'loop'"):
            attention(q, k, v, batch, "picky")
    monkeypatch.setattr(table, "BACKENDS", (row, *BACKENDS))
    assert select("auto", q) is row


def test_wrong_arguments_are_refused(pack, documents):
    batch = pack(documents)
    q, k, v = tensors(batch, 4, 4)
    cases = [
        ((q, k, v, batch, "lop"), r"attention=lop .*'loop'"),
        ((q, k, v, batch, "flash"), r"attention=flash .*'varlen'"),
        ((q, k[:, :3], v[:, :3], batch), "divide"),
        ((q[1:], k[1:], v[1:], batch), "32 slots"),
        ((q, k[..., 1:], v[..., 1:], batch), "attention takes q"),
        ((q[:, 0], k[:, 0], v[:, 0], batch), "attention takes q"),
        ((q, k.bfloat16(), v, batch), "share a dtype.*float32.*bfloat16"),
        ((q, k, v, batch, "auto", 0), "window"),
        ((q, k, v, batch, "auto", 3, None, False), "not causal"),
        ((q, k, v, batch, "loop", None, 0.5), r"attention=loop .*cap=0.5.*'explicit'"),
    ]
    cases += [
        ((q, k, v, batch, row.name), f"attention={row.name} .*cpu.*'loop'") for row in BACKENDS if row.devices
    ]
    for arguments, expected in cases:
        with pytest.raises(ValueError, match=expected):
            attention(*arguments)


def test_short_bfloat16_documents_are_computed_in_float32_on_a_cpu():
    """Rounded once, at the end, under autocast too; longer ones are computed in bfloat16."""
    lengths = [5, FLOAT32_TOKENS, FLOAT32_TOKENS + 1]
    none = np.zeros((0, 2), dtype=np.int64)
    collate = PackedCollator(max_documents=3, max_seqlen=max(lengths))
    batch = collate([Document(np.zeros(length, dtype=np.uint16), none) for length in lengths])
    q, k, v = tensors(batch, 2, 2, torch.bfloat16, grad=False)
    full = attention(q.float(), k.float(), v.float(), batch, "loop").bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = attention(q, k, v, batch, "loop")
    short = 5 + FLOAT32_TOKENS
    assert torch.equal(half[:short], full[:short])
    assert not torch.equal(half[short:], full[short:])


def test_operators_are_those_that_selective_checkpointing_keeps(pack, documents):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    batch = pack(documents)
    for backend in ("loop", "dense"):
        seen = []
        with Names():
            attention(*tensors(batch, 4, 4), batch, backend)
        assert any(name.startswith(find_backend(backend).operators) for name in seen), seen
    assert all(row.operators for row in BACKENDS if row.name != "explicit")  # its tiles are recomputed anyway


def test_versions_of_flash_attention_are_activated_in_torch(monkeypatch):
    active = [None]
    for name, value in (("_installed", True), ("_generation", 9)):
        monkeypatch.setattr(table, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    for name in ("varlen", "flash3", "flash3", "auto", "flash4"):
        table.activated_index(name, torch.device("cuda"), torch.bfloat16, 64)
    assert active == [None, "FA3", "FA4"]
