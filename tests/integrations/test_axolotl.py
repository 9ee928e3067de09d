"""Axolotl's sampler by its own name: nested batches, one length for all ranks and epochs, nothing lost in silence."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from multipack.integrations import axolotl_sampler
from multipack.integrations.axolotl import MultipackBatchSampler, pack_group, pack_parallel
from multipack.planning.packing import pack

CASES = settings(deadline=None, max_examples=60)


def lognormal(count=2000, seed=0, longest=2048):
    draw = np.random.default_rng(seed).lognormal(5.5, 1.0, count)
    return np.clip(draw, 1, longest).astype(np.int64)


def shuffled(lengths, seed=0):
    return RandomSampler(lengths, generator=torch.Generator().manual_seed(seed))


def documents_of(batches):
    return [document for batch in batches for held in batch for document in held]


class Epochs:
    """A sampler whose epochs are given."""

    def __init__(self, *epochs):
        self.epochs, self.reads = epochs, 0

    def __iter__(self):
        self.reads += 1
        return iter(self.epochs[min(self.reads, len(self.epochs)) - 1])


def test_arguments_as_axolotl_gives_them():
    lengths = lognormal(300)
    common = {"lengths": lengths, "batch_max_len": 4096, "batch_size": 1, "drop_last": True}
    packing = {"packing_efficiency_estimate": None, "group_size": 100_000, "bin_size": 200}
    more = {"sequential": False, "num_processes": 8, "mp_start_method": "spawn"}
    base = MultipackBatchSampler(shuffled(lengths), **common, **packing, **more)
    older = MultipackBatchSampler(sampler=shuffled(lengths), **common)
    assert list(base) == list(older)
    assert base.packing_efficiency_estimate == 1.0
    assert sorted(documents_of(base.generate_batches())) == list(range(300))
    newer = MultipackBatchSampler(shuffled(lengths), 1, 4096, lengths, 3, 0.9, False)
    assert (newer.bin_size, newer.packing_efficiency_estimate, newer.drop_last) == (3, 0.9, False)
    with pytest.raises(ValueError, match="bin_size must be a whole number"):
        MultipackBatchSampler(shuffled(lengths), 1, 4096, lengths, 0.9)


@st.composite
def problems(draw):
    capacity = draw(st.integers(1, 150))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=70))
    options = {
        "batch_size": draw(st.integers(1, 5)),
        "drop_last": draw(st.booleans()),
        "sequential": draw(st.booleans()),
        "group_size": draw(st.sampled_from([1, 7, 100_000])),
        "bin_size": draw(st.sampled_from([None, 1, 3, 200])),
    }
    return np.array(lengths), capacity, options


@CASES
@given(problems())
def test_every_document_is_in_a_bin_or_left_out(problem):
    lengths, capacity, options = problem
    sampler = MultipackBatchSampler(
        SequentialSampler(lengths), batch_max_len=capacity, lengths=lengths, **options
    )
    if options["drop_last"] and len(lengths) < options["batch_size"]:
        with pytest.raises(ValueError, match="too few for a batch"):
            list(sampler)
        return
    batches = list(sampler)
    assert isinstance(sampler, BatchSampler)
    assert len(batches) == len(sampler) == sampler.num_batches() >= 1
    assert all(type(number) is int for number in documents_of(batches))
    held = [held for batch in batches for held in batch]
    assert all(0 < len(each) <= (options["bin_size"] or 70) for each in held)
    assert all(lengths[each].sum() <= capacity for each in held)
    assert sorted([*documents_of(batches), *sampler.left_out.tolist()]) == list(range(len(lengths)))
    assert all(len(batch) == options["batch_size"] for batch in batches[:-1])
    assert all(1 <= len(batch) <= options["batch_size"] for batch in batches)
    if options["drop_last"]:
        assert len(batches[-1]) == options["batch_size"]
    else:
        assert sampler.left_out.size == 0
    if options["sequential"]:
        assert documents_of(batches) == list(range(len(documents_of(batches))))
    assert sampler.total_tokens_used == lengths[documents_of(batches)].sum()
    assert sampler.total_token_slots == len(held) * capacity
    assert 0 < sampler.efficiency() <= 1


def test_openchat_is_filled_like_best_fit(shared_data):
    lengths = np.load(shared_data / "lengths" / "openchat_v1.npy")
    sampler = MultipackBatchSampler(shuffled(lengths), 8, 32768, lengths)
    assert len(list(sampler)) == 36  # as Axolotl, which leaves out 1.02 % of the tokens
    assert lengths[sampler.left_out].sum() < 0.0102 * lengths.sum()
    assert sampler.efficiency() >= 0.9986
    squares = np.array([[(lengths[held] ** 2).sum() for held in batch] for batch in sampler])
    assert np.ptp(squares, axis=1).mean() < 0.05 * squares.mean()
    one = MultipackBatchSampler(shuffled(lengths), 1, 32768, lengths)
    assert len(one) <= -(-len(pack(lengths, 32768)) * 1001 // 1000)
    assert one.left_out.size == 0


def test_every_epoch_has_the_first_ones_length_and_reads_the_sampler_once():
    lengths = lognormal(1500)
    draw = np.random.default_rng(0)
    order = Epochs(*(draw.permutation(1500) for _ in range(9)))
    sampler = MultipackBatchSampler(order, 2, 2048, lengths, drop_last=False)
    length, epochs = len(sampler), []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        expected = sampler.generate_batches()
        epochs.append(list(sampler))
        assert epochs[-1] == expected
        assert order.reads == epoch + 1
        assert len(epochs[-1]) == len(sampler) == length
        assert sorted(documents_of(epochs[-1])) == list(range(1500))
    assert all(epoch != epochs[0] for epoch in epochs[1:])
    assert list(sampler) != epochs[-1]  # hosts need not call set_epoch


def test_setting_the_epoch_reaches_the_sampler_below():
    lengths = lognormal(500)
    below = DistributedSampler(range(500), num_replicas=2, rank=1, seed=3)
    sampler = MultipackBatchSampler(below, 1, 4096, lengths)
    first = list(sampler)
    sampler.set_epoch(1)
    sampler.set_epoch(1)
    assert below.epoch == 1
    second = list(sampler)
    assert sorted(documents_of(second)) == sorted(below)
    assert sorted(documents_of(first)) != sorted(documents_of(second))
    sampler.sampler = SequentialSampler(range(100))  # as accelerate replaces it
    assert sorted(documents_of(sampler.generate_batches())) == list(range(100))


def test_later_epochs_with_more_documents_leave_some_out(caplog):
    lengths = np.full(40, 10)
    sampler = MultipackBatchSampler(Epochs(range(20), range(40)), 1, 10, lengths)
    assert len(list(sampler)) == 20
    sampler.set_epoch(1)
    with caplog.at_level(logging.WARNING):
        assert len(list(sampler)) == 20
    assert sampler.left_out.size == 20
    assert "20 documents (200 tokens) are in none of the 20 batches" in caplog.text


@pytest.mark.parametrize("sequential", [False, True])
def test_later_epochs_with_fewer_documents_have_emptier_bins(sequential):
    lengths = np.full(40, 10)
    sampler = MultipackBatchSampler(Epochs(range(40), range(12)), 2, 100, lengths, sequential=sequential)
    assert len(list(sampler)) == 2
    sampler.set_epoch(1)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [2, 2]
    assert sorted(documents_of(batches)) == list(range(12))
    sampler.sampler = Epochs(range(3))
    sampler.set_epoch(2)
    with pytest.raises(ValueError, match="3 documents in epoch 2, too few for 2 batches"):
        list(sampler)


def test_long_documents():
    lengths = [10, 20, 999, 30]
    with pytest.raises(ValueError, match="document 2 has 999 tokens, but batch_max_len=100"):
        MultipackBatchSampler(SequentialSampler(lengths), 1, 100, lengths, overlong="error")
    for options, documents in (({"overlong": "drop"}, [0, 1, 3]), ({}, [0, 1, 2, 3])):  # by default alone
        with pytest.warns(UserWarning, match=r"1 of 4 documents \(999 tokens\)"):
            sampler = MultipackBatchSampler(SequentialSampler(lengths), 1, 100, lengths, **options)
        assert sampler.overlong_documents.tolist() == [2]
        assert sorted(documents_of(sampler)) == documents
        assert ([[2]] in list(sampler)) == (not options)


def test_unknown_settings_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        MultipackBatchSampler(SequentialSampler(range(3)), 1, 10, [1, 2, 3], drop_lst=False)
    assert "no effect here: drop_lst" in caplog.text


class Turned:
    """Yields documents from a place of its own, which it moves by itself and saves."""

    def __init__(self, lengths):
        self.count, self.place = len(lengths), 0

    def __iter__(self):
        self.place += 7
        return iter(np.roll(np.arange(self.count), self.place).tolist())

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def seedable(lengths):
    """Accelerate's sampler, which goes to its next epoch by itself."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    return data_loader.SeedableRandomSampler(lengths, data_seed=3)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("order", [RandomSampler, shuffled, seedable, Turned])
