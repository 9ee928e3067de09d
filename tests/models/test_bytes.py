"""Bytes that a step moves outside of matrix products and attention, counted on fake tensors of full width."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.data.batch import PackedBatch
from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models import decoder
from multipack.models.decoder import Decoder
from multipack.ops import loss as loss_module
from multipack.shapes import SHAPES

TOKENS, MICRO_BATCHES = 8192, 8
EMPTY = ("aten::empty", "aten::new_empty")
PRODUCTS = ("aten::mm", "aten::addmm", "multipack::document_attention")


class FusedNorm(torch.autograd.Function):
    """RMSNorm by the one kernel of GPUs; on a CPU torch composes it of five."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        out, inverse = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, inverse, weight)
        return out

    @staticmethod
    def backward(ctx, upstream):
        x, inverse, weight = ctx.saved_tensors
        grads = torch.ops.aten._fused_rms_norm_backward(upstream, x, ctx.shape, inverse, weight, [True, True])
        return grads[0], None, grads[1], None


class Bytes(TorchDispatchMode):
    """Bytes read and written by operators that are neither products nor views, by operator."""

    def __init__(self):
        super().__init__()
        self.moved = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        name = operator.name()
        returned = operator._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        if name.startswith("aten::") and not is_view and not name.startswith((*PRODUCTS, *EMPTY)):
            tensors = [x for x in tree_leaves((args, kwargs or {}, out)) if isinstance(x, Tensor)]
            if name.startswith(
                ("aten::gather", "aten::scatter")
            ):  # touch as many elements as there are indices
                tensors = tensors[1:2] * 3
            self.moved[name] += sum(x.numel() * x.element_size() for x in tensors)
        return out


@pytest.fixture
def _like_a_gpu(monkeypatch):
    """Fake tensors on a CPU, which autocast knows, take the path of GPUs; values are not checked."""
    monkeypatch.setattr(decoder, "check_tokens", lambda *arguments: None)
    monkeypatch.setattr(
        loss_module, "_check_rows", lambda hidden, weight, targets, *_: torch.arange(len(targets))
    )
    monkeypatch.setattr(torch.nn.functional, "rms_norm", FusedNorm.apply)
    monkeypatch.setattr(loss_module, "FUSED_DEVICES", ("cpu",))
    monkeypatch.setattr(loss_module, "chunk_rows", lambda columns, device: 2**28 // columns)


def pack_of(tokens: int) -> PackedBatch:
    """Eight equal documents that fill a pack."""
    spans = np.array([[0, tokens // 8]])
    return PackedCollator(8, tokens)([Document(np.zeros(tokens // 8, np.uint32), spans)] * 8)


@pytest.mark.slow
@pytest.mark.usefixtures("_like_a_gpu")
def test_bytes_of_an_uncompiled_step():
    """Per pack of llama-1b: 187 GB with casts in every micro-batch, small chunks, and sums beside the products."""
    shape = SHAPES["llama-1b"]
    moved = []
    for layers in (1, 2):
        with torch.device("meta"):
            model = Decoder(replace(shape, layers=layers))
        with FakeTensorMode() as fake:
            for module in model.modules():
                for key, value in module._parameters.items():
                    if value is not None:
                        module._parameters[key] = torch.nn.Parameter(torch.empty(value.shape))
            batch = pack_of(TOKENS)._each(fake.from_tensor)
            with Bytes() as counted, torch.autocast("cpu", torch.bfloat16):
                for _ in range(MICRO_BATCHES):
                    model(batch).backward()
        moved.append(counted.moved)
    whole = moved[0].total() + (shape.layers - 1) * (moved[1].total() - moved[0].total())
    assert whole / MICRO_BATCHES < 170e9  # and fewer where norms are one kernel
