from __future__ import annotations

import pytest
import torch

from multipack.models.generate import generate, single_document


def test_greedy_is_the_argmax_of_the_logits(model, reference_logits):
    new = generate(model, [4, 9], 8, temperature=0)
    ids = [4, 9]
    for _ in range(8):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    assert new == ids[2:]
    logits = model.logits(single_document(ids[:-1]))
    assert logits.argmax(-1).tolist()[1:] == new


def test_looks_at_the_last_context_tokens_only(model):
    prompt = [token % 50 for token in range(1, 41)]
    assert generate(model, prompt, 3, temperature=0) == generate(model, prompt[-16:], 3, temperature=0)


def test_drawing_is_seeded_and_leaves_the_global_generator_alone(model):
    before = torch.get_rng_state()
    draws = [generate(model, [1], 12, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]
    assert generate(model, [1], 12) == generate(model, [1], 12)
    assert torch.equal(torch.get_rng_state(), before)


def test_frequencies_follow_the_softmax(model):
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([generate(model, [7], 1, 2.0, 0, None, generator)[0] for _ in range(2000)])
    observed = torch.bincount(draws, minlength=50) / 2000
    with torch.no_grad():
        expected = (model.logits(single_document([7]))[0] / 2.0).softmax(-1)
    assert (observed - expected).abs().max() < 5 * (0.25 / 2000) ** 0.5
    assert (observed - expected).abs().sum() < 0.25


def test_top_k_draws_among_the_likeliest(model):
    with torch.no_grad():
        likeliest = set(model.logits(single_document([7]))[0].topk(3).indices.tolist())
    generator = torch.Generator().manual_seed(0)
    drawn = {generate(model, [7], 1, 5.0, 3, None, generator)[0] for _ in range(60)}
    assert drawn == likeliest
    assert generate(model, [7], 5, 1.0, 1) == generate(model, [7], 5, 0)
    assert len(generate(model, [7], 2, 1.0, 1000)) == 2


def test_tiny_temperature_is_greedy_and_does_not_overflow(model):
    assert generate(model, [7], 5, 1e-30) == generate(model, [7], 5, 0)


def test_stops_at_the_end_token_without_returning_it(model):
    free = generate(model, [7], 10, temperature=0)
    stopped = generate(model, [7], 10, temperature=0, end_id=free[3])
    assert stopped == free[: free.index(free[3])]


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored_also_after_an_error(model, training):
    model.train(training)
    generate(model, [1], 1)
    assert model.training is training
    with pytest.raises(ValueError, match="token 50 is outside the vocabulary"):
        generate(model, [50], 1)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_prompt_is_not_changed_and_nothing_may_be_asked(model):
    prompt = [1, 2]
    assert generate(model, prompt, 0) == []
    generate(model, prompt, 2)
    assert prompt == [1, 2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"max_tokens": -1}, "max_tokens must not be negative, got -1"),
        ({"temperature": -0.5}, "temperature must not be negative, got -0.5"),
        ({"top_k": -2}, "top_k must not be negative, got -2"),
    ],
)
def test_bad_options_are_refused(model, options, says):
    with pytest.raises(ValueError, match=says):
        generate(model, **{"prompt_ids": [1], "max_tokens": 1, **options})