def test_resume_is_exact(sequential, order, tmp_path):
    """Also with a sampler that draws from torch's own generator, as Axolotl's does, or that has a state of its own."""
    lengths = lognormal(400)

    def make():
        return MultipackBatchSampler(order(lengths), 2, 2048, lengths, sequential=sequential)

    torch.manual_seed(5)
    whole = make()
    iterator = iter(whole)
    begun = [next(iterator) for _ in range(4)]
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    torch_state = torch.get_rng_state()  # which hosts save and restore themselves
    rest, second = list(iterator), list(whole)
    torch.set_rng_state(torch_state)
    again = make()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.state_dict()["batch"] == 4
    assert list(again) == rest
    assert len(begun) + len(rest) == len(again) == len(whole)
    assert list(again) == second


def test_no_batch_is_lost_between_ranks_and_other_ranks_resume(monkeypatch):
    """Hosts assign batch b to rank b % ranks and drop a last round that is not full.

    The epoch was saved with four ranks: the rest of it stays as it was.
    """
    lengths = lognormal(400)
    monkeypatch.setattr(axolotl_sampler, "world_size", lambda: 4)
    whole = MultipackBatchSampler(SequentialSampler(lengths), 1, 4096, lengths)
    batches, state = list(whole), whole.state_at(8)
    assert len(batches) % 4 == 0
    assert sorted(documents_of(batches)) == list(range(400))
    monkeypatch.setattr(axolotl_sampler, "world_size", lambda: 1)
    again = MultipackBatchSampler(SequentialSampler(lengths), 1, 4096, lengths)
    again.load_state_dict(state)
    assert list(again) == batches[8:]
    assert list(again) != batches


