"""Measured cost: the mixes that are timed, what the fit makes of them, and runs that keep and reuse it."""

import json
import re

import numpy as np
import pytest
import torch

from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console
from multipack.shapes import ModelShape
from multipack.training.calibrate import COST_FILE, DecoderTimer, calibrate, cost_rows, mixes
from multipack.training.run_config import compose, compose_run
from multipack.training.trainer import Trainer, train

SHAPE = ModelShape(layers=2, heads=2, d_model=16, d_ff=32, vocabulary_size=50, dropout=0.5)


def _seconds(lengths, base=2e-3, token=3e-6, pair=2e-9, document=4e-5):
    x = np.array(lengths, dtype=np.float64)
    return base + token * x.sum() + pair * (x * (x + 1)).sum() + document * len(x)


@pytest.mark.parametrize(
    ("tokens", "longest"), [(2048, 2048), (256, 100), (1000, 64), (7, 7), (1, 1), (64, 1)]
)
def test_mixes_fit_and_differ(tokens, longest):
    made = mixes(tokens, longest)
    assert 1 <= len(made) <= 21
    assert all(min(lengths) >= 1 and max(lengths) <= longest and sum(lengths) <= tokens for lengths in made)
    assert len({tuple(lengths) for lengths in made}) == len(made)
    if tokens >= 256 and longest >= 64:
        assert len(made) >= 12
        assert max(map(sum, made)) >= 0.9 * tokens
        assert max(map(max, made)) == min(tokens, longest)


def test_coefficients_are_recovered_through_the_mixes():
    model = calibrate(_seconds, SHAPE, capacity=8192, longest=8192, budget_seconds=100.0)
    assert (model.linear, model.quadratic, model.constant) == (1500, 1, 20_000)
    assert model.seconds([100, 5000]) == pytest.approx(_seconds([100, 5000]), rel=1e-9)
    assert model.flops([10]) == CostModel.from_shape(SHAPE).flops([10])


def test_the_budget_limits_what_is_timed():
    timed = []

    def timer(lengths):
        timed.append(sum(lengths))
        return _seconds(lengths, base=0.0, token=1e-3)

    model = calibrate(timer, SHAPE, capacity=1 << 20, longest=1 << 20, budget_seconds=30.0)
    assert (
        max(timed) == 1024
    )  # 2 rounds of 21 mixes, 12 × their size in tokens: 24.6 s, and twice that is too much
    assert sum(timed) * 1e-3 < 1.5 * 30.0
    assert model.linear == pytest.approx(1e-3 / 2e-9, rel=1e-3)


def test_the_least_of_two_rounds_counts():
    calls = []

    def timer(lengths):
        calls.append(lengths)
        disturbed = 5.0 if len(calls) % 37 == 20 else 0.0  # another program, for a moment
        return _seconds(lengths) + disturbed

    model = calibrate(timer, SHAPE, capacity=512, longest=512, budget_seconds=1e9)
    assert len(calls) > 37
    assert (model.linear, model.constant) == (1500, 20_000)


def test_times_that_say_nothing_are_refused_by_the_setting():
    with pytest.raises(ValueError, match=r"plan\.cost=measured: .* use plan\.cost=flops"):
        calibrate(lambda lengths: 1.0, SHAPE, capacity=512, longest=512)
    with pytest.raises(ValueError, match=r"plan\.cost=measured: .* in documents of up to 2"):
        calibrate(_seconds, SHAPE, capacity=2, longest=2)


