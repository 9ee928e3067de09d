"""Reader ranks: the same packs, asked of storage by readers alone; errors reach all ranks; no deadlock."""

import os
import signal
import threading
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.data.packs.loader import PackedLoader
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import StoreWriter
from multipack.data.text.tokenizer import byte_tokenizer
from multipack.data.views.documents import Documents
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.readers import ScatteredLoader, open_loader, opens_tokens
from multipack.parallel.world import World

SECONDS = 20.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of very different lengths, most of them with a prompt."""
    path = tmp_path_factory.mktemp("readers") / "corpus"
    draw = np.random.default_rng(3)
    with StoreWriter(path, byte_tokenizer()) as writer:
        for number in range(90):
            length = int(np.clip(draw.lognormal(3.0, 0.8), 3, 120))
            prompt = int(draw.integers(0, length - 1))
            tokens = [number % 5, *draw.integers(0, 256, length - 1).tolist()]
            writer.add(f"doc{number}", [(tokens[:prompt], False), (tokens[prompt:], True)])
    return str(path)


def parts(path, mesh, capacity=128):
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
    )
    return store, documents, sampler, replace(PackedCollator.of(sampler), min_prefix=1)


def content(batch):
    """Everything that a batch holds, comparable."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if values.get("tree") is not None:
        values["tree"] = content(values["tree"])
    return {
        name: (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def threads():
    """The threads of loaders that do not end in a moment."""
    made = [thread for thread in threading.enumerate() if thread.name.startswith("multipack-loader")]
    for thread in made:
        thread.join(0.2)
    return [thread for thread in made if thread.is_alive()]


def equal(world, path, options, readers, prefetch):
    mesh = build_mesh(ParallelConfig(**options), world)
    _, documents, sampler, collator = parts(path, mesh)
    own, expected = PackedLoader(documents, sampler, collator, prefetch), []
    for epoch in range(2):
        own.set_epoch(epoch)
        expected.append([content(batch) for batch in own])
    store, documents, sampler, collator = parts(path, mesh)
    loader = open_loader(documents, sampler, collator, mesh, readers=readers, prefetch=prefetch)
    assert isinstance(loader, ScatteredLoader)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert [content(batch) for batch in loader] == expected[epoch]
    assert any(batch["tree"] for batch in expected[0])
    assert not threads()
    assert opens_tokens(mesh, readers) == (loader.reader == world.rank)
    return store.bytes_asked


@pytest.mark.parametrize(
    ("size", "options", "readers", "opens"),
    [
        (2, {}, 1, [0]),
        (4, {}, 3, [0, 2]),  # each serves two, so that the third has no ranks to serve
        pytest.param(4, {"tensor": 2}, 2, [0, 2], marks=pytest.mark.slow),  # one rank of each model replica
        pytest.param(4, {"pipeline": 2}, 2, [0, 1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_rank_gets_the_packs_that_it_would_have_read(pools, corpus, size, options, readers, opens):
    found = pools(size).run(equal, corpus, options, readers, 0 if size == 2 else 2)
    store = TokenStore(corpus)
    once = 2 * store.num_tokens + 16 * sum(
        len(store.spans_of(number)) for number in range(store.num_documents)
    )
    assert [rank for rank, asked in enumerate(found) if asked] == opens
    assert sum(found) == 2 * once  # two epochs, nothing twice


def resumed(world, path, taken):
    mesh = build_mesh(ParallelConfig(), world)

    def fresh():
        _, documents, sampler, collator = parts(path, mesh)
        return open_loader(documents, sampler, collator, mesh, readers=1, prefetch=3)

    first = fresh()
    first.set_epoch(2)
    batches = iter(first)
    begun = [content(next(batches)) for _ in range(taken)]
    state = first.state_dict()
    if world.is_main:  # ranks need not end at the same time
        first.close()
    world.barrier()
    first.close()
    assert not threads()
    whole = [content(batch) for batch in first]
    second = fresh()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert begun + [content(batch) for batch in second] == whole
    first.load_state_dict(state)  # an iteration that was ended leaves nothing between the ranks
    assert [content(batch) for batch in first] == whole[taken:]
    return state["step"] * 4 + state["micro_batch"]


def test_the_state_is_exact_and_iterations_may_end_anywhere(pools, corpus):
    assert pools(2).run(resumed, corpus, 5) == [5, 5]


def ahead(world, path, prefetch):
    """A collator that stands still shows what was made before."""
    mesh = build_mesh(ParallelConfig(), world)
    _, documents, sampler, collator = parts(path, mesh)
    gate, made = threading.Event(), threading.Semaphore(0)
    gate.set()

    def gated(pack):
        assert gate.wait(SECONDS)
        made.release()
        return collator(pack)

    loader = open_loader(documents, sampler, gated, mesh, readers=1, prefetch=prefetch)
    batches = iter(loader)
    taken = [content(next(batches))]
    if loader.reader == world.rank:
        for _ in range(mesh.data_size * (1 + prefetch)):
            assert made.acquire(timeout=SECONDS)
        assert not made.acquire(blocking=False)  # and no further
        gate.clear()
    world.barrier()
    taken += [content(next(batches)) for _ in range(prefetch)]
    world.barrier()  # every rank got its packs while no reader could make one
    gate.set()
    taken += [content(batch) for batch in batches]
    sampler.set_epoch(0)
    return taken == [content(batch) for batch in PackedLoader(documents, sampler, collator)]


def test_packs_are_there_before_they_are_asked_for(pools, corpus):
    assert pools(2).run(ahead, corpus, 2) == [True, True]


def failing(world, path, kind, prefetch):
    mesh = build_mesh(ParallelConfig(), world)
    _, documents, sampler, collator = parts(path, mesh)
    calls = []

    def breaking(pack):
        calls.append(1)
        if len(calls) == 2 * world.size:  # the last pack of the second round
            raise kind("token 999 is damaged")
        return collator(pack)

    loader = open_loader(documents, sampler, breaking, mesh, readers=1, prefetch=prefetch)
    batches = iter(loader)
    next(batches)
    try:
        next(batches)
    except Exception as failure:
        told = (type(failure).__name__, str(failure))
    assert not threads()
    calls.clear()
    next(iter(loader))  # the next iteration works
    loader.close()
    return told


@pytest.mark.parametrize(("kind", "prefetch"), [(ValueError, 2), (KeyError, 0)])
def test_an_error_of_the_reader_reaches_all_ranks(pools, corpus, kind, prefetch):
    for name, message in pools(2).run(failing, corpus, kind, prefetch):
        assert name == ("ValueError" if kind is ValueError else "RuntimeError")
        assert message.startswith("rank 0, which reads: ")
        assert "token 999 is damaged" in message
        assert "in a batch of the documents" in message


def two_loaders(world, path):
    """Training and validation read at the same time, between training's own collectives."""
    mesh = build_mesh(ParallelConfig(), world)
    loaders, expected = [], []
    for capacity in (128, 256):
        _, documents, sampler, collator = parts(path, mesh, capacity)
        expected.append([content(batch) for batch in PackedLoader(documents, sampler, collator, 0)])
        loaders.append(open_loader(documents, sampler, collator, mesh, readers=1))
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


def test_two_loaders_do_not_disturb_each_other(pools, corpus):
    pools(2).run(two_loaders, corpus)


def killed(world, path):
    mesh = build_mesh(ParallelConfig(), world)
    _, documents, sampler, collator = parts(path, mesh)
    loader = open_loader(documents, sampler, collator, mesh, readers=1)
    batches = iter(loader)
    next(batches)
    if world.is_main:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in batches:
        pass


def test_a_reader_that_is_gone_is_named(pool_type, corpus):
    with pool_type(2) as pool:
        reader, other = pool.outcomes(killed, corpus, seconds=15)
    assert "exit code -9" in reader.error
    assert "rank 0 reads for rank 1" in other.error


# Without processes


@pytest.mark.parametrize("readers", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "context": 2}], ids=str)
def test_few_ranks_open_tokens(readers, options):
    config = ParallelConfig(**options)
    size = 4 * config.model_ranks
    meshes = [Mesh(World(rank=rank, size=size), config.axes(size)) for rank in range(size)]
    opens = [mesh.data_rank for mesh in meshes if opens_tokens(mesh, readers)]
    expected = list(range(0, 4, -(-4 // readers))) if readers else [mesh.data_rank for mesh in meshes]
    assert opens == expected


@pytest.mark.parametrize(("size", "readers"), [(3, 2), (16, 6), (8, 2)])
def test_ranks_that_read_together_make_a_group_without_the_others(monkeypatch, size, readers):
    """Under nccl torch splits the world's communicator on ranks that are no members: uneven numbers would hang."""
    made = {}

    def new_group(ranks, use_local_synchronization=False, **options):
        assert use_local_synchronization
        made.setdefault(rank, []).append(ranks)

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    for rank in range(size):
        mesh = Mesh.plain(World(rank=rank, size=size))
        open_loader(None, None, None, mesh, readers=readers)
    assert [len(groups) for groups in made.values()] == [1] * size
    assert all(
        made[member] == groups and rank in groups[0] for rank, groups in made.items() for member in groups[0]
    )


def test_a_single_process_reads_for_itself(corpus):
    mesh = Mesh.plain(World())
    _, documents, sampler, collator = parts(corpus, mesh)
    loader = open_loader(documents, sampler, collator, mesh, readers=1)
    own = PackedLoader(documents, parts(corpus, mesh)[2], collator)
    assert [content(batch) for batch in loader] == [content(batch) for batch in own]
    assert not isinstance(open_loader(documents, sampler, collator, mesh), ScatteredLoader)
