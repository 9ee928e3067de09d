"""A resumed run is the uninterrupted one, bit for bit: records, weights, states of the optimizer."""

import json
import shutil

import pytest
import torch

from hf_models import run_words, save_model, short_run
from multipack.data.text.tokenizer import byte_tokenizer
from multipack.models.decoder import Decoder
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose_run
from multipack.training.run_doctor import examine_run
from multipack.training.train import train

SHAPE = ModelShape(2, 2, 1, 64, 128, vocabulary_size=264, tied=False, context=64, head_dim=64)
ADAPTED = ["adapter.rank=2", "adapter.dropout=0.1"]
EXPERTS = ["adapter=lora", "adapter.rank=2", "adapter.targets=[self_attn]"]
OWN = ["tokenizer=byte", "model=tiny", "model.layers=1", "model.dropout=0.1"]
RECORDS = {
    "pairs": lambda n: {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}!"},
    "labels": lambda n: {
        "prompt": f"{n}+1=",
        "completion": f"{n + n % 2}",
        "label": n % 2 == 1,
        "w": 1 + n % 3,
    },
}
KINDS = {
    "muon": ("texts", ["optimizer.name=muon", "train.loss_weighting=document"]),
    "8bit": ("texts", ["optimizer.name=adamw_8bit"]),
    "bf16": ("texts", ["optimizer.name=adamw_bf16"]),
    "shared": ("texts", ["data.share_prefixes=all", "data.min_prefix=1"]),
    "dora": ("base", ["adapter=dora", "adapter.train=[norm]", *ADAPTED]),
    "qlora": ("base", ["adapter=qlora", *ADAPTED]),
    "pairs": ("pairs", []),
    "simpo": ("pairs", ["preference.loss=simpo", "preference.beta=2"]),
    "orpo": ("pairs", ["preference.loss=orpo", "preference.beta=2"]),
    "reward": ("pairs", ["preference.loss=reward"]),
    "labels": ("labels", ["data.weight_field=w", "preference.undesirable=0.7", "optimizer.lr=1e-2"]),
    "foreign": ("mixtral", []),
    "foreign recomputed": ("mixtral", ["train.recompute=full"]),
    "foreign nf4": ("mixtral", [*EXPERTS, "adapter.quantize=nf4"]),
    "foreign int8": ("deepseek_v3", [*EXPERTS, "adapter.quantize=int8"]),
}
"""Kind of run → what it is trained on, or the model that it starts from, and its words."""
FAST = ("dora", "pairs", "labels", "foreign", "foreign nf4")


@pytest.fixture
def words(tmp_path, save_decoder):
    """(documents or model, further words) → the words of a run of four steps, with checkpoints after two and four."""

    def make(start, more):
        few = short_run(tmp_path)
        if start == "texts":
            return [*few, *OWN, *more]
        if start in RECORDS:
            file = tmp_path / "items.jsonl"
            file.write_text("".join(json.dumps(RECORDS[start](n)) + "\n" for n in range(40)))
            return [*few, *OWN, f"data.path={file}", "plan.packs_per_step=4", *more]
        if start == "base":
            torch.manual_seed(1)
            base = save_decoder(tmp_path / "base", Decoder(SHAPE), byte_tokenizer())
            return [*few, "optimizer.lr=0.01", f"train.init_from={base}", *more]
        pytest.importorskip("transformers", "5.2", reason="transformers >= 5.2 is not installed")
        save_model(start, tmp_path / "base", **({"hidden_size": 64, "intermediate_size": 64} if more else {}))
        return [*run_words(tmp_path, tmp_path / "base"), *more]

    return make


def tensors(out):
    source = load_checkpoint(RunDirectory(out).latest_checkpoint()).source
    groups = ("model", "optimizer")
    return {f"{group}.{name}": value for group in groups for name, value in source.whole(group).items()}


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_resumed_run_is_the_uninterrupted_one(words, tmp_path, files, kind):
    whole, part = tmp_path / "whole", tmp_path / "part"
    given = words(*KINDS[kind])
    train(compose_run([*given, "train.eval_every=2", "train.sample_tokens=0", f"out={whole}"]))
    shutil.copytree(whole, part)  # as if it had been killed before the last checkpoint
    shutil.rmtree(part / "checkpoints" / "step-00000004")
    (part / "checkpoints" / "latest").unlink()
    train(compose_run(["train.resume=true", f"out={part}"]))
    assert files(part).untimed == files(whole).untimed
    assert len(files(whole).losses) == 4
    expected, found = tensors(whole), tensors(part)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert not [each for each in examine_run(part) if each.status == "fail"]
