"""Reader ranks: the same packs, bit for bit, asked of storage by readers alone; errors reach everybody; no deadlock."""

import os
import signal
import threading
from dataclasses import fields

import numpy as np
import pytest
import torch

from multipack.data.collate import PackedCollator
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.preference import PreferenceCollator, PreferencePairs
from multipack.data.sampler import PackedBatchSampler
from multipack.data.store import StoreWriter, TokenStore
from multipack.data.tokenizer import byte_tokenizer
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.readers import (
    Readers,
    ScatteredLoader,
    check_readers,
    decode_batch,
    encode_batch,
    join_readers,
    open_loader,
    opens_tokens,
)
from multipack.parallel.world import World

SECONDS = 20.0
THREAD = "multipack-readers"


def write_corpus(path, count=90, seed=3):
    """Documents of very different lengths, most of them with a prompt."""
    draw = np.random.default_rng(seed)
    with StoreWriter(path, byte_tokenizer(), source_hash="readers") as writer:
        for number in range(count):
            length = int(np.clip(draw.lognormal(3.0, 0.8), 3, 120))
            prompt = int(draw.integers(0, length - 1))
            tokens = draw.integers(0, 256, length).tolist()
            writer.add(f"doc{number}", [(tokens[:prompt], False), (tokens[prompt:], True)])
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("readers") / "corpus")


def parts(path, mesh, weighting="token", capacity=128):
    """A store of this process's own, a view of it, the plan dealt to this rank, and its collator."""
    store = TokenStore(path)
    documents = Documents.whole(store)
    sampler = PackedBatchSampler(
        documents.lengths,
        capacity=capacity,
        packs_per_step=8,
        targets=documents.target_counts,
        rank=mesh.data_rank,
        world_size=mesh.data_size,
        loss_weighting=weighting,
    )
    return store, documents, sampler, PackedCollator.of(sampler)


