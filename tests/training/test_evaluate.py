"""`multipack evaluate`: equal to the run's own evaluations, and to transformers on other documents."""

import json
import math
import shutil

import pytest
import torch

from multipack.training.evaluate import evaluate
from multipack.training.export import export
from multipack.training.run_config import compose
from multipack.training.train import train


def test_a_run_is_evaluated_on_its_validation_documents_and_not_changed(finished, files):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    records = files(finished).evaluations
    found = evaluate(finished)
    assert (found.step, found.sets[0].documents) == (6, 12)
    assert found.sets[0].loss == pytest.approx(records[-1]["val_loss"], rel=1e-6)
    assert found.sets[0].perplexity == pytest.approx(math.exp(found.sets[0].loss))
    best = min(records, key=lambda record: record["val_loss"] if record["step"] else math.inf)
    assert evaluate(finished, weights="best").step == best["step"]
    middle = evaluate(finished / "checkpoints" / "step-00000003")
    assert middle.sets[0].loss == pytest.approx(records[1]["val_loss"], rel=1e-6)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_other_documents_are_evaluated_as_transformers_does(finished, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, folder = tmp_path / "other.jsonl", tmp_path / "exported"
    rows = [{"prompt": f"say {n}:", "completion": " plan token" * (1 + n % 4)} for n in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    export(finished, folder)
    words = ["data=jsonl", f"data.path={file}"]
    found = evaluate(folder, [*words, "train.dtype=fp32"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, targets = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["prompt"] + "\n").input_ids
        ids = torch.tensor([prompt + tokenizer(row["completion"]).input_ids + [tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        count = ids.shape[1] - len(prompt)
        total, targets = total + model(ids, labels=labels).loss.item() * count, targets + count
    assert (found.sets[0].documents, found.sets[0].targets) == (9, targets)
    assert found.sets[0].loss == pytest.approx(total / targets, rel=1e-5)
    assert evaluate(finished, [f"data.path={file}"]).sets[0].loss == pytest.approx(
        found.sets[0].loss, rel=1e-5
    )


def test_pairs_are_evaluated_with_their_reference(finished, words, tmp_path, files, changed):
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}:", "chosen": "yes" * (1 + n % 3), "rejected": "no"} for n in range(20)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, more = tmp_path / "dpo", ["train.steps=2", "train.eval_every=2", "optimizer.lr=1e-3"]
    train(compose(changed(words, f"data.path={pairs}", f"train.init_from={finished}", *more, f"out={out}")))
    last = files(out).evaluations[-1]
    found = evaluate(out)
    assert found.sets[0].perplexity is None
    assert found.sets[0].loss == pytest.approx(last["val_loss"], rel=1e-5)
    assert found.metrics["reward_margin"] == pytest.approx(last["val_reward_margin"], rel=1e-4)
    # On given pairs the reference is computed anew: that which the run started from.
    assert evaluate(out, [f"data.path={pairs}"]).metrics["reward_margin"] > 0
    export(out, tmp_path / "exported")
    with pytest.raises(ValueError, match=r"set preference\.reference=MODEL"):
        evaluate(tmp_path / "exported", ["data=jsonl", f"data.path={pairs}"])


def test_what_cannot_be_evaluated_is_one_line(finished, tmp_path, corpus_path):
    (tmp_path / "foreign").mkdir()
    for path, words, named in (
        (tmp_path / "none", [], "is not there"),
        (tmp_path / "foreign", [], "neither a run directory"),
        (finished, ["data=jsonl", "data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (finished, ["out=runs/b"], "writes no run"),
        (finished, ["train.stepz=1"], "did you mean train.steps"),
        (finished, ["data=store", "data.path=nowhere"], "nowhere"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=named) as caught:
            evaluate(path, words)
        assert "\n" not in str(caught.value)
    (finished / "checkpoints" / "step-00000006" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-00000006 cannot be read"):
        evaluate(finished)
    (finished / "checkpoints" / "latest").write_text("step-9")
    with pytest.raises(FileNotFoundError, match="names no checkpoint"):
        evaluate(finished)
    shutil.rmtree(finished / "checkpoints")
    with pytest.raises(FileNotFoundError, match="has no latest checkpoint: none is complete"):
        evaluate(finished)
