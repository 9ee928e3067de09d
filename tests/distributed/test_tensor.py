"""Tensor parallelism equals one process: losses, gradients, trained weights; its collectives are counted."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import sharding as tiny
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from multipack.models.compile import compile_blocks
from multipack.models.decoder import PARALLEL_PLAN, Decoder
from multipack.models.recompute import recompute_blocks, tile_layers
from multipack.ops.logits import LossOptions
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.tensor import divide_tensors
from multipack.shapes import ModelShape

LLAMA = ModelShape(
    layers=2, heads=8, kv_heads=4, d_model=32, d_ff=48, vocabulary_size=56, context=64, tied=False
)
GPT = replace(
    LLAMA, kv_heads=8, positions="learned", norm="layernorm", activation="gelu", bias=True, tied=True
)
SHAPES = {
    "gpt": GPT,
    "gpt-no-bias-untied": replace(GPT, bias=False, tied=False),
    "llama": LLAMA,
    "llama-tied-bias": replace(LLAMA, tied=True, bias=True, head_dim=6),
    "families": tiny.with_switches(LLAMA),
    "one-key-head": replace(LLAMA, qkv_bias=True, kv_heads=1, head_norm="head"),
    "olmo2": replace(LLAMA, norms="after", head_norm="all"),
}
SLOTS = 64


def _batch(number=0, slots=SLOTS, weighting="token"):
    """Documents of unequal lengths, different in every batch; padded to `slots`."""
    lengths = np.random.default_rng(number).permutation([19, 1, 12, 3, 7 + number])
    return tiny.packed(lengths.tolist(), number, LLAMA.vocabulary_size, slots, loss_weighting=weighting)


def _whole(name, **changes):
    """The same decoder on every rank, with norms and biases far from their initial values."""
    torch.manual_seed(3)
    model = Decoder(replace(SHAPES[name], **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def _mesh(world, **config):
    return build_mesh(ParallelConfig(**{"tensor": world.size, **config}), world)


def _divided(world, model):
    divide_tensors(model, _mesh(world).axis("tp"), PARALLEL_PLAN)
    return model


def _gradients(model):
    return {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.named_parameters()
    }


def _worst(found, wanted):
    """The largest relative distance of any tensor; those that are only rounding (GPT's key biases) relative to all."""
    assert found.keys() == wanted.keys()
    floor = 1e-2 * torch.stack([each.norm() for each in wanted.values()]).norm()
    return max(
        ((found[name] - wanted[name]).norm() / max(wanted[name].norm(), floor)).item() for name in wanted
    )


def _errors(world, build, batch, divided=None, autocast=False):
    """Relative errors of loss and gradients of a divided model, once forward and backward."""
    losses, models = [], (build(), divided or _divided(world, build()))
    for model in models:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch)
        assert loss.dtype == torch.float32
        loss.backward()
        losses.append(loss.item())
    assert len(set(world.gather(losses[1].hex()))) == 1
    return abs(losses[1] / losses[0] - 1), _worst(_gradients(models[1]), _gradients(models[0]))


# Against one process: one pass forward and backward; test_parity.py compares steps, norms and weights.


def once(world, name, autocast):
    return _errors(world, partial(_whole, name), _batch(), autocast=autocast)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("gpt", 2), ("llama", 4), ("llama-tied-bias", 2), ("families", 4)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("gpt-no-bias-untied", 4), ("one-key-head", 4), ("olmo2", 4), ("families", 2))
        ),
    ],
)
def test_equals_one_process(pools, name, size):
    for errors in pools(size).run(once, name, False):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_runs_under_autocast(pools, name):
    for loss, gradients in pools(2).run(once, name, True):
        assert loss < 2e-3
        assert gradients < 5e-2


def with_terms(world, training, tiles, kind):
    """Smoothing, z-loss and weights by documents, with tiles and activation checkpointing."""

    def build():
        model = _whole("llama").train(training)
        model.loss_options = LossOptions(z_loss=1e-2, label_smoothing=0.1)
        return model

    batch = _batch(1, weighting="document")
    divided = _divided(world, build())
    tile_layers(divided, tiles)
    if kind == "compiled":
        compile_blocks(divided, backend="eager")
    else:
        recompute_blocks(divided, kind)
    return _errors(world, build, batch, divided)


