"""Packed and padded steps over the same documents."""

import itertools
import math

import pytest
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.ops.loss import linear_cross_entropy
from multipack.training.compare import compare_with_padding, padded_batches


@pytest.fixture(params=["token", "document"])
def run(trainer, request):
    return trainer("plan.capacity=512", f"train.loss_weighting={request.param}")


def test_padded_batches_hold_each_document_once_and_have_the_same_loss(run):
    plan, documents = run.feed.plan, run.corpus.train
    weighting = plan.loss_weighting
    batches = padded_batches(documents, plan.documents(0), 4, seed=1, loss_weighting=weighting)
    assert sum(batch.num_documents for batch in batches) == len(plan.documents(0))
    assert sum(batch.num_tokens for batch in batches) == plan.tokens(0)
    assert sum(batch.denominator for batch in batches) == plan.denominator(0)
    for batch in batches:
        assert set(batch.lengths) == {max(batch.lengths)}
    collate = PackedCollator.of(plan)
    packs = [collate([documents[int(number)] for number in pack]) for pack in plan.packs(0)]
    with run.engine.evaluating() as model:
        padded, packed = (sum(float(model(batch)) for batch in each) for each in (batches, packs))
    assert padded == pytest.approx(packed, rel=1e-6)


def test_the_ratio_is_of_tokens_per_second_and_weights_stay(run):
    """Readings of the clock are 1, 2, 4, 8 … apart, so the padded step takes four times the packed one."""
    before = {name: value.clone() for name, value in run.engine.state()["model"].items()}
    readings, losses = itertools.count(), []

    def padded_loss(*arguments, **options):
        losses.append(linear_cross_entropy(*arguments, **options))
        return losses[-1]

    found = compare_with_padding(
        run.engine,
        run.corpus.train,
        run.feed.plan,
        batch_size=4,
        steps=1,
        clock=lambda: float(2 ** next(readings)),
        padded_loss=padded_loss,
    )
    # Reading 0 begins; 1 to 4 warm up; then the packed step takes 2⁶ − 2⁵ and the padded one 2⁸ − 2⁷ seconds.
    tokens = run.feed.plan.tokens(0)
    rates = (found.packed_tokens_per_second, found.padded_tokens_per_second)
    assert (found.steps, found.ratio, rates) == (1, 4.0, (tokens / 32, tokens / 128))
    assert found.pad_factor > 1
    assert len(losses) == 2 * math.ceil(len(run.feed.plan.documents(0)) / 4)  # of padded batches only
    after = run.engine.state()["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
