"""Blocks compiled one by one: one graph for all layers and packs, equal results."""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile

import numpy as np
import pytest
import torch
from torch.library import opcheck
from torch.nn.parallel import DistributedDataParallel

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.compile import compile_blocks, keep_compiled_code_private
from multipack.models.decoder import Decoder
from multipack.models.recompute import recompute_blocks
from multipack.ops import loss
from multipack.ops.attention import attention, table
from multipack.ops.attention.loop import GROUPED_KERNELS, document_attention
from multipack.ops.logits import softmax_of_logits
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World


@pytest.fixture(autouse=True)
def _fresh():
    """Forget what other tests compiled, and where their graphs broke."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def packs(document):
    """pad_to → six packs of different layouts, of one number of slots or of many; documents begin alike."""

    def make(pad_to=None, min_prefix=None):
        draw = np.random.default_rng(3)
        collate = PackedCollator(6, 96 if pad_to else 16, pad_to=pad_to, min_prefix=min_prefix)
        for number in range(6):
            lengths = draw.integers(1, 17, draw.integers(2, 7)).tolist()
            tokens = [document(16, number).tokens[:length].copy() for length in lengths]
            for last, own in enumerate(tokens):
                own[-1] = last
            spans = np.array([[0, 1]])
            yield collate([Document(own, spans * len(own)) for own in tokens])

    return make


class Count:
    """A backend that runs graphs unchanged and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, _):
        self.graphs += 1
        return graph


def breaks():
    """Counts of graph breaks by reason."""
    return dict(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.parametrize(("pad_to", "window"), [pytest.param(96, None, marks=pytest.mark.slow), (None, 3)])
@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_one_graph_serves_all_layers_and_packs(shape, packs, distance, gradients, pad_to, window):
    model, count = Decoder(dataclasses.replace(shape, window=window or 0)), Count()
    reference = copy.deepcopy(model)
    compile_blocks(model, backend=count, one_size=pad_to is not None)
    for min_prefix in (None, 1):  # documents in packs share nothing, or share what they have in common
        for batch, plain in zip(packs(pad_to, min_prefix), packs(pad_to), strict=True):
            assert min_prefix or batch.tree is None
            for each, given in ((model, batch), (reference, plain)):
                each.zero_grad()
                each(given).backward()
            assert distance(gradients(model), gradients(reference)) < 1e-6
        assert count.graphs == (2 if min_prefix else 1)
    assert not breaks()
    assert list(model.state_dict()) == list(reference.state_dict())


@pytest.mark.parametrize("pad_to", [160, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_a_run_compiles_three_graphs_at_most(monkeypatch, shape, document, pad_to):
    """Evaluation, training, evaluation: two graphs of a block, and one of the softmax, which GPUs compile too."""
    model, count = Decoder(shape), Count()
    softmax = torch.compile(softmax_of_logits, dynamic=True, backend=count)
    monkeypatch.setattr(loss, "FUSED_DEVICES", ("cpu",))
    monkeypatch.setattr(loss, "compiled_softmax", lambda: softmax)
    compile_blocks(model, backend=count, one_size=pad_to is not None)
    draw = np.random.default_rng(0)
    for trains in (False, True, False):
        for _ in range(4):
            lengths = draw.integers(2, 40, draw.integers(1, 5))
            batch = PackedCollator(8, 160, pad_to)([document(int(length)) for length in lengths])
            with torch.set_grad_enabled(trains):
                out = model.train(trains)(batch)
            if trains:
                out.backward()
    assert count.graphs == 3
    assert not breaks()


@pytest.fixture
def _one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
@pytest.mark.usefixtures("_one_rank")
def test_ddp_does_not_split_a_compiled_block(shape, packs):
    """torch would divide a graph at DDP's buckets, where these hold less than a block's gradients."""
    model, count = Decoder(shape), Count()
    compile_blocks(model, backend=count)
    replicated = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    replicated(next(packs(96))).backward()
    assert count.graphs == 1


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_a_step_casts_weights_once_outside_of_graphs(model, packs, distance, gradients, recompute):
    """In evaluation and training, also where the backward pass runs a block again."""
    batches, halves, engines = list(packs())[:3], [], []
    for each in (model, copy.deepcopy(model)):
        engines.append(ModelEngine([each], torch.optim.SGD(each.parameters()), Mesh(World()), torch.bfloat16))
    recompute_blocks(model, recompute)
    compile_blocks(model, lambda graph, inputs: halves.append(half_precision(inputs)) or graph)
    weights = dict(model.named_parameters())
    for learning_rate in (0.1, 0.0):
        losses = [engine.evaluate(batches) for engine in engines]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        for engine in engines:
            engine.forward_backward(batches, 100)
        assert distance(*(gradients(engine.model) for engine in engines)) < 0.01
        assert all(each is weights[name] for name, each in model.named_parameters())  # no copies
        for engine in engines:
            engine.step(learning_rate)
    assert halves == [7, 7]  # matrices of a block, in the graphs of evaluation and of training


def half_precision(inputs):
    """Number of a graph's inputs in bfloat16."""
    return sum(isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in inputs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_flex_becomes_part_of_the_graph(monkeypatch, shape, packs, distance):
    """On a CPU it goes forward only; its mask is made inside, from `cu_seqlens`, for every layout."""
    wide = dataclasses.replace(shape, head_dim=16)
    rows = [dataclasses.replace(row, devices=()) if row.name == "flex" else row for row in table.BACKENDS]
    monkeypatch.setattr(table, "BACKENDS", tuple(rows))
    model, count = Decoder(wide, "flex"), Count()
    reference = Decoder(wide, "loop")
    reference.load_state_dict(model.state_dict())
    compile_blocks(model, backend=count)
    with torch.no_grad():
        for batch in packs():
            assert distance(model.hidden(batch), reference.hidden(batch)) < 1e-6
    assert count.graphs == 1
    assert not breaks()


@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_backends_that_would_compile_for_every_pack_are_refused(monkeypatch, shape, packs):
    rows = [dataclasses.replace(row, compiles=()) if row.name == "dense" else row for row in table.BACKENDS]
    monkeypatch.setattr(table, "BACKENDS", tuple(rows))
    model = Decoder(shape, "dense")
    model(next(packs()))
    compile_blocks(model, backend="eager")
    with pytest.raises(Exception, match=r"attention=dense .*torch.compile.*'loop'"):
        model(next(packs()))


def arguments(dtype, window, lengths=(5, 140, 140, 1, 0, 0), heads=4, kv_heads=2, width=8):
    slots = sum(lengths)
    tensors = [
        torch.randn(slots, n, width, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)
    ]
    return (*tensors, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), window)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 3), (torch.bfloat16, None)])
