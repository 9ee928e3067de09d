"""Bytes that a step moves outside of matrix products and attention, counted on fake tensors of full width."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor.scheduler import ExternKernelSchedulerNode, Scheduler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.data.packs.batch import PackedBatch
from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models import decoder
from multipack.models.compile import compile_blocks
from multipack.models.decoder import Decoder
from multipack.ops import loss as loss_module
from multipack.ops import norm
from multipack.ops.autocast import keeping_copies
from multipack.ops.logits import softmax_of_logits
from multipack.ops.target_rows import Targets
from multipack.shapes import SHAPES, ModelShape

TOKENS, MICRO_BATCHES = 8192, 8
EMPTY = ("aten::empty", "aten::new_empty")
ZEROS = ("aten::new_zeros", "aten::zeros_like")
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
        self.launches = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        name = operator.name()
        returned = operator._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        if name.startswith("aten::") and not is_view and not name.startswith((*PRODUCTS, *EMPTY)):
            read = () if name.startswith(ZEROS) else (args, kwargs or {})
            tensors = [x for x in tree_leaves((read, out)) if isinstance(x, Tensor)]
            if name.startswith(("aten::gather", "aten::scatter")):  # as many elements as there are indices
                tensors = tensors[1:2] * 3
            self.launches += 1
            self.moved[name] += sum(x.numel() * x.element_size() for x in tensors)
        return out


def every_target(hidden, weight, targets, num_targets, weights, *_):
    return Targets(targets, weights, torch.arange(len(targets)), None)


@contextmanager
def path_of_gpus():
    """Fake tensors on a CPU, which autocast knows, take the path of GPUs; values are not checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "check_tokens", lambda *arguments: None)
        patch.setattr(loss_module, "checked_targets", every_target)
        patch.setattr(norm, "rms_norm", lambda x, weight, eps: FusedNorm.apply(x, weight.shape, weight, eps))
        patch.setattr(loss_module, "FUSED_DEVICES", ("cpu",))
        patch.setattr(loss_module, "chunk_rows", lambda columns, device: 2**28 // columns)
        yield


def pack_of(tokens: int) -> PackedBatch:
    """Eight equal documents that fill a pack."""
    spans = np.array([[0, tokens // 8]])
    return PackedCollator(8, tokens)([Document(np.zeros(tokens // 8, np.uint32), spans)] * 8)


def uncompiled(shape: ModelShape, micro_batches: int, **loss) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, launches) of a block, and of the rest of a step, operator by operator; `loss` are options of the loss."""
    one, two = (_moved(replace(shape, layers=layers), micro_batches, loss) for layers in (1, 2))
    return two - one, 2 * one - two


def _moved(shape: ModelShape, micro_batches: int, loss) -> np.ndarray:
    with torch.device("meta"):
        model = Decoder(shape)
    model.training_loss = partial(model.loss_function, **loss)
    with path_of_gpus(), FakeTensorMode() as fake:
        for module in model.modules():
            for key, value in module._parameters.items():
                if value is not None:
                    module._parameters[key] = torch.nn.Parameter(torch.empty(value.shape))
        batch = pack_of(TOKENS)._each(fake.from_tensor)
        with Bytes() as counted, torch.autocast("cpu", torch.bfloat16):
            for _ in range(micro_batches):
                model(batch).backward()
    return np.array([counted.moved.total(), counted.launches])


@contextmanager
def compiled_bytes(monkeypatch):
    """A list that receives the bytes of each kernel that inductor makes; products and attention are not its own."""
    sizes, codegen = [], Scheduler.codegen

    def count(scheduler):
        own = [node for node in scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
        sizes.extend(node.get_read_write_buffers_sizes() for node in own)
        return codegen(scheduler)

    torch.compiler.reset()
    with monkeypatch.context() as patch, torch.compiler.config.patch(force_disable_caches=True):
        patch.setattr(Scheduler, "codegen", count)
        yield sizes
    torch.compiler.reset()


def block_bytes(monkeypatch, shape: ModelShape, tokens: int) -> int:
    """Bytes of a compiled block and its gradients for one pack."""
    model = Decoder(replace(shape, layers=1, vocabulary_size=512))
    compile_blocks(model)
    cpu = torch.device("cpu")
    with compiled_bytes(monkeypatch) as sizes, keeping_copies(cpu), torch.autocast("cpu", torch.bfloat16):
        model(pack_of(tokens)).backward()
    return sum(sizes)


@pytest.mark.slow
def test_bytes_and_launches_of_an_uncompiled_step():
    """Per pack of llama-1b, without products and attention: 187 GB and 1,824 kernels before copies of weights were
    kept, chunks of the loss larger, and products added in place."""
    shape = SHAPES["llama-1b"]
    block, rest = uncompiled(shape, MICRO_BATCHES)
    moved, launches = (shape.layers * block + rest) / MICRO_BATCHES
    assert moved < 170e9  # and fewer where norms are one kernel
    assert launches < 1_450


@pytest.mark.slow
def test_bytes_of_the_compiled_softmax(monkeypatch):
    """At most three passes over bfloat16 logits: two that read them, and one that writes their gradient."""
    rows, columns = 256, 8192
    with compiled_bytes(monkeypatch) as sizes:
        compiled = torch.compile(softmax_of_logits)
        compiled(
            torch.zeros(rows, columns, dtype=torch.bfloat16),
            torch.zeros(rows, 1, dtype=torch.int64),
            0.0,
            0.0,
        )
    assert 0 < sum(sizes) <= 1.01 * 3 * 2 * rows * columns


@pytest.mark.slow
def test_bytes_of_a_compiled_step(monkeypatch):
    """Per pack of llama-1b 85 GB, less than half of 187 GB."""
    shape = SHAPES["llama-1b"]
    few, many = (block_bytes(monkeypatch, shape, tokens) for tokens in (64, 128))
    # Some bytes belong to the weights, the others are in proportion to the tokens.
    block = few + (TOKENS - 64) / 64 * (many - few)
    weights = sum(weight.numel() for weight in Decoder(replace(shape, layers=1)).blocks.parameters())
    cast = 6 * weights * (1 / MICRO_BATCHES + 1)  # the weights once a step, and their gradients
    accumulated = 12 * weights  # the gradients, in float32

    def softmax(logits, target, *terms):
        moved.append(3 * logits.numel() * logits.element_size())
        losses, own = logits.new_zeros(len(logits), dtype=torch.float32), logits.new_zeros(target.shape)
        return losses, losses, torch.empty_like(logits), own

    moved = []  # by the losses of two models
    monkeypatch.setattr(loss_module, "compiled_softmax", lambda: softmax)
    _, rest = uncompiled(shape, 1, compiled=True)
    whole = shape.layers * (block + cast + accumulated) + rest[0] + sum(moved) / 2
    assert whole < 187e9 / 2
