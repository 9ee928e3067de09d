"""Context parallelism: losses and gradients of the ranks add up to those of one process, documents crossing ranks."""

import copy
import dataclasses
from datetime import timedelta
from unittest import mock

import pytest
import sharding as tiny
import torch
import torch.distributed as dist

from multipack.models.compile import compile_blocks
from multipack.models.decoder import Decoder
from multipack.models.recompute import recompute_blocks
from multipack.parallel.context import ContextBatch, divide_context
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.planning.cost import CostModel
from multipack.planning.placement import place
from multipack.shapes import ModelShape

SLOTS = 64
LENGTHS = (3, 38, 1, 7, 5)
"""Documents have prompts, and padding follows: no two ranks have equally many targets."""
LLAMA = ModelShape(layers=2, heads=4, kv_heads=4, d_model=32, d_ff=48, vocabulary_size=50, context=SLOTS)
GPT = dataclasses.replace(LLAMA, positions="learned", norm="layernorm", activation="gelu", bias=True)
SHAPES = {
    "gpt": GPT,
    "llama": dataclasses.replace(LLAMA, kv_heads=2, tied=False),
    "one key head": dataclasses.replace(LLAMA, kv_heads=1, head_dim=6),
    "window": dataclasses.replace(LLAMA, window=12),
    "three key heads": dataclasses.replace(LLAMA, heads=6, kv_heads=3, head_dim=6),
}


def summed_over(tensor, group):
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def pack(lengths=LENGTHS, weighting="token", pad_to=SLOTS):
    return tiny.packed(lengths, 3, 50, pad_to, loss_weighting=weighting)


def pair(world, shape, method, mesh=None):
    """A model, the same one divided, and the function that divides packs."""
    torch.manual_seed(5)
    whole = Decoder(shape)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    divided = copy.deepcopy(whole)
    config = ParallelConfig(context=world.size, context_method=method)
    mesh = mesh or build_mesh(config, world)
    placing = config.placing(CostModel.from_shape(shape), 4)
    return whole, divided, divide_context(divided, mesh.axis("cp"), placing)


def same_as_one(world, name, method, lengths, options):
    """Largest relative differences of loss and gradients, and how many targets this rank had."""
    mesh = build_mesh(ParallelConfig(context=world.size), world)
    group = mesh.axis("cp").get_group()
    whole, divided, share = pair(world, SHAPES[name], method, mesh)
    batch = pack(lengths, "document" if "weights" in options else "token")
    own = share(batch)
    for kind in {"full", "selective"} & {*options}:
        recompute_blocks(divided, kind)
    if "compile" in options:
        compile_blocks(divided, backend="eager")
    precision = torch.autocast("cpu", torch.bfloat16, enabled="bf16" in options)
    if "float64" in options:
        whole.double(), divided.double()
    with precision:
        expected = whole(batch)
        loss = divided(own)
    expected.backward()
    loss.backward()
    total = summed_over(loss.detach(), group)
    differences = [((total - expected).abs() / expected.abs()).item()]
    # Some gradients are nothing but rounding: that of the keys' biases, which softmax does not see.
    least = 1e-2 * max(parameter.grad.norm() for parameter in whole.parameters())
    for ours, theirs in zip(divided.parameters(), whole.parameters(), strict=True):
        summed = summed_over(ours.grad, group)
        differences.append(((summed - theirs.grad).norm() / max(theirs.grad.norm(), least)).item())
    assert summed_over(torch.tensor(own.num_target_tokens), group) == batch.num_target_tokens
    return max(differences), own.num_target_tokens


def check(pool, name, method, lengths=LENGTHS, options=(), tolerance=1e-5):
    found = pool.run(same_as_one, name, method, lengths, options)
    assert max(difference for difference, _ in found) < tolerance
    return [targets for _, targets in found]


@pytest.mark.parametrize(
    ("name", "ranks"), [pytest.param("gpt", 4, marks=pytest.mark.slow), ("llama", 2), ("one key head", 4)]
)
@pytest.mark.parametrize("method", ["ulysses", "planned"])
def test_losses_and_gradients_sum_to_those_of_one_process(pools, name, method, ranks):
    targets = check(pools(ranks), name, method)
    assert len(set(targets)) > 1


def test_any_documents(pools):
    """Planned attention has the same test with threads, in tests/parallel/test_planned.py."""
    for lengths in ((64,), (2,) * 30, (32, 32), (7,)):
        check(pools(4), "gpt", "ulysses", lengths)


@pytest.mark.parametrize("method", ["ulysses", "planned"])
@pytest.mark.parametrize(
    "options",
    [("weights", "float64"), ("selective",), ("full",), pytest.param(("compile",), marks=pytest.mark.slow)],
)
def test_options(pools, options, method):
    tolerance = 1e-12 if "float64" in options else 1e-5
    check(pools(2), "llama", method, options=options, tolerance=tolerance)


def test_bf16_is_accurate_to_rounding(pools):
    for method in ("ulysses", "planned"):
        check(pools(2), "llama", method, options=("bf16", "full"), tolerance=0.03)


def test_ulysses_has_windows_and_copies_key_heads_that_its_ranks_do_not_divide(pools):
    check(pools(4), "window", "ulysses")
    check(pools(2), "three key heads", "ulysses")