def test_states_of_something_else_are_refused():
    lengths = lognormal(300)
    sampler = MultipackBatchSampler(SequentialSampler(lengths), 2, 4096, lengths)
    state = sampler.state_dict()
    for other, name in (
        (MultipackBatchSampler(SequentialSampler(lengths), 4, 4096, lengths), "batch_size from 2"),
        (
            MultipackBatchSampler(SequentialSampler(lengths), 2, 4096, lengths, bin_size=8),
            "bin_size from 200",
        ),
        (MultipackBatchSampler(SequentialSampler(lengths), 2, 4096, lengths[::-1].copy()), "lengths"),
    ):
        with pytest.raises(ValueError, match=name):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="lacks order"):
        sampler.load_state_dict({key: value for key, value in state.items() if key != "order"})
    for name, value in (
        ("batch", 10**6),
        ("length", 0),
        ("fingerprint", "0" * 16),
        ("order", torch.tensor([10**6])),
        ("order", torch.tensor([0.5])),
    ):
        with pytest.raises(ValueError, match="saved"):
            sampler.load_state_dict(state | {name: value})
    with pytest.raises(ValueError, match="lengths changed"):
        sampler.load_state_dict(state | {"order": state["order"].flip(0)})
    assert len(sampler.state_dict()["order"]) == 300


