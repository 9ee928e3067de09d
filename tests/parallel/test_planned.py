"""Attention over placed documents with threads as ranks: exact, and sending no more than the placement says."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from queue import Queue

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.ops.attention import attention
from multipack.parallel.planned import Schedule, planned_attention
from multipack.planning.cost import CostModel
from multipack.planning.placement import head_tail, place

HEADS, KV_HEADS, WIDTH, SLOTS = 4, 2, 8, 96
SHORT = CostModel(None, linear=4)
"""Attention dominates."""


class Threads:
    """Rows between threads, in the order in which each pair exchanges them."""

    def __init__(self, ranks):
        self.boxes = [[Queue() for _ in range(ranks)] for _ in range(ranks)]
        self.sent_rows = [0] * ranks

    def exchange(self, rank, sent, sent_sizes, received_sizes):
        assert sent_sizes[rank] == received_sizes[rank] == 0
        self.sent_rows[rank] += len(sent)
        for other, rows in enumerate(sent.split(list(sent_sizes))):
            self.boxes[rank][other].put(rows.clone())
        received = sent.new_empty(sum(received_sizes), *sent.shape[1:])

        def wait():
            for other, rows in enumerate(received.split(list(received_sizes))):
                rows.copy_(self.boxes[other][rank].get(timeout=20))

        return received, wait


def run(placement, tensors, upstream, backend="auto"):
    """Output and gradients of the whole pack, and the rows that each rank sends: forward, backward."""
    ranks, slots = placement.ranks, len(upstream)
    threads, most = Threads(ranks), int(placement.tokens.max())
    schedules = [Schedule.of(placement, rank, most) for rank in range(ranks)]

    def one(rank):
        schedule = schedules[rank]
        padding = most - len(schedule.tokens)
        own = [
            torch.cat([x[schedule.tokens], torch.randn(padding, *x.shape[1:]).to(x.dtype)]).requires_grad_()
            for x in tensors
        ]
        out = planned_attention(*own, schedule, backend=backend, exchange=partial(threads.exchange, rank))
        forward = threads.sent_rows[rank]
        out.backward(torch.cat([upstream[schedule.tokens], upstream.new_zeros(padding, *upstream.shape[1:])]))
        return [x[: most - padding] for x in (out.detach(), *(x.grad for x in own))], forward

    with ThreadPoolExecutor(ranks) as executor:
        done = list(executor.map(one, range(ranks)))
    whole = [part.new_full((slots, *part.shape[1:]), torch.nan) for part in done[0][0]]
    for schedule, (parts, _) in zip(schedules, done, strict=True):
        for target, part in zip(whole, parts, strict=True):
            target[schedule.tokens] = part
    forward = [rows for _, rows in done]
    return whole, forward, [both - first for both, first in zip(threads.sent_rows, forward, strict=True)]


def drawn(slots, dtype=torch.float32, kv_heads=KV_HEADS):
    torch.manual_seed(3)
    shapes = [(slots, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    *tensors, upstream = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return tensors, upstream


def reference(lengths, tensors, upstream, backend="dense"):
    documents = [Document(np.zeros(n, dtype=np.uint16), np.array([[0, n]])) for n in lengths]
    batch = PackedCollator(len(lengths), sum(lengths))(documents)
    own = [x.clone().requires_grad_() for x in tensors]
    out = attention(*own, batch, backend)
    out.backward(upstream)
    return [out.detach(), *(x.grad for x in own)]


@settings(deadline=None, max_examples=30)
@given(
    cuts=st.lists(st.integers(1, SLOTS - 1), max_size=12, unique=True),
    ranks=st.sampled_from([1, 2, 3, 4, 7, 8]),
    more=st.sampled_from([0, 1, 5]),
    kv_heads=st.sampled_from([1, 2, 4]),
    plain=st.booleans(),
    ring=st.booleans(),
)
@example(cuts=[], ranks=8, more=0, kv_heads=4, plain=False, ring=False)
@example(cuts=[12, 24, 48], ranks=4, more=0, kv_heads=2, plain=True, ring=True)  # borders on chunks
@example(cuts=[48, *range(50, 96, 2)], ranks=4, more=0, kv_heads=2, plain=False, ring=True)
@example(cuts=[*range(1, 9)], ranks=8, more=0, kv_heads=2, plain=False, ring=False)  # shares of a token
def test_is_exact_for_any_documents(cuts, ranks, more, kv_heads, plain, ring):
    lengths = tuple(b - a for a, b in pairwise([0, *sorted(cuts), SLOTS]))
    each = -(-SLOTS // ranks) + more
    placement = head_tail(lengths, ranks, each) if ring else place(lengths, SHORT, ranks, each)
    tensors, upstream = drawn(SLOTS, torch.float64, kv_heads)
    found, forward, backward = run(placement, tensors, upstream, "explicit" if plain else "auto")
    for ours, theirs in zip(found, reference(lengths, tensors, upstream), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert forward == placement.sent.tolist()
    assert backward == (placement.sent + placement.received).tolist()


@pytest.mark.parametrize("kernel", ["loop", "explicit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accurate_to_rounding(kernel, dtype):
    lengths = (3, 50, 11)
    tensors, upstream = drawn(sum(lengths), dtype)
    found, *_ = run(place(lengths, SHORT, 4, 16), tensors, upstream, kernel)
    exact = reference(lengths, [x.double() for x in tensors], upstream.double())
    usual = reference(lengths, tensors, upstream, "loop")
    for ours, true, theirs in zip(found, exact, usual, strict=True):
        assert ours.dtype == dtype
        noise = (theirs.double() - true).norm()
        assert (ours.double() - true).norm() < 2 * noise + 1e-9


def test_wrong_arguments_are_refused():
    (q, k, v), _ = drawn(32)
    schedule = Schedule.of(place((32,), SHORT, 1, 32), 0)
    with pytest.raises(ValueError, match=r"attention=dense .*'loop'"):
        planned_attention(q, k, v, schedule, backend="dense")
    for tensors, named in (
        ((q[:16], k[:16], v[:16]), "has 32 slots, but q has 16"),
        ((q, k, v[:, :1]), "takes q"),
        ((q.half(), k, v), "share a dtype"),
    ):
        with pytest.raises(ValueError, match=named):
            planned_attention(*tensors, schedule)
