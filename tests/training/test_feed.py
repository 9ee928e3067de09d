"""Training on documents that arrive: steps, ranks, resuming, growing folders, ends."""

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from growing import Rows, complete, reopen, write_shard
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.data.views.arriving import DocumentsLate, StreamedRecords
from multipack.data.views.corpus import load_corpus
from multipack.models.decoder import Decoder
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.shapes import SHAPES
from multipack.training.checks import check
from multipack.training.run_config import compose
from multipack.training.stream_feed import StreamFeed
from multipack.training.train import train

LENGTHS = np.random.default_rng(8).lognormal(2.5, 0.8, 90).clip(2, 60).astype(int)


@dataclass(frozen=True)
class Linked(World):
    """One of several ranks that are threads of this process."""

    barrier: threading.Barrier = None
    brought: dict = None

    def sum(self, values):
        """Element-wise sum over the threads."""
        self.brought[self.rank] = values
        self.barrier.wait(10)
        total = [sum(each) for each in zip(*(self.brought[rank] for rank in range(self.size)), strict=True)]
        self.barrier.wait(10)
        return total


def on_two_ranks(run):
    """The results of `run(rank, world)` on two ranks."""
    barrier, brought = threading.Barrier(2), {}
    with ThreadPoolExecutor(2) as ranks:
        worlds = [Linked(rank, 2, barrier=barrier, brought=brought) for rank in range(2)]
        return list(ranks.map(run, range(2), worlds))


def thirty(number):
    """The documents of a shard."""
    for document in range(30 * number, 30 * number + 30):
        yield f"doc{document}", [([(document + i) % 250 for i in range(LENGTHS[document])], True)]


@pytest.fixture
def folder(tmp_path):
    """Three complete shards of 30 documents."""
    path = tmp_path / "shards"
    for number in range(3):
        write_shard(path, thirty(number))
    complete(path)
    return path


def config_of(path, *words):
    fixed = "data.source=store data.stream=true data.validation=0 data.patience_seconds=60 train.steps=1000"
    plan = "model=tiny model.layers=1 plan.capacity=64 plan.packs_per_step=4 plan.window=2"
    return compose([*fixed.split(), *plan.split(), f"data.path={path}", *words])


def feed_of(path, *words, world=None):
    config = config_of(path, *words)
    arriving = load_corpus(config.data, config.tokenizer, limit=64).arriving
    return StreamFeed(
        config, Mesh.plain(world or World()), arriving, CostModel.from_shape(), time.perf_counter
    )


def summary(data):
    """What does not depend on the rank."""
    return data.index, sorted(data.documents.tolist()), data.target_tokens, data.denominator


def trained(feed, model, steps=None):
    """The loss of each step, with a plain optimizer."""
    losses = []
    for data in itertools.islice(feed, steps):
        model.zero_grad()
        total = sum(model(batch) for batch in data.micro_batches) / data.denominator
        total.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        losses.append(total.item())
    feed.close()
    return losses


def tiny():
    torch.manual_seed(0)
    return Decoder(replace(SHAPES["tiny"].with_vocabulary(257), layers=1))


def test_documents_without_targets_are_refused(tmp_path):
    path = tmp_path / "shards"
    write_shard(path, [(f"doc{document}", [([1, 2, 3], False)]) for document in range(30)])
    complete(path)
    with pytest.raises(ValueError, match=r"none of the \d+ documents of the first step has a target token"):
        next(iter(feed_of(path)))
    assert next(iter(feed_of(path, "data.train_on_prompt=true"))).target_tokens > 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_document_is_trained_on_once(folder, prefetch):
    feed = feed_of(folder, f"train.prefetch={prefetch}")
    steps = list(feed)
    feed.close()
    assert feed.ended
    assert sorted(np.concatenate([data.documents for data in steps]).tolist()) == list(range(90))
    for data in steps:
        assert len(data.micro_batches) == 4
        assert data.lengths.tolist() == LENGTHS[data.documents].tolist()
        assert data.target_tokens == sum(batch.num_target_tokens for batch in data.micro_batches)
        assert data.denominator == data.target_tokens
        assert data.cost_spread == 0.0
        for batch, pack in zip(data.micro_batches, data.packs, strict=True):
            assert list(batch.lengths)[: len(pack)] == LENGTHS[pack].tolist()
            assert [int(batch.input_ids[at]) for at in batch.cu_seqlens[: len(pack)]] == (pack % 250).tolist()
    last = steps[-1].documents[0]
    assert feed.name(last) == f"shard {last // 30}: doc{last}"
    assert feed.name(0) == f"document 0 of {folder}"


@pytest.mark.parametrize("stop", [0, 3])
def test_two_ranks_share_the_steps_of_one(folder, stop):
    single = [summary(data) for data in feed_of(folder)]
    first = feed_of(folder)
    assert [summary(data) for data in itertools.islice(first, stop)] == single[:stop]
    state = first.state_dict()

    def run(rank, world):
        feed = feed_of(folder, world=world)
        feed.load_state_dict(state)
        steps = list(feed)
        feed.close()
        return steps

    found = on_two_ranks(run)
    assert [summary(data) for data in found[0]] == [summary(data) for data in found[1]] == single[stop:]
    for one, other in zip(*found, strict=True):
        assert len(one.micro_batches) == len(other.micro_batches) == 2
        own = [batch.num_target_tokens for data in (one, other) for batch in data.micro_batches]
        assert sum(own) == one.target_tokens
        assert 0 <= one.cost_spread < 1