@pytest.mark.parametrize(
    ("training", "tiles", "kind"),
    [
        (False, 1, "none"),
        (True, 1, "selective"),
        (True, 3, "full"),
        pytest.param(True, 1, "compiled", marks=pytest.mark.slow),
    ],
)
def test_keeps_the_terms_of_the_training_loss_in_tiles_too(pools, training, tiles, kind):
    for errors in pools(2).run(with_terms, training, tiles, kind):
        assert max(errors) < 1e-5


# Collectives, counted.


def counted(world, name):
    layers, found = {}, {}
    for blocks in (1, 2):
        model = _divided(world, _whole(name, layers=blocks))
        batch, counts = _batch(), []
        with CommDebugMode() as comm:
            loss = model(batch)
        counts.append(comm.get_comm_counts())
        with CommDebugMode() as comm:
            loss.backward()
        counts.append(comm.get_comm_counts())
        layers[blocks] = [{str(op).rsplit(".", 1)[-1]: n for op, n in each.items()} for each in counts]
    for direction, one, two in zip(("forward", "backward"), layers[1], layers[2], strict=True):
        block = {op: two[op] - one.get(op, 0) for op in two}
        found[direction] = (block, {op: one[op] - block[op] for op in one})
    return found


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_collectives_of_a_block(pools, name):
    for found in pools(2).run(counted, name):
        gather, scatter, reduce = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
        block, rest = found["forward"]
        assert block == {gather: 2, scatter: 2}
        # The embedding's; the loss gathers hidden states, and three numbers a row for its only chunk.
        assert rest == {scatter: 1, gather: 2}
        block, rest = found["backward"]
        assert block == {gather: 2, scatter: 2, reduce: 2}  # one reduction a norm, biases included
        assert rest == {scatter: 1, gather: 1, reduce: 2 if name == "gpt" else 1}  # norm, positions


# Random numbers.


def dropped(world):
    """Where dropout zeroed this rank's embeddings, which are all 1."""
    model = Decoder(replace(LLAMA, dropout=0.5))
    with torch.no_grad():
        model.embedding.weight.fill_(1.0)
    _divided(world, model)
    torch.manual_seed(int(np.random.SeedSequence([0, world.rank]).generate_state(1)[0]))
    return (model.embed(_batch()) == 0).numpy()


def test_ranks_drop_different_elements(pools):
    masks = pools(4).run(dropped)
    for rank, mask in enumerate(masks):
        assert mask.shape == (SLOTS // 4, LLAMA.d_model)
        for other in masks[:rank]:
            assert 0.4 < (mask != other).mean() < 0.6


# What is refused.


def refused(world):
    mesh = _mesh(world).axis("tp")
    model, custom = _divided(world, _whole("gpt")), _whole("gpt")
    custom.loss_function = _own_loss
    unnamed = {name: kind for name, kind in PARALLEL_PLAN.items() if name != "blocks.*.feed_forward.up"}
    hidden, targets = torch.zeros(4, 32), torch.zeros(4, dtype=torch.int64)
    divide = lambda plan, **changes: divide_tensors(_whole("gpt", **changes), mesh, plan)  # noqa: E731
    return tiny.refusals(
        lambda: model(_batch(slots=61)),
        lambda: divide(unnamed),
        lambda: divide({**PARALLEL_PLAN, "norm": "diagonal"}),
        lambda: divide({**PARALLEL_PLAN, "norm": "row"}),
        lambda: divide(PARALLEL_PLAN, vocabulary_size=57),
        lambda: divide_tensors(custom, mesh, PARALLEL_PLAN),
        lambda: model.loss_function(hidden, model.output_weight, targets),
    )


def _own_loss(hidden, weight, targets):
    return hidden.sum()


def test_mistakes_are_refused_equally_on_all_ranks(pools):
    patterns = (
        "parallel.tensor=2 .*61",
        r"blocks\.0\.feed_forward\.up .*weight, bias",
        "norm 'diagonal'.* column, heads, row",
        "norm 'row'.* Linear, got LayerNorm",
        r"embedding\.weight .*57.*parallel\.tensor=2",
        "_own_loss.* parallel.tensor=1",
        r"targets \(8,\)",
    )
    tiny.check_refusals(pools(2).run(refused), patterns)
