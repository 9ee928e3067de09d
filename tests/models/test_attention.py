from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models import attention as module
from multipack.models.attention import BACKENDS, Backend, attention, document_mask, find_backend

HEADS = [(4, 4), (4, 2), (4, 1)]


def numpy_attention(q, k, v, lengths, window=None):
    """Float64, one query at a time."""
    q, k, v = (x.detach().double().numpy() for x in (q, k, v))
    out = np.zeros_like(q)
    group, start = q.shape[1] // k.shape[1], 0
    for length in lengths:
        for i in range(start, start + length):
            first = start if window is None else max(start, i + 1 - window)
            for head in range(q.shape[1]):
                scores = k[first : i + 1, head // group] @ q[i, head] / np.sqrt(q.shape[2])
                weights = np.exp(scores - scores.max())
                out[i, head] = weights / weights.sum() @ v[first : i + 1, head // group]
        start += length
    return out


def tensors(batch, heads, kv_heads, dtype=torch.float32, width=8, grad=True):
    sizes = (heads, kv_heads, kv_heads)
    return tuple(torch.randn(batch.num_slots, n, width, dtype=dtype, requires_grad=grad) for n in sizes)


def backward(out, inputs, upstream):
    return torch.autograd.grad(out, inputs, upstream.to(out.dtype))


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("backend", ["loop", "dense"])
def test_equals_numpy_in_float64(pack, documents, backend, heads, kv_heads, window):
    batch = pack(documents, pad_to=40)
    q, k, v = tensors(batch, heads, kv_heads, torch.float64)
    expected = numpy_attention(q, k, v, batch.lengths, window)
    np.testing.assert_allclose(
        attention(q, k, v, batch, backend, window).detach(), expected, rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_loop_equals_dense_forward_and_backward(
    pack, documents, distance, dtype, tolerance, heads, kv_heads, window
):
    batch = pack(documents)
    inputs = tensors(batch, heads, kv_heads, dtype)
    upstream = torch.randn(inputs[0].shape, dtype=dtype)
    loop, dense = (attention(*inputs, batch, name, window) for name in ("loop", "dense"))
    assert distance(loop, dense) < tolerance
    for ours, oracle in zip(backward(loop, inputs, upstream), backward(dense, inputs, upstream), strict=True):
        assert distance(ours, oracle) < tolerance


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_long_documents_of_several_kernel_blocks(document, distance, heads, kv_heads):
    batch = PackedCollator(3, 1000)([document(700), document(33), document(300)])
    inputs = tensors(batch, heads, kv_heads)
    upstream = torch.randn(inputs[0].shape)
    loop, dense = (attention(*inputs, batch, name) for name in ("loop", "dense"))
    assert distance(loop, dense) < 1e-6
    for ours, oracle in zip(backward(loop, inputs, upstream), backward(dense, inputs, upstream), strict=True):
        assert distance(ours, oracle) < 1e-6


def test_grouped_queries_equal_repeated_key_heads(pack, documents):
    batch = pack(documents)
    q, k, v = tensors(batch, 6, 2)
    repeated = attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), batch)
    torch.testing.assert_close(attention(q, k, v, batch), repeated, rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_equal_lengths_run_as_one_call_and_equal_the_loop(pack, document, distance, monkeypatch, window):
    batch = pack([document(6, seed) for seed in range(4)])
    inputs = tensors(batch, 4, 2)
    upstream = torch.randn(inputs[0].shape)
    calls = []
    one_document = module._document
    monkeypatch.setattr(module, "_document", lambda *args: calls.append(1) or one_document(*args))
    batched = attention(*inputs, batch, window=window)
    assert len(calls) == 1
    alone = pack([document(6)])
    pieces = zip(*(x.split(6) for x in inputs), strict=True)
    looped = torch.cat([attention(*piece, alone, window=window) for piece in pieces])
    assert distance(batched, looped) < 1e-6
    for ours, theirs in zip(
        backward(batched, inputs, upstream), backward(looped, inputs, upstream), strict=True
    ):
        assert distance(ours, theirs) < 1e-6


def test_another_document_changes_no_bit(pack, documents):
    batch = pack(documents)
    q, k, v = tensors(batch, 4, 2, grad=False)
    before = attention(q, k, v, batch)
    inside = slice(8, 20)  # the third document
    for x in (q, k, v):
        x[inside] = 100 * torch.randn_like(x[inside])
    after = attention(q, k, v, batch)
    assert torch.equal(before[:8], after[:8])
    assert torch.equal(before[20:], after[20:])
    assert not torch.equal(before[inside], after[inside])


def test_strided_inputs_are_taken_as_they_are(pack, documents):
    batch = pack(documents)
    fused = torch.randn(batch.num_slots, 8, 8)
    views = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    torch.testing.assert_close(
        attention(*views, batch), attention(*(x.clone() for x in views), batch), rtol=0, atol=0
    )


def test_mask_is_the_picture(pack, document):
    mask = document_mask(pack([document(3), document(2)], pad_to=6))
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    expected += [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == expected
    windowed = document_mask(pack([document(3), document(2)], pad_to=6), window=2)
    expected[2] = [0, 1, 1, 0, 0, 0]
    assert windowed.int().tolist() == expected


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


@pytest.fixture
def row():
    """A row that takes little: bfloat16 on the CPU, forward only, no window, no grouped queries."""
    return Backend("picky", ("cpu",), (torch.bfloat16,), False, False, False, find_backend("loop").function)


@pytest.mark.parametrize(
    ("change", "kv_heads", "window", "says"),
    [
        ({"devices": ("cuda",)}, 4, None, "cpu tensors"),
        ({"dtypes": (torch.float16,)}, 4, None, "torch.bfloat16"),
        ({}, 4, 3, "window=3"),
        ({}, 2, None, "2 key heads for 4 query heads"),
        ({"needs": "no_such_package"}, 4, None, "no_such_package is not installed"),
    ],
)
def test_row_that_cannot_is_passed_over_and_refused(
    pack, documents, monkeypatch, row, change, kv_heads, window, says
):
    row = dataclasses.replace(row, **change)
    monkeypatch.setattr(module, "BACKENDS", (row, *BACKENDS))
    batch = pack(documents)
    q, k, v = tensors(batch, 4, kv_heads, torch.bfloat16, grad=False)
    assert module.select("auto", q, k, v, window).name == "loop"
    with pytest.raises(
        ValueError, match=rf"attention=picky cannot take .*{says}.*nearest that can is 'loop'"
    ):
        attention(q, k, v, batch, "picky", window)


def test_one_entry_adds_a_backend(pack, documents, monkeypatch, row):
    monkeypatch.setattr(module, "BACKENDS", (row, *BACKENDS))
    batch = pack(documents)
    q, k, v = tensors(batch, 4, 4, torch.bfloat16)
    with torch.no_grad():
        assert module.select("auto", q, k, v) is row
    with pytest.raises(ValueError, match=r"picky.*no backward pass"):
        attention(q, k, v, batch, "picky")


def test_unknown_backend_names_the_nearest(pack, documents):
    batch = pack(documents)
    with pytest.raises(ValueError, match=r"attention=lop is unknown; did you mean 'loop'"):
        attention(*tensors(batch, 4, 4), batch, "lop")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (((32, 4, 8), (32, 3, 8), (32, 3, 8)), "must divide"),
        (((31, 4, 8), (31, 4, 8), (31, 4, 8)), "32 slots"),
        (((32, 4, 8), (32, 4, 6), (32, 4, 6)), "attention takes q"),
        (((32, 32), (32, 32), (32, 32)), "attention takes q"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(pack, documents, sizes, says):
    with pytest.raises(ValueError, match=says):
        attention(*(torch.zeros(size) for size in sizes), pack(documents))


def test_mixed_dtypes_and_empty_windows_are_refused(pack, documents):
    batch = pack(documents)
    q, k, v = tensors(batch, 4, 4)
    with pytest.raises(ValueError, match=r"share a dtype.*float32.*bfloat16"):
        attention(q, k.bfloat16(), v, batch)
    with pytest.raises(ValueError, match="window must be at least 1"):
        attention(q, k, v, batch, window=0)


def test_short_bfloat16_documents_are_attended_to_in_float32_on_a_cpu():
    """Rounded once, at the end; also under autocast, which would cast them back. Longer ones are not."""
    from multipack.models.attention import FLOAT32_TOKENS

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
