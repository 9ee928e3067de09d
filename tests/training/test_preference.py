"""Reference log-probabilities computed once and kept, and preferences that are learned."""

from __future__ import annotations

import gzip
import json
import math
import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.preference import PreferenceCollator, PreferencePairs
from multipack.data.sampler import PackedBatchSampler
from multipack.data.store import TokenStore
from multipack.data.tokenizer import byte_tokenizer, train_bpe
from multipack.data.writer import StoreWriter
from multipack.models.dpo import PreferenceDecoder
from multipack.parallel.engine import ModelEngine
from multipack.parallel.materialize import weights_hash
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.shapes import ModelShape
from multipack.training import preference
from multipack.training.preference import (
    PREFERENCE_LEGEND,
    PreferenceMetrics,
    reference_log_probabilities,
)

SHAPE = ModelShape(2, 2, 1, 32, 48, vocabulary_size=257)
CAPACITY = 96


@pytest.fixture
def pairs(tmp_path):
    """Twenty pairs of bytes."""
    draw, tokenizer = np.random.default_rng(4), byte_tokenizer()
    with StoreWriter(tmp_path / "pairs.store", tokenizer, pairs=True) as writer:
        for number in range(20):
            prompt, chosen, rejected = (
                draw.integers(97, 123, size).tolist() for size in draw.integers(1, 20, 3)
            )
            for answer in (chosen, rejected):
                writer.add(f"pair {number}", [(prompt, False), (answer, True)])
    return Documents.whole(TokenStore(tmp_path / "pairs.store"))


@pytest.fixture
def decoder():
    torch.manual_seed(2)
    return PreferenceDecoder(SHAPE, beta=0.2)


def engine_of(decoder, dtype=torch.float32, lr=1e-3):
    return ModelEngine([decoder], torch.optim.AdamW(decoder.parameters(), lr=lr), Mesh(World()), dtype)


def ask(decoder, documents, **options):
    engine = engine_of(decoder)
    settings = {
        "weights": weights_hash(engine.whole_parameters()),
        "dtype": torch.float32,
        "capacity": CAPACITY,
        **options,
    }
    return reference_log_probabilities(
        engine.evaluating, documents, documents.store.path, Mesh(World()), **settings
    )


@contextmanager
def never():
    raise AssertionError("the reference was asked again")
    yield


def test_the_reference_gives_each_pair_what_it_gives_it_alone(decoder, pairs):
    found = ask(decoder, pairs)
    assert found.values.shape == (20, 2)
    assert found.note.startswith("reference log-probabilities of 20 pairs computed and kept in")
    plan = PackedBatchSampler(pairs.lengths, capacity=CAPACITY, packs_per_step=1)
    collate, each = PreferenceCollator.of(plan), PreferencePairs(pairs)
    for number in range(20):
        with torch.no_grad():
            alone = decoder.eval()(collate([each[number]]))
        np.testing.assert_allclose(found.values[number], alone[0].numpy(), rtol=1e-6)


def test_it_is_kept_beside_the_store_and_read_by_later_runs(decoder, pairs):
    first = ask(decoder, pairs)
    assert first.file.parent == pairs.store.path
    again = reference_log_probabilities(
        never,
        pairs,
        pairs.store.path,
        Mesh(World()),
        weights=weights_hash(decoder.named_parameters()),
        dtype=torch.float32,
        capacity=4 * CAPACITY,
    )
    assert np.array_equal(first.values, again.values)
    assert again.file == first.file
    TokenStore(pairs.store.path).verify()  # the store itself is what it was


def test_other_weights_pairs_or_precisions_have_files_of_their_own(decoder, pairs):
    files = {ask(decoder, pairs).file, ask(decoder, pairs.take(range(10))).file}
    files.add(ask(decoder, pairs, dtype=torch.bfloat16).file)
    with torch.no_grad():
        decoder.norm.weight[0] += 1
    files.add(ask(decoder, pairs).file)
    assert len(files) == 4


@pytest.mark.parametrize("damage", ["truncate", "other", "shape", "infinite"])
def test_a_file_that_is_wrong_is_made_anew(decoder, pairs, damage):
    from safetensors.torch import load_file, save_file

    first = ask(decoder, pairs)
    values = load_file(first.file)["log_probabilities"]
    metadata = {"format": "multipack-reference-1"}
    if damage == "truncate":
        os.truncate(first.file, 100)
    elif damage == "other":
        save_file({"log_probabilities": values + 1}, first.file, metadata=metadata)
    else:
        with preference.safe_open(first.file, "pt") as opened:
            metadata = opened.metadata()
        wrong = values[:3].clone() if damage == "shape" else torch.full_like(values, -math.inf)
        save_file({"log_probabilities": wrong}, first.file, metadata=metadata)
    again = ask(decoder, pairs)
    assert again.note.startswith(f"{first.file.name} was not usable (")
    assert np.array_equal(again.values, first.values)
    assert "from" in ask(decoder, pairs).note


