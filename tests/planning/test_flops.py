"""FLOPs against torch's own counter.

`FlopCounterMode` counts every matrix product that runs. Attention it counts as l × l pairs, causal or not, where
a causal document has l(l+1)/2 that need computing: the difference, l(l−1)/2 pairs of 12 FLOPs and more for every
unit of width, is added to ours before they are compared, and is the only one. (The counter does not know the
CPU's fused attention; the plain products behind it, or the fused one with torch's formula for it, are counted.)
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.ops.attention import loop, table
from multipack.planning.cost import CostModel
from multipack.shapes import ModelShape

LENGTHS = [70, 1, 33, 200]
SMALL = {"layers": 2, "heads": 4, "d_model": 64, "d_ff": 96, "vocabulary_size": 50, "context": 512}
VARIANTS = {
    "llama": {},
    "gqa, wide heads": {"kv_heads": 2, "head_dim": 24},
    "gpt2": {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
    "one key head, untied": {"kv_heads": 1, "tied": False},
}


@pytest.fixture(autouse=True)
def visible_attention(monkeypatch):
    """The counter does not look into our operator: here documents go through torch's public function."""
    rows = [replace(row, forward=loop._by_sdpa) if row.name == "loop" else row for row in table.BACKENDS]
    monkeypatch.setattr(table, "BACKENDS", tuple(rows))


def _batch():
    documents = [
        Document(np.arange(length, dtype=np.uint16) % 50, np.array([[0, length]])) for length in LENGTHS
    ]
    return PackedCollator(max_documents=8, max_seqlen=256)(documents)


def _every_row_is_projected(hidden, weight, targets, **_):
    """Cross-entropy over all tokens: the decoder's own loss leaves a document's last token out."""
    return F.cross_entropy(F.linear(hidden, weight), targets.clamp(min=0), reduction="sum")


def _beyond_causal(shape, recompute="none"):
    """FLOPs of the pairs above the diagonal, which the counter counts: l² − l(l+1)/2 of each document and layer."""
    exact = np.array(LENGTHS)
    causal = CostModel.from_shape(shape, recompute=recompute)
    per_unit = causal.flops([2], executed=True) - 2 * causal.flops(
        [1], executed=True
    )  # 6·N·H·e·(6 − 2·2), or 7, or 9
    return per_unit / 2 * float((2 * exact**2 - exact * (exact + 1)).sum())


@pytest.mark.parametrize("name", VARIANTS)
def test_our_decoder(name):
    shape = ModelShape(**SMALL, **VARIANTS[name])
    model = Decoder(shape, attention="loop")
    model.loss_function = _every_row_is_projected
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(_batch()).backward()
    expected = CostModel.from_shape(shape).flops(LENGTHS) + _beyond_causal(shape)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_our_own_loss_projects_targets_only():
    shape = ModelShape(**SMALL)
    products = partial(_product)
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: products}) as counter,
    ):
        Decoder(shape, attention="loop")(_batch()).backward()
    not_projected = 6 * shape.d_model * shape.vocabulary_size * len(LENGTHS)
    expected = CostModel.from_shape(shape).flops(LENGTHS) + _beyond_causal(shape) - not_projected
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def _product(sum_shape, left, right, *args, out_shape=None, **kwargs):
    """FLOPs of sum += left @ right, in place, which the counter does not know."""
    return 2 * left[0] * left[1] * right[1]


FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *a, **_: sdpa_flop_count(
        q, k, v
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda upstream, q, k, v, *a, **_: sdpa_backward_flop_count(upstream, q, k, v)
    ),
}
"""torch's formulas for fused attention (five products backward), for the CPU's kernel."""


@pytest.mark.parametrize("recompute", ["flash", "full"])
def test_recomputation_is_what_is_executed(recompute):
    shape = ModelShape(**SMALL)

    def whole(hidden, weight, targets, **_):
        return checkpoint(_every_row_is_projected, hidden, weight, targets, use_reentrant=False)

    full = recompute == "full"
    model = Decoder(shape, attention="loop")
    model.loss_function = whole if full else _every_row_is_projected
    if full:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with (
        FlopCounterMode(display=False, custom_mapping=FUSED) as counter,
        torch.utils.checkpoint.set_checkpoint_early_stop(
            False
        ),  # which would spare each block's last product
    ):
        model(_batch()).backward()
    cost = CostModel.from_shape(shape, recompute=recompute)
    expected = cost.flops(LENGTHS, executed=True) + _beyond_causal(shape, recompute)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)
    assert cost.flops(LENGTHS) == CostModel.from_shape(shape).flops(LENGTHS)
