from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.data.packs.collate import PackedCollator
from multipack.models.decoder import Decoder
from multipack.models.rotary import rotary_tables, rotate
from multipack.ops.logits import LossOptions
from multipack.shapes import ModelShape

ALL = pytest.mark.parametrize(
    "shape", ["gpt2", "gpt2-no-bias", "llama", "llama-gqa", "llama-untied-bias"], indirect=True
)


def alone(model, documents, pack):
    """Σ loss with every document in a pack of its own."""
    return sum(model(pack([document])) for document in documents)


# --- what it computes ---------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_of_the_logits(model, documents, pack):
    """tests/models/test_pretrained.py compares the logits with those of transformers."""
    batch = pack(documents)
    assert batch.num_target_tokens == sum(np.count_nonzero(d.shifted_targets() >= 0) for d in documents)
    loss = model(batch)
    logits = model.double().logits(batch)
    expected = F.cross_entropy(logits, batch.targets.long(), ignore_index=-100, reduction="sum").item()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert model(batch).item() == pytest.approx(expected, rel=1e-13)


@ALL
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_packed_equals_each_document_alone(model, documents, pack, gradients, distance, dtype, tolerance):
    model = model.to(dtype)
    apart = copy.deepcopy(model)
    packed_loss, apart_loss = model(pack(documents)), alone(apart, documents, pack)
    assert abs(packed_loss - apart_loss).item() <= tolerance * apart_loss.item()
    packed_loss.backward()
    apart_loss.backward()
    assert distance(gradients(model), gradients(apart)) < tolerance


def test_fixed_shapes_and_padded_rows_equal_the_pack(model, documents, pack, pad, gradients, distance):
    free, fixed = pack(documents), pack(documents, pad_to=60)  # the padding is longer than the context
    torch.testing.assert_close(model.logits(fixed)[:32], model.logits(free), rtol=1e-6, atol=1e-6)
    found = []
    for batch in (free, fixed, pad(documents)):
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        found.append((loss.item(), gradients(model)))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert distance(gradient, found[0][1]) < 1e-6


def test_pack_without_documents_weighs_nothing_and_stays_connected(model, pack):
    loss = model(pack([], pad_to=20))
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_bfloat16_autocast_is_close(model, documents, pack, gradients, distance):
    low = copy.deepcopy(model)
    exact = model(pack(documents))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = low(pack(documents))
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=2e-2)
    exact.backward()
    rounded.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in low.parameters())
    assert distance(gradients(low), gradients(model)) < 5e-2
    assert model.bfloat16()(pack(documents)).item() == pytest.approx(exact.item(), rel=3e-2)