def content(batch):
    """Everything that a batch holds, comparable."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {
        name: (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def case_equal(world, path, options, readers, prefetch, weighting):
    mesh = build_mesh(ParallelConfig(**options), world)
    store, documents, sampler, collator = parts(path, mesh, weighting)
    own = PackedLoader(documents, sampler, collator, prefetch)
    expected = []
    for epoch in range(2):
        own.set_epoch(epoch)
        expected.append([content(batch) for batch in own])

    store, documents, sampler, collator = parts(path, mesh, weighting)
    loader = open_loader(
        documents, sampler, collator, mesh, readers=readers, prefetch=prefetch, timeout_seconds=SECONDS
    )
    assert isinstance(loader, ScatteredLoader)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert [content(batch) for batch in loader] == expected[epoch]
    assert loader.tokens_read == own.tokens_read
    assert loader.batches_read == own.batches_read == 2 * len(sampler)
    assert not threads()
    assert opens_tokens(mesh, readers) == loader.readers.reads
    served = len(set(loader.readers.data_ranks.values())) if loader.readers.reads else 0
    return store.bytes_asked, loader.bytes_sent, served


@pytest.mark.parametrize(
    ("size", "options", "readers", "opens"),
    [
        (2, {}, 1, [0]),
        (2, {}, 2, [0, 1]),
        (2, {"tensor": 2}, 1, [0]),
        (4, {}, 1, [0]),
        (4, {}, 2, [0, 2]),
        (4, {}, 3, [0, 2]),  # each serves two, so that the third has nobody
        (4, {"tensor": 2}, 1, [0]),
        (4, {"tensor": 2}, 2, [0, 2]),  # one of those that hold a model together
        (4, {"pipeline": 2}, 2, [0, 1]),
    ],
    ids=str,
)
def test_every_rank_gets_the_packs_that_it_would_have_read(pools, corpus, size, options, readers, opens):
    weighting = "document" if readers == 2 else "token"
    prefetch = 0 if (size, readers) == (2, 1) else 2
    found = pools(size).run(case_equal, corpus, options, readers, prefetch, weighting)
    store = TokenStore(corpus)
    once = store.num_tokens * store.tokens.itemsize + store.spans.nbytes
    assert [rank for rank, (asked, *_) in enumerate(found) if asked] == opens
    assert sum(asked for asked, *_ in found) == 2 * once  # two epochs, nothing twice
    assert all((sent > 0) == (rank in opens and len(opens) < size) for rank, (_, sent, _) in enumerate(found))
    assert sum(served for *_, served in found) == ParallelConfig(**options).data_size(size)


def case_resumed(world, path, taken):
    mesh, gate, made = build_mesh(ParallelConfig(), world), threading.Event(), []

    def fresh():
        _, documents, sampler, collator = parts(path, mesh)

        def held_up(pack):  # so that the reader is behind when the iteration ends
            made.append(1)
            assert len(made) <= world.size * taken or gate.wait(SECONDS)
            return collator(pack)

        return open_loader(documents, sampler, held_up, mesh, readers=1, prefetch=3, timeout_seconds=SECONDS)

    first = fresh()
    first.set_epoch(2)
    batches = iter(first)
    begun = [content(next(batches)) for _ in range(taken)]
    state, rounds = first.state_dict(), 0
    if world.is_main:  # ranks need not end at the same time: what was begun is finished without the other
        threading.Timer(0.1, gate.set).start()
        first.close()
        rounds = first.rounds
    world.barrier()
    first.close()
    assert first.rounds == (rounds or first.rounds) == taken + 3
    assert not threads()
    gate.set()
    whole = [content(batch) for batch in first]
    second = fresh()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert begun + [content(batch) for batch in second] == whole
    # the first one goes on too: iterations that were ended leave nothing between the ranks
    first.load_state_dict(state)
    assert [content(batch) for batch in first] == whole[taken:]
    return state["step"], state["micro_batch"], first.rounds


@pytest.mark.parametrize("taken", [1, 5])
def test_the_state_is_exact_and_iterations_may_end_anywhere(pools, corpus, taken):
    found = pools(2).run(case_resumed, corpus, taken)
    assert len(set(found)) == 1  # the same place, and equally many rounds, on both ranks
    assert found[0][0] * 4 + found[0][1] == taken


def case_ahead(world, path, prefetch):
    """A collator that stands still proves what was made before."""
    mesh = build_mesh(ParallelConfig(), world)
    _, documents, sampler, collator = parts(path, mesh)
    gate, made = threading.Event(), threading.Semaphore(0)
    gate.set()

    def gated(pack):
        assert gate.wait(SECONDS)
        made.release()
        return collator(pack)

    loader = open_loader(
        documents, sampler, gated, mesh, readers=1, prefetch=prefetch, timeout_seconds=SECONDS
    )
    batches = iter(loader)
    taken = [content(next(batches))]
    if loader.readers.reads:
        for _ in range(mesh.data_size * (1 + prefetch)):
            assert made.acquire(timeout=SECONDS)
        assert not made.acquire(blocking=False)  # and not further than it may
        gate.clear()
    world.barrier()
    taken += [content(next(batches)) for _ in range(prefetch)]
    world.barrier()  # every rank had its packs while no reader could make one
    gate.set()
    taken += [content(batch) for batch in batches]
    sampler.set_epoch(0)
    return taken == [content(batch) for batch in PackedLoader(documents, sampler, collator)]


def test_packs_are_there_before_they_are_asked_for(pools, corpus):
    assert pools(2).run(case_ahead, corpus, 2) == [True, True]


def case_failing(world, path, error, prefetch):
    mesh = build_mesh(ParallelConfig(), world)
    _, documents, sampler, collator = parts(path, mesh)
    calls = []

    def breaking(pack):
        calls.append(1)
        if len(calls) == 2 * world.size:  # the last pack of the second round
            raise {"ValueError": ValueError, "KeyError": KeyError}[error]("token 999 is damaged")
        return collator(pack)

    loader = open_loader(
        documents, sampler, breaking, mesh, readers=1, prefetch=prefetch, timeout_seconds=SECONDS
    )
    batches = iter(loader)
    next(batches)
    try:
        next(batches)
    except Exception as failure:
        told = (type(failure).__name__, str(failure), loader.batches_read)
    assert not threads()
    calls.clear()  # the next iteration works: nothing of the failed one is left
    batches = iter(loader)
    next(batches)
    loader.close()
    return told


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", ["ValueError", "KeyError"])
def test_an_error_of_the_reader_reaches_all_ranks(pools, corpus, error, prefetch):
    found = pools(4).run(case_failing, corpus, error, prefetch)
    assert found[0][0] == error
    for rank, (kind, message, taken) in enumerate(found[1:], 1):
        assert kind == ("ValueError" if error == "ValueError" else "RuntimeError")
        assert message.startswith(f"rank 0, which reads for rank {rank}: ")
        assert "token 999 is damaged" in message
        assert "while making a batch of the documents" in message
        assert taken == 1


def case_two_loaders(world, path):
    """Training and validation read at the same time, between training's own collectives."""
    mesh = build_mesh(ParallelConfig(), world)
    loaders, expected = [], []
    for capacity in (128, 256):
        _, documents, sampler, collator = parts(path, mesh, capacity=capacity)
        expected.append([content(batch) for batch in PackedLoader(documents, sampler, collator, 0)])
        loaders.append(open_loader(documents, sampler, collator, mesh, readers=1, timeout_seconds=SECONDS))
    train, validation = loaders
    seen = []
    for number, batch in enumerate(train):
        seen.append(content(batch))
        assert world.sum([1.0]) == [world.size]
        if number in (2, 4):  # an evaluation that takes some packs, always from the first one
            batches = iter(validation)
            assert [content(next(batches)) for _ in range(2)] == expected[1][:2]
            world.sum([1.0])
            validation.close()
    assert seen == expected[0]
    return train.rounds, validation.rounds