class Shard:
    """What a rank gets of the batches in accelerate with drop_last: whole rounds of whole batches, in turn."""

    def __init__(self, batches, size, ranks, rank):
        whole = [batch for batch in batches if len(batch) == size]
        self.batches = whole[rank : len(whole) // ranks * ranks : ranks]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("sequential", [False, True])
def test_no_document_is_lost_between_ranks(size, sequential, monkeypatch):
    lengths = lognormal(1500)
    for ranks in (1, 2, 8, 64):
        monkeypatch.setattr(axolotl_sampler, "world_size", lambda ranks=ranks: ranks)
        sampler = MultipackBatchSampler(shuffled(lengths), size, 4096, lengths, sequential=sequential)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert len(batches) % ranks == 0
        shares = [Shard(batches, size, ranks, rank).batches for rank in range(ranks)]
        assert {len(share) for share in shares} == {len(batches) // ranks}
        seen = [document for share in shares for document in documents_of(share)]
        assert sorted([*seen, *sampler.left_out.tolist()]) == list(range(1500))
        assert ranks == 1 or sampler.left_out.size == 0


@pytest.mark.parametrize("sequential", [False, True])
def test_documents_that_fill_no_round_are_left_out(sequential, monkeypatch):
    """Ten documents of a bin each fill one round of eight batches; batches of two bins are fewer than the ranks."""
    lengths = np.full(10, 7)
    monkeypatch.setattr(axolotl_sampler, "world_size", lambda: 8)
    sampler = MultipackBatchSampler(range(10), 1, 10, lengths, sequential=sequential)
    assert len(list(sampler)) == 8
    assert sorted([*documents_of(sampler), *sampler.left_out.tolist()]) == list(range(10))
    few = MultipackBatchSampler(range(10), 2, 10, lengths, sequential=sequential)
    with pytest.raises(ValueError, match=r"on each of 8 ranks.*eval_sample_packing"):
        len(few)
    divided = DistributedSampler(range(10), num_replicas=8, rank=0)
    assert len(MultipackBatchSampler(divided, 1, 10, lengths, sequential=sequential)) == 2


def first_fit_bins(lengths, capacity, limit):
    """Bins of Axolotl's packing: in the sampler's order, each document into the first bin with room and a place."""
    rooms, sizes, first, shortest = [], [], 0, min(lengths)
    for length in lengths:
        number = first
        while number < len(rooms) and (rooms[number] < length or sizes[number] == limit):
            number += 1
        if number == len(rooms):
            rooms.append(capacity)
            sizes.append(0)
        rooms[number] -= length
        sizes[number] += 1
        while first < len(rooms) and (rooms[first] < shortest or sizes[first] == limit):
            first += 1
    return len(rooms)


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        ("natural_instructions_193k", 32_768),
        ("tinyshakespeare_speeches", 8192),
        ("stdlib311_doc2src", 65_536),
        ("instructlab_sdg_24k", 32_768),
        ("gsm8k_train", 32_768),
    ],
)
def test_a_limit_of_200_documents_needs_no_more_bins_than_axolotl(name, capacity, shared_data):
    """Short documents and Axolotl's default bin_size: packing the longest first would need up to 41 % more bins."""
    lengths = np.load(shared_data / "lengths" / f"{name}.npy")
    lengths = lengths[:: 1 + len(lengths) // 50_000]
    order = np.random.default_rng(1).permutation(len(lengths))
    groups = [lengths[order[first : first + 100_000]] for first in range(0, len(order), 100_000)]
    theirs = sum(first_fit_bins(group.tolist(), capacity, 200) for group in groups)
    bound = pack(lengths, capacity, max_documents=200).lower_bound
    for own in (
        pack(lengths[order], capacity, max_documents=200),
        pack_group(lengths[order], 0, capacity, len(order), 200),
        pack_parallel(lengths[order], capacity, 100_000, 200),
    ):
        assert len(own) <= min(theirs, int(np.ceil(1.01 * bound)))
    for size, drop_last in ((1, False), (1, True), (8, False), (8, True)):
        sampler = MultipackBatchSampler(order.tolist(), size, capacity, lengths, drop_last=drop_last)
        batches = sampler.generate_batches()
        assert len(batches) <= (theirs // size if drop_last else -(-theirs // size))
        assert sum(map(len, batches)) <= max(np.ceil(1.01 * bound), -(-bound // size) * size)
        assert all(len(held) <= 200 for batch in batches for held in batch)
        assert sorted([*documents_of(batches), *sampler.left_out.tolist()]) == list(range(len(lengths)))
