"""Preference optimization on packs against the padded computation, each answer alone."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from multipack.data.packs.collate import PreferenceCollator, PreferencePair
from multipack.data.views.documents import Document
from multipack.models.objectives import LOSSES
from multipack.models.preference import PreferenceDecoder
from multipack.training.settings import PreferenceConfig

VOCABULARY = 50
SIZES = ((2, 5, 3), (4, 1, 6), (1, 7, 7), (3, 2, 9))
"""Tokens of prompt, chosen answer and rejected answer."""
PLAN = SimpleNamespace(most_documents=4, longest=64, min_prefix=None, loss_weighting="document")


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
        made.append(PreferencePair(*answers, reference))
    return made


@pytest.fixture
def decoder(shape, model):
    """A preference decoder with the weights of `model`."""
    made = PreferenceDecoder(shape, beta=0.3)
    made.load_state_dict(model.state_dict())
    return made


def padded_loss(model, pairs, beta, label_smoothing=0.0):
    """The usual computation: one row per answer, with a mask of the targets."""
    answers = [half for chosen, rejected, *_ in pairs for half in (chosen, rejected)]
    log_probabilities = []
    for answer in answers:
        batch = PreferenceCollator.of(PLAN).packed([answer])
        logits = model.logits(batch)
        each = torch.gather(
            F.log_softmax(logits, -1), 1, torch.from_numpy(answer.shifted_targets()).clamp(min=0)[:, None]
        )
        log_probabilities.append((each[:, 0] * torch.from_numpy(answer.shifted_targets() >= 0)).sum())
    policy = torch.stack(log_probabilities).view(-1, 2)
    reference = torch.from_numpy(np.stack([pair.reference for pair in pairs])).to(policy.dtype)
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
    decoder.options["label_smoothing"] = label_smoothing
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


def expected_loss(name, policy, reference, counts, beta, margin):
    """The formulas of the papers, pair by pair, in Python's floats."""
    total = 0.0
    for (chosen, rejected), (of_chosen, of_rejected), (m, n) in zip(policy, reference, counts, strict=True):
        x = (chosen - rejected) - (of_chosen - of_rejected)
        odds = [p - math.log1p(-math.exp(p)) for p in (chosen / m, rejected / n)]
        total += {
            "robust": lambda x=x: (0.8 * softplus(-beta * x) - 0.2 * softplus(beta * x)) / 0.6,
            "hinge": lambda x=x: max(0.0, 1 - beta * x),
            "ipo": lambda a=(chosen - of_chosen) / m, b=(rejected - of_rejected) / n: (
                (a - b - 1 / (2 * beta)) ** 2
            ),
            "simpo": lambda a=chosen / m, b=rejected / n: softplus(margin - beta * (a - b)),
            "orpo": lambda a=chosen / m, odds=odds: -a + beta * softplus(odds[1] - odds[0]),
        }[name]()
    return total


def softplus(x):
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("name", ["robust", "hinge", "ipo", "simpo", "orpo"])
def test_other_losses_equal_their_formulas(shape, model, pairs, name):
    options = {"robust": {"label_smoothing": 0.2}, "simpo": {"margin": 0.7}}.get(name, {})
    made = PreferenceDecoder(shape, loss=name, beta=0.3, **options).double()
    made.load_state_dict(model.state_dict())
    policy = padded_loss(made, pairs, 0.3)[1].tolist()
    counts = [(chosen, rejected) for _, chosen, rejected in SIZES]
    reference = [pair.reference.tolist() for pair in pairs]
    batch = PreferenceCollator.of(PLAN)(pairs)
    expected = expected_loss(name, policy, reference, counts, 0.3, 0.7)
    assert made(batch).item() == pytest.approx(expected, rel=1e-9)
    found = made.loss.means(made.take_tally())
    if name in ("simpo", "orpo"):  # without a reference, rewards are of log-probabilities per token
        values = [
            (chosen / m, rejected / n) for (chosen, rejected), (m, n) in zip(policy, counts, strict=True)
        ]
    else:
        values = (np.array(policy) - np.array(reference)).tolist()
    assert found["reward_chosen"] == pytest.approx(0.3 * np.mean([chosen for chosen, _ in values]))
    assert found["reward_rejected"] == pytest.approx(0.3 * np.mean([rejected for _, rejected in values]))
    made.options["sft"] = 0.5
    extra = -0.5 * sum(chosen / m for (chosen, _), (m, _) in zip(policy, counts, strict=True))
    assert made(batch).item() == pytest.approx(expected + extra, rel=1e-9)
    weight = made.blocks[0].feed_forward.up.weight  # a step along the gradient changes the loss as it says
    made(batch).backward()
    step = 1e-6 * weight.grad / weight.grad.norm()
    with torch.no_grad():
        weight += step
        above = made(batch).item()
        weight -= 2 * step
        below = made(batch).item()
    assert (above - below) / 2e-6 == pytest.approx(weight.grad.norm().item(), rel=1e-5)


