"""Bytes that the compiled softmax moves, counted in the kernels that inductor makes."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.scheduler import ExternKernelSchedulerNode, Scheduler

from multipack.ops.logits import softmax_of_logits


@pytest.mark.slow
def test_bytes_of_the_compiled_softmax(monkeypatch):
    """At most three passes over bfloat16 logits: two that read them, and one that writes their gradient."""
    rows, columns = 256, 8192
    sizes, codegen = [], Scheduler.codegen

    def count(scheduler):
        own = [node for node in scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
        sizes.extend(node.get_read_write_buffers_sizes() for node in own)
        return codegen(scheduler)

    torch.compiler.reset()
    monkeypatch.setattr(Scheduler, "codegen", count)
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16)
    with torch.compiler.config.patch(force_disable_caches=True):
        torch.compile(softmax_of_logits)(logits, torch.zeros(rows, 1, dtype=torch.int64), 0.0, 0.0)
    torch.compiler.reset()
    assert 0 < sum(sizes) <= 1.01 * 3 * 2 * rows * columns
