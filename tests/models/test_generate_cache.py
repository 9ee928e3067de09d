"""Generation with the cache equals the whole forward pass for every token, alone and together."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from multipack.models.decoder import Decoder
from multipack.models.generate import PACK_TOKENS, generate
from multipack.models.kv_cache import INITIAL_CAPACITY, KeyValueCache
from multipack.models.sampling import Sampling

LONG = 256
COUNT = 8
GREEDY = Sampling(max_tokens=COUNT, temperature=0)


def continued(model, prompt, count, end_ids=(), use_cache=True, **sampling):
    """The new tokens of one prompt."""
    (found,) = generate(model, [prompt], Sampling(count, **sampling), end_ids=end_ids, use_cache=use_cache)
    return found.tokens


def longer(model: Decoder, context: int) -> Decoder:
    """The same family with a longer context; its weights are so large that greedy text is varied."""
    torch.manual_seed(11)
    grown = Decoder(dataclasses.replace(model.shape, context=context))
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5 if name.startswith("blocks") else 0.1)
    return grown


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (length,), generator=generator).tolist()


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_logits_equal_those_of_the_whole_text(model, single, dtype, tolerance):
    model = longer(model, LONG).eval().to(dtype)
    ids, cache = prompt_of(135), KeyValueCache(model.shape, 1, model.norm.weight)
    batch = single(ids[:60])
    cache.admit(batch)
    rows = [model.hidden(batch, cache)]
    for position in range(60, len(ids)):
        batch = cache.advance([ids[position]])
        assert batch.position_ids.tolist() == [position]
        rows.append(model.hidden(batch, cache))
    assert cache.lengths == [135]
    assert cache.capacity == 4 * INITIAL_CAPACITY == LONG
    found = F.linear(torch.cat(rows), model.output_weight)
    expected = model.logits(single(ids))
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("together", [2, 64])
@pytest.mark.parametrize("shape", ["gpt2", "llama-gqa", "olmo3", "gemma2", "phi3-long"], indirect=True)
def test_prompts_together_are_each_as_alone(model, together):
    model = longer(model, 64)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((5, 31, 1, 60, 80, 2))]
    found = generate(model, prompts, GREEDY, together=together)
    alone = [continued(model, prompt, COUNT, temperature=0) for prompt in prompts]
    assert [completion.tokens for completion in found] == alone
    assert {completion.reason for completion in found} == {"length"}
    assert found == generate(model, prompts, GREEDY, use_cache=False)
    assert (
        len({token for tokens in alone for token in tokens}) > 3
    )  # not one repeated, which anything would get right


def test_texts_end_independently(model):
    model = longer(model, 128)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((4, 30, 11, 7, 19))]
    free = [continued(model, prompt, COUNT, temperature=0) for prompt in prompts]
    # A token that some of the texts have, and some have not.
    ends = {next(token for token in range(50) if 1 < sum(token in text for text in free) < 4)}
    for together in (2, 5):
        found = generate(model, prompts, GREEDY, end_ids=ends, together=together)
        for completion, whole in zip(found, free, strict=True):
            expected = list(itertools.takewhile(lambda token: token not in ends, whole))
            assert completion.tokens == expected
            assert completion.reason == ("end" if len(expected) < COUNT else "length")
        assert {completion.reason for completion in found} == {"end", "length"}


def test_draws_do_not_depend_on_the_other_prompts(model):
    model = longer(model, 64)
    prompts = [prompt_of(length, length) for length in (6, 3, 20)]
    sampling = Sampling(max_tokens=12, temperature=1.5, top_k=20, top_p=0.9, seed=4)
    found = generate(model, prompts, sampling)
    for number, prompt in enumerate(prompts):
        alone = continued(model, prompt, 12, temperature=1.5, top_k=20, top_p=0.9, seed=4 + number)
        assert found[number].tokens == alone
    twins = generate(model, [prompts[0], prompts[0]], sampling)
    assert twins[0].tokens == found[0].tokens != twins[1].tokens


@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_prompts_are_read_in_packs_and_each_token_costs_one_token(model, monkeypatch):
    monkeypatch.setattr("multipack.models.generate.PACK_TOKENS", 100)
    model, passes = longer(model, LONG), []
    whole = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda batch, cache=None: passes.append(batch.lengths) or whole(batch, cache)
    )
    generate(model, [prompt_of(n) for n in (50, 50, 1, 200, 5)], Sampling(max_tokens=3, temperature=0))
    assert [list(filter(None, lengths)) for lengths in passes] == [
        [50, 50],
        [1],
        [200],
        [5],
        [1] * 5,
        [1] * 5,
    ]
    assert PACK_TOKENS > 100


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_half_precision_keeps_half_of_the_bytes(model, how):
    model = longer(model, 128).eval()
    if how == "weights":
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        cache = KeyValueCache(model.shape, 1, model.norm.weight)
        cached, whole = (
            continued(model, prompt_of(9), 1, temperature=0, use_cache=use) for use in (True, False)
        )
    assert {stored.dtype for stored in cache.stored} == {torch.bfloat16}
    assert cached == whole


def test_compiled_blocks_are_not_compiled_for_generation(model):
    expected = continued(model, prompt_of(5), 8, temperature=0)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=_refuse)
    assert continued(model, prompt_of(5), 8, temperature=0) == expected


def _refuse(graph, inputs):
    raise AssertionError("generation compiled a block")


GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@torch.no_grad()
@pytest.mark.parametrize(
    ("device", "count", "dtype", "tolerance"),
    [
        ("cpu", 12, torch.bfloat16, 5e-2),
        pytest.param("cuda", 100, torch.float32, 1e-3, marks=GPU),
        pytest.param("cuda", 100, torch.bfloat16, 5e-2, marks=GPU),
    ],
)
def test_on_any_device_together_as_alone(model, single, device, count, dtype, tolerance):
    """Kernels round by the shapes of products: texts may part where two tokens have almost equal logits."""
    model = longer(model, LONG).to(device).eval()
    prompts = [prompt_of(length, length) for length in (5, 31, 1, 100)]
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        found = generate(model, prompts, Sampling(max_tokens=count, temperature=0))
        for prompt, completion in zip(prompts, found, strict=True):
            alone = continued(model, prompt, count, temperature=0, use_cache=False)
            pairs = zip(completion.tokens, alone, strict=True)
            parting = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            if parting is not None:
                logits = model.logits(single(prompt + alone[:parting]).to(device))[-1].float()
                gap = logits[alone[parting]] - logits[completion.tokens[parting]]
                assert gap.abs() <= tolerance * logits.abs().max()
