"""Preference optimization on packs against the padded computation, each answer alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from multipack.data.collate import PreferenceCollator
from multipack.data.documents import Document
from multipack.models.dpo import PreferenceDecoder, preference_metrics

VOCABULARY = 50
SIZES = ((2, 5, 3), (4, 1, 6), (1, 7, 7), (3, 2, 9))
"""Tokens of prompt, chosen answer and rejected answer."""
PLAN = SimpleNamespace(most_documents=4, longest=64, align=1, loss_weighting="document")


@pytest.fixture
def pairs():
    made = []
    for seed, (prompt, chosen, rejected) in enumerate(SIZES):
        draw, answers = np.random.default_rng(seed), []
        begin = draw.integers(0, VOCABULARY, prompt)
        for size in (chosen, rejected):
            tokens = np.concatenate([begin, draw.integers(0, VOCABULARY, size)]).astype(np.uint16)
            answers.append(Document(tokens, np.array([[prompt, prompt + size]], dtype=np.int64)))
        reference = -3.0 * draw.random(2) * (chosen, rejected)
        made.append((*answers, reference))
    return made


@pytest.fixture
def decoder(shape, model):
    """A preference decoder with the weights of `model`."""
    made = PreferenceDecoder(shape, beta=0.3)
    made.load_state_dict(model.state_dict())
    return made


def padded_loss(model, pairs, beta, label_smoothing=0.0):
    """The usual computation: one row per answer, with a mask of the targets."""
    answers = [half for chosen, rejected, _ in pairs for half in (chosen, rejected)]
    log_probabilities = []
    for answer in answers:
        batch = PreferenceCollator.of(PLAN).packed([answer])
        logits = model.logits(batch)
        each = torch.gather(
            F.log_softmax(logits, -1), 1, torch.from_numpy(answer.shifted_targets()).clamp(min=0)[:, None]
        )
        log_probabilities.append((each[:, 0] * torch.from_numpy(answer.shifted_targets() >= 0)).sum())
    policy = torch.stack(log_probabilities).view(-1, 2)
    reference = torch.from_numpy(np.stack([reference for _, _, reference in pairs])).to(policy.dtype)
    ratios = policy - reference
    x = beta * (ratios[:, 0] - ratios[:, 1])
    loss = -(1 - label_smoothing) * torch.log(torch.sigmoid(x)) - label_smoothing * torch.log(
        torch.sigmoid(-x)
    )
    return loss.sum(), policy


@pytest.mark.parametrize(("label_smoothing", "pad_to"), [(0.0, None), (0.2, 80)])
def test_loss_and_gradients_equal_the_padded_computation(
    decoder, pairs, gradients, distance, label_smoothing, pad_to
):
    decoder.label_smoothing = label_smoothing
    batch = PreferenceCollator.of(PLAN, pad_to)(pairs)
    loss = decoder(batch)
    loss.backward()
    ours = gradients(decoder)
    decoder.zero_grad()
    expected, policy = padded_loss(decoder, pairs, 0.3, label_smoothing)
    expected.backward()
    assert loss.dtype == torch.float32
    assert abs(loss - expected) < 1e-5 * expected
    assert distance(ours, gradients(decoder)) < 1e-5
    assert distance(decoder.pair_log_probabilities(batch), policy) < 1e-6


def test_a_pack_without_pairs_is_zero_and_reaches_every_parameter(decoder):
    loss = decoder(PreferenceCollator.of(PLAN)([]))
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_without_reference_values_it_returns_log_probabilities(decoder, pairs, pack, documents):
    unknown = [(chosen, rejected, None) for chosen, rejected, _ in pairs]
    batch = PreferenceCollator.of(PLAN)(unknown)
    with torch.no_grad():
        found = decoder.eval()(batch)
    assert found.shape == (4, 2)
    assert found.dtype == torch.float64
    with pytest.raises(ValueError, match="no reference values"):
        decoder.train()(batch)
    with pytest.raises(ValueError, match="PreferenceCollator"):
        decoder(pack(documents))


def test_metrics_are_means_over_pairs_by_mode(decoder, pairs):
    collate = PreferenceCollator.of(PLAN)
    decoder(collate(pairs[:3]))
    decoder(collate(pairs[3:]))
    decoder.eval()(collate(pairs[:1]))
    policy = padded_loss(decoder, pairs, 0.3)[1].detach()
    rewards = 0.3 * (policy.double() - torch.from_numpy(np.stack([reference for _, _, reference in pairs])))
    expected = {
        "reward_accuracy": float((rewards[:, 0] > rewards[:, 1]).double().mean()),
        "reward_margin": float((rewards[:, 0] - rewards[:, 1]).mean()),
        "reward_chosen": float(rewards[:, 0].mean()),
        "reward_rejected": float(rewards[:, 1].mean()),
    }
    assert preference_metrics(decoder.take_tally()) == pytest.approx(expected, abs=1e-5)
    assert decoder.take_tally() == [0.0] * 5
    assert decoder.take_tally(training=False)[0] == 1
    assert preference_metrics([0.0] * 5) == {}
    assert set(preference_metrics([1.0] * 5, "val_")) == {f"val_{name}" for name in expected}
