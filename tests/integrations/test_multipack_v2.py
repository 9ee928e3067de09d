"""The samplers of multipack_sampler V2 by their own names: their steps, without their losses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.integrations.host_sampler import full_steps
from multipack.integrations.multipack_v2 import (
    InterleavedSampler,
    MultipackDistributedBatchSampler,
    MultipackDistributedBatchSampler_LinearAttention,
)
from multipack.planning import report as measure
from multipack.planning.options import PlanOptions
from multipack.planning.packing import pack

BOTH = [MultipackDistributedBatchSampler, MultipackDistributedBatchSampler_LinearAttention]
CASES = settings(deadline=None, max_examples=60)


@pytest.fixture
def openchat(shared_data):
    return np.load(shared_data / "lengths" / "openchat_v1.npy").astype(np.int64)


def lognormal(count=2000, seed=0, longest=2048):
    draw = np.random.default_rng(seed).lognormal(5.5, 1.0, count)
    return np.clip(draw, 1, longest).astype(np.int64)


def epoch_of(kind, lengths, capacity, replicas, epoch=0, **options):
    """Every rank's batches, as (steps, ranks) lists of documents."""
    ranks = [kind(capacity, lengths, replicas, rank, **options) for rank in range(replicas)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    columns = [list(sampler) for sampler in ranks]
    assert {len(column) for column in columns} == {len(ranks[0])}
    return list(zip(*columns, strict=True))


def table_row(samplers, lengths, capacity, epochs=1):
    """What the notebook of multipack V2 prints: steps, L² lag (mean, largest), efficiency, utilization."""
    lags, tokens = [], []
    for epoch in range(epochs):
        loads = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            loads.append([(lengths[batch].sum(), (lengths[batch] ** 2).sum()) for batch in sampler])
        loads = np.array(loads)
        lags.append(measure.spread(loads[:, :, 1].T))
        tokens.append(loads[:, :, 0].T)
    used = np.concatenate(tokens)
    return {
        "steps": [sampler.num_batches() for sampler in samplers],
        "lag": np.mean([math.sqrt(lag.mean()) for lag in lags]),
        "largest lag": np.mean([math.sqrt(lag.max()) for lag in lags]),
        "efficiency": used.sum() / (used.size * capacity),
        "utilization": measure.utilization(used),
    }


def test_openchat(openchat):
    ranks = [MultipackDistributedBatchSampler(32768, openchat, 8, rank) for rank in range(8)]
    row = table_row(ranks, openchat, 32768)
    assert row["steps"] == [37] * 8
    assert row["lag"] < 438
    assert row["largest lag"] < 717
    assert row["utilization"] >= 0.9970
    assert row["efficiency"] == pytest.approx(0.9816, abs=5e-5)
    assert ranks[0].efficiency() == pytest.approx(row["efficiency"])
    assert ranks[0].dropped.size == 0
    kind = MultipackDistributedBatchSampler_LinearAttention
    row = table_row([kind(32768, openchat, 8, rank) for rank in range(8)], openchat, 32768)
    assert row["steps"] == [37] * 8
    assert row["efficiency"] == pytest.approx(0.9816, abs=5e-5)
    full = [kind(32768, openchat, 8, rank, drop_last=True) for rank in range(8)]
    row = table_row(full, openchat, 32768)
    assert row["steps"] == [36] * 8
    assert row["efficiency"] >= 0.9964
    assert 0 < openchat[full[0].dropped].sum() < 0.0124 * openchat.sum()
    row = table_row([InterleavedSampler(openchat, 16, 8, rank) for rank in range(8)], openchat, 32768, 10)
    assert row["steps"] == [48] * 8
    assert (round(row["lag"]), round(row["largest lag"])) == (1914, 2000)
    assert row["efficiency"] == pytest.approx(0.7567, abs=5e-5)
    assert row["utilization"] == pytest.approx(0.9679, abs=5e-5)


@st.composite
def problems(draw):
    capacity = draw(st.integers(1, 200))
    shortest = draw(st.sampled_from([1, max(1, capacity // 3), capacity // 2 + 1]))
    lengths = draw(st.lists(st.integers(min(shortest, capacity), capacity), min_size=1, max_size=80))
    return lengths, capacity, draw(st.integers(1, 7)), draw(st.integers(0, 3)), draw(st.booleans())


@CASES
@given(problems(), st.sampled_from(BOTH))
def test_every_rank_has_a_batch_in_every_step_and_nothing_is_lost(problem, kind):
    lengths, capacity, replicas, epoch, drop_last = problem
    fewest = len(pack(lengths, capacity))
    if len(lengths) < replicas or (not drop_last and -(-fewest // replicas) * replicas > len(lengths)):
        hint = (
            "use fewer ranks"
            if drop_last or len(lengths) < replicas
            else "drop_last=True, or use fewer ranks"
        )
        with pytest.raises(ValueError, match=hint):
            kind(capacity, lengths, replicas, 0, drop_last=drop_last)
        return
    steps = epoch_of(kind, lengths, capacity, replicas, epoch, drop_last=drop_last)
    sampler = kind(capacity, lengths, replicas, 0, drop_last=drop_last)
    sampler.set_epoch(epoch)
    assert len(sampler) == len(steps) == sampler.num_batches() == len(sampler.generate_batches())
    held = [batch for step in steps for batch in step]
    assert all(len(batch) for batch in held)
    assert all(np.array(lengths)[batch].sum() <= capacity for batch in held)
    assert sorted(np.concatenate([*held, sampler.dropped]).tolist()) == list(range(len(lengths)))
    assert drop_last or sampler.dropped.size == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", BOTH)
def test_one_rank_by_default_and_epochs_in_different_orders(kind):
    lengths, epochs = lognormal(300), []
    sampler = kind(4096, lengths)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in sampler])
        assert sorted(np.concatenate(epochs[-1]).tolist()) == list(range(300))
    assert {len(epoch) for epoch in epochs} == {len(sampler)}
    assert all(epochs[0] != later for later in epochs[1:])
    sampler.set_epoch(0)
    assert [batch.tolist() for batch in sampler.generate_batches()] == epochs[0]
    for other in (lengths.tolist(), lengths.astype(np.int32), torch.tensor(lengths)):
        assert [batch.tolist() for batch in kind(4096, other)] == epochs[0]


def test_one_long_document_does_not_end_the_epoch():
    lengths = [*lognormal(200).tolist(), 5000, 6000]
    with pytest.raises(ValueError, match=r"document 200 has 5000 tokens, document 201 .* overlong='drop'"):
        MultipackDistributedBatchSampler(4096, lengths, 2, 0)
    with pytest.warns(UserWarning, match=r"2 of 202 documents \(11,000 tokens\)"):
        sampler = MultipackDistributedBatchSampler(4096, lengths, 1, 0, overlong="drop")
    assert sampler.overlong_documents.tolist() == [200, 201]
    assert sorted(np.concatenate(list(sampler)).tolist()) == list(range(200))
    with pytest.warns(UserWarning, match="a separate bin"):
        sampler = MultipackDistributedBatchSampler(4096, lengths, 1, 0, overlong="alone")
    assert [200] in [batch.tolist() for batch in sampler]


def test_statistics_count_what_was_iterated():
    lengths = lognormal()
    sampler = MultipackDistributedBatchSampler(4096, lengths, 4, 1)
    before = sampler.efficiency()
    assert (sampler.eff_total_used, sampler.eff_total_slots) == (0, 0)
    list(sampler)
    assert sampler.eff_total_used == lengths.sum()
    assert sampler.eff_total_slots == len(sampler) * 4 * 4096
    assert sampler.efficiency() == before == lengths.sum() / (len(sampler) * 4 * 4096)
    sampler.generate_batches()
    assert sampler.eff_total_used == lengths.sum()
    sampler.generate_batches(set_stats=True)
    assert sampler.eff_total_used == 2 * lengths.sum()


def resumed(state, lengths, replicas, rank, kind=MultipackDistributedBatchSampler, **options):
    sampler = kind(4096, lengths, replicas, rank, **options)
    sampler.load_state_dict(state)
    return sampler


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("drop_last", [False, True])
def test_resume_goes_on_with_the_same_batches(kind, drop_last):
    lengths = lognormal(900)
    whole = kind(4096, lengths, 3, 2, drop_last=drop_last)
    whole.set_epoch(4)
    batches = [batch.tolist() for batch in whole]
    begun = kind(4096, lengths, 3, 2, drop_last=drop_last)
    begun.set_epoch(4)
    iterator = iter(begun)
    for _ in range(5):
        next(iterator)
    state = begun.state_dict()
    assert state == whole.state_at(5)
    again = resumed(state, lengths, 3, 2, kind, drop_last=drop_last)
    again.set_epoch(4)  # hosts repeat the epoch; the position stays
    assert [batch.tolist() for batch in again] == batches[5:]
    assert [batch.tolist() for batch in again] == batches
    again.set_epoch(5)
    whole.set_epoch(5)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in whole]


def test_states_of_something_else_are_refused():
    lengths = lognormal(300)
    sampler = MultipackDistributedBatchSampler(4096, lengths, 2, 0)
    state = sampler.state_dict()
    for changed, name in (
        (MultipackDistributedBatchSampler(4096, lengths, 2, 0, seed=1), "seed from 0 to 1"),
        (MultipackDistributedBatchSampler(4096, lengths[:-1], 2, 0), "lengths"),
        (MultipackDistributedBatchSampler(8192, lengths, 2, 0), "batch_max_length from 4096"),
        (MultipackDistributedBatchSampler(4096, lengths, 3, 0), "num_replicas from 2 to 3"),
        (MultipackDistributedBatchSampler_LinearAttention(4096, lengths, 2, 0), "balance"),
    ):
        with pytest.raises(ValueError, match=name):
            changed.load_state_dict(state)
    with pytest.raises(ValueError, match="lacks epoch"):
        sampler.load_state_dict({key: value for key, value in state.items() if key != "epoch"})
    for batch in (-1, 10**6, "8"):
        with pytest.raises(ValueError, match="saved sampler state's batch"):
            sampler.load_state_dict(state | {"batch": batch})
    assert sampler.state_dict() == state


def test_a_process_that_does_not_know_its_rank_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="init_process_group first"):
        MultipackDistributedBatchSampler(4096, [5, 6, 7])


def test_interleaved_lists_what_it_leaves_out():
    for count, steps, over in ((27, 3, 0), (29, 3, 2)):
        lengths = np.arange(1, count + 1)
        ranks = [InterleavedSampler(lengths, 3, 3, rank) for rank in range(3)]
        held = [document for sampler in ranks for batch in sampler for document in batch.tolist()]
        assert [len(list(sampler)) for sampler in ranks] == [len(ranks[0])] * 3 == [steps] * 3
        assert ranks[0].dropped.size == over
        assert sorted([*held, *ranks[0].dropped.tolist()]) == list(range(count))


def packs_of(made):
    """The non-empty packs of each step, as dealt to one rank each."""
    return [
        [documents for documents in made.deal(step, made.packs_per_step) if len(documents)]
        for step in range(made.num_steps)
    ]


@st.composite
def step_problems(draw):
    capacity = draw(st.integers(1, 120))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    options = PlanOptions(
        capacity=capacity,
        packs_per_step=draw(st.integers(1, 6)),
        window=2,
        order=draw(st.sampled_from(["given", "shuffled"])),
        max_documents=draw(st.sampled_from([0, 1, 4])),
    )
    return np.array(lengths), options


@CASES
@given(step_problems(), st.booleans())
def test_steps_are_full_if_there_are_enough_documents(problem, drop_last):
    lengths, options = problem
    packs = options.packs_per_step
    plan = full_steps(lengths, options, drop_last=drop_last)
    made = packs_of(plan)
    held = [documents for step in made for documents in step]
    assert len(made) >= 1
    assert all(len(documents) <= (options.max_documents or 60) for documents in held)
    assert all(lengths[documents].sum() <= options.capacity for documents in held)
    assert sorted(np.concatenate([*held, plan.dropped]).tolist()) == list(range(len(lengths)))
    assert all(len(step) == packs for step in made[:-1])
    is_full = plan.num_documents >= plan.num_steps * packs
    assert is_full == (len(made[-1]) == packs)
    fewest = len(pack(lengths, options.capacity, max_documents=options.max_documents or None))
    if drop_last:
        assert len(held) <= max(fewest, packs) or fewest % packs == 0
    else:
        assert plan.dropped.size == 0
        assert is_full or len(lengths) < packs * -(-fewest // packs)
    again = full_steps(lengths, options, drop_last=drop_last, steps=plan.num_steps)
    assert again.num_steps == plan.num_steps


def test_no_step_is_made_that_would_lack_documents():
    """401 documents fit into 400 packs, but only if the two short ones, far apart in order, share one."""
    lengths = np.full(401, 60)
    lengths[[0, 300]] = 45
    plan = full_steps(lengths, PlanOptions(capacity=100, packs_per_step=8, window=1, order="given"))
    assert (plan.num_steps, plan.num_documents) == (50, 401)
    assert all(len(step) == 8 for step in packs_of(plan))


def test_dropped_documents_fill_empty_packs_first():
    """One document per pack: a long one takes the tokens of a step, but two ranks need two documents."""
    options = PlanOptions(capacity=4, packs_per_step=2, window=1, order="given", max_documents=1)
    plan = full_steps(np.array([1, 4, 1, 1, 1]), options, drop_last=True)
    assert [len(step) for step in packs_of(plan)] == [2, 2]
    assert plan.num_documents + plan.dropped.size == 5
