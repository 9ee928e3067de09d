"""Linear cross-entropy and log-probabilities equal torch's, in chunks and tiles, without whole logits."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.ops import loss as loss_module
from multipack.ops.logits import LossOptions, chunk_rows, softmax_of_logits
from multipack.ops.loss import linear_cross_entropy, linear_log_probabilities

WIDTH, VOCABULARY = 12, 29
LOSSES = (linear_cross_entropy, linear_log_probabilities)


def make_inputs(seed=0, dtype=torch.float64, tokens=37, scale=1.0):
    """(hidden, weight, targets); a third of the targets are ignored."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=draw, dtype=torch.float64).mul_(scale).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randint(-VOCABULARY // 2, VOCABULARY, (tokens,), generator=draw)
    return hidden.requires_grad_(), weight.requires_grad_(), targets.where(targets >= 0, -100)


def logits_of(hidden, weight, cap):
    logits = F.linear(hidden, weight)
    return cap * torch.tanh(logits / cap) if cap else logits


def reference(hidden, weight, targets, weights=None, z_loss=0.0, label_smoothing=0.0, logit_cap=0.0):
    """The sum with all terms, by autograd."""
    logits = logits_of(hidden, weight, logit_cap)
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * torch.logsumexp(logits, dim=-1).square() * (targets != -100)
    return (losses if weights is None else losses * weights).sum()


def log_probabilities(hidden, weight, targets, cap=0.0):
    return -F.cross_entropy(logits_of(hidden, weight, cap), targets, reduction="none")


def assert_equal(found, wanted, inputs, tolerance):
    """Values and gradients, of an arbitrary incoming gradient, agree in norm."""
    upstream = torch.arange(1.0, wanted.numel() + 1, dtype=wanted.dtype).view_as(wanted) * 0.37
    pairs = [(found, wanted)]
    gradients = [torch.autograd.grad(each, inputs, upstream, retain_graph=True) for each in (found, wanted)]
    pairs += zip(*gradients, strict=True)
    for mine, other in pairs:
        assert mine.dtype == other.dtype
        assert (mine - other).norm() <= tolerance * other.norm().clamp(min=1e-30)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 41),
    tiles=st.integers(1, VOCABULARY + 3),
    scale=st.sampled_from([0.1, 1.0, 300.0]),
    z_loss=st.sampled_from([0.0, 0.01]),
    smoothing=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
    cap=st.sampled_from([0.0, 5.0]),
)
def test_equals_torch_in_chunks_and_tiles(
    seed, tokens, chunk, tiles, scale, z_loss, smoothing, weighted, cap
):
    *inputs, targets = make_inputs(seed, tokens=tokens, scale=scale)
    cap = cap if scale <= 1.0 else 0.0  # the gradient of larger logits would be rounding errors
    cuts = {"chunk_tokens": chunk, "vocabulary_tiles": tiles, "logit_cap": cap}
    terms = {"z_loss": z_loss, "label_smoothing": smoothing}
    terms["weights"] = torch.rand(tokens, dtype=torch.float64) if weighted else None
    wanted = reference(*inputs, targets, **terms, logit_cap=cap)
    assert_equal(linear_cross_entropy(*inputs, targets, **cuts, **terms), wanted, inputs, 1e-13)
    found = linear_log_probabilities(*inputs, targets, **cuts)
    assert_equal(found, log_probabilities(*inputs, targets, cap), inputs, 1e-13)
    assert not found[targets == -100].any()


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    targets_of=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    chunk=st.integers(1, 11),
    tiles=st.sampled_from([1, 4]),
    terms=st.sampled_from([{}, {"z_loss": 0.01, "label_smoothing": 0.3}]),
    cap=st.sampled_from([0.0, 5.0]),
)
def test_rows_with_several_targets_equal_repeated_rows(seed, targets_of, chunk, tiles, terms, cap):
    hidden, weight, _ = make_inputs(seed, tokens=12)
    inputs, draw = (hidden, weight), torch.Generator().manual_seed(seed)
    places = torch.tensor(targets_of)
    rows, places = places.unique(return_inverse=True)  # of 12 rows some have no target
    targets = torch.randint(0, VOCABULARY, places.shape, generator=draw)
    weights = torch.randn(places.shape, generator=draw, dtype=torch.float64)  # those of a row may cancel
    cuts = {"chunk_tokens": chunk, "vocabulary_tiles": tiles, "logit_cap": cap}
    repeated = hidden[rows[places]]
    for own in (None, weights):
        wanted = reference(repeated, weight, targets, own, logit_cap=cap, **terms)
        found = linear_cross_entropy(*inputs, targets, weights=own, rows=rows[places], **cuts, **terms)
        assert_equal(found, wanted, inputs, 1e-12)
    found = linear_log_probabilities(*inputs, targets, rows=rows[places], **cuts)
    assert_equal(found, log_probabilities(repeated, weight, targets, cap), inputs, 1e-12)


