"""Ring attention with threads as ranks: exact, balanced, and sending no more than stated."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from queue import Queue

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.ops.attention import attention
from multipack.ops.partial import CPU, PLAIN
from multipack.parallel.ring import Ring, head_tail, ring_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8


class Threads:
    """Messages between threads, in the order in which each pair exchanges them."""

    def __init__(self, ranks):
        self.boxes = {(a, b): Queue() for a in range(ranks) for b in range(ranks)}
        self.sent_elements = [0] * ranks

    def exchange(self, rank, sent, to, received, source):
        assert rank not in (to, source)
        if sent is not None:
            assert sent.is_contiguous()
            self.sent_elements[rank] += sent.numel()
            self.boxes[rank, to].put(sent.clone())

        def wait():
            if received is not None:
                message = self.boxes[source, rank].get(timeout=20)
                assert message.shape == received.shape
                assert message.dtype == received.dtype
                received.copy_(message)

        return wait


def run(lengths, ranks, tensors, upstream, kernel=None):
    """Output and gradients of the whole pack, computed by a number of ranks, and the elements that each sends."""
    slots, threads = sum(lengths), Threads(ranks)

    def one(rank):
        pieces = head_tail(slots, rank, ranks)
        own = [torch.cat([x[p] for p in pieces]).requires_grad_() for x in tensors]
        ring = Ring.of(lengths, rank, ranks)
        starts = torch.tensor([0, *np.cumsum(ring.lengths)], dtype=torch.int32, device=upstream.device)
        out = ring_attention(*own, ring, starts, kernel=kernel, exchange=partial(threads.exchange, rank))
        forward = threads.sent_elements[rank]
        out.backward(torch.cat([upstream[p] for p in pieces]))
        return (out.detach(), *(x.grad for x in own)), forward

    with ThreadPoolExecutor(ranks) as executor:
        done = list(executor.map(one, range(ranks)))
    assert all(box.empty() for box in threads.boxes.values())
    whole = [part.new_empty(slots, *part.shape[1:]) for part in done[0][0]]
    for rank, (parts, _) in enumerate(done):
        for target, part in zip(whole, parts, strict=True):
            for piece, values in zip(head_tail(slots, rank, ranks), part.chunk(2), strict=True):
                target[piece] = values
    forward = [elements for _, elements in done]
    return whole, forward, [all_ - first for all_, first in zip(threads.sent_elements, forward, strict=True)]


def pack(lengths):
    documents = [Document(np.zeros(n, dtype=np.uint16), np.array([[0, n]])) for n in lengths]
    return PackedCollator(len(lengths), sum(lengths))(documents)


def drawn(slots, dtype=torch.float32, kv_heads=KV_HEADS):
    torch.manual_seed(3)
    shapes = [(slots, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    *tensors, upstream = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return tensors, upstream


def scores(ring):
    """Pairs of a query and a key that a rank computes."""
    squares = sum(length * (length + 1) // 2 for length in ring.lengths)
    sizes = [[rows.stop - rows.start for rows in seen] for seen in ring.seen if seen]
    return squares + sum(queries * keys for queries, keys in sizes)


def reference(lengths, tensors, upstream, backend="dense"):
    own = [x.clone().requires_grad_() for x in tensors]
    out = attention(*own, pack(lengths), backend)
    out.backward(upstream)
    return [out.detach(), *(x.grad for x in own)]


@settings(deadline=None, max_examples=30)
@given(
    cuts=st.lists(st.integers(1, 95), max_size=12, unique=True),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    plain=st.booleans(),
)
@example(cuts=[], ranks=8, kv_heads=4, plain=False)
@example(cuts=[12, 24, 48], ranks=4, kv_heads=2, plain=True)  # borders on chunks
@example(cuts=[48, *range(50, 96, 2)], ranks=4, kv_heads=2, plain=False)  # the head is a document of its own
@example(cuts=[*range(2, 50, 2)], ranks=4, kv_heads=2, plain=True)  # and the tail
@example(cuts=[23, 25], ranks=2, kv_heads=2, plain=False)  # a chunk's last token begins a document
def test_is_exact_for_any_documents(cuts, ranks, kv_heads, plain):
    edges = [0, *sorted(cuts), 96]
    lengths = tuple(b - a for a, b in pairwise(edges))
    tensors, upstream = drawn(96, torch.float64, kv_heads)
    found, *_ = run(lengths, ranks, tensors, upstream, PLAIN if plain else None)
    for ours, theirs in zip(found, reference(lengths, tensors, upstream), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kernel", [CPU, PLAIN], ids=["cpu", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accurate_to_rounding(kernel, dtype):
    lengths = (3, 50, 11)  # one is longer than a chunk
    tensors, upstream = drawn(sum(lengths), dtype)
    found, *_ = run(lengths, 4, tensors, upstream, kernel)
    exact = reference(lengths, [x.double() for x in tensors], upstream.double())
    usual = reference(lengths, tensors, upstream, "loop")
    for ours, true, theirs in zip(found, exact, usual, strict=True):
        assert ours.dtype == dtype
        noise = (theirs.double() - true).norm()
        assert (ours.double() - true).norm() < 2 * noise + 1e-9


@pytest.mark.parametrize("ranks", [2, 8])
def test_head_and_tail_balance_the_work(ranks):
    slots, draw = 1024, np.random.default_rng(5)
    assert len({scores(Ring.of((slots,), rank, ranks)) for rank in range(ranks)}) == 1
    found = []
    for _ in range(20):  # skewed packs: most documents short, some longer than a chunk
        cut = np.cumsum(np.maximum(1, draw.lognormal(4, 1.5, 400).astype(int)))
        lengths = np.diff([0, *cut[cut < slots], slots]).tolist()
        keys = np.concatenate([np.arange(1, length + 1) for length in lengths])  # that each query sees
        contiguous = keys.reshape(ranks, -1).sum(1)
        ours = np.array([scores(Ring.of(lengths, rank, ranks)) for rank in range(ranks)])
        assert ours.sum() == keys.sum()
        found.append((ours.max() / ours.mean() - 1, contiguous.max() / contiguous.mean() - 1))
    balanced, unbalanced = np.mean(found, axis=0)
    assert balanced < 0.9 * unbalanced


def test_a_rank_sends_only_the_part_that_crosses_into_others_chunks():
    """Bytes of whole packs are counted over processes in tests/distributed/test_context.py."""
    slots = 64
    _, forward, _ = run((slots // 2 - 3, 6, slots // 2 - 3), 2, *drawn(slots))
    crossing = slots // 4  # from chunk 0 into 1; that into 2 from 1 stays on its rank
    assert forward[0] == 2 * crossing * KV_HEADS * WIDTH


def test_wrong_arguments_are_refused():
    (q, k, v), _ = drawn(32)
    ring, starts = Ring.of((32,), 0, 1), torch.tensor([0, 16, 32], dtype=torch.int32)
    for tensors, named in (
        ((q[:16], k[:16], v[:16]), "has 32 tokens, but q has 16"),
        ((q, k, v[:, :1]), "takes q"),
        ((q.half(), k, v), "share a dtype"),
    ):
        with pytest.raises(ValueError, match=named):
            ring_attention(*tensors, ring, starts)
