"""Packs whose documents share their beginnings: losses and gradients equal those of documents one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multipack.data.packs.collate import PackedCollator, PreferenceCollator, PreferencePair
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.models.preference import PreferenceDecoder
from multipack.ops.logits import LossOptions
from multipack.shapes import ModelShape

VOCABULARY, CONTEXT = 11, 24
LLAMA = ModelShape(
    layers=2, heads=4, kv_heads=2, d_model=16, d_ff=24, vocabulary_size=VOCABULARY, context=CONTEXT
)
GPT2 = dataclasses.replace(
    LLAMA, kv_heads=4, positions="learned", norm="layernorm", activation="gelu", bias=True, tied=True
)
SHAPES = {
    "llama": dataclasses.replace(LLAMA, tied=False),
    "gpt2": GPT2,
    "window": dataclasses.replace(LLAMA, window=3, full_every=2),
    "gemma2": dataclasses.replace(LLAMA, attention_cap=2.0, logit_cap=3.0, window=3, full_every=2),
}


@st.composite
def forests(draw: st.DrawFn) -> list[Document]:
    """Up to eight documents that grow on each other: each begins with a part of an earlier one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    made: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 8))):
        before = made[rng.integers(len(made))]
        begin = before[: rng.integers(0, min(len(before), CONTEXT - 6) + 1)]
        made.append([*begin, *rng.integers(0, VOCABULARY, rng.integers(0 if begin else 1, 6)).tolist()])
    return [with_targets(tokens, rng) for tokens in made[1:]]


def with_targets(tokens: list[int], rng: np.random.Generator) -> Document:
    """A document of a random weight, with at most one range of targets."""
    spans = np.sort(rng.integers(0, len(tokens) + 1, (1, 2)))
    spans = spans[spans[:, 0] < spans[:, 1]]
    return Document(np.array(tokens, dtype=np.uint16), spans, float(rng.integers(0, 5)) / 2)


def gradients(model: torch.nn.Module, loss: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """A loss, and the gradient of all parameters."""
    model.zero_grad()
    found = loss()
    found.backward()
    own = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return float(found.detach()), torch.cat([each.flatten() for each in own]).double()


def assert_equal(model: Decoder, shared: Callable[[], Tensor], alone: Callable[[], Tensor]) -> None:
    # A gradient sums over slots (of up to eight documents) and over branches of layers, in two orders: the rounding of
    # such a sum grows with the root of their number.
    summands = 8 * CONTEXT * 2 * model.shape.layers
    tolerance = max(torch.finfo(next(model.parameters()).dtype).eps * summands**0.5, 1e-12)
    (loss, gradient), (wanted, reference) = gradients(model, shared), gradients(model, alone)
    assert abs(loss - wanted) <= tolerance * abs(wanted) + 1e-12
    assert (gradient - reference).norm() <= tolerance * reference.norm() + 1e-12


CASES = {
    "documents": forests(),
    "min_prefix": st.integers(1, 3),
    "weighting": st.sampled_from(["token", "document"]),
    "pad_to": st.sampled_from([None, 200]),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "options": st.sampled_from(
        [{}, {"z_loss": 0.1, "label_smoothing": 0.2}, {"vocabulary_tiles": 3, "chunk_tokens": 4}]
    ),
}


def compare(name, documents, min_prefix, weighting, pad_to, dtype, options):
    """A shared pack against one that shares nothing."""
    torch.manual_seed(3)
    model = Decoder(SHAPES[name], loss_options=LossOptions(**options)).to(dtype)
    given = {"pad_to": pad_to, "loss_weighting": weighting, "weighted": True}
    shared = PackedCollator(8, CONTEXT, min_prefix=min_prefix, **given)(documents)
    plain = PackedCollator(8, CONTEXT, **given)(documents)
    for field in ("denominator", "num_tokens", "num_target_tokens", "num_documents", "longest"):
        assert getattr(shared, field) == getattr(plain, field)
    assert_equal(model, lambda: model(shared), lambda: model(plain))


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=6, deadline=None)
@given(**CASES)
def test_losses_and_gradients_equal_those_of_unshared_documents(name, **case):
    compare(name, **case)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=300, deadline=None)
@given(**CASES)
def test_losses_and_gradients_of_many_trees(name, **case):
    compare(name, **case)


@pytest.mark.parametrize("name", ["sigmoid", "orpo", "reward", "kto"])
def test_objectives_equal_those_of_pairs_that_share_nothing(name):
    rng, items = np.random.default_rng(5), []
    for prompt, first, second in ((8, 4, 3), (2, 6, 1), (12, 1, 1)):
        begin = rng.integers(0, VOCABULARY, prompt)
        answers = [np.append(begin, rng.integers(0, VOCABULARY, size)) for size in (first, second)]
        answers[0][prompt], answers[1][prompt] = 0, 1
        # The second answer also trains on the end of the prompt, which is shared.
        spans = [[prompt, prompt + first]], [[prompt - 1, prompt + second]]
        both = (Document(a.astype(np.uint16), np.array(b)) for a, b in zip(answers, spans, strict=True))
        items.append(PreferencePair(*both, -9.0 * rng.random(2), 0.5, name != "kto"))
    plan = SimpleNamespace(most_documents=3, longest=CONTEXT, min_prefix=None)
    sharing = SimpleNamespace(**vars(plan) | {"min_prefix": 4})
    torch.manual_seed(3)
    model = PreferenceDecoder(dataclasses.replace(LLAMA, scores=int(name == "reward")), loss=name).double()
    shared = PreferenceCollator.of(sharing)(items)
    plain = PreferenceCollator.of(plan)(items)
    assert shared.num_slots == plain.num_slots - 8 - 12
    assert_equal(model, lambda: model(shared), lambda: model(plain))


def test_a_pack_without_common_beginnings_is_as_before(documents):
    plain, same = PackedCollator(8, 64)(documents), PackedCollator(8, 64, min_prefix=5)(documents)
    assert same.tree is None
    for name, value in vars(plain).items():
        other = getattr(same, name)
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_lengths_that_decide_the_rotation_are_those_of_whole_unshared_documents(kind):
    factors = (1.0,) * LLAMA.rotary_width if kind == "longrope" else ()
    shape = dataclasses.replace(
        LLAMA, rope_type=kind, rope_factor=4.0, context=6, rope_context=6, rope_factors=factors
    )
    documents, model = [Document(np.arange(9, dtype=np.uint16), np.array([[1, 9]]))] * 2, Decoder(shape)
    with pytest.raises(ValueError, match=rf"rope_type={kind} .*share_prefixes=off"):
        model(PackedCollator(2, 9, min_prefix=2)(documents))
    batch = PackedCollator(2, 18)(documents)
    assert torch.isfinite(model(batch))
    half = dataclasses.replace(batch, position_ids=batch.position_ids[:9])  # of one of two context ranks
    with pytest.raises(ValueError, match=rf"rope_type={kind} .*parallel.context=1"):
        model.rotation(half)