def test_the_timer_leaves_no_trace():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    readings = iter(range(100))
    timer = DecoderTimer(
        SHAPE, "auto", torch.device("cpu"), torch.float32, clock=lambda: float(next(readings))
    )
    assert timer([5, 3]) == 1.0  # between two readings of the clock
    assert torch.equal(torch.get_rng_state(), before)
    gradients = [parameter.grad for parameter in timer.model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    half = DecoderTimer(SHAPE, "auto", torch.device("cpu"), torch.bfloat16)
    assert half([64]) > 0


def test_rows_say_what_was_measured():
    model = calibrate(_seconds, SHAPE, capacity=512, longest=512)
    rows = dict(cost_rows(model))
    assert rows["measured times"] == (
        "2 ms a micro-batch, 3 µs a token, 2 ns an l(l+1), 40 µs a document (error 0.0 %)"
    )
    assert rows["cost of l tokens"].startswith("1,500·l + l(l+1) + 20,000; by FLOPs alone ")
    assert cost_rows(CostModel.from_shape(SHAPE)) == []


def _plan(session):
    plan = session.feed.plan
    session.close()
    return plan.fingerprint, plan.order.tolist(), plan.pack_offsets.tolist()


def test_a_measured_run_keeps_its_cost_and_resumes_with_it(words, tmp_path, capsys):
    out = tmp_path / "run"
    train(compose([*words, "plan.cost=measured", f"out={out}"]))
    printed = capsys.readouterr().out
    assert "measured times" in printed
    assert re.search(r"cost of l tokens +.*l\(l\+1\)|cost of l tokens", printed)
    saved = CostModel.load(out / COST_FILE)
    assert saved.timed is not None
    assert saved.shape is not None
    checkpoint = out / "checkpoints" / "step-00000006"
    assert CostModel.load(checkpoint / COST_FILE).to_dict() == saved.to_dict()
    listed = json.loads((checkpoint / "state.json").read_text())["files"]
    assert COST_FILE in listed
    # A cost that no measuring would give: what the resumed run plans with is what was saved.
    changed = {**saved.to_dict(), "linear": 12_345, "quadratic": 1, "constant": 678}
    for folder in (out, checkpoint):
        (folder / COST_FILE).write_text(json.dumps(changed))
    listed[COST_FILE] = (checkpoint / COST_FILE).stat().st_size
    state = json.loads((checkpoint / "state.json").read_text())
    fingerprint = _fingerprint_with(words, changed, tmp_path)
    state["files"], state["progress"]["data"]["fingerprint"] = listed, fingerprint
    (checkpoint / "state.json").write_text(json.dumps(state))
    resumed = compose_run(["train.resume=true", f"out={out}", "train.steps=8"])
    session = Trainer(resumed, World(), Console(rank=1))
    assert (session.cost_model.linear, session.cost_model.constant) == (12_345, 678)
    assert session.step == 6
    assert _plan(session)[0] == fingerprint
    assert train(resumed).step == 8


def _fingerprint_with(words, cost, tmp_path):
    """The fingerprint of the run's plan under another cost."""
    from multipack.data.corpus import load_corpus
    from multipack.planning.plan import plan

    config = compose(words)
    documents = load_corpus(config.data, config.tokenizer, limit=config.plan.capacity).train
    options = {"options": config.plan.for_ranks(1), "seed": config.train.seed}
    targets, cost = documents.target_counts, CostModel.from_dict(cost)
    return plan(documents.lengths, targets=targets, cost=cost, **options).fingerprint


def test_a_run_stopped_before_its_first_checkpoint_plans_alike(words, tmp_path):
    out = tmp_path / "run"
    config = compose([*words, "plan.cost=measured", f"out={out}"])
    first = _plan(Trainer(config, World(), Console(rank=1)))
    again = compose_run(["train.resume=true", f"out={out}"])
    assert again.plan.cost == "measured"
    assert _plan(Trainer(again, World(), Console(rank=1))) == first


def test_a_checkpoint_without_its_cost_is_refused(words, tmp_path):
    out = tmp_path / "run"
    train(compose([*words, "train.steps=1", "train.eval_every=0", "plan.cost=measured", f"out={out}"]))
    checkpoint = out / "checkpoints" / "step-00000001"
    (checkpoint / COST_FILE).unlink()
    state = json.loads((checkpoint / "state.json").read_text())
    del state["files"][COST_FILE]
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        ValueError, match=r"cost\.json is missing: the run was planned with plan\.cost=measured"
    ):
        Trainer(compose_run(["train.resume=true", f"out={out}"]), World(), Console(rank=1))


def test_the_run_itself_does_not_notice_the_measuring(words, tmp_path):
    """Weights and the generators after assembling are those of a run that counts FLOPs."""
    seen = []
    for cost in ("flops", "measured"):
        out = tmp_path / cost
        session = Trainer(compose([*words, f"plan.cost={cost}", f"out={out}"]), World(), Console(rank=1))
        weights = session.engine.state()["model"]
        seen.append((torch.get_rng_state(), {name: value.clone() for name, value in weights.items()}))
        session.close()
        assert (out / COST_FILE).exists() == (cost == "measured")
    assert torch.equal(seen[0][0], seen[1][0])
    assert all(torch.equal(value, seen[1][1][name]) for name, value in seen[0][1].items())