@pytest.mark.parametrize("tiles", [1, 3])
def test_float32_and_bfloat16_are_close(tiles):
    *inputs, targets = make_inputs(dtype=torch.float32, tokens=400)
    terms = {"z_loss": 1e-2, "label_smoothing": 0.1, "weights": torch.rand(400)}
    options = {"chunk_tokens": 64, "vocabulary_tiles": tiles}
    wanted = reference(*inputs, targets, **terms), log_probabilities(*inputs, targets)
    assert_equal(linear_cross_entropy(*inputs, targets, **options, **terms), wanted[0], inputs, 1e-6)
    assert_equal(linear_log_probabilities(*inputs, targets, **options), wanted[1], inputs, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*inputs, targets, **options, **terms)
        mixed = linear_cross_entropy(inputs[0].bfloat16(), inputs[1], targets, **options, **terms)
        found = linear_log_probabilities(*inputs, targets, **options)
    assert torch.equal(loss, mixed)
    assert_equal(loss, wanted[0], inputs, 2e-2)
    assert_equal(found, wanted[1], inputs, 2e-2)
    half = [x.detach().bfloat16().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(linear_cross_entropy(*half, targets, **options), half)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


def test_backward_can_run_twice():
    *inputs, targets = make_inputs()
    loss = linear_cross_entropy(*inputs, targets, chunk_tokens=8)
    first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_wanted_gradients_are_computed():
    hidden, weight, targets = make_inputs()
    for loss in LOSSES:
        for frozen, wanted in ((hidden, weight), (weight, hidden)):
            expected = torch.autograd.grad(loss(hidden, weight, targets).sum(), wanted)[0]
            frozen.requires_grad_(False)
            assert torch.equal(torch.autograd.grad(loss(hidden, weight, targets).sum(), wanted)[0], expected)
            frozen.requires_grad_()
        with torch.no_grad():
            without = loss(hidden, weight, targets)
        assert not without.requires_grad
        assert torch.equal(without, loss(hidden, weight, targets).detach())


def test_without_targets_it_is_zero_and_still_connected():
    hidden, weight, targets = make_inputs()
    for loss in LOSSES:
        found = loss(hidden, weight, torch.full_like(targets, -100), num_targets=0)
        gradients = torch.autograd.grad(found.sum(), (hidden, weight))
        assert not found.any()
        assert not any(each.any() for each in gradients)
        assert [each.shape for each in gradients] == [hidden.shape, weight.shape]


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor whose last dimension is `width`; number of matrix products, and rows of `mm`."""

    def __init__(self, width):
        super().__init__()
        self.width, self.largest, self.products, self.rows = width, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.products += function.name() in ("aten::mm", "aten::addmm", "aten::addmm_")
        self.rows += len(out) if function.name() == "aten::mm" else 0
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[-1] == self.width:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(("tiles", "width"), [(1, VOCABULARY), (3, 10)])
def test_logits_never_exceed_a_chunk_of_a_tile(tiles, width):
    *inputs, targets = make_inputs(tokens=400)
    with Sizes(width) as sizes:
        linear_cross_entropy(*inputs, targets, chunk_tokens=16, vocabulary_tiles=tiles).backward()
    assert 0 < sizes.largest <= 16 * width


def test_one_tile_computes_logits_once_and_no_gradient_that_is_not_wanted():
    *inputs, targets = make_inputs()
    counts = []
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled), Sizes(VOCABULARY) as sizes:
            linear_cross_entropy(*inputs, targets)
        counts.append(sizes.products)
    assert counts == [1, 3]


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_row_is_projected_once_whatever_the_number_of_its_targets(chunk):
    hidden, weight, _ = make_inputs(tokens=20)
    rows = torch.arange(3, 15).repeat(16)  # 12 rows, apart in the list of targets
    targets = torch.arange(len(rows)) % VOCABULARY
    for loss in LOSSES:
        with torch.no_grad(), Sizes(VOCABULARY) as sizes:
            loss(hidden, weight, targets, rows=rows, chunk_tokens=chunk)
        assert sizes.rows == 12
        with Sizes(VOCABULARY) as sizes:  # gradients of log-probabilities project again
            loss(hidden, weight, targets, rows=rows, chunk_tokens=chunk).sum().backward()
        assert sizes.rows == (12 if loss is linear_cross_entropy else 24)


def test_the_gradient_of_a_row_with_many_targets_is_rounded_once():
    hidden, weight, _ = (x.detach() for x in make_inputs(dtype=torch.float32, tokens=4))
    rows = torch.arange(4).repeat_interleave(200)
    targets = torch.randint(0, VOCABULARY, rows.shape, generator=torch.Generator().manual_seed(0))
    half = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    wide = [x.detach().float().requires_grad_() for x in half]
    for loss in LOSSES:
        found = torch.autograd.grad(loss(*half, targets, rows=rows).sum(), half[0])[0].float()
        wanted = torch.autograd.grad(loss(*wide, targets, rows=rows).sum(), wide[0])[0]
        assert (found - wanted).norm() <= 6e-3 * wanted.norm()


def test_on_a_gpu_rows_are_found_without_reading_the_device():
    """Meta tensors have no values to read; there the rows are as many as there can be."""
    for tokens, expected in ((100, 60), (40, 40)):
        rows = torch.empty(60, dtype=torch.int64, device="meta")
        targets = loss_module._Targets.of(rows, None, rows, tokens)
        assert (targets.rows.shape, targets.places.shape) == ((expected,), (60,))


def test_wrong_arguments_are_refused():
    hidden, weight, _ = make_inputs(tokens=6)
    arguments = {"hidden": hidden, "weight": weight, "targets": torch.zeros(6, dtype=torch.int64)}
    both = (
        ({"hidden": torch.zeros(6, 4)}, r"weight \(V, d\)"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, r"targets \(6,\)"),
        ({"targets": torch.full((6,), VOCABULARY)}, f"target {VOCABULARY} .* vocabulary of {VOCABULARY}"),
        ({"targets": torch.full((6,), -99)}, "target -99"),
        ({"hidden": torch.zeros(6, WIDTH)}, "autocast"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"vocabulary_tiles": 0}, "vocabulary_tiles"),
        ({"num_targets": 9}, "num_targets=9"),
    )
    entropy = (
        ({"weights": torch.ones(5)}, r"weights \(6,\)"),
        ({"weights": torch.ones(6, dtype=torch.int64)}, r"floating-point weights"),
        ({"weights": torch.ones(6, requires_grad=True)}, "weights get no gradient"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
    )
    logs = (
        ({"z_loss": 1e-4}, "^log-probabilities have no z_loss"),
        ({"label_smoothing": 0.1}, "^log-probabilities have no z_loss and no label_smoothing"),
    )
    for loss, cases in ((linear_log_probabilities, both + logs), (linear_cross_entropy, both + entropy)):
        for changes, expected in cases:
            with pytest.raises(ValueError, match=expected):
                loss(**{**arguments, **changes})


def test_options_are_keywords():
    *inputs, targets = make_inputs()
    for loss in LOSSES:
        with pytest.raises(TypeError, match="positional"):
            loss(*inputs, targets, 5)


@pytest.mark.parametrize(("z_loss", "smoothing", "weighted"), [(0.0, 0.0, False), (1e-2, 0.1, True)])
def test_the_function_that_is_compiled_on_gpus_computes_the_same(monkeypatch, z_loss, smoothing, weighted):
    *inputs, targets = make_inputs(tokens=40)
    terms = {"z_loss": z_loss, "label_smoothing": smoothing}
    terms["weights"] = torch.rand(40, dtype=torch.float64) if weighted else None
    monkeypatch.setattr(loss_module, "FUSED_DEVICES", ("cpu",))
    monkeypatch.setattr(loss_module, "compiled_softmax", lambda: softmax_of_logits)
    found = linear_cross_entropy(*inputs, targets, chunk_tokens=16, compiled=True, **terms)
    assert_equal(found, reference(*inputs, targets, **terms), inputs, 1e-13)


class Moved(TorchDispatchMode):
    """Bytes of (V, d) float32 tensors that operators other than matrix products read or write."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.bytes = shape, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if not operator.name().startswith(("aten::addmm", "aten::mm", "aten::zeros_like", "aten::slice")):
            for each in (*args, out):
                if (
                    isinstance(each, Tensor)
                    and tuple(each.shape) == self.shape
                    and each.dtype == torch.float32
                ):
                    self.bytes += 4 * each.numel()
        return out


def test_on_a_gpu_products_are_added_to_the_gradient_in_few_large_chunks():
    """Sums of the weight's gradient move no bytes of their own; meta tensors take the path of GPUs."""
    hidden, weight = (torch.empty(n, 2048, dtype=torch.bfloat16, device="meta") for n in (8192, 128_256))
    head = loss_module._Head(weight, torch.bfloat16, LossOptions())
    assert 2**29 < chunk_rows(128_256, hidden.device) * 128_256 * 4 <= 2**30
    assert chunk_rows(128_256, torch.device("cpu")) == 1024
    numbers = torch.empty(8192, dtype=torch.int64, device="meta")
    with Moved((128_256, 2048)) as moved, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda device, enabled: nullcontext())
        head.losses(hidden, loss_module._Targets(numbers, None, numbers), (True, True))
    assert moved.bytes == 0