def mixed_dtypes(world, method):
    """Attention's result under autocast, from queries and keys that a norm of their own left in float32."""
    _, divided, share = pair(world, SHAPES["llama"], method)
    q, k, v = (torch.randn(SLOTS // world.size, heads, 8) for heads in (4, 2, 2))
    own = share(pack())
    with torch.autocast("cpu", torch.bfloat16):
        out = divided.blocks[0].attention.attend(q, k, v.bfloat16(), own, "auto", window=None)
    return tuple(out.shape), str(out.dtype)


@pytest.mark.parametrize("method", ["ulysses", "planned"])
def test_tensors_are_cast_before_they_are_sent(pools, method):
    assert pools(2).run(mixed_dtypes, method) == [((SLOTS // 2, 4, 8), "torch.bfloat16")] * 2


def sent_bytes(world, name, method, lengths):
    """Bytes that this rank sends to others for all layers: forward, and backward."""
    _, divided, share = pair(world, SHAPES[name], method)
    count = [0]

    def all_to_all(received, sent, received_sizes=None, sent_sizes=None, **options):
        assert not sent_sizes or sent_sizes[world.rank] == 0
        count[0] += sent.nbytes if sent_sizes else sent.nbytes * (world.size - 1) // world.size
        return exchange(received, sent, received_sizes, sent_sizes, **options)

    exchange = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", all_to_all):
        loss = divided(share(pack(lengths)))
        forward = count[0]
        loss.backward()
    return forward, count[0] - forward


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_bytes_sent_follow_the_formulas(pools, ranks):
    shape = SHAPES["llama"]
    each, kv_heads = SLOTS // ranks, max(shape.kv_heads, ranks)
    layers, size = shape.layers, 4 * shape.head_width
    ulysses = layers * (ranks - 1) * each // ranks * (2 * shape.heads + 2 * kv_heads) * size
    if shape.heads % ranks == 0:
        assert pools(ranks).run(sent_bytes, "llama", "ulysses", LENGTHS) == [(ulysses, ulysses)] * ranks
    for lengths in ((SLOTS,), LENGTHS, (8,) * 8):
        found = pools(ranks).run(sent_bytes, "llama", "planned", lengths)
        config = ParallelConfig(context=ranks, context_method="planned")
        placement = config.placing(CostModel.from_shape(shape), 4)(lengths, SLOTS)
        key = layers * 2 * shape.kv_heads * size
        sent, received = placement.sent * key, placement.received * key
        assert found == list(zip(sent.tolist(), (sent + received).tolist(), strict=True))
        assert placement.sent.any() == (len(lengths) < 8), "short documents are sent nowhere"
    assert place((SLOTS,), CostModel.from_shape(shape), ranks, each).sent.max() == (ranks - 1) * each


def shares(world, method):
    """What every rank holds of a pack."""
    *_, share = pair(world, SHAPES["gpt"], method)
    batch = pack(weighting="document")
    own = share(batch)
    moved = own.to("cpu", non_blocking=True)
    assert type(own) is type(moved) is ContextBatch
    assert moved.whole.cu_seqlens is moved.cu_seqlens
    assert (own.lengths, own.longest, own.max_seqlen) == (batch.lengths, batch.longest, batch.max_seqlen)
    assert torch.equal(own.cu_seqlens, batch.cu_seqlens)
    meta = own.to("meta")
    moved = [meta.input_ids, meta.weights, meta.cu_seqlens, meta.whole.targets]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert method == "ulysses" or meta.schedule.pieces.cu_seqlens.device.type == "meta"
    return [getattr(own, name).tolist() for name in ("input_ids", "targets", "position_ids", "weights")]


def test_a_share_has_this_ranks_tokens_and_the_bounds_of_all_documents(pools):
    batch = pack(weighting="document")
    for method in ("ulysses", "planned"):
        found = pools(2).run(shares, method)
        held = sorted(row for own in found for row in zip(*own, strict=True))
        whole = [getattr(batch, name) for name in ("input_ids", "targets", "position_ids", "weights")]
        if method == "planned":  # padding is at position 0
            whole[2] = whole[2].where(torch.arange(SLOTS) < sum(LENGTHS), 0)
        assert held == sorted(zip(*(each.tolist() for each in whole), strict=True))


def mistakes(world):
    """Messages of mistakes."""
    _, model, share = pair(world, LLAMA, "planned")
    mesh = build_mesh(ParallelConfig(context=world.size), world).axis("cp")
    return tiny.refusals(
        lambda: share(pack((30, 21), pad_to=None)),
        lambda: model(pack()),
        lambda: share(tiny.alike(3, 50, SLOTS, shares=True)),
        lambda: divide_context(torch.nn.Linear(2, 2), mesh),
    )


def test_mistakes_are_refused_equally_on_all_ranks(pools):
    patterns = (
        "a pack of 51 slots .*parallel.context=2: .*50",
        "divide_context",
        "parallel.context_method=planned .*share_prefixes=off",
        "Linear .*`attend`",
    )
    tiny.check_refusals(pools(2).run(mistakes), patterns)


def one_leaves(world):
    """Rank 1 takes no part in the attention."""
    _, model, share = pair(world, LLAMA, "planned")
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=2))
    if world.rank == 1:
        dist.distributed_c10d._get_default_store().wait(["rank 0 has given up"], timedelta(seconds=30))
        return ""
    try:
        model(share(pack()))
        return "not noticed"
    except RuntimeError as error:
        return str(world.watch.report(error))
    finally:
        dist.distributed_c10d._get_default_store().set("rank 0 has given up", "")


@pytest.mark.slow
def test_a_rank_that_takes_no_part_in_an_exchange_is_named(pool_type):
    pool = pool_type(2, timeout_seconds=2)
    first = pool.outcomes(one_leaves)[0]
    pool.kill()
    assert first.value == "rank 1 did not answer before the first step within parallel.timeout_seconds=2"
