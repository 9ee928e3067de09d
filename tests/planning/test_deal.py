"""Assignment to ranks: any number of ranks trains on the same documents, in packs that fit, balanced."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import problems
from multipack.planning.cost import CostModel
from multipack.planning.deal import deal_packs, least_step_cost, step_cost
from multipack.planning.options import PlanOptions
from multipack.planning.packing import packs_from
from multipack.planning.plan import plan
from multipack.shapes import SHAPES

SYNCS = ["micro", "step"]


@settings(deadline=None, max_examples=25)
@given(problems(), st.sampled_from(SYNCS))
def test_any_number_of_ranks_has_the_same_documents_within_the_limits(problem, sync):
    lengths, options = problem
    made = plan(lengths, **options)
    costs = made.balanced.cost(made.slots)
    for step in range(made.num_steps):
        own = made.packs(step)
        for world in range(1, made.packs_per_step + 1):
            micro_batches = made.micro_batches(world)
            assert micro_batches == -(-made.packs_per_step // world)
            dealt = made.deal(step, world, sync)
            assert len(dealt) == world * micro_batches
            assert sorted(dealt.order.tolist()) == sorted(own.order.tolist())
            assert dealt.totals(made.slots).max() <= made.capacity
            assert dealt.sizes().max() <= made.most_documents
            assert dealt.sizes().max() <= (made.options.max_documents or len(made.lengths))
            assert (dealt.sizes() > 0).sum() == min(len(dealt), len(dealt.order))
            again = made.deal(step, world, sync)
            assert dealt.order.tolist() == again.order.tolist()
            assert dealt.offsets.tolist() == again.offsets.tolist()
            reached = step_cost(dealt.totals(costs), world, sync)
            if (
                len(own) == len(dealt)
                and made.options.balance != "joint"
                and (sync != "step" or micro_batches == 1)
            ):
                assert reached <= step_cost(-np.sort(-own.totals(costs)), world, sync)
            lengths, inside = made.slots[own.order], costs[own.order]
            assert least_step_cost(lengths, inside, world, micro_batches, made.capacity, sync) <= reached


MODELS = {
    "llama": lambda lengths: CostModel(None, 50, 1).cost(lengths),
    "attention alone": lambda lengths: CostModel(None, 0, 1).cost(lengths),
    "tokens": np.copy,
    "a constant for each document": lambda lengths: CostModel(None, 3, 1).cost(lengths) + 700,
    "a sliding window": lambda lengths: 5 * lengths + np.minimum(lengths, 7) ** 2 + 11,
    "steps": lambda lengths: 1 + 900 * (lengths > 6) + 40 * (lengths > 13),
}


@settings(deadline=None, max_examples=48)
@given(st.data())
def test_no_arrangement_is_below_the_bound_and_deals_are_close(data):
    """Every arrangement of a few documents, by brute force."""
    world, micro_batches = data.draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (1, 3), (2, 3)]))
    packs, capacity = world * micro_batches, data.draw(st.integers(3, 30))
    shortest = max(data.draw(st.sampled_from([1, capacity // 3, capacity // 2])), 1)
    most = {2: 8, 3: 7, 4: 6, 6: 5}[packs]
    lengths = np.array(data.draw(st.lists(st.integers(shortest, capacity), min_size=1, max_size=most)))
    kind = data.draw(st.sampled_from(sorted(MODELS)))
    costs = MODELS[kind](lengths)
    ways = np.array(list(itertools.product(range(packs), repeat=len(lengths))))
    inside = ways[:, :, None] == np.arange(packs)
    fits = (inside * lengths[None, :, None]).sum(axis=1).max(axis=1) <= capacity
    reached = (inside * costs[None, :, None]).sum(axis=1)[fits]
    if not len(reached):
        return
    own = packs_from(np.unique(ways[fits][0], return_inverse=True)[1], len(np.unique(ways[fits][0])))
    options = PlanOptions(capacity=capacity, packs_per_step=packs)
    table = reached.reshape(-1, micro_batches, world)
    for sync in ("micro", "step"):
        times = table.sum(axis=1).max(axis=1) if sync == "step" else table.max(axis=2).sum(axis=1)
        optimum = times.min()
        bound = least_step_cost(lengths, costs, world, micro_batches, capacity, sync)
        assert max(-(-int(costs.sum()) // world), 1) <= bound <= optimum
        dealt = deal_packs(own, lengths[own.order], costs[own.order], options, world, sync, 0)
        assert dealt.totals(lengths).max() <= capacity
        if sync == "step" and kind == "llama":
            assert step_cost(dealt.totals(costs), world, sync) <= 2 * optimum


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("world", [8, 3, 1])
def test_ordinary_documents_are_balanced(world, sync):
    lengths = np.random.default_rng(0).lognormal(5.0, 0.8, 4000).clip(1, 2000).astype(int)
    made = plan(lengths, capacity=8192, packs_per_step=8, balance="cost")
    costs = made.cost_model.cost(lengths)
    for step in range(made.num_steps):
        dealt = made.deal(step, world, sync)
        totals = dealt.totals(costs)
        assert step_cost(totals, world, sync) * world <= totals.sum() * 1.001


@pytest.mark.parametrize("ranks", [8, 64])
def test_ranks_that_synchronize_once_a_step_are_balanced_with_packs_of_few_documents(ranks):
    """Documents of up to a whole pack, and a cost that is mostly quadratic: ranks with four packs each are equal."""
    lengths = np.random.default_rng(3).lognormal(6.5, 1.5, 100 * ranks).clip(1, 16_384).astype(int)
    cost = CostModel.from_shape(SHAPES["tiny"])
    made = plan(lengths, capacity=16_384, packs_per_step=4 * ranks, window=2, cost=cost)
    for step in range(made.num_steps - 1):
        totals = made.deal(step, ranks, "step").totals(cost.cost(lengths))
        assert step_cost(totals, ranks, "step") * ranks <= totals.sum() * 1.001


def test_more_ranks_than_packs():
    made = plan([5, 6, 7], capacity=10, packs_per_step=2)
    with pytest.raises(ValueError, match="3 ranks cannot share steps of packs_per_step=2"):
        made.deal(0, 3)
    with pytest.raises(ValueError, match="data_parallel_size must be a whole number"):
        made.micro_batches(0)
    with pytest.raises(ValueError, match="choose one of micro, step"):
        made.deal(0, 1, "epoch")


def test_fewer_documents_than_ranks():
    made = plan([5, 6], capacity=10, packs_per_step=4)
    assert sorted(made.deal(0, 4).sizes().tolist()) == [0, 0, 1, 1]
    first, second = made.deal(0, 3).sizes().reshape(2, 3)
    assert (sorted(first.tolist()), second.tolist()) == ([0, 1, 1], [0, 0, 0])


def test_a_sync_point_takes_as_long_as_its_longest_document():
    """One long document and 96 short ones on 4 ranks: the other packs of its sync point cost as much."""
    lengths = np.array([1000] + [100] * 96)
    packs = packs_from(np.concatenate([[0], 1 + np.arange(96) // 9]), 12)
    costs = CostModel(None, linear=1000).cost(lengths)
    options = PlanOptions(capacity=2000, packs_per_step=12)
    dealt = deal_packs(packs, lengths[packs.order], costs[packs.order], options, 4, "micro", 0)
    table = dealt.totals(costs).reshape(3, 4)
    assert table.max() == costs[0]
    assert step_cost(dealt.totals(costs), 4, "micro") <= 1.06 * costs.sum() / 4


def test_ranks_that_do_not_divide_the_packs_wait_little():
    """64 packs on 48 ranks: the step's own packs would leave a third of the time unused."""
    lengths = np.random.default_rng(0).lognormal(5.7, 1.0, 30_000).clip(1, 8192).astype(int)
    made = plan(lengths, capacity=8192, packs_per_step=64, window=1)
    costs = made.cost_model.cost(lengths)
    for sync, share in (("step", 0.99), ("micro", 0.9)):
        totals = made.deal(0, 48, sync).totals(costs)
        assert totals.sum() / (48 * step_cost(totals, 48, sync)) > share


