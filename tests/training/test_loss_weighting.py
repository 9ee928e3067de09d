"""Runs whose loss is a mean over documents, and runs whose documents are aligned."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from multipack.data.batch import IGNORE
from multipack.parallel.world import World
from multipack.reports.console import Console
from multipack.training.assemble import assemble
from multipack.training.compare import compare_with_padding, padded_batches
from multipack.training.evaluate import validation_loss
from multipack.training.run_config import compose, compose_run
from multipack.training.trainer import train
from multipack.words import ConfigError

DOCUMENT = "train.loss_weighting=document"


def _records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _losses(out):
    return [record["loss"] for record in _records(out) if "loss" in record]


def _with(words, *more):
    keys = {word.partition("=")[0] for word in more}
    return [word for word in words if word.partition("=")[0] not in keys] + list(more)


@pytest.fixture
def session(words, tmp_path):
    """words → an assembled run, which is closed afterwards."""
    made = []

    def make(*more):
        config = compose([*_with(words, *more), f"out={tmp_path / str(len(made))}"])
        made.append(assemble(config, World(), Console(rank=1)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _mean_of_each_document_alone(model, documents):
    """The mean over documents of each one's mean loss, from logits in float64."""
    means = []
    for number in range(len(documents)):
        document = documents[number]
        targets = torch.from_numpy(document.shifted_targets())
        if not (targets != IGNORE).any():
            continue
        logits = model.logits(_alone(document)).double()
        means.append(torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE))
    return torch.stack(means).mean()


def _alone(document):
    from multipack.data.collate import PackedCollator

    return PackedCollator(1, len(document.tokens))([document])


@pytest.mark.parametrize("more", [[], ["model.kv_heads=1"], ["plan.align=8"], ["train.fixed_shape=true"]])
def test_a_step_has_the_loss_and_gradient_of_each_document_alone(session, more):
    run = session(DOCUMENT, *more)
    data = next(iter(run.feed))
    assert len(data.micro_batches) == 4
    with run.engine.evaluating() as model:
        model.train()
    documents = run.corpus.train.take(data.documents)
    expected = _mean_of_each_document_alone(model, documents)
    expected.backward()
    gradient = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    result = run.engine.forward_backward(data.micro_batches, data.denominator)
    assert data.denominator == np.count_nonzero(documents.target_counts)
    assert sum(result.losses) / data.denominator == pytest.approx(float(expected.detach()), abs=1e-5)
    for parameter, alone in zip(model.parameters(), gradient, strict=True):
        assert torch.linalg.vector_norm(parameter.grad - alone) <= 1e-5 * torch.linalg.vector_norm(alone)


def test_evaluation_is_the_mean_over_validation_documents(session):
    run = session(DOCUMENT, "data.validation=0.3")
    assert run.validation is not None
    found = validation_loss(run.engine, run.validation, run.validation_packs)
    with run.engine.evaluating() as model:
        expected = float(_mean_of_each_document_alone(model, run.corpus.validation))
    assert found == pytest.approx(expected, abs=1e-5)
    token = session("data.validation=0.3")
    assert token.validation is not None
    assert abs(validation_loss(token.engine, token.validation, token.validation_packs) - found) > 1e-4


def test_a_weighted_run_learns_logs_and_resumes_bit_for_bit(words, tmp_path):
    long = _with(words, DOCUMENT, "train.steps=12", "train.eval_every=4", "model.kv_heads=1")
    train(compose([*long, f"out={tmp_path / 'whole'}"]))
    out = tmp_path / "parts"
    train(compose(_with(long, "train.steps=6", "optimizer.decay_steps=12", f"out={out}")))
    train(compose_run([f"out={out}", "train.resume=true", "train.steps=12"]))
    losses = _losses(tmp_path / "whole")
    assert losses[-1] < losses[0] - 0.3
    assert _losses(out) == losses
    train_losses = [
        [r["train_loss"] for r in _records(run) if "train_loss" in r] for run in (tmp_path / "whole", out)
    ]
    assert train_losses[0][-1] == train_losses[1][-1]


