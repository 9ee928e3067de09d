"""Runs beside frozen weights of 4 bits (QLoRA) or 8 bits, and adapters together with what else a run may have."""

import json

import pytest
import torch

from multipack.data.text.tokenizer import byte_tokenizer
from multipack.models.decoder import Decoder
from multipack.ops.lora import quantize
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.training.checks import check
from multipack.training.export import export
from multipack.training.inference import load_model
from multipack.training.run_config import compose_run
from multipack.training.train import train
from multipack.training.weights import find_weights
from multipack.words import ConfigError

SHAPE = ModelShape(2, 2, 1, 64, 128, vocabulary_size=264, tied=False, context=64, head_dim=64)


def dequantized(state, kind="nf4"):
    """The values that quantized matrices of blocks stand for."""
    config = AdapterConfig("lora", quantize=kind)
    return {
        name: quantize(value, config).to(torch.float32)
        if name.startswith("blocks.") and value.dim() == 2
        else value
        for name, value in state.items()
    }


@pytest.fixture
def bases(tmp_path, save_decoder, request):
    """A base, and one with the values that its quantized matrices stand for."""
    torch.manual_seed(1)
    model = Decoder(SHAPE)
    save_decoder(tmp_path / "base", model, byte_tokenizer())
    model.load_state_dict(dequantized(model.state_dict(), getattr(request, "param", "nf4")))
    save_decoder(tmp_path / "rounded", model, byte_tokenizer())
    return tmp_path / "base", tmp_path / "rounded"


@pytest.fixture
def words(tmp_path):
    """Words of a run with adapters of rank 2, without a base."""
    file = tmp_path / "documents.jsonl"
    lines = [json.dumps({"text": "abcdefghij"[number % 7 :] * 3}) for number in range(60)]
    file.write_text("\n".join(lines) + "\n")
    return (
        f"data=jsonl data.path={file} plan.capacity=64 plan.packs_per_step=2 plan.window=4 train.device=cpu"
        " train.dtype=fp32 train.steps=4 train.eval_every=2 train.sample_tokens=0 train.checkpoint_every=2"
        " log.every=0 optimizer.lr=0.01 adapter.rank=2"
    ).split()


def run(words, out):
    train(compose_run([*words, f"out={out}"]))
    return out


def losses(out):
    records = [json.loads(line) for line in RunDirectory(out).metrics.read_text().splitlines()]
    return [record.get("loss", record.get("val_loss")) for record in records if "config" not in record]


@pytest.mark.parametrize(
    ("bases", "kind"),
    [
        ("nf4", "lora"),
        pytest.param("int8", "lora", marks=pytest.mark.slow),
        pytest.param("nf4", "dora adapter.train=[norm] adapter.targets=[q_proj]", marks=pytest.mark.slow),
    ],
    indirect=["bases"],
)
def test_a_run_equals_one_beside_dequantized_weights(words, bases, tmp_path, kind, request):
    base, rounded = bases
    kinds, quantize = kind.split(), f"adapter.quantize={request.node.callspec.params['bases']}"
    ours = run(
        [*words, f"adapter={kinds[0]}", quantize, *kinds[1:], f"train.init_from={base}"], tmp_path / "a"
    )
    theirs = run([*words, f"adapter={kinds[0]}", *kinds[1:], f"train.init_from={rounded}"], tmp_path / "b")
    found, expected = losses(ours), losses(theirs)
    assert len(found) > 6
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found[-1] < found[0] - 0.1
    own, other = find_weights(ours), find_weights(theirs)
    assert own.adapter.names == other.adapter.names
    for name, value in other.state().items():
        torch.testing.assert_close(own.read(name), value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_exports_hold_what_was_trained(words, bases, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    for path in bases:
        export(path, tmp_path / f"hf-{path.name}")
    out = run([*words, "adapter=qlora", f"train.init_from={tmp_path / 'hf-base'}"], tmp_path / "run")
    rows = export(out, tmp_path / "adapter")
    assert any("BitsAndBytesConfig(load_in_4bit=True" in value for _, value in rows)
    rows = export(out, tmp_path / "merged", merge=True)
    assert any("merged into the values of the NF4 weights" in value for _, value in rows)
    ids, logits = torch.tensor([[7, 30, 100, 41, 5]]), {}
    for name in ("hf-base", "hf-rounded", "merged"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        if name != "merged":
            model = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
        with torch.no_grad():
            logits[name] = model.eval().double()(ids).logits[0]
    torch.testing.assert_close(logits["merged"], logits["hf-rounded"], rtol=0, atol=1e-5)
    assert (logits["merged"] - logits["hf-base"]).abs().max() > 0.01


def test_frozen_weights_of_another_base_are_refused(words, bases, tmp_path, save_decoder):
    base, rounded = bases
    out = run([*words, "adapter=qlora", f"train.init_from={base}", "train.steps=2"], tmp_path / "run")
    moved = base.rename(tmp_path / "moved")
    rounded.rename(base)
    message = r"adapter.base=.*base.* holds other weights than these adapters were trained beside"
    with pytest.raises(ValueError, match=message):
        train(compose_run(["train.resume=true", f"out={out}", "train.steps=4"]))
    with pytest.raises(ValueError, match=message):
        load_model(out)
    where = next(moved.glob("**/step-*"), moved)
    train(compose_run(["train.resume=true", f"out={out}", "train.steps=4", f"adapter.base={where}"]))
    assert len(losses(out)) > 6


def test_settings_that_do_not_go_together_are_refused(words, bases, tmp_path):
    start = [*words, "adapter=qlora", f"train.init_from={bases[0]}"]
    with pytest.raises(
        ConfigError, match=r"adapter.quantize=nf4 quantizes frozen weights, and adapter.name=none"
    ):
        compose_run([*words, "adapter.quantize=nf4"])
    out = run([*start, "train.steps=2"], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"adapter.quantize was nf4 in that run"):
        compose_run(["train.resume=true", f"out={out}", "adapter.quantize=none"])
    config = compose_run([*start, "parallel.tensor=4"])
    with pytest.raises(ValueError, match=r"parallel.tensor=4 .*model.d_ff=128: use parallel.tensor=2"):
        config.adapter.check_blocks(config.model, 4)
    AdapterConfig("lora", quantize="int8").check_blocks(config.model, 3)  # numbers have no blocks to cut
    config = compose_run([*start, "model=tiny", "model.d_ff=100"])
    with pytest.raises(ValueError, match=r"model.d_ff=100: use adapter.quantize=int8"):
        check(config, 1)
