"""Drawing one token from logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.models.sampling import Sampling, draw

PROBABILITIES = (0.02, 0.4, 0.08, 0.3, 0.2)


def drawn(sampling: Sampling, draws: int = 400, probabilities=PROBABILITIES) -> list[int]:
    generator, logits = torch.Generator().manual_seed(0), torch.tensor(probabilities).log()
    return [draw(logits, sampling, generator) for _ in range(draws)]


def test_top_p_draws_among_the_fewest_with_the_probability():
    two, three, four = {1, 3}, {1, 3, 4}, {1, 2, 3, 4}
    cases = (
        (0.1, {1}),
        (0.39, {1}),
        (0.41, two),
        (0.69, two),
        (0.75, three),
        (0.97, four),
        (1.0, {0, *four}),
    )
    for top_p, nucleus in cases:
        assert set(drawn(Sampling(top_p=top_p))) == nucleus


def test_top_p_keeps_proportions():
    found = drawn(Sampling(top_p=0.65), draws=2000)
    assert found.count(1) / 2000 == pytest.approx(4 / 7, abs=0.04)


def test_temperature_is_applied_before_top_p():
    assert set(drawn(Sampling(temperature=0.1, top_p=0.9))) == {1}
    assert (
        set(drawn(Sampling(temperature=1e-30))) == set(drawn(Sampling(temperature=0))) == {1}
    )  # no overflow
    assert set(drawn(Sampling(temperature=100.0, top_p=0.75))) == {1, 2, 3, 4}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-40, 40).map(lambda value: value / 4), min_size=1, max_size=30),
    st.floats(0.01, 1.0),
    st.integers(0, 31),
    st.integers(0, 2**20),
)
def test_a_draw_is_in_the_smallest_set_with_the_mass(values, top_p, top_k, seed):
    logits = torch.tensor(values)
    token = draw(logits, Sampling(top_k=top_k, top_p=top_p), torch.Generator().manual_seed(seed))
    kept = sorted(values, reverse=True)[: top_k or None]
    probabilities = torch.tensor(kept, dtype=torch.float64).softmax(0)
    likelier = sum(value > values[token] for value in kept)
    # What is likelier than the drawn token has, by itself, less than the mass asked for.
    assert values[token] in kept
    assert probabilities[:likelier].sum() < top_p + 1e-6


def test_wrong_options_are_refused():
    nan = float("nan")
    wrong = {
        "top_p": (0.0, 1.5, nan),
        "temperature": (-0.5, nan),
        "max_tokens": (-1,),
        "top_k": (-1,),
        "stop": (("",),),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                Sampling(**{name: value})
