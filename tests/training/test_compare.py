import itertools

import pytest
import torch

from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.reports.console import Console
from multipack.training.assemble import assemble
from multipack.training.compare import compare_with_padding, padded_batches
from multipack.training.run_config import compose


@pytest.fixture
def session(words, tmp_path):
    session = assemble(
        compose([*words, "plan.capacity=512", f"out={tmp_path / 'run'}"]), World(), Console(rank=1)
    )
    yield session
    session.close()


def test_padded_batches_hold_each_document_once_and_as_wide_as_the_longest(session):
    numbers = session.feed.plan.documents(0)
    batches = padded_batches(session.corpus.train, numbers, batch_size=4, seed=1)
    assert sum(batch.num_documents for batch in batches) == len(numbers)
    assert sum(batch.num_tokens for batch in batches) == session.feed.plan.tokens(0)
    assert sum(batch.num_target_tokens for batch in batches) == session.feed.plan.targets(0)
    for batch in batches:
        assert set(batch.lengths) == {max(batch.lengths)}


def test_the_ratio_is_of_real_tokens_per_second_and_weights_stay(session):
    """On a clock whose looks are 1, 2, 4, 8 … apart, a later step takes known multiples of an earlier one."""
    before = {name: value.clone() for name, value in session.engine.state()["model"].items()}
    looks = itertools.count()
    found = compare_with_padding(
        session.engine,
        session.corpus.train,
        session.feed.plan,
        batch_size=4,
        steps=1,
        clock=lambda: float(2 ** next(looks)),
    )
    # Looks: 0 begins; 1, 2 packed and 3, 4 padded warm up; then packed takes 2⁶ − 2⁵, padded 2⁸ − 2⁷ seconds.
    real = session.feed.plan.tokens(0)
    assert found.steps == 1
    assert found.packed_tokens_per_second == real / 32
    assert found.padded_tokens_per_second == real / 128
    assert found.ratio == 4.0
    assert found.pad_factor > 1
    after = session.engine.state()["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_losses_of_both_ways_agree(session):
    plan, documents, model = session.feed.plan, session.corpus.train, session.engine
    numbers = plan.documents(0)
    with model.evaluating() as bare:
        padded = sum(float(bare(batch)) for batch in padded_batches(documents, numbers, 4, seed=0))
        packed = sum(
            float(bare(session.feed.loader._collator([documents[int(n)] for n in pack])))
            for pack in plan.packs(0)
        )
    assert padded == pytest.approx(packed, rel=1e-6)


def test_several_processes_are_refused(session):
    from dataclasses import replace

    session.engine.mesh = Mesh.plain(replace(session.world, size=2))
    with pytest.raises(ValueError, match="one process only"):
        compare_with_padding(session.engine, session.corpus.train, session.feed.plan)
    session.engine.mesh = Mesh.plain(World())
