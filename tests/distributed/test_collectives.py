"""Collectives: equal to their numpy definitions, with true adjoints, and mistakes that name the rank."""

import os
import signal
from datetime import timedelta
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.parallel import collectives
from multipack.parallel.collectives import identity
from multipack.parallel.rollcall import ranks_of, roll_call

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
REDUCE = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "product": lambda x: x.prod(0),
}


# What every collective is, in numpy: from all ranks' tensors x, as a list, to all ranks' results.

NOTHING = np.zeros(0)


def _one(size, rank, value):
    return [value if other == rank else NOTHING for other in range(size)]


def _pieces(x, dim, size):
    return np.split(x, size, dim)


DEFINITIONS = {
    "all_reduce": lambda x, op="sum": [REDUCE[op](np.stack(x))] * len(x),
    "reduce": lambda x, destination=0, op="sum": _one(len(x), destination, REDUCE[op](np.stack(x))),
    "broadcast": lambda x, source=0: [x[source]] * len(x),
    "all_gather": lambda x, dim=0: [np.concatenate(x, dim)] * len(x),
    "gather": lambda x, destination=0, dim=0: _one(len(x), destination, np.concatenate(x, dim)),
    "scatter": lambda x, source=0, dim=0: _pieces(x[source], dim, len(x)),
    "reduce_scatter": lambda x, dim=0, op="sum": _pieces(REDUCE[op](np.stack(x)), dim, len(x)),
    "all_to_all": lambda x, split_dim=0, join_dim=0: [
        np.concatenate([_pieces(own, split_dim, len(x))[rank] for own in x], join_dim)
        for rank in range(len(x))
    ],
}


def _arguments(size):
    """(name, options) of every collective in every form."""
    last = size - 1
    for op in REDUCE:
        yield "all_reduce", {"op": op}
        yield "reduce", {"op": op, "destination": last}
        yield "reduce_scatter", {"op": op, "dim": 1}
    for root, dim in product({0, last}, (0, 1, -1)):
        yield "gather", {"destination": root, "dim": dim}
        yield "scatter", {"source": root, "dim": dim}
    for dim in (0, 1, -1):
        yield "all_gather", {"dim": dim}
        yield "reduce_scatter", {"dim": dim}
    for root in {0, last}:
        yield "broadcast", {"source": root}
    for split, join in product((0, 1, 2), repeat=2):
        yield "all_to_all", {"split_dim": split, "join_dim": join}


def _drawn(rank, shape):
    """±1 and ±2: sums and products of 8 ranks are exact in every dtype."""
    return np.random.default_rng(rank).choice([-2.0, -1.0, 1.0, 2.0], shape)


def every_form(world, size):
    """Compare every form in every dtype with its definition, in a group of the first `size` ranks."""
    group = dist.new_group(range(size)) if 1 < size < world.size else None
    if world.rank >= size or (world.size > 1 and size == 1):
        return 0  # a group of one is tested where there is no other process
    shape, compared = (size, 2 * size, size), 0
    everybody = [_drawn(rank, shape) for rank in range(size)]
    for (name, options), dtype in product(_arguments(size), DTYPES):
        if options.get("op") == "mean" and dtype == torch.int64:
            continue
        own = torch.tensor(everybody[world.rank], dtype=dtype)
        strided = own.mT.contiguous().mT  # the same values; not contiguous where there is more than one
        expected = DEFINITIONS[name](everybody, **options)[world.rank]
        for argument in (own, strided):
            before = argument.clone()
            result = getattr(collectives, name)(argument, **options, group=group)
            told = (name, options, dtype, size, world.rank)
            assert torch.equal(argument, before), told
            assert result.dtype == dtype, told
            assert result.is_contiguous(), told
            assert tuple(result.shape) == (expected.shape if size > 1 else shape), told
            # A mean divides before it sums: two roundings a rank.
            rounding = 8 * torch.finfo(dtype).eps if options.get("op") == "mean" else 0
            np.testing.assert_allclose(
                result.double().numpy(), expected, rtol=0, atol=rounding, err_msg=str(told)
            )
            compared += 1
    numbers = torch.tensor(float(world.rank))
    assert collectives.all_reduce(numbers, group=group) == size * (size - 1) / 2
    assert collectives.all_gather(torch.zeros(0, 3), group=group).shape == (0, 3)
    if group is not None:
        dist.destroy_process_group(group)
    return compared


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_equals_its_numpy_definition(pools, size):
    compared = pools(1 if size == 1 else 4).run(every_form, size)
    assert min(compared[:size]) > 300


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 6, 7, 8])
def test_each_equals_its_numpy_definition_on_more_ranks(pools, size):
    assert min(pools(8).run(every_form, size)[:size]) > 300