@pytest.mark.parametrize("balance", ["cost", "joint"])
@pytest.mark.parametrize(("window", "ranks"), [(1, 8), (4, 2)])
def test_ranks_get_similar_documents_over_an_epoch(window, ranks, balance):
    """Packs rotate: otherwise rank 0 has the longest document of most steps, and a third of the others' documents."""
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, 8_000).clip(1, 2048).astype(int)
    made = plan(lengths, capacity=2048, packs_per_step=ranks, window=window, balance=balance)
    documents, squares, longest = np.zeros((3, ranks))
    for step in range(made.num_steps):
        dealt = made.deal(step, ranks)
        documents += dealt.sizes()
        squares += dealt.totals(lengths**2)
        most = np.array([lengths[held].max() for held in dealt])
        longest += (most == most.max()) / np.count_nonzero(most == most.max())
    for totals in (documents, squares):
        assert np.abs(totals / totals.mean() - 1).max() <= 0.05
    assert longest.max() <= 1.4 * longest.mean()


REAL = ("natural_instructions_193k", "gsm8k_train", "openchat_v1", "tinyshakespeare_speeches")


@pytest.mark.parametrize("sync", ["micro", "step"])
@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "steps"),
    [("", 2, 4, 40), ("", 16, 4, 40), ("", 8, 1, 150), *((name, 8, 4, 38) for name in REAL)],
)
def test_ranks_get_similar_documents_in_a_short_epoch(name, ranks, micro_batches, steps, sync, request):
    """The bound of `Plan.deal`, on max / min over ranks of the numbers of documents and the sums of squares."""
    packs, random = ranks * micro_batches, np.random.default_rng(0)
    if name:
        data = request.getfixturevalue("shared_data")  # skips where they are not at hand
        stored = np.load(data / f"lengths/{name}.npy").astype(np.int64)
        lengths = random.choice(stored, packs * steps * 4000 // int(stored.mean()))
    else:
        lengths = random.lognormal(5.0, 0.8, 2 * packs * steps * 10).clip(1, 2048).astype(int)
        lengths = lengths[: np.searchsorted(lengths.cumsum(), packs * steps * 4000)]
    made = plan(lengths, capacity=4096, packs_per_step=packs)
    totals = np.zeros((2, ranks))
    for step in range(made.num_steps):
        dealt = made.deal(step, ranks, sync)
        for total, values in zip(totals, (dealt.sizes(), dealt.totals(lengths**2)), strict=True):
            total += values.reshape(-1, ranks).sum(axis=0)
    assert steps - 4 <= made.num_steps <= steps + 2
    assert (totals.max(axis=1) <= 1.05 * totals.min(axis=1)).all()


@pytest.mark.parametrize("sync", SYNCS)
def test_the_rotation_keeps_micro_batches_and_ranks_together(sync):
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, 400).clip(1, 2048).astype(int)
    own = np.arange(400) // 25
    first, second = (
        deal_packs(
            packs_from(own, 16),
            lengths,
            CostModel(None, linear=1000).cost(lengths),
            PlanOptions(capacity=16_384, packs_per_step=16),
            4,
            sync,
            turn,
        )
        for turn in (0, 1)
    )
    tables = [np.array([sorted(held.tolist()) for held in packs], dtype=object) for packs in (first, second)]
    rows = [[{tuple(held) for held in row} for row in table.reshape(4, 4)] for table in tables]
    assert rows[0] == rows[1]
    with_longest = [[lengths.argmax() in held for held in packs].index(True) % 4 for packs in (first, second)]
    assert with_longest[0] != with_longest[1]
