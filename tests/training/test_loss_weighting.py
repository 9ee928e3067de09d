"""Runs whose loss is a mean over documents, and runs whose documents are aligned."""

import math

import numpy as np
import pytest
import torch

from multipack.data.batch import IGNORE
from multipack.data.collate import PackedCollator
from multipack.training.run_config import compose, compose_run
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


@pytest.mark.parametrize("more", [["plan.align=8"], ["train.fixed_shape=true"]])
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
    found = run.feeds.validation_loss()
    with run.engine.evaluating() as model:
        expected = float(_mean_over_documents(model, run.corpus.validation))
    assert found == pytest.approx(expected, abs=1e-5)
    assert abs(trainer("data.validation=0.3").feeds.validation_loss() - found) > 1e-4


def test_a_resumed_run_may_change_its_weighting_and_says_so(finished, capsys, files):
    train(compose_run([f"out={finished}", "train.resume=true", "train.steps=8", DOCUMENT]))
    assert "train.loss_weighting changes from token to document" in capsys.readouterr().out
    assert len(files(finished).losses) == 8


def test_an_aligned_run_counts_tokens_and_reports_the_rest_as_padding(
    trainer, words, tmp_path, files, changed
):
    train(compose(changed(words, "plan.align=16", "train.steps=1", f"out={tmp_path / 'run'}")))
    plan, [record] = trainer("plan.align=16").feed.plan, files(tmp_path / "run").steps
    documents = plan.documents(0)
    tokens, slots = int(plan.lengths[documents].sum()), int(plan.slots[documents].sum())
    assert slots > tokens == plan.tokens(0)
    assert record["tps"] * record["dt"] == pytest.approx(tokens)
    assert record["padding"] == pytest.approx(1 - tokens / slots)
    assert record["target_tokens"] == plan.targets(0)


def test_documents_are_cut_to_what_aligned_packs_can_hold(trainer):
    """100 is not a multiple of 16: the longest piece has 96 tokens, and a fixed shape has 96 slots."""
    run = trainer("plan.capacity=100", "plan.align=16", "data.overlong=split", "train.fixed_shape=true")
    assert run.corpus.train.lengths.max() == 96
    data = next(iter(run.feed))
    assert {batch.num_slots for batch in data.micro_batches} == {96}
    result = run.engine.forward_backward(data.micro_batches, data.denominator)
    assert all(math.isfinite(loss) for loss in result.losses)