def one_form(world, name, options, inputs, dtype):
    own = torch.tensor(inputs[world.rank], dtype=getattr(torch, dtype))
    return getattr(collectives, name)(own, **options).double().numpy()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), size=st.sampled_from([2, 4]))
def test_rounding_is_that_of_a_sum_and_nothing_else_changes_values(pools, data, size):
    name, options = data.draw(st.sampled_from(list(_arguments(size))))
    dtype = data.draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"]))
    shape = [size * data.draw(st.integers(0, 4)) for _ in range(3)]
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    raw = torch.tensor(draw.normal(size=(size, *shape)), dtype=getattr(torch, dtype))
    inputs = list(raw.double().numpy())
    expected = DEFINITIONS[name](inputs, **options)
    results = pools(size).run(one_form, name, options, inputs, dtype)
    bound = np.abs(np.stack(inputs)).max(initial=1) ** size * 2 * size * torch.finfo(raw.dtype).eps
    exact = options.get("op", "max" if "reduce" not in name else "sum") in ("max", "min")
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=0, atol=0 if exact else bound)


def ways(world):
    """Means of fp16 that would overflow if they were summed first; one group beside another."""
    high = torch.full((4,), 60_000.0, dtype=torch.float16)
    mean = collectives.all_reduce(high, op="mean").tolist()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[world.rank // 2]
    others = collectives.all_gather(torch.tensor([world.rank]), group=group, check=True).tolist()
    second = collectives.broadcast(torch.tensor([world.rank]), source=1, group=group).item()
    outside = ""
    try:
        collectives.all_reduce(torch.ones(1), group=halves[1 - world.rank // 2])
    except ValueError as error:
        outside = str(error)
    return mean, others, second, outside, ranks_of(group)


def test_means_do_not_overflow_and_groups_count_their_own_ranks(pools):
    for rank, (mean, others, second, outside, ranks) in enumerate(pools(4).run(ways)):
        assert mean == [60_000.0] * 4
        pair = [0, 1] if rank < 2 else [2, 3]
        assert others == ranks == pair
        assert second == pair[1]
        assert outside == f"rank {rank} is not in the group that was given, so it must not call"


# Gradients. All ranks together are one function, from the stacked arguments of all ranks to their stacked results, and
# torch's gradcheck compares its Jacobian with finite differences: every rank evaluates the same points in step.


class _Everybody(torch.autograd.Function):
    """(ranks, *shape) → (ranks, *result's shape), row r being rank r's; gradients come from the collective's own."""

    @staticmethod
    def forward(ctx, stacked, world, collective):
        with torch.enable_grad():
            ctx.own = stacked[world.rank].detach().requires_grad_()
            ctx.result = collective(ctx.own)
        ctx.size = world.size
        return _stacked(ctx.result.detach(), world.size)

    @staticmethod
    def backward(ctx, gradients):
        row = gradients[dist.get_rank()][: ctx.result.numel()].reshape(ctx.result.shape)
        (gradient,) = torch.autograd.grad(ctx.result, ctx.own, row, retain_graph=True)
        rows = [torch.empty_like(ctx.own) for _ in range(ctx.size)]
        dist.all_gather(rows, gradient.contiguous())
        return torch.stack(rows), None, None


def _stacked(own, size):
    """Every rank's numbers as rows; empty results are rows of zeros."""
    rows = [None] * size
    dist.all_gather_object(rows, own.flatten().tolist())
    longest = max(map(len, rows))
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in rows], dtype=torch.float64)


def adjoints(world):
    """gradcheck of every collective that has a gradient; their names."""
    size, draw = world.size, torch.Generator().manual_seed(5)
    # In every form between two ranks; between more in the forms and shapes that give small Jacobians.
    small, forms = size > 2, []
    for name, options in _arguments(size):
        dims = [value for key, value in options.items() if "dim" in key]
        roots = [value for key, value in options.items() if key in ("source", "destination")]
        if any(dim == 2 or (small and dim) for dim in dims):
            continue
        # The result of all_reduce is one value: below.
        if name == "all_reduce" or options.get("op", "sum") not in ("sum", "mean") or (small and 0 in roots):
            continue
        forms.append((name, lambda x, name=name, options=options: getattr(collectives, name)(x, **options)))
    # What ranks do alike with one value counts once; where they go on apart, identity says so, and all counts.
    forms.append(("all_reduce", lambda x: identity(collectives.all_reduce(x))))
    forms.append(("all_reduce", lambda x: identity(collectives.all_reduce(x, op="mean"))))
    for name, form in forms:
        cut = name in ("scatter", "reduce_scatter", "all_to_all")
        shape = (2, 2) if not small else (size,) if cut else (1,)
        stacked = torch.randn(size, *shape, generator=draw, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, form=form: _Everybody.apply(x, world, form), (stacked,))
    return {name for name, _ in forms}


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_the_transposed_maps(pools, size):
    assert pools(size).run(adjoints) == [set(DEFINITIONS)] * size


def tensor_parallel(world):
    """A column-parallel then row-parallel layer: loss computed alike on all ranks, gradients those of one process."""
    draw = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(3, 8, 8, generator=draw, dtype=torch.float64)).unbind()
    x.requires_grad_()
    own_up, own_down = up.chunk(world.size, 1)[world.rank], down.chunk(world.size, 0)[world.rank]
    own_up, own_down = own_up.clone().requires_grad_(), own_down.clone().requires_grad_()
    y = collectives.all_reduce(torch.tanh(identity(x) @ own_up) @ own_down)
    y.square().sum().backward()
    found = [x.grad.clone(), own_up.grad, own_down.grad]

    x.grad = None
    up, down = up.clone().requires_grad_(), down.clone().requires_grad_()
    (torch.tanh(x @ up) @ down).square().sum().backward()
    wanted = [x.grad, up.grad.chunk(world.size, 1)[world.rank], down.grad.chunk(world.size, 0)[world.rank]]
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def test_identity_and_all_reduce_are_the_pair_of_tensor_parallelism(pools):
    assert max(pools(4).run(tensor_parallel)) < 1e-12


