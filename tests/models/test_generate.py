from __future__ import annotations

import pytest
import torch

from multipack.data.text.tokenizer import byte_tokenizer, character_tokenizer
from multipack.models.decoder import Decoder
from multipack.models.generate import generate
from multipack.models.sampling import Sampling
from multipack.shapes import ModelShape


def continued(model, prompt, count, end_ids=(), use_cache=True, **sampling):
    """The new tokens of one prompt."""
    (found,) = generate(model, [prompt], Sampling(count, **sampling), end_ids=end_ids, use_cache=use_cache)
    return found.tokens


def test_greedy_is_the_argmax_of_the_logits(model, single):
    new = continued(model, [4, 9], 8, temperature=0)
    assert model.logits(single([4, 9, *new[:-1]])).argmax(-1).tolist()[1:] == new


def test_only_the_last_context_tokens_count(model):
    prompt = [token % 50 for token in range(1, 41)]
    assert continued(model, prompt, 3, temperature=0) == continued(model, prompt[-16:], 3, temperature=0)


def test_draws_are_seeded_and_leave_the_global_generator_alone(model):
    before = torch.get_rng_state()
    draws = [continued(model, [1], 12, seed=seed) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]
    assert continued(model, [1], 12) == continued(model, [1], 12)
    assert torch.equal(torch.get_rng_state(), before)


def test_stops_at_the_end_token_without_returning_it(model):
    free = continued(model, [7], 10, temperature=0)
    stopped = continued(model, [7], 10, temperature=0, end_ids=[free[3]])
    assert stopped == free[: free.index(free[3])]


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_prompt_are_left_as_they_were(model, training):
    model.train(training)
    prompt = [1, 2]
    assert continued(model, prompt, 0) == []
    continued(model, prompt, 2)
    assert prompt == [1, 2]
    with pytest.raises(ValueError, match="token 50"):
        continued(model, [50], 1)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_wrong_options_are_refused(model):
    heard = []
    batch = {"tokenizer": byte_tokenizer(), "listener": lambda *arguments: heard.append(arguments)}
    for prompts, options, named in (
        ([[]], {}, "prompt"),
        ([[3, -1]], {}, "token -1"),
        ([[1], [99]], batch, "token 99"),
        ([[1]], {"sampling": Sampling(stop=("a",))}, "tokenizer"),
        ([[1]], {"together": 0}, "together"),
    ):
        with pytest.raises(ValueError, match=named):
            generate(model, prompts, **{"sampling": Sampling(max_tokens=3), **options})
    assert not heard


@pytest.fixture
def writer():
    """A decoder of bytes and the end token."""
    torch.manual_seed(3)
    model = Decoder(ModelShape(layers=1, heads=2, d_model=16, d_ff=16, vocabulary_size=257, context=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def test_completions_have_text_that_stop_strings_cut(writer):
    tokenizer = byte_tokenizer()
    prompts = [tokenizer.encode(text) for text in ("abc", "xy")]
    free = generate(writer, prompts, Sampling(max_tokens=60, seed=5), tokenizer=tokenizer)
    assert [completion.text for completion in free] == [tokenizer.decode(each.tokens) for each in free]
    whole = free[0].text
    begin = next(place for place in range(10, len(whole)) if "�" not in whole[place : place + 2])
    stop = whole[begin : begin + 2]
    heard: dict[int, list[str]] = {0: [], 1: []}
    found = generate(
        writer,
        prompts,
        Sampling(max_tokens=60, seed=5, stop=(stop,)),
        tokenizer=tokenizer,
        listener=lambda number, piece: heard[number].append(piece),
    )
    assert found[0].text == whole[: whole.index(stop)]
    assert found[0].reason == "stop"
    assert found[0].tokens == free[0].tokens[: len(found[0].tokens)]
    assert found[1] == free[1] or stop in free[1].text
    assert ["".join(pieces) for pieces in heard.values()] == [completion.text for completion in found]
    assert "" not in heard[0]


def test_only_tokens_of_the_tokenizer_are_drawn(model):
    """The model has 50 tokens; the tokenizer of two characters, 2."""
    tokenizer = character_tokenizer(iter(["ab"]))
    (found,) = generate(model, [[0, 1]], Sampling(max_tokens=40, temperature=9.0), tokenizer=tokenizer)
    assert set(found.tokens) == {0, 1}
    assert set(found.text) == {"a", "b"}


def test_no_prompts_and_no_tokens(model):
    assert generate(model, [], Sampling()) == []
    (found,) = generate(model, [[1]], Sampling(max_tokens=0))
    assert (found.tokens, found.reason, found.text) == ([], "length", "")