def test_a_folder_that_takes_no_file_is_told(decoder, pairs, monkeypatch):
    def refuse(path, content):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(preference, "write_atomically", refuse)
    assert "not kept ([Errno 13] Permission denied" in ask(decoder, pairs).note


def test_weights_that_are_not_finite_cannot_be_a_reference(decoder, pairs):
    with torch.no_grad():
        decoder.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match=r"the reference model gives pair 0 .*preference\.reference"):
        ask(decoder, pairs)


def test_no_pairs_need_no_reference(decoder, pairs):
    assert ask(decoder, pairs.take([])).values.shape == (0, 2)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_compute_shares_that_add_up(decoder, pairs, size):
    whole, parts = ask(decoder, pairs).values, np.zeros((20, 2))
    engine = engine_of(decoder)
    for rank in range(size):
        share = np.zeros((20, 2))
        preference._compute(
            share,
            engine.evaluating,
            pairs,
            Mesh.plain(World(rank=rank, size=size)),
            CAPACITY,
            (None, 1),
            None,
        )
        assert not (parts.any(axis=1) & share.any(axis=1)).any()
        parts += share
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


def test_fixed_shapes_give_the_same(decoder, pairs):
    np.testing.assert_allclose(
        ask(decoder, pairs, pad_to=CAPACITY, weights="a").values, ask(decoder, pairs).values, rtol=1e-6
    )


def test_the_initial_loss_is_that_of_a_coin(decoder, pairs):
    reference = ask(decoder, pairs).values
    engine, feed = train_feed(decoder, pairs, reference)
    result = engine.forward_backward(feed, 20)
    assert sum(result.losses) / 20 == pytest.approx(math.log(2), abs=1e-5)
    metrics = PreferenceMetrics(decoder).gradient(1, engine)
    assert metrics.keys() == PREFERENCE_LEGEND.keys()
    assert abs(metrics["reward_margin"]) < 1e-5


def train_feed(decoder, documents, reference, capacity=CAPACITY, lr=1e-3):
    """An engine, and all packs of an epoch."""
    sampler = PackedBatchSampler(
        documents.lengths,
        capacity=capacity,
        packs_per_step=1,
        targets=documents.target_counts,
        loss_weighting="document",
    )
    pairs = PreferencePairs(documents, reference)
    assert sum(sampler.plan.denominator(step) for step in range(sampler.plan.num_steps)) == len(documents)
    loader = PackedLoader(pairs, sampler, PreferenceCollator.of(sampler), prefetch=0)
    return engine_of(decoder, lr=lr), list(loader)


def test_real_preferences_are_learned(shared_data, tmp_path):
    """Accuracy on the pairs that are trained on rises from that of a coin to nearly all."""
    with gzip.open(shared_data / "text" / "dpo_en_demo_300.json.gz", "rt") as file:
        records = json.load(file)
    texts = [
        [
            record["conversations"][-1]["value"][-120:],
            record["chosen"]["value"][:160],
            record["rejected"]["value"][:160],
        ]
        for record in records
    ]
    texts = [each for each in texts if each[1] != each[2]][:48]
    tokenizer = train_bpe((text for each in texts for text in each), 512)
    with StoreWriter(tmp_path / "pairs.store", tokenizer, pairs=True) as writer:
        for number, each in enumerate(texts):
            prompt, chosen, rejected = (tokenizer.encode(text) for text in each)
            for answer in (chosen, rejected):
                writer.add(f"{number}", [(prompt, False), ([*answer, tokenizer.end_id], True)])
    documents = Documents.whole(TokenStore(tmp_path / "pairs.store"))
    torch.manual_seed(0)
    decoder = PreferenceDecoder(
        ModelShape(2, 2, 1, 32, 64, vocabulary_size=tokenizer.vocabulary_size), beta=0.1
    )
    reference = ask(decoder, documents, capacity=2048).values
    engine, packs = train_feed(decoder, documents, reference, capacity=2048, lr=3e-3)
    metrics, losses = PreferenceMetrics(decoder), []
    for epoch in range(8):
        for batch in packs:
            losses.append(engine.forward_backward([batch], batch.denominator).losses[0] / batch.denominator)
            last = metrics.gradient(epoch, engine)
            engine.clip(1.0)
            engine.step(3e-3)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    with engine.evaluating() as model:
        loss = sum(float(model(batch)) for batch in packs) / len(documents)
    pairs, accurate, margin, *_ = decoder.take_tally(training=False)
    assert pairs == len(documents)
    assert accurate / pairs > 0.9
    assert margin / pairs > 0.5
    assert loss < 0.5
    assert last["reward_margin"] > 0
