"""`model.kernels`: what is replaced and why not, and calls of Liger's functions with their documented arguments.

Liger's kernels need a GPU. A stand-in has functions of the same names and arguments (liger-kernel 0.8.5), in torch.
"""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from multipack.models.decoder import Decoder
from multipack.models.kernels import MODULE, use_liger
from multipack.models.recompute import recompute_blocks
from multipack.ops.logits import LossOptions
from multipack.ops.loss import linear_cross_entropy
from multipack.shapes import SHAPES, ModelShape
from multipack.training.blueprint import kernels_of
from multipack.training.run_config import compose

SHAPE = ModelShape(2, 4, 2, 32, 48, vocabulary_size=61, context=64)
ALL = ["RMSNorm", "SwiGLU", "RoPE", "linear cross-entropy"]
GPU = torch.device("cuda")


def _norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    assert (casting_mode, in_place) == ("gemma", False)
    return F.rms_norm(x, weight.shape, weight + offset, eps)


def _swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    return F.silu(a) * b


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(batch, heads, tokens, D) and (tokens, D / 2), as transformers' `apply_rotary_pos_emb`."""
    assert rotary_dim == q.shape[-1] == 2 * cos.shape[-1]
    assert q.shape[2] == len(cos)
    cos, sin = (torch.cat([each, each], -1) for each in (cos, sin))

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(q), turned(k)


def _loss(
    x,
    weight,
    target,
    bias=None,
    ce_weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
):
    assert accum_dtype == torch.float32
    logits = F.linear(x, weight, bias).float()
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    squares = logits.logsumexp(-1)[target != ignore_index].square().sum()
    return F.cross_entropy(logits, target, **options) + lse_square_scale * squares, None, None, None


@pytest.fixture
def liger(monkeypatch):
    """The stand-in, installed."""
    functions = {"RMSNorm": _norm, "SiLUMul": _swiglu, "Rope": _rope, "FusedLinearCrossEntropy": _loss}
    made = ModuleType(MODULE)
    made.calls = dict.fromkeys(functions, 0)

    def counting(name):
        def apply(*arguments):
            made.calls[name] += 1
            return functions[name](*arguments)

        return SimpleNamespace(apply=apply)

    for name in functions:
        setattr(made, f"Liger{name}Function", counting(name))
    parent = ModuleType("liger_kernel")
    parent.__spec__ = SimpleNamespace(name="liger_kernel")
    monkeypatch.setitem(sys.modules, "liger_kernel", parent)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, norm="rmsnorm+1", head_norm="head", tied=False)], ids=["llama", "gemma"]
)
def test_losses_and_gradients_are_those_of_torch(liger, pack, document, shape):
    batch = pack([document(17), document(23)])
    results = []
    for kernels in ([], ALL):
        torch.manual_seed(0)
        model = Decoder(shape, loss_options=LossOptions(z_loss=1e-3, label_smoothing=0.1))
        nn.init.normal_(model.norm.weight)
        use_liger(model, kernels, liger)
        recompute_blocks(model, "full")
        loss = model(batch)
        loss.backward()
        with torch.no_grad():
            evaluated = model.eval()(batch)
        results.append({"loss": loss, "eval": evaluated, **{n: p.grad for n, p in model.named_parameters()}})
    assert all(liger.calls.values())
    for name, value in results[0].items():
        torch.testing.assert_close(
            results[1][name], value, rtol=1e-4, atol=1e-5 * float(value.detach().abs().max())
        )


def test_rows_with_several_targets_take_the_loss_that_projects_them_once(liger):
    model = Decoder(SHAPE)
    use_liger(model, ALL, liger)
    hidden, targets = torch.randn(3, 32), torch.tensor([5, 6, 7, 8])
    given = hidden, model.output_weight, targets
    options = {"rows": torch.tensor([0, 0, 2, 0]), "z_loss": 1e-3}
    assert torch.equal(model.loss_function(*given, **options), linear_cross_entropy(*given, **options))
    assert not any(liger.calls.values())


def test_auto_takes_what_suits_where_it_is_installed(liger):
    def taken(*words, shape=SHAPE, device=GPU):
        return kernels_of(compose(["train.compile=false", *words]), shape, device)

    assert taken() == ALL
    assert taken("model.kernels=liger") == ALL
    assert taken("model.kernels=torch") == taken(device=torch.device("cpu")) == []
    assert taken("train.compile=true") == taken("train.compile=true", shape=SHAPES["gpt2"]) == ALL[3:]
    assert taken(shape=SHAPES["gpt2"]) == ALL[3:]
    assert taken("parallel.tensor=2") == ["SwiGLU", "RoPE"]
    assert taken("train.recompute=selective", "train.loss_weighting=document") == ["RMSNorm", "SwiGLU"]
    assert taken(shape=replace(SHAPE, activation="geglu", rope_width=4)) == ["RMSNorm", ALL[3]]


def test_liger_is_refused_with_the_reason(liger, monkeypatch):
    def refused(message, *words, shape=SHAPE, device=GPU):
        config = compose(["train.compile=false", "model.kernels=liger", *words])
        with pytest.raises((ValueError, ImportError), match=message) as caught:
            kernels_of(config, shape, device)
        assert "\n" not in str(caught.value)

    refused("this run is on a CPU; use model.kernels=auto", device=torch.device("cpu"))
    refused("model.norm=layernorm cannot be with its RMSNorm", shape=SHAPES["gpt2"])
    refused("model.activation=geglu .*SwiGLU", shape=replace(SHAPE, activation="geglu"))
    refused("train.recompute=selective .*RoPE", "train.recompute=selective")
    refused("train.loss_weighting=document .*cross-entropy", "train.loss_weighting=document")
    refused("train.tiles=2", "train.tiles=2")
    refused("parallel.tensor=2", "parallel.tensor=2")
    refused("train.compile=true", "train.compile=true")
    monkeypatch.setitem(sys.modules, MODULE, None)
    refused(r"\[liger\]")