def test_operator_passes_opcheck(dtype, window):
    q, k, v, bounds, window = arguments(dtype, window)
    opcheck(document_attention, (q, k, v, bounds, window, None if window else behind_the_first(bounds)))


def behind_the_first(bounds):
    """`PackedTree.ends` of nodes that all go on from the first one."""
    sizes = bounds.diff()
    return torch.cat([bounds[-1].expand(sizes[0]), bounds[2:].repeat_interleave(sizes[1:])])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("tree", [False, True])
def test_gradients_of_the_operator(window, tree):
    q, k, v, bounds, window = arguments(torch.float64, window, (5, 3, 3, 0), 2, 1, 4)
    ends = behind_the_first(bounds) if tree else None
    assert torch.autograd.gradcheck(lambda *x: document_attention(*x, bounds, window, ends)[0], (q, k, v))


def test_operator_refuses_bounds_of_other_tensors():
    q, k, v, bounds, window = arguments(torch.float32, None)
    with pytest.raises(ValueError, match=r"cu_seqlens .*286"):
        document_attention(q, k, v, bounds[:3], window)


@pytest.mark.skipif(not GROUPED_KERNELS, reason="torch sums gradients of repeated key heads in bfloat16")
def test_bfloat16_gradients_come_from_unrounded_results(document, distance):
    """Short documents have the gradients of float32 attention, rounded once."""
    batch = PackedCollator(3, 300)([document(300), document(20), document(5)])
    half = [torch.randn(325, n, 16).bfloat16().requires_grad_() for n in (4, 2, 2)]
    full = [x.detach().float().requires_grad_() for x in half]
    upstream = torch.randn(325, 4, 16).bfloat16()
    ours = torch.autograd.grad(attention(*half, batch), half, upstream)
    theirs = torch.autograd.grad(attention(*full, batch), full, upstream.float())
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.equal(got, expected.bfloat16())


def test_compiled_code_is_kept_where_others_cannot_put_theirs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code_private()
    own = tmp_path / f"multipack-{os.getuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own / "compiled")
    assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()
    own.symlink_to(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with pytest.raises(ValueError, match="TORCHINDUCTOR_CACHE_DIR"):
        keep_compiled_code_private()