def test_ranks_that_read_different_documents_stop(folder, tmp_path):
    other = tmp_path / "other"
    write_shard(other, thirty(1))  # the second shard's documents come first
    complete(other)

    def run(rank, world):
        feed = feed_of((folder, other)[rank], world=world)
        with pytest.raises(ValueError, match="ranks read different documents"):
            list(feed)
        feed.close()

    on_two_ranks(run)


@pytest.mark.parametrize(("source", "stop"), [("folder", 0), ("folder", 6), ("records", 4)])
def test_a_resumed_run_equals_an_uninterrupted_one(folder, source, stop):
    def made():
        if source == "folder":
            return feed_of(folder)
        config = config_of("some/set", "data.source=huggingface", "data.overlong=split", "data.overlap=4")
        records = [{"prompt": f"{n}:", "completion": "y" * int(length)} for n, length in enumerate(LENGTHS)]
        arriving = StreamedRecords(config.data, 24, TokenizerConfig(kind="byte"), lambda: Rows(records))
        return StreamFeed(config, Mesh.plain(World()), arriving, CostModel.from_shape(), time.perf_counter)

    model = tiny()
    whole = trained(made(), model)
    first, half = made(), tiny()
    losses = trained(first, half, stop) if stop else []
    state = json.loads(json.dumps(first.state_dict()))
    second = made()
    second.load_state_dict(state)
    assert losses + trained(second, half) == whole
    assert second.ended
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), half.parameters(), strict=True))


def test_a_run_trains_until_its_stream_ends(folder, tmp_path, capsys):
    more = ["train.eval_every=0", "log.verbose=true"]
    result = train(config_of(folder, *more, "plan.budget=48", f"out={tmp_path / 'run'}"))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"ended after step {result.step} of 1000: the stream of documents has ended" in printed


def test_all_ranks_end_when_documents_come_too_late_for_one(folder):
    def late(steps):
        yield from itertools.islice(steps, 2)
        raise DocumentsLate("waited too long")

    def run(rank, world):
        feed = feed_of(folder, world=world)
        if rank:
            feed._collated = partial(late, feed._collated())
        return [summary(data) for data in feed], feed.late, feed.ended

    (steps, here, ended), (others, there, _) = on_two_ranks(run)
    assert steps == others
    assert len(steps) == 2
    assert not ended
    assert here == "documents came too late on 1 of 2 ranks, and here in time"
    assert there == "waited too long"


def test_a_stop_while_waiting_loses_nothing(folder):
    reopen(folder)
    feed = feed_of(folder, "data.patience_seconds=100")
    threading.Timer(0.3, feed.interrupt).start()
    head = [summary(data) for data in feed]
    assert not feed.ended  # there may be more
    state = json.loads(json.dumps(feed.state_dict()))
    feed.close()
    complete(folder)
    second = feed_of(folder)
    second.load_state_dict(state)
    assert head + [summary(data) for data in second] == [summary(data) for data in feed_of(folder)]
    assert second.ended


def test_a_run_whose_documents_are_late_is_saved_and_resumes(tmp_path, capsys):
    path = tmp_path / "shards"
    for _ in range(2):
        write_shard(path, [(f"doc{document}", [([document % 250] * 20, True)]) for document in range(120)])
    words = ["data.patience_seconds=0.2", "train.eval_every=0"]
    feed = feed_of(path, *words)
    steps = len(list(feed))
    feed.close()
    assert steps > 0
    assert not feed.ended
    assert "waited 0.2 s for" in feed.late
    words.append(f"out={tmp_path / 'run'}")
    with pytest.raises(ValueError, match=rf"shard 2 of .*train\.resume.*saved after step {steps}\)"):
        train(config_of(path, *words))
    complete(path)
    capsys.readouterr()
    result = train(config_of(path, *words, "train.resume=true"))
    assert f"continuing after step {steps}" in capsys.readouterr().out
    assert result.step > steps


def test_impossible_settings_and_states_are_refused(folder):
    with pytest.raises(ValueError, match=r"set train\.steps"):
        check(config_of(folder, "train.steps=0"), 1)
    with pytest.raises(ValueError, match=r"5 data-parallel ranks cannot share plan\.packs_per_step=4"):
        check(config_of(folder), 5)
    with pytest.raises(ValueError, match="tail keep or drop"):
        feed_of(folder, "plan.tail=carry")
    state = feed_of(folder, "plan.capacity=128").state_dict()
    with pytest.raises(ValueError, match="capacity from 128 to 64"):
        feed_of(folder).load_state_dict(state)


def test_prompts_and_validation_come_from_held_back_documents(folder):
    config = config_of(folder, "data.validation=0.2")
    corpus = load_corpus(config.data, config.tokenizer, limit=64)
    assert len(corpus.validation) == 6
    assert (len(corpus.train), corpus.store_path) == (0, folder)
    assert corpus.prompts
    feed = StreamFeed(config, Mesh.plain(World()), corpus.arriving, CostModel.from_shape(), time.perf_counter)
    assert sum(len(data.documents) for data in feed) == 84
    feed.close()