def alone(world):
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    total = sum(
        getattr(collectives, name)(x, check=True).square().sum() for name in (*DEFINITIONS, "identity")
    )
    total.backward()
    return x.grad.tolist()


def test_a_process_on_its_own_is_a_group_of_one_with_gradients(pools):
    (gradient,) = pools(1).run(alone)
    assert gradient == (18 * np.arange(6).reshape(2, 3)).tolist()


# Mistakes.


def disagreements(world):
    """What each rank is told when rank 1 does something else than the others, with check=True."""
    odd, told = world.rank == 1, {}

    def attempt(what, call):
        try:
            call()
            told[what] = "not noticed"
        except ValueError as error:
            told[what] = str(error)

    four, like = torch.zeros(4, 2), torch.zeros(5 if odd else 4, 2)
    attempt("shape", lambda: collectives.all_reduce(like, check=True))
    attempt("uneven pieces", lambda: collectives.all_gather(like, check=True))
    attempt("uneven exchange", lambda: collectives.all_to_all(like, check=True))
    attempt("dtype", lambda: collectives.reduce(four.half() if odd else four, check=True))
    attempt("op", lambda: collectives.all_reduce(four, "max" if odd else "sum", check=True))
    attempt("root", lambda: collectives.broadcast(four, source=int(odd), check=True))
    attempt("dim", lambda: collectives.gather(four, dim=int(odd), check=True))
    attempt("gradient", lambda: collectives.scatter(four.requires_grad_(odd), check=True))
    attempt(
        "collective",
        lambda: (collectives.all_gather if odd else collectives.reduce_scatter)(four, check=True),
    )
    attempt("all alike, and wrong", lambda: collectives.reduce_scatter(torch.zeros(7, 2), check=True))
    alive = collectives.all_reduce(torch.ones(1), check=True).item()
    return told, alive


def test_ranks_that_disagree_are_told_alike_and_by_name(pools):
    results = pools(4).run(disagreements)
    told, _ = results[0]
    assert all(other == told for other, _ in results)
    assert all(alive == 4 for _, alive in results)
    assert told["shape"] == (
        "ranks must call the same with tensors of one shape and dtype, but"
        " ranks 0, 2, 3: all_reduce(float32 4×2 on cpu, op=sum);"
        " rank 1: all_reduce(float32 5×2 on cpu, op=sum)"
    )
    for what, words in {
        "uneven pieces": "rank 1: all_gather(float32 5×2",
        "uneven exchange": "rank 1: all_to_all(float32 5×2",
        "dtype": "rank 1: reduce(float16 4×2",
        "op": "rank 1: all_reduce(float32 4×2 on cpu, op=max)",
        "root": "rank 1: broadcast(float32 4×2 on cpu, source=1)",
        "dim": "rank 1: gather(float32 4×2 on cpu, destination=0, dim=1)",
        "gradient": "rank 1: scatter(float32 4×2 on cpu, source=0, dim=0, with gradient)",
        "collective": "ranks 0, 2, 3: reduce_scatter(float32 4×2 on cpu, op=sum, dim=0); rank 1: all_gather",
    }.items():
        assert words in told[what], what
    assert (
        "4 ranks cannot share dimension 0, which is 7 long, evenly; pad it to 8"
        in (told["all alike, and wrong"])
    )


