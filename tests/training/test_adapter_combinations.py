"""Adapters together with everything else that a run may have: the same losses as without it."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from multipack.data.text.tokenizer import byte_tokenizer
from multipack.models.decoder import Decoder
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.training.preferences import REFERENCE
from multipack.training.run_config import compose_run
from multipack.training.train import train

SHAPE = ModelShape(2, 2, 1, 64, 128, vocabulary_size=264, tied=False, context=64, head_dim=64)
ADAPTERS = {
    "lora": "adapter=lora adapter.rank=2",
    "qlora": "adapter=qlora adapter.rank=2",
    "qdora": "adapter=dora adapter.quantize=nf4 adapter.rank=2",
}


@pytest.fixture
def base(tmp_path, save_decoder):
    torch.manual_seed(1)
    return save_decoder(tmp_path / "base", Decoder(SHAPE), byte_tokenizer())


def run(tmp_path, base, kind, *words, records, out="run"):
    """Losses of a run of three steps, with those of its evaluations."""
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    common = (
        f"data=jsonl data.path={file} plan.capacity=64 plan.packs_per_step=2 plan.window=4 train.device=cpu"
        " train.dtype=fp32 train.steps=3 train.eval_every=2 train.sample_tokens=0 log.every=0"
        f" optimizer.lr=0.01 train.init_from={base} {ADAPTERS[kind]}"
    )
    train(compose_run([*common.split(), *words, f"out={tmp_path / out}"]))
    lines = map(json.loads, RunDirectory(tmp_path / out).metrics.read_text().splitlines())
    found = [line for line in lines if "loss" in line or "val_loss" in line]
    return [line.get("loss", line.get("val_loss")) for line in found], found


TEXTS = [{"text": "abcdefghij"[number % 7 :] * 3} for number in range(60)]
PAIRS = [
    {"prompt": "say", "chosen": "abcdefghij"[number % 5 :], "rejected": "zyx" * (1 + number % 4)}
    for number in range(40)
]
SAME = (
    "train.recompute=full",
    "train.recompute=selective",
    "train.tiles=2",
    "train.fixed_shape=true",
    "parallel.data=zero3 parallel.offload=cpu",
    "train.compile=true",
    "train.dtype=bf16",
)
"""Settings with which losses are the same, but for rounding in bf16."""


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.slow
def test_losses_are_the_same(tmp_path, base, kind):
    expected, _ = run(tmp_path, base, kind, records=TEXTS, out="plain")
    assert len(expected) > 4
    for words in SAME:
        found, _ = run(tmp_path, base, kind, *words.split(), records=TEXTS, out=words)
        limit = 5e-3 if "bf16" in words else 1e-5
        np.testing.assert_allclose(found, expected, rtol=limit, err_msg=words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qdora"])
@pytest.mark.parametrize("loss", ["sigmoid", "simpo"])
def test_the_reference_of_pairs_is_the_model_without_adapters(tmp_path, base, kind, loss):
    start = ["data.format=preference", f"preference.loss={loss}", "preference.beta=1"]
    _, records = run(tmp_path, base, kind, *start, records=PAIRS)
    assert records[-1]["val_reward_margin"] > records[0]["val_reward_margin"]
    if loss == "simpo":  # which has no reference
        return
    assert abs(records[0]["val_reward_margin"]) < 1e-4
    found = load_file(tmp_path / "run" / REFERENCE)
    held = ["adapter.quantize=none"] if kind == "lora" else []
    theirs = [*start, f"preference.reference={base}"]
    run(tmp_path, base, kind, *theirs, *held, records=PAIRS, out="given")
    expected = load_file(tmp_path / "given" / REFERENCE)
    for name, values in expected.items():
        # A given reference is not quantized.
        np.testing.assert_allclose(found[name], values, rtol=1e-5 if kind == "lora" else 0.05)
