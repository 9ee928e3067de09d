"""What a step's loss is divided by is known from the plan alone, and changes nothing else of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning.plan import plan


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_denominators_count_targets_or_documents_that_have_one(data):
    lengths = np.array(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=50)))
    with_targets = data.draw(st.booleans())
    targets = (
        np.array([data.draw(st.integers(0, length - 1)) for length in lengths]) if with_targets else None
    )
    counts = lengths - 1 if targets is None else targets
    options = {"capacity": 40, "packs_per_step": 3, "targets": targets}
    token = plan(lengths, **options)
    document = plan(lengths, **options, loss_weighting="document")
    assert token.loss_weighting == "token"
    for step in range(token.num_steps):
        numbers = token.documents(step)
        assert token.denominator(step) == token.targets(step) == counts[numbers].sum()
        assert document.denominator(step) == (counts[numbers] > 0).sum()
        assert document.targets(step) == token.targets(step)
    assert sum(map(document.denominator, range(document.num_steps))) == (counts > 0).sum()


def test_the_weighting_is_no_part_of_the_plan():
    lengths = np.arange(1, 60)
    token = plan(lengths, capacity=64, packs_per_step=4)
    document = plan(lengths, capacity=64, packs_per_step=4, loss_weighting="document")
    assert document.fingerprint == token.fingerprint
    assert np.array_equal(document.order, token.order)
    assert document.check_state(token.state(2)) == 2


def test_a_document_that_is_carried_into_a_step_counts_each_time():
    made = plan(
        [5, 5, 1], capacity=5, packs_per_step=4, tail="keep", carried=[0, 2], loss_weighting="document"
    )
    assert sum(map(made.denominator, range(made.num_steps))) == 3  # document 0 twice, 1 once, 2 has no target


def test_an_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match="loss_weighting='sum' is unknown; choose one of token, document"):
        plan([3], capacity=4, packs_per_step=1, loss_weighting="sum")