def test_kto_equals_its_formula_and_weighs_items(shape, model, pairs):
    """λ (1 − σ(β (r − z))) of desirable answers, λ (1 − σ(β (z − r))) of others; z is never negative."""
    made = PreferenceDecoder(shape, loss="kto", beta=0.3, desirable=1.5, undesirable=0.5).double()
    made.load_state_dict(model.state_dict())
    policy = padded_loss(made, pairs, 0.3)[1]
    ratios = (policy - torch.from_numpy(np.stack([pair.reference for pair in pairs]))).tolist()
    labels = ((1.0, True), (1.0, False), (2.0, True), (0.0, False))
    batch = PreferenceCollator.of(PLAN)(
        [
            pair._replace(weight=weight, is_desirable=label)
            for pair, (weight, label) in zip(pairs, labels, strict=True)
        ]
    )
    assert batch.denominator == 4.0
    right = []
    for kl in (0.0, 1.7, -3.0):
        made.last["kl"] = kl
        expected = 0.0
        for (ratio, _), (weight, label) in zip(ratios, labels, strict=True):
            gain = 0.3 * (ratio - max(kl, 0.0)) * (1 if label else -1)
            expected += (1.5 if label else 0.5) * weight / (1 + math.exp(gain))
            right.append(gain > 0)
        assert made(batch).item() == pytest.approx(expected, rel=1e-9)
    found = made.loss.means(made.take_tally())
    assert found["kl"] == pytest.approx(np.mean([other for _, other in ratios]))
    assert found["reward_accuracy"] == pytest.approx(np.mean(right))
    assert found["reward_rejected"] == pytest.approx(0.3 * (ratios[1][0] + ratios[3][0]) / 2)
    assert found["reward_margin"] == pytest.approx(found["reward_chosen"] - found["reward_rejected"])


@pytest.mark.parametrize("pad_to", [None, 80])
def test_rewards_are_values_at_last_tokens(shape, pairs, gradients, distance, pad_to):
    torch.manual_seed(4)
    made = PreferenceDecoder(replace(shape, scores=1), loss="reward")
    loss = made(PreferenceCollator.of(PLAN, pad_to)(pairs))
    loss.backward()
    ours = gradients(made)
    made.zero_grad()
    alone = PreferenceCollator.of(PLAN).packed
    values = [made.logits(alone([each]))[-1, 0] for pair in pairs for each in (pair.first, pair.second)]
    policy = torch.stack(values).view(-1, 2)
    expected = -torch.log(torch.sigmoid(policy[:, 0] - policy[:, 1])).sum()
    expected.backward()
    policy = policy.detach()
    assert abs(loss - expected) < 1e-5 * expected
    assert distance(ours, gradients(made)) < 1e-5
    found = made.loss.means(made.take_tally())
    assert found["reward_accuracy"] == float((policy[:, 0] > policy[:, 1]).double().mean())
    assert found["reward_chosen"] == pytest.approx(float(policy[:, 0].mean()), abs=1e-5)
    for loss, scores in (("reward", 0), ("sigmoid", 1)):
        with pytest.raises(ValueError, match=rf"preference\.loss={loss} needs model\.scores={1 - scores}"):
            PreferenceDecoder(replace(shape, scores=scores), loss=loss)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "ipo", "label_smoothing": 0.1}, "sigmoid and robust, got ipo"),
        ({"loss": "orpo", "reference": "runs/first"}, "has no reference model"),
        ({"sft": -1.0}, r"preference\.sft=-1\.0"),
        (
            {"loss": "sigmoid", "margin": 1.0},
            r"preference\.margin=1\.0 is of preference\.loss=simpo, got sigmoid",
        ),
        ({"loss": "dop"}, r"preference\.loss=dop is not one of auto, sigmoid, .*orpo"),
    ],
)
def test_settings_without_effect_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PreferenceConfig(**fields)


def test_a_pack_without_pairs_is_zero_and_reaches_every_parameter(decoder):
    loss = decoder(PreferenceCollator.of(PLAN)([]))
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_without_reference_values_it_returns_log_probabilities(decoder, pairs, pack, documents):
    unknown = [pair._replace(reference=None) for pair in pairs]
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
    rewards = 0.3 * (policy.double() - torch.from_numpy(np.stack([pair.reference for pair in pairs])))
    expected = {
        "reward_accuracy": float((rewards[:, 0] > rewards[:, 1]).double().mean()),
        "reward_margin": float((rewards[:, 0] - rewards[:, 1]).mean()),
        "reward_chosen": float(rewards[:, 0].mean()),
        "reward_rejected": float(rewards[:, 1].mean()),
    }
    row = LOSSES["sigmoid"]
    assert row.means(decoder.take_tally()) == pytest.approx(expected, abs=1e-5)
    assert decoder.take_tally() == [0.0] * 6
    assert decoder.take_tally(training=False)[1] == 1
    assert row.means([0.0] * 6) == {}
    assert set(row.means([1.0] * 6, "val_")) == {f"val_{name}" for name in expected}
