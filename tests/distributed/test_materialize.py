"""Models filled tensor by tensor: one process's values, in the memory of a tensor beside the pieces."""

import gc
import math
import time
from unittest import mock

import pytest
import sharding as tiny
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from multipack.models.decoder import PARALLEL_PLAN, DecoderPart, initial_parameters
from multipack.parallel.fsdp import shard
from multipack.parallel.materialize import GPU_CHUNK, check_equal, hash_tensor, materialize
from multipack.parallel.state import local, piece_of
from multipack.parallel.tensor import divide_tensors
from multipack.parallel.world import World


def _divided(world, kind, way):
    """What a rank holds of a model, on the meta device."""
    if way == "stages":  # dealt in turn: the first rank has the first and the last, and so tied weights twice
        layers = tiny.SHAPES[kind].layers
        stages = [DecoderPart(0, 1, layers), DecoderPart(1, 2, layers), DecoderPart(2, layers, layers)]
        return [tiny.on_meta(kind, part) for part in stages[world.rank :: world.size]]
    model = tiny.on_meta(kind)
    if "tensors" in way:
        mesh = tiny.mesh_of(dp_shard=world.size // 2, tp=2)
        divide_tensors(model, mesh["tp"], PARALLEL_PLAN)
    else:
        mesh = tiny.mesh_of(dp_shard=world.size, tp=1)
    if "shards" in way:
        shard(model, mesh["dp_shard"], reshard=True)
    return [model]


def _filled(world, kind, way):
    models = _divided(world, kind, way)
    with tiny.Communication() as sent:
        materialize(models, tiny.drawn(kind), tiny.whole_shapes(kind), world)
    assert not sent.calls
    _check_pieces(world, models, kind)
    for model in models:  # the same values, read on rank 0 alone
        for parameter in model.parameters():
            local(parameter).data.zero_()
    source = tiny.drawn(kind) if world.is_main else None
    materialize(models, source, tiny.whole_shapes(kind), world, from_main=True)
    return _check_pieces(world, models, kind)


def _check_pieces(world, models, kind):
    expected = dict(tiny.fresh(kind).named_parameters())
    held = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert torch.equal(local(parameter), piece_of(expected[name], parameter)), name
            assert parameter.requires_grad
            held[name] = parameter
    check_equal(held, world)
    return sorted(held), sum(local(each).numel() for each in held.values())


@pytest.mark.parametrize(
    ("kind", "way"), [("gpt", "whole"), ("llama", "shards"), ("gpt", "tensors"), ("gpt", "stages")]
)
def test_two_ranks_get_their_pieces_of_what_one_process_draws(pools, kind, way):
    outcomes = pools(2).run(_filled, kind, way)
    whole = tiny.whole_shapes(kind)
    assert set().union(*(names for names, _ in outcomes)) == set(whole)
    numbers = sum(each.numel() for each in tiny.on_meta(kind).parameters())
    if way == "shards":
        assert [held for _, held in outcomes] == [numbers // 2] * 2
    if way == "tensors":
        assert numbers // 2 < outcomes[0][1] < numbers


def test_four_ranks_get_shards_of_halves_of_matrices(pools):
    for _, held in pools(4).run(_filled, "gpt", "tensors, shards"):
        assert held < 0.4 * sum(each.numel() for each in tiny.on_meta("gpt").parameters())


def _bytes_made():
    """Address → bytes of the tensors on the CPU that were made since `gc.freeze`."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not each.is_meta]
    storages = [local(each.detach()).untyped_storage() for each in tensors]
    return {each.data_ptr(): each.nbytes() for each in storages}


def _most_alive(world):
    """The largest sum of numbers in tensors that are no piece of the model, at any of the broadcasts."""
    model = tiny.on_meta("llama")
    shard(model, tiny.mesh_of(dp_shard=world.size, tp=1)["dp_shard"], reshard=True)
    broadcast, alive = dist.broadcast, []

    def watched(tensor, src):
        pieces = {local(each).untyped_storage().data_ptr() for each in model.parameters()}
        alive.append(math.inf)
        for _ in range(100):  # a thread of gloo may hold what was sent before for a moment longer
            made = _bytes_made()
            alive[-1] = min(alive[-1], sum(made[place] // 4 for place in made.keys() - pieces))
            if alive[-1] <= tensor.numel():
                break
            time.sleep(0.01)
        broadcast(tensor, src=src)

    gc.collect()
    gc.freeze()
    with mock.patch.object(dist, "broadcast", watched):
        materialize([model], tiny.drawn("llama"), tiny.whole_shapes("llama"), world, from_main=True)
    gc.unfreeze()
    assert len(alive) == len(list(model.parameters()))
    return max(alive)


def test_a_rank_holds_one_whole_tensor_beside_its_pieces(pools):
    largest = max(torch.Size(shape).numel() for shape in tiny.whole_shapes("llama").values())
    for most in pools(2).run(_most_alive):
        assert largest <= most < 1.1 * largest


def test_one_process_copies(tmp_path):
    model = tiny.on_meta("llama")
    materialize([model], tiny.drawn("llama"), tiny.whole_shapes("llama"), World())
    assert tiny.largest_difference(model, tiny.fresh("llama")) == 0


def test_weights_on_a_gpu_are_drawn_there():
    """Fake tensors raise if one of another device takes part, or a value is read."""
    made, shapes = initial_parameters(tiny.SHAPES["llama"], 0), tiny.whole_shapes("llama")
    with FakeTensorMode():
        for name, shape in shapes.items():
            drawn = made(name, torch.device("cuda"))
            assert (drawn.device.type, tuple(drawn.shape)) == ("cuda", shape)


def test_a_source_of_other_tensors_is_refused():
    given, shapes = tiny.drawn("gpt"), tiny.whole_shapes("gpt")
    with pytest.raises(ValueError, match=r"gives embedding.weight \(95, 32\); expected \(96, 32\)"):
        materialize([tiny.on_meta("gpt")], lambda *each: given(*each)[1:], shapes, World())


def test_a_model_that_is_no_part_of_the_whole_is_refused():
    shapes, model = tiny.whole_shapes("gpt"), tiny.on_meta("gpt")
    for wrong in ((31,), None):
        with pytest.raises(ValueError, match=r"norm.bias has shape \(32,\), and in the whole model"):
            materialize([model], tiny.drawn("gpt"), {**shapes, "norm.bias": wrong or ()}, World())
    model.register_buffer("table", torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="table of Decoder is a buffer"):
        materialize([model], tiny.drawn("gpt"), shapes, World())


def _tampered(world, way, places):
    """The errors after a change of one number of a tensor on a rank, for each place (tensor, rank)."""
    (model,) = _divided(world, "gpt", way)
    materialize([model], tiny.drawn("gpt"), tiny.whole_shapes("gpt"), world)
    held, errors = dict(model.named_parameters()), []
    same = check_equal(held, world)
    assert len(set(world.gather(same))) == 1
    for name, rank in places:
        number = local(held[name]).detach().view(-1)[:1]
        kept = number.clone()
        number += world.rank == rank
        try:
            assert check_equal(held, world) != same
        except RuntimeError as error:
            errors.append(str(error))
        number.copy_(kept)
    return errors


def test_ranks_whose_pieces_differ_are_named(pools):
    name = "blocks.1.feed_forward.up.weight"  # rank 3 has rows 32 to 64, as rank 1
    for whole, piece in pools(4).run(_tampered, "tensors", [("norm.weight", 2), (name, 3)]):
        assert whole.startswith("ranks [2] hold another norm.weight than rank 0 (1 tensors in all)")
        assert piece.startswith(f"ranks [3] hold another {name}[32:64, 0:32] than rank 1")


def test_pieces_that_only_one_rank_holds_cannot_differ(pools):
    assert pools(2).run(_tampered, "shards", [("norm.weight", 1)]) == [[], []]


# Hashes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("size", [1, 70_000])  # one chunk, and more
def test_one_changed_bit_changes_the_hash(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1)).mul(100).to(dtype)
    before, bits = hash_tensor(tensor), tensor.view(torch.uint8)
    for place in (0, len(bits) // 2, len(bits) - 1):
        for bit in range(8):
            bits[place] ^= 1 << bit
            assert hash_tensor(tensor) != before
            bits[place] ^= 1 << bit
    assert hash_tensor(tensor) == before


def test_the_hash_depends_on_positions():
    tensor = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    pairs = [(0, 1), (3, 65_536 + 3), (100, 199_999)]
    hashes = {int(hash_tensor(tensor))}
    for first, second in pairs:
        other = tensor.clone()
        other[[first, second]] = tensor[[second, first]]
        hashes.add(int(hash_tensor(other)))
    hashes.add(int(hash_tensor(torch.cat([tensor[65_536:131_072], tensor[:65_536], tensor[131_072:]]))))
    changed = tensor.clone()
    changed[:2] = -tensor[:2]  # two equal changes, which xor does not see
    hashes.add(int(hash_tensor(changed)))
    assert len(hashes) == len(pairs) + 3
    assert int(hash_tensor(tensor.view(400, 500).t())) == int(
        hash_tensor(tensor.view(400, 500).t().contiguous())
    )
    assert int(hash_tensor(torch.empty(0, 3))) == 0


def test_hashing_on_a_gpu_does_not_synchronize():
    with FakeTensorMode():  # raises where a value is read
        found = hash_tensor(torch.empty(3, GPU_CHUNK, dtype=torch.bfloat16, device="cuda"))
    assert (found.device.type, found.dtype, found.shape) == ("cuda", torch.int64, ())