class Casts(TorchDispatchMode):
    """Shapes of the tensors that are cast to bfloat16."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.name() == "aten::_to_copy" and out.dtype == torch.bfloat16:
            self.shapes.append(tuple(out.shape))
        return out


def test_a_block_casts_its_inputs_once(model, documents, pack):
    """Autocast would cast the input of attention for each of three projections, and of the feed-forward for two."""
    batch = pack(documents, pad_to=40)
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        model.hidden(batch)
    assert casts.shapes.count((batch.num_slots, model.shape.d_model)) == 2 * len(model.blocks)


def test_dropout_is_seeded_and_off_in_eval(shape, documents, pack):
    model = Decoder(dataclasses.replace(shape, dropout=0.3))
    batch, losses = pack(documents), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(batch).item())
    assert losses[0] == losses[1] != losses[2]
    plain = Decoder(shape)
    plain.load_state_dict(model.state_dict())
    assert model.eval()(batch).item() == plain(batch).item()


# --- rotary positions ---------------------------------------------------------------------------------


def test_rotation_keeps_lengths_and_its_gradient_is_right():
    shape = ModelShape(heads=2, d_model=12, rope_theta=100.0)
    tables = rotary_tables(torch.tensor([0, 1, 5, 0, 9]), shape, torch.float64)
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rotate(x, *tables).norm(dim=-1), x.norm(dim=-1))
    assert torch.autograd.gradcheck(lambda y: rotate(y, *tables), (x,))


def test_angles_stay_exact_under_autocast_and_in_bfloat16_models(documents, pack):
    model = Decoder(ModelShape(vocabulary_size=50))
    expected = model.rotation(pack(documents))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.rotation(pack(documents))
    low = model.bfloat16().rotation(pack(documents))
    for tables in (mixed, low):
        assert torch.equal(tables[0], expected[0])
        assert torch.equal(tables[1], expected[1])
    exact = rotary_tables(torch.arange(8192), model.shape, torch.float64)
    single = rotary_tables(torch.arange(8192), model.shape, torch.float32)
    assert (single[0] - exact[0]).abs().max() < 2e-3  # bfloat16 angles would be off by up to 2


# --- parameters ---------------------------------------------------------------------------------------


def test_initial_weights_have_the_stated_spread_and_follow_the_seed():
    shape = ModelShape(layers=8, d_model=128, d_ff=512, vocabulary_size=500, bias=True, norm="layernorm")
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(Decoder(shape))
    for name, parameter in models[0].named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            expected = 128**-0.5 / (4 if residual else 1)
            assert parameter.std().item() == pytest.approx(expected, rel=0.03)
    first, same, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_loss_function_can_be_replaced_and_gets_weights_only_if_there_are_any(shape, documents, pack):
    def summed(hidden, weight, targets, num_targets, **options):
        assert (hidden.shape, weight.shape, targets.shape) == ((32, 32), (50, 32), (32,))
        seen.append(options)
        return hidden.sum()

    model, seen = Decoder(shape, loss_options=LossOptions(z_loss=0.1)), []
    model.loss_function = summed
    model(pack(documents))
    model.eval()(PackedCollator(8, 64, loss_weighting="document")(documents))
    assert "weights" in seen[1]
    assert "weights" not in seen[0]
    assert [options["z_loss"] for options in seen] == [0.1, 0.0]


# --- windows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_layers", [0, 2])
def test_each_layer_sees_its_window(shape, pack, documents, window_layers):
    """Two layers that see three tokens each: the last position depends on at most five tokens."""
    model = Decoder(dataclasses.replace(shape, window=3, window_layers=window_layers)).double()
    batch = pack(documents)
    before = model.hidden(batch)
    end = 20  # of the third document, 12 tokens long
    for distance in range(1, 12):
        changed = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
        changed.input_ids[end - 1 - distance] = (batch.input_ids[end - 1 - distance] + 1) % 50
        after = model.hidden(changed)
        assert torch.equal(before[end - 1], after[end - 1]) == (distance > 4)


# --- bad input ----------------------------------------------------------------------------------------


def test_bad_shapes_and_batches_are_refused(shape, document, documents, pack):
    model = Decoder(shape)
    long, low, high = pack([document(5), document(17)]), pack(documents), pack(documents)
    low.input_ids[4], high.input_ids[4] = -1, 50
    some = dataclasses.replace(shape, window=3, window_layers=1)
    other = Decoder(shape)  # a new feed-forward must not train from uninitialized memory
    other.blocks[1].feed_forward = torch.nn.Module()
    other.blocks[1].feed_forward.experts = torch.nn.Parameter(torch.empty(4, 8, 8))
    cases = [
        (lambda: Decoder(ModelShape()), r"model\.vocabulary_size=0.*with_vocabulary"),
        (lambda: Decoder(some), r"window_layers=1.*planning"),
        (lambda: Decoder(shape, attention="dens"), "attention=dens .*did you mean 'dense'"),
        (lambda: model(low), "token -1 is outside the vocabulary of 50"),
        (lambda: model(high), "token 50 is outside the vocabulary of 50"),
        (other.reset_parameters, r"blocks\.1\.feed_forward .*experts"),
    ]
    if shape.positions == "learned":
        cases.append((lambda: model(long), r"17 tokens is longer than .* model\.context=16"))
    else:
        assert model(long).isfinite()
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()