def test_two_loaders_do_not_disturb_each_other(pools, corpus):
    found = pools(4).run(case_two_loaders, corpus)
    assert len(set(found)) == 1


def case_out_of_step(world, path):
    """A rank that took fewer packs than its reader: told, by name."""
    mesh = build_mesh(ParallelConfig(), world)
    _, documents, sampler, collator = parts(path, mesh)
    loader = open_loader(documents, sampler, collator, mesh, readers=1, prefetch=0, timeout_seconds=SECONDS)
    batches = iter(loader)
    next(batches)
    if world.is_main:
        threading.Thread(target=next, args=(batches,), daemon=True).start()
        return ""
    with pytest.raises(RuntimeError) as caught:
        next(iter(loader))
    return str(caught.value)


def test_a_rank_that_is_out_of_step_is_told(pools, corpus):
    told = pools(2).run(case_out_of_step, corpus)[1]
    assert "rank 0 sent pack 1 of iteration 1, and rank 1 is at pack 0 of iteration 2" in told


def case_killed(world, path):
    mesh = build_mesh(ParallelConfig(), world)
    _, documents, sampler, collator = parts(path, mesh)
    loader = open_loader(documents, sampler, collator, mesh, readers=1, timeout_seconds=SECONDS)
    batches = iter(loader)
    next(batches)
    if world.is_main:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in batches:
        pass


def test_a_reader_that_is_gone_is_named(pool_type, corpus):
    with pool_type(2) as pool:
        reader, other = pool.outcomes(case_killed, corpus, seconds=15)
    assert "exit code -9" in reader.error
    assert "rank 0 reads for this rank and did not send pack" in other.error


# Without processes


def seen_from(rank, size, options):
    return Mesh(World(rank=rank, size=size), ParallelConfig(**options).axes(size))


@pytest.mark.parametrize("readers", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"tensor": 2}, {"pipeline": 2, "context": 2}], ids=str)
def test_few_ranks_open_tokens(readers, options):
    size = 4 * ParallelConfig(**options).model_ranks
    opens = [rank for rank in range(size) if opens_tokens(seen_from(rank, size, options), readers)]
    if not readers:
        assert len(opens) == size
        return
    served = -(-4 // readers)
    assert [seen_from(rank, size, options).data_rank for rank in opens] == list(range(0, 4, served))
    assert len(opens) <= readers


def test_more_readers_than_ranks_are_refused(corpus):
    check_readers(4, 4)
    with pytest.raises(ValueError, match=r"data.readers=5 of 4 data-parallel ranks: at most data.readers=4"):
        check_readers(5, 4)
    with pytest.raises(ValueError, match=r"at most data\.readers=1"):
        opens_tokens(Mesh.plain(World()), 2)
    with pytest.raises(ValueError, match=r"data\.readers=0"):
        join_readers(Mesh.plain(World()), 0)


def test_a_single_process_reads_for_itself(corpus):
    mesh = Mesh.plain(World())
    _, documents, sampler, collator = parts(corpus, mesh)
    loader = open_loader(documents, sampler, collator, mesh, readers=1)
    assert loader.readers == Readers(0, 0, {0: 0}, None)
    sampler_of_own = parts(corpus, mesh)[2]
    own = [content(batch) for batch in PackedLoader(documents, sampler_of_own, collator)]
    assert [content(batch) for batch in loader] == own
    assert loader.bytes_sent == 0
    assert not isinstance(open_loader(documents, sampler, collator, mesh), ScatteredLoader)


@pytest.mark.parametrize("weighting", ["token", "document"])
@pytest.mark.parametrize("chosen", [[], [0], [4, 1, 7]])
def test_a_batch_is_the_same_after_its_way(corpus, weighting, chosen):
    documents = Documents.whole(TokenStore(corpus))
    batch = PackedCollator(8, 200, loss_weighting=weighting)([documents[number] for number in chosen])
    back = decode_batch(encode_batch(batch))
    assert content(back) == content(batch)
    assert type(back.lengths) is tuple


@pytest.mark.parametrize("known", [False, True])
def test_pairs_travel_too(tmp_path, known):
    with StoreWriter(tmp_path / "pairs", byte_tokenizer(), source_hash="p") as writer:
        for number in range(3):
            halves = [([1, 2], False), ([3 + number], True), ([1, 2], False), ([9, 8], True)]
            writer.add(f"pair{number}", halves, border=3)
    documents = Documents.whole(TokenStore(tmp_path / "pairs"))
    reference = np.array([[0.1, -2.0], [1 / 3, 4.0], [5.0, 6.0]]) if known else None
    pairs = PreferencePairs(documents, reference)
    batch = PreferenceCollator(PackedCollator(8, 16))([pairs[1], pairs[0]])
    assert content(decode_batch(encode_batch(batch))) == content(batch)


def test_unknown_batches_are_refused():
    class Other:
        pass

    with pytest.raises(TypeError, match="type Other cannot be sent"):
        encode_batch(Other())
