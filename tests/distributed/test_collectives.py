"""Collectives: equal to their numpy definitions, with transposed gradients, and failures that name the rank."""

import os
import signal
from datetime import timedelta
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from multipack.parallel import collectives

# From all ranks' tensors, as a list, to all ranks' results.
DEFINITIONS = {
    "identity": lambda x: x,
    "all_gather": lambda x: [np.concatenate(x)] * len(x),
    "reduce_scatter": lambda x: np.split(np.sum(x, 0), len(x)),
    "all_to_all": lambda x, split_dim=0, join_dim=0: [
        np.concatenate([np.split(own, len(x), split_dim)[rank] for own in x], join_dim)
        for rank in range(len(x))
    ],
}
TRANSPOSED = {
    "identity": lambda y: [np.sum(y, 0)] * len(y),
    "all_gather": DEFINITIONS["reduce_scatter"],
    "reduce_scatter": DEFINITIONS["all_gather"],
    "all_to_all": lambda y, split_dim=0, join_dim=0: DEFINITIONS["all_to_all"](y, join_dim, split_dim),
}
FORMS = [
    *((name, {}) for name in ("identity", "all_gather", "reduce_scatter")),
    *(("all_to_all", {"split_dim": a, "join_dim": b}) for a, b in product((0, 1, 2), repeat=2)),
]


def drawn(seed, shape):
    """±1 and ±2: sums of 8 ranks are exact in every dtype."""
    return np.random.default_rng(seed).choice([-2.0, -1.0, 1.0, 2.0], shape)


def every_form(world):
    """Compare every form in every dtype, forward and backward, with its definition."""
    size, compared = world.size, 0
    shape = (size, 2 * size, size)
    everybody = [drawn(rank, shape) for rank in range(size)]
    for (name, options), dtype in product(FORMS, (torch.float32, torch.bfloat16, torch.int64)):
        expected = DEFINITIONS[name](everybody, **options)[world.rank]
        own = torch.tensor(everybody[world.rank], dtype=dtype)
        for argument in (own, own.mT.contiguous().mT):  # the same values; not contiguous
            argument.requires_grad_(dtype.is_floating_point)
            result = getattr(collectives, name)(argument, **options)
            told = (name, options, dtype, size, world.rank)
            np.testing.assert_array_equal(result.detach().double().numpy(), expected, err_msg=str(told))
            assert result.dtype == dtype, told
            if dtype.is_floating_point:
                gradients = [drawn(100 + rank, expected.shape) for rank in range(size)]
                result.backward(torch.tensor(gradients[world.rank], dtype=dtype))
                wanted = TRANSPOSED[name](gradients, **options)[world.rank]
                np.testing.assert_array_equal(argument.grad.double().numpy(), wanted, err_msg=str(told))
            compared += 1
    assert collectives.all_gather(torch.zeros(0, 3)).shape == (0, 3)
    return compared


@pytest.mark.parametrize("size", [2, 4])
def test_each_equals_its_definition_and_its_gradient_the_transposed_one(pools, size):
    assert set(pools(size).run(every_form)) == {2 * 3 * len(FORMS)}


def in_groups(world):
    """Neighbors gather their ranks."""
    own = [dist.new_group([0, 1]), dist.new_group([2, 3])][world.rank // 2]
    return collectives.all_gather(torch.tensor([world.rank]), group=own).tolist()


def test_groups_number_their_own_ranks(pools):
    assert pools(4).run(in_groups) == [[0, 1]] * 2 + [[2, 3]] * 2


def bytes_of_every_length(world):
    """Texts and bytes, some of them empty, over all ranks and over pairs of them."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][world.rank // 2]
    own = bytes(range(world.rank * 5))
    assert collectives.gather_bytes(own, pair) == [bytes(range(rank * 5)) for rank in pair_of(world.rank)]
    assert collectives.gather_bytes(b"") == [b""] * 4
    assert world.gather("ü" * world.rank) == ["", "ü", "üü", "üüü"]
    assert world.from_main(f"rank {world.rank}") == "rank 0"
    source = pair_of(world.rank)[1]
    assert collectives.broadcast_bytes(own, source, pair) == bytes(range(source * 5))
    sent = [b"", b"to the second"] if world.rank == source else None
    received = collectives.scatter_bytes(sent, source, pair)
    assert received.numpy().tobytes() == [b"", b"to the second"][world.rank % 2]


def pair_of(rank):
    return [[0, 1], [2, 3]][rank // 2]


def test_bytes_arrive_as_they_were_sent(pools):
    pools(4).run(bytes_of_every_length)


def one_is_missing(world, dies):
    """Collectives wait 2 s: enough for ranks that leave the same barrier on a busy machine."""
    world.barrier()
    world.watch._interval, world.watch._grace = 0.1, 1.0
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    world.watch.at_step(7)
    world.barrier()
    if world.rank == 1 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1:
        return "stayed away"
    try:
        collectives.all_gather(torch.ones(1_000))
    except RuntimeError as error:
        return str(world.watch.report(error))
    return "not noticed"


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_is_missing_is_named(pool_type, dies):
    pool = pool_type(2)
    first, absent = pool.outcomes(one_is_missing, dies)
    pool.kill()
    assert absent.error == ("ended with exit code -9" if dies else "")
    assert first.value.startswith(f"rank 1 {'ended' if dies else 'did not answer'} at step 7")


def all_answer(world):
    return world.gather("here")


def fails(world):
    if world.rank == 1:
        raise KeyError("only here")
    signal.pause()


def test_the_pool_reports_which_ranks_failed_and_starts_anew(pool_type):
    with pool_type(2) as pool:
        assert pool.run(all_answer) == [["here"] * 2] * 2
        with pytest.raises(AssertionError, match="KeyError: 'only here'") as caught:
            pool.run(fails, seconds=0.5)
        assert "rank 0 of 2: not done after 0.5 s\nrank 1 of 2: " in str(caught.value)
        assert pool.run(all_answer) == [["here"] * 2] * 2