def refusals(world):
    told = []
    for call in (
        lambda x: collectives.all_reduce(x, op="premul_sum"),
        lambda x: collectives.all_reduce(x.long(), op="mean"),
        lambda x: collectives.all_reduce(x.requires_grad_(), op="max"),
        lambda x: collectives.reduce(x, destination=2),
        lambda x: collectives.broadcast(x, source=-1),
        lambda x: collectives.all_gather(x.sum()),
        lambda x: collectives.all_gather(x, dim=2),
        lambda x: collectives.all_to_all(x, split_dim=1),
        lambda x: collectives.scatter(x, dim=-1),
    ):
        try:
            call(torch.zeros(2, 3))
        except ValueError as error:
            told.append(str(error))
    return told


def test_what_cannot_be_meant_is_refused_before_anything_is_sent(pools):
    first, second = pools(2).run(refusals)
    assert first == second
    for words, message in zip(
        (
            "all_reduce: op='premul_sum' is none of sum, mean, max, min, product; for a factor, multiply",
            "all_reduce: a mean of torch.int64 is no whole number; take op='sum'",
            "all_reduce: op='max' has no gradient here",
            "reduce: destination=2, but the group's ranks are 0 … 1",
            "broadcast: source=-1, but the group's ranks are 0 … 1",
            "all_gather: dim=0, but the tensor has none: pass tensor.reshape(1)",
            "all_gather: dim=2, but the tensor has dimensions 0 … 1",
            "all_to_all: 2 ranks cannot share dimension 1, which is 3 long, evenly; pad it to 4",
            "scatter: 2 ranks cannot share dimension -1, which is 3 long, evenly; pad it to 4",
        ),
        first,
        strict=True,
    ):
        assert words in message


def _impatient(world):
    """Wait 3 s for others from here on, long enough for ranks that leave the same barrier on a busy machine."""
    world.barrier()
    three = timedelta(seconds=3)
    dist.group.WORLD.set_timeout(three)
    store = dist.group.WORLD.get_group_store()
    store.set_timeout(three)
    world.barrier()
    return store


def one_is_missing(world, check):
    """Rank 1 does not take part, and comes when the others have given up."""
    store = _impatient(world)
    if world.rank == 1 and not check:
        return "stayed away"
    if world.rank == 1:
        store.wait(["gave up 0", "gave up 2"], timedelta(seconds=20))
    try:
        collectives.all_reduce(torch.ones(3), check=check)
        return "not noticed"
    except TimeoutError as error:
        return str(error)
    finally:
        store.set(f"gave up {world.rank}", "")


def test_a_rank_that_does_not_come_is_named_and_told_when_it_does(pool_type):
    with pool_type(3) as pool:
        first, late, second = pool.run(one_is_missing, True)
        waited = "rank 1 of ranks 0, 1, 2 did not take part within 3 s"
        assert (first, second) == (f"{waited} (rank 0 did, and waited)", f"{waited} (rank 2 did, and waited)")
        assert late == "rank 0 gave up waiting for rank 1 before rank 1 took part"


def test_a_rank_that_does_not_come_is_named_without_checks_too(pool_type):
    pool = pool_type(3)
    first, _, second = (outcome.value for outcome in pool.outcomes(one_is_missing, False))
    for message in (first, second):
        assert message.startswith("all_reduce failed (")
        assert "asked why, rank 1 of ranks 0, 1, 2 did not take part within 3 s" in message
    pool.kill()


def one_dies(world):
    _impatient(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collectives.all_reduce(torch.ones(1_000))
        return "not noticed"
    except TimeoutError as error:
        return str(error)


def test_a_rank_that_is_killed_is_named(pool_type):
    first, killed, second = pool_type(3).outcomes(one_dies)
    assert killed.error == "ended with exit code -9"
    assert all(
        "rank 1 of ranks 0, 1, 2 did not take part within 3 s" in outcome.value for outcome in (first, second)
    )


def rolls(world):
    """Many roll calls one after another, at different speeds: none reads another's answers."""
    answers = [roll_call(f"{number} of {world.rank}") for number in range(20)]
    return all(
        answer == [f"{number} of {rank}" for rank in range(world.size)]
        for number, answer in enumerate(answers)
    )


def test_roll_calls_follow_each_other(pools):
    assert pools(4).run(rolls) == [True] * 4


def fails(world):
    if world.rank == 1:
        raise KeyError("only here")
    return world.rank


def sleeps(world):
    signal.pause()


def test_the_pool_tells_which_rank_failed_and_starts_anew(pool_type):
    with pool_type(2) as pool:
        with pytest.raises(AssertionError, match=r"rank 1 of 2: (.|\n)*KeyError: 'only here'"):
            pool.run(fails)
        with pytest.raises(AssertionError, match=r"rank 0 of 2: not done after 0\.5 s"):
            pool.run(sleeps, seconds=0.5)
        assert pool.run(rolls) == [True, True]
