"""Runs whose loss is a mean over documents."""

import json

import numpy as np
import pytest
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import IGNORE
from multipack.training.run_config import compose_run
from multipack.training.train import train

DOCUMENT = "train.loss_weighting=document"


def _mean_over_documents(model, documents):
    """The mean over documents of the mean loss of each one alone, from logits in float64."""
    means = []
    for document in (documents[number] for number in range(len(documents))):
        targets = torch.from_numpy(document.shifted_targets())
        if (targets != IGNORE).any():
            alone = PackedCollator(1, len(document.tokens))([document])
            logits = model.logits(alone).double()
            means.append(torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE))
    return torch.stack(means).mean()


@pytest.mark.parametrize("more", [[], ["train.fixed_shape=true"]])
def test_a_step_has_the_loss_and_gradient_of_each_document_alone(trainer, more):
    run = trainer(DOCUMENT, *more)
    data = next(iter(run.feed))
    model = run.engine.model
    documents = run.corpus.train.take(data.documents)
    expected = _mean_over_documents(model, documents)
    expected.backward()
    gradient = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    result = run.engine.forward_backward(data.micro_batches, data.denominator)
    assert data.denominator == np.count_nonzero(documents.target_counts)
    assert sum(result.losses) / data.denominator == pytest.approx(float(expected.detach()), abs=1e-5)
    for parameter, alone in zip(model.parameters(), gradient, strict=True):
        assert torch.linalg.vector_norm(parameter.grad - alone) <= 1e-5 * torch.linalg.vector_norm(alone)


def test_evaluation_is_the_mean_over_validation_documents(trainer):
    run = trainer(DOCUMENT, "data.validation=0.3")
    found = run.feeds.validation.losses()[""]
    with run.engine.evaluating() as model:
        expected = float(_mean_over_documents(model, run.corpus.validation))
    assert found == pytest.approx(expected, abs=1e-5)
    assert abs(trainer("data.validation=0.3").feeds.validation.losses()[""] - found) > 1e-4


def test_a_resumed_run_may_change_its_weighting_and_says_so(finished, capsys, files):
    train(compose_run([f"out={finished}", "train.resume=true", "train.steps=8", DOCUMENT]))
    assert "train.loss_weighting changes from token to document" in capsys.readouterr().out
    assert len(files(finished).losses) == 8


@pytest.fixture
def weighted(trainer, tmp_path):
    """Number and weight of each record, and more words → a trainer on them, all of which are one step."""

    def make(weights, *more):
        rows = [
            {"prompt": "Q" * (1 + n % 4), "completion": "xyz"[n % 3] * (1 + n), "w": w} for n, w in weights
        ]
        file = tmp_path / f"{len(rows)}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        field = "data.weight_field=w", "data.validation=0", "train.eval_every=0"
        return trainer(f"data.path={file}", *field, "plan.packs_per_step=16", "train.steps=1", *more)

    return make


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_a_document_of_weight_two_counts_as_two(weighted, weighting):
    """The loss and the gradient of a step, with weights and with repeated documents."""
    weights = [2, 0, 1, 3] * 3
    repeated = [(n, 1) for n, weight in enumerate(weights) for _ in range(weight)]
    found = []
    for rows in (list(enumerate(weights)), repeated):
        run = weighted(rows, f"train.loss_weighting={weighting}")
        data = next(iter(run.feed))
        result = run.engine.forward_backward(data.micro_batches, data.denominator)
        gradient = torch.cat([each.grad.flatten() for each in run.engine.model.parameters()])
        found.append((sum(result.losses) / data.denominator, data.denominator, gradient))
    (loss, denominator, gradient), (expected, divisor, wanted) = found
    assert denominator == divisor == sum(batch.denominator for batch in data.micro_batches)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert torch.linalg.vector_norm(gradient - wanted) <= 1e-5 * torch.linalg.vector_norm(wanted)


def test_weights_below_one_do_not_change_the_mean(weighted):
    losses = []
    for weight in (1, 0.001):
        run = weighted([(n, weight) for n in range(12)])
        data = next(iter(run.feed))
        losses.append(sum(run.engine.forward_backward(data.micro_batches, data.denominator).losses))
        losses[-1] /= data.denominator
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_plan_without_the_weights_of_its_documents_is_refused(weighted):
    run = weighted([(n, 2) for n in range(12)])
    documents = run.corpus.train
    sampler = PackedBatchSampler(documents.lengths, capacity=64, packs_per_step=1)
    with pytest.raises(
        ValueError, match=r"has the weight 2, and the plan has none.*weights=documents\.weights"
    ):
        PackedCollator.of(sampler)([documents[0]])
    with pytest.raises(ValueError, match="at least 0: document 1 has -1"):
        PackedBatchSampler([4, 4], weights=[1, -1], capacity=64, packs_per_step=1)
