"""The sampler: equal counts, the plan's documents, positions that survive, and torch's own loader."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler

from multipack.data.packs.collate import PackedCollator
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import Document
from multipack.planning.plan import plan
from multipack.planning.report import displacement

LENGTHS = np.random.default_rng(7).lognormal(3.0, 0.9, 500).clip(1, 200).astype(int)
OPTIONS = {"capacity": 256, "packs_per_step": 6, "seed": 3}


def sampler(rank=0, world_size=1, lengths=LENGTHS, **options):
    return PackedBatchSampler(lengths, rank=rank, world_size=world_size, **(OPTIONS | options))


def epochs(made, numbers):
    out = []
    for epoch in numbers:
        made.set_epoch(epoch)
        out += list(made)
    return out


@pytest.mark.parametrize("tail", ["keep", "drop", "carry"])
@pytest.mark.parametrize("world", [1, 3])
def test_resume_is_exact_at_every_position(tail, world):
    rank = world - 1
    whole = epochs(sampler(rank, world, tail=tail), range(3))
    assert whole != epochs(sampler(rank, world, tail=tail), [0, 0, 0])
    for stop in (0, 1, 5, len(whole) // 3, len(whole) - 1, len(whole)):
        made, got = sampler(rank, world, tail=tail), []
        state = made.state_dict()
        while len(got) < stop:
            made.set_epoch(len(got) // len(made))
            for batch in made:
                got.append(batch)
                state = made.state_dict()
                if len(got) == stop:
                    break
        resumed = sampler(rank, world, tail=tail)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        resumed.set_epoch(state["epoch"])  # hosts do this, once or twice
        resumed.set_epoch(state["epoch"])
        got += list(resumed)  # the position is used once: the following epochs are whole
        got += epochs(resumed, range(state["epoch"] + 1, 3))
        assert got == whole


def test_another_epoch_ends_a_running_iterator():
    made = sampler()
    iterator = iter(made)
    next(iterator)
    made.set_epoch(1)
    assert list(iterator) == []
    assert made.state_dict()["step"] == 0


@pytest.mark.parametrize("tail", ["keep", "carry"])
def test_another_world_goes_on_with_the_same_documents(tail):
    def documents(world, state=None):
        ranks = [sampler(r, world, tail=tail) for r in range(world)]
        steps = []
        for rank in ranks:
            if state is None:
                rank.set_epoch(1)
            else:
                rank.load_state_dict(state)
            batches = list(rank)
            count, starts = rank.micro_batches, range(0, len(batches), rank.micro_batches)
            steps.append([[d for batch in batches[i : i + count] for d in batch] for i in starts])
        return [sorted(d for part in parts for d in part) for parts in zip(*steps, strict=True)]

    whole = documents(1)
    before = sampler(0, 6, tail=tail)
    before.set_epoch(1)
    state = before.state_at(4)
    for world in (6, 4, 3, 2, 1):
        assert documents(world) == whole
        assert documents(world, state) == whole[4:]


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_ranks_that_change_at_any_step_train_every_document_once(data):
    """Two epochs, interrupted after random numbers of steps and continued by random numbers of ranks."""
    capacity = data.draw(st.integers(1, 120))
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    packs, enough = data.draw(st.integers(1, 6)), sum(lengths) > 6 * 120
    options = {
        "capacity": capacity,
        "packs_per_step": packs,
        "sync": data.draw(st.sampled_from(["micro", "step"])),
        "tail": data.draw(st.sampled_from(["keep", "drop", "carry"])) if enough else "keep",
        "window": data.draw(st.integers(1, 3)),
        "max_documents": data.draw(st.one_of(st.none(), st.integers(1, 3))),
    }
    state, waiting = None, []
    for epoch in range(2):
        step, seen = 0, []
        while True:
            world = data.draw(st.integers(1, packs))
            ranks = [PackedBatchSampler(lengths, rank=r, world_size=world, **options) for r in range(world)]
            for rank in ranks:
                rank.load_state_dict(json.loads(json.dumps(state))) if state else None
                rank.set_epoch(epoch)
                assert len(rank) == rank.steps_per_epoch * rank.micro_batches == len(ranks[0])
            stop = min(step + data.draw(st.integers(1, 4)), ranks[0].steps_per_epoch)
            for rank in ranks:
                for _, batch in zip(range((stop - step) * rank.micro_batches), rank, strict=False):
                    assert sum(lengths[document] for document in batch) <= capacity
                    assert len(batch) <= rank.most_documents
                    seen += batch
            state, step, made = ranks[0].state_at(stop), stop, ranks[0].plan
            if step == ranks[0].steps_per_epoch:
                break
        assert sorted([*seen, *made.dropped, *made.carried]) == sorted([*range(len(lengths)), *waiting])
        waiting = made.carried.tolist()


def test_states_of_others_are_refused():
    made = sampler(0, 2)
    state = made.state_at(1)
    inside = made.state_at(1, 1)
    cases = [
        (sampler(0, 2, lengths=LENGTHS + 1), state, "lengths changed"),
        (sampler(0, 2, capacity=300), state, "capacity from 256 to 300"),
        (sampler(0, 2, targets=LENGTHS // 2), state, "target counts changed"),
        (sampler(0, 2, seed=4), state, "has seed 3, but this sampler has seed 4"),
        (sampler(0, 3), inside, "inside step 1, after 1 micro-batches"),
        (sampler(0, 2, sync="step"), inside, "inside step 1"),
        (made, state | {"step": -1}, "at least 0"),
        (made, state | {"step": "1"}, "whole number"),
        (made, state | {"step": 1000}, "at most"),
        (made, inside | {"effort": 2}, "inside step 1"),
        (made, [], "lacks fingerprint"),
        (made, None, "damaged: TypeError"),
        (made, {}, "lacks fingerprint"),
    ]
    whole = list(made)
    for target, given_state, message in cases:
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(given_state)
    assert list(made) == whole  # a refused state changes nothing
    carrying = sampler(tail="carry")
    state = carrying.state_dict() | {"epoch": 1, "carried": [len(LENGTHS)]}
    with pytest.raises(ValueError, match="carried names documents outside 0"):
        carrying.load_state_dict(state)
    sampler(0, 2).load_state_dict(inside)
    sampler(0, 2).load_state_dict(inside | {"effort": 1, "checksum": "0" * 64})  # of an earlier version
    sampler(0, 3, sync="step").load_state_dict(made.state_at(1))


def test_carry_chain_is_computed_when_epochs_are_skipped():
    one, jump = sampler(tail="carry"), sampler(tail="carry")
    walked = [epochs(one, [epoch]) for epoch in range(4)]
    assert epochs(jump, [3]) == walked[3]
    assert len(jump.plan.carried_in) > 0
    assert epochs(jump, [1]) == walked[1]
    trained = np.bincount(
        np.concatenate([np.concatenate(epoch) for epoch in walked]).astype(int), minlength=500
    )
    one.set_epoch(3)
    assert (trained + np.bincount(one.plan.carried, minlength=500) == 4).all()


def test_impossible_worlds_are_refused():
    for place, options, message in (
        ((0, 7), {}, "7 ranks cannot share steps of packs_per_step=6"),
        ((2, 2), {}, "outside world_size=2"),
        ((-1, 2), {}, "rank must be"),
        ((0, 1), {"sync": "never"}, "choose one of micro"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler(*place, **options)
    with pytest.raises(ValueError, match="epoch"):
        sampler().set_epoch(-1)


def test_interface_of_hosts():
    made = sampler()
    assert isinstance(made, Sampler)
    assert not isinstance(made, BatchSampler)
    assert made.sampler is made
    made.sampler = None
    assert made.sampler is made
    assert made.longest == LENGTHS.max()
    assert repr(made).startswith("PackedBatchSampler(rank 0 of 1, ")
    assert len(made.deal_of(0)) == made.micro_batches
    assert made.epoch == 0


def test_torch_data_loader():
    made = sampler(1, 2)
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=made, collate_fn=list)
    assert len(loader) == len(made)
    assert list(loader) == list(made)
    made.set_epoch(1)
    assert list(loader) == list(made)
    made.load_state_dict(made.state_at(2))
    assert list(loader) == list(made)[2 * made.micro_batches :]


@pytest.mark.parametrize(("world", "loss_weighting"), [(1, "document"), (3, "token"), (3, "document")])
def test_denominators_of_all_ranks_add_up_to_the_plans(world, loss_weighting):
    """Collated packs of all ranks and micro-batches: their denominators are what the plan said without looking."""
    documents = [
        Document(np.arange(length, dtype=np.uint16), np.array([[length // 3, length]])) for length in LENGTHS
    ]
    targets = [int((each.shifted_targets() != -100).sum()) for each in documents]
    options = {"targets": targets, "loss_weighting": loss_weighting}
    ranks = [iter(sampler(rank, world, **options)) for rank in range(world)]
    made = sampler(0, world, **options)
    collate = PackedCollator.of(made)
    for step in range(made.steps_per_epoch):
        batches = [
            collate([documents[number] for number in next(rank)])
            for _ in range(made.micro_batches)
            for rank in ranks
        ]
        assert sum(batch.denominator for batch in batches) == made.plan.denominator(step)
        assert sum(batch.num_target_tokens for batch in batches) == made.plan.targets(step)
        assert sum(batch.num_tokens for batch in batches) == made.plan.tokens(step)
        assert max(batch.num_slots for batch in batches) <= 256


@pytest.mark.parametrize("name", ["uniform", "lognormal", "small packs"])
def test_every_epoch_is_as_close_to_its_order_as_a_plan(name):
    """A fixed number of steps must not be bought with a wider window than was asked for."""
    random = np.random.default_rng(3)
    lengths = {
        "uniform": random.integers(1, 8193, 1000),
        "lognormal": random.lognormal(5.7, 1.0, 3000).clip(1, 8192).astype(int),
        "small packs": np.minimum(random.integers(24, 6000, 1000), 2048) * 4,
    }[name]
    options = {"capacity": 8192, "packs_per_step": 4, "window": 4}
    sampler = PackedBatchSampler(lengths, **options)
    assert abs(sampler.steps_per_epoch - plan(lengths, **options).num_steps) <= 3
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sampler.plan.num_steps == sampler.steps_per_epoch
        assert sampler.plan.window <= 8
        assert np.quantile(displacement(sampler.plan), 0.99) <= 14