def test_bf16_trains_with_weights(words, tmp_path):
    train(compose(_with(words, DOCUMENT, "train.steps=16", "train.dtype=bf16", f"out={tmp_path / 'run'}")))
    losses = _losses(tmp_path / "run")
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.3


def test_a_resumed_run_may_weigh_anew_and_says_so(words, tmp_path, capsys):
    out = tmp_path / "run"
    train(compose(_with(words, "train.steps=4", "optimizer.decay_steps=8", f"out={out}")))
    train(compose_run([f"out={out}", "train.resume=true", "train.steps=8", DOCUMENT]))
    assert "train.loss_weighting was token until now and is document from here on" in capsys.readouterr().out
    assert len(_losses(out)) == 8


def test_an_unknown_weighting_is_refused(words):
    with pytest.raises(ConfigError, match="loss_weighting"):
        compose([*words, "train.loss_weighting=sequence"])


def test_padding_is_compared_under_the_same_weights(session):
    run = session(DOCUMENT)
    plan, documents = run.feed.plan, run.corpus.train
    batches = padded_batches(documents, plan.documents(0), 4, seed=0, loss_weighting=plan.loss_weighting)
    assert sum(batch.denominator for batch in batches) == plan.denominator(0)
    with run.engine.evaluating() as model:
        padded = sum(float(model(batch)) for batch in batches)
        packed = sum(float(model(batch)) for batch in next(iter(run.feed)).micro_batches)
    assert padded == pytest.approx(packed, rel=1e-6)
    assert compare_with_padding(run.engine, documents, plan, batch_size=4, steps=1).ratio > 0


def test_aligned_runs_have_the_losses_of_tight_ones_over_the_same_documents(session):
    """The plans differ, since aligned documents fill more; so the same documents are put into both kinds of packs."""
    aligned, tight = session("plan.align=16"), session()
    data = next(iter(aligned.feed))
    collate = replace(aligned.feed.loader._collator, align=1)
    packs = aligned.feed.sampler.deal_of(0)
    with aligned.engine.evaluating() as model:
        padded = [float(model(batch)) for batch in data.micro_batches]
        plain = [
            float(model(collate([aligned.corpus.train[int(number)] for number in pack]))) for pack in packs
        ]
    assert padded == pytest.approx(plain, rel=1e-6)
    assert all(not length % 16 for batch in data.micro_batches for length in batch.lengths)
    assert aligned.feed.plan.fingerprint != tight.feed.plan.fingerprint


def test_an_aligned_run_counts_real_tokens_and_calls_the_rest_padding(words, tmp_path):
    train(compose(_with(words, "plan.align=16", "train.compare_padding=true", f"out={tmp_path / 'run'}")))
    steps = [record for record in _records(tmp_path / "run") if "loss" in record]
    run = assemble(
        compose(_with(words, "plan.align=16", f"out={tmp_path / 'again'}")), World(), Console(rank=1)
    )
    plan = run.feed.plan
    for index, record in enumerate(steps[: plan.num_steps]):
        documents = plan.documents(index)
        tokens, slots = int(plan.lengths[documents].sum()), int(plan.slots[documents].sum())
        assert slots > tokens == plan.tokens(index)
        assert record["tps"] * record["dt"] == pytest.approx(tokens)
        assert record["padding"] == pytest.approx(1 - tokens / slots)
        assert record["target_tokens"] == plan.targets(index)
    run.close()


def test_documents_are_cut_to_what_aligned_packs_can_hold(session):
    """100 is no multiple of 16: the longest piece has 96 tokens, and a fixed shape has 96 slots."""
    run = session("plan.capacity=100", "plan.align=16", "data.overlong=split", "train.fixed_shape=true")
    assert run.corpus.train.lengths.max() == 96
    data = next(iter(run.feed))
    assert {batch.num_slots for batch in data.micro_batches} == {96}
    result = run.engine.forward_backward(data.micro_batches, data.denominator)
    assert all(math.isfinite(loss) for loss in result.losses)


def test_an_alignment_above_the_capacity_is_refused(words):
    with pytest.raises(ConfigError, match=r"plan\.align=512 exceeds plan\.capacity=256"):
        compose([*words, "plan.align=512"])
