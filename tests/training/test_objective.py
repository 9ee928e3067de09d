"""The objective follows from the documents: next tokens, or preferences against a reference that the run keeps."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from multipack.data.packs.collate import PackedCollator, PreferenceCollator, PreferencePairs
from multipack.data.packs.loader import PackedLoader
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import StoreWriter
from multipack.data.text.tokenizer import byte_tokenizer
from multipack.data.views.documents import Document, Documents
from multipack.models.objectives import LOSSES
from multipack.models.objectives.scores import PreferenceLoss, difference
from multipack.models.preference import PreferenceDecoder
from multipack.models.sampling import Sampling
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.training.checkpoint import load_checkpoint
from multipack.training.export import export, loading_code
from multipack.training.inference import load_model, print_completions
from multipack.training.preferences import Preferences, read_reference
from multipack.training.run_config import compose, compose_run
from multipack.training.run_doctor import examine_run
from multipack.training.train import train

SHAPE = ModelShape(2, 2, 1, 32, 48, vocabulary_size=257)
CAPACITY = 96


@pytest.fixture
def pairs(tmp_path):
    """Twenty pairs of bytes."""
    draw, tokenizer = np.random.default_rng(4), byte_tokenizer()
    with StoreWriter(tmp_path / "pairs.store", tokenizer, pairs=True) as writer:
        for number in range(20):
            prompt, chosen, rejected = (
                draw.integers(97, 123, size).tolist() for size in draw.integers(1, 20, 3)
            )
            for answer in (chosen, rejected):
                writer.add(f"pair {number}", [(prompt, False), (answer, True)])
    return Documents.whole(TokenStore(tmp_path / "pairs.store"))


@pytest.fixture
def decoder():
    torch.manual_seed(2)
    return PreferenceDecoder(SHAPE, beta=0.2)


def _engine(decoder):
    optimizer = torch.optim.AdamW(decoder.parameters())
    return ModelEngine([decoder], optimizer, Mesh(World()), torch.float32)


@pytest.fixture
def objective(pairs):
    """More words → the objective of a run on pairs."""

    def make(*words):
        corpus = SimpleNamespace(tokenizer=byte_tokenizer(), train=pairs)
        return Preferences(compose([f"plan.capacity={CAPACITY}", *words]), corpus)

    return make


def _reference(objective, decoder, documents):
    with _engine(decoder).evaluating() as model:
        return objective.reference_values(model, documents, Mesh(World()), lambda *_: None)


def test_the_reference_of_a_pair_does_not_depend_on_its_pack(decoder, pairs, objective):
    found = _reference(objective(), decoder, pairs)
    assert found.shape == (20, 2)
    np.testing.assert_allclose(
        _reference(objective("train.fixed_shape=true"), decoder, pairs), found, rtol=1e-6
    )
    plan = PackedBatchSampler(pairs.lengths, capacity=CAPACITY, packs_per_step=1)
    collate, each = PreferenceCollator.of(plan), PreferencePairs(pairs)
    for number in range(20):
        with torch.no_grad():
            alone = decoder.eval()(collate([each[number]]))
        np.testing.assert_allclose(found[number], alone[0].numpy(), rtol=1e-6)
    assert _reference(objective(), decoder, pairs.take([])).shape == (0, 2)


def test_a_named_reference_holds_what_products_read_in_their_dtype(pairs, objective, save_decoder, tmp_path):
    """The values are those of the float32 weights, which autocast casts at every product."""
    torch.manual_seed(3)
    whole = PreferenceDecoder(replace(SHAPE, tied=False))
    path = save_decoder(tmp_path / "reference", whole, byte_tokenizer())
    engine = ModelEngine([whole], torch.optim.SGD(whole.parameters()), Mesh(World()), torch.bfloat16)
    named = objective(f"preference.reference={path}")
    with named._reference_model(engine) as (model, _):
        held = {name: each.dtype for name, each in model.named_parameters()}
        found = named.reference_values(model, pairs, Mesh(World()), lambda *_: None)
    with engine.evaluating() as model:
        expected = named.reference_values(model, pairs, Mesh(World()), lambda *_: None)
    assert np.array_equal(found, expected)
    assert held["blocks.1.feed_forward.up.weight"] == held["head.weight"] == torch.bfloat16
    assert held["embedding.weight"] == held["norm.weight"] == torch.float32


def test_weights_that_are_not_finite_are_no_reference(decoder, pairs, objective):
    with torch.no_grad():
        decoder.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match=r"the reference model gives pair 0 .*preference\.reference"):
        _reference(objective(), decoder, pairs)


@pytest.mark.parametrize("damage", ["none", "missing", "truncated", "name", "shape", "infinite"])
def test_saved_values_are_read_back_or_refused(pairs, tmp_path, damage):
    file, values = tmp_path / "reference.safetensors", np.arange(40.0).reshape(20, 2)
    save_file({"train": torch.from_numpy(values)}, file)
    if damage == "none":
        assert np.array_equal(read_reference(file, {"train": pairs})["train"], values)
        return
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        os.truncate(file, 100)
    else:
        wrong = {"shape": values[:3], "infinite": np.full_like(values, np.inf)}.get(damage, values)
        save_file({"other" if damage == "name" else "train": torch.from_numpy(wrong)}, file)
    with pytest.raises(ValueError, match=r"reference\.safetensors.*new run"):
        read_reference(file, {"train": pairs})


def test_preferences_are_learned(decoder, pairs, objective):
    """The initial loss is log 2; accuracy on the training pairs rises from a half to nearly one."""
    sampler = PackedBatchSampler(
        pairs.lengths,
        capacity=1024,
        packs_per_step=1,
        targets=pairs.target_counts,
        loss_weighting="document",
    )
    views = PreferencePairs(pairs, _reference(objective(), decoder, pairs))
    packs = list(PackedLoader(views, sampler, PreferenceCollator.of(sampler), prefetch=0))
    engine, losses = _engine(decoder), []
    for step in range(20):
        losses.append(sum(engine.forward_backward(packs, len(pairs)).losses) / len(pairs))
        last = objective().metrics(engine)
        assert last.keys() == objective().legend.keys()
        if not step:
            assert abs(last["reward_margin"]) < 1e-5
        engine.clip(1.0)
        engine.step(3e-3)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    with engine.evaluating() as model:
        loss = sum(float(model(batch)) for batch in packs) / len(pairs)
    found = decoder.loss.means(decoder.take_tally(training=False))
    assert found["reward_accuracy"] > 0.9
    assert found["reward_margin"] > 0.5
    assert loss < 0.5


@pytest.fixture
def sums(words, tmp_path):
    """Words of a run on pairs."""
    file = tmp_path / "preferences.jsonl"
    rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}!"} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [word for word in words if not word.startswith(("train.steps", "data.path"))]
    return [*kept, f"data.path={file}", "train.eval_every=2", "optimizer.decay_steps=4"]


def test_a_resumed_run_of_pairs_needs_no_reference_weights(words, sums, tmp_path, capsys):
    """The initial weights are gone when it resumes."""
    base, parts = tmp_path / "base", tmp_path / "parts"
    few = [word for word in words if not word.startswith("train.steps")]
    train(compose([*few, "train.steps=1", "train.eval_every=0", f"out={base}"]))
    start = [*sums, f"train.init_from={base}"]
    train(compose_run([*start, "train.steps=2", f"out={parts}"]))
    printed = capsys.readouterr().out
    assert re.search(
        r"final validation loss \S+, reward accuracy \S+, reward margin \S+ after 2 steps", printed
    )
    shutil.rmtree(base)
    train(compose_run([f"out={parts}", "train.resume=true", "train.steps=4"]))
    records = list(RunDirectory(parts).records())
    steps = [record for record in records if "loss" in record]
    # Nothing is preferred yet: log 2.
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert all("val_reward_accuracy" in record for record in records if "val_loss" in record)
    file = parts / "reference.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1  # of a number, which stays finite
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"reference\.safetensors is not what was written.*new run"):
        train(compose_run([f"out={parts}", "train.resume=true", "train.steps=5"]))
    assert [each.name for each in examine_run(parts) if each.status == "fail"] == [file.name]
    file.unlink()
    with pytest.raises(ValueError, match=r"reference\.safetensors.*new run"):
        train(compose_run([f"out={parts}", "train.resume=true", "train.steps=5"]))


def test_fp16_that_always_overflows_ends_the_run(words, tmp_path, monkeypatch):
    """Every step is skipped until no loss scale is left."""
    from multipack.training.callbacks.callback import NonFiniteLoss

    clip = ModelEngine.clip

    def overflowing(self, max_norm):
        clip(self, max_norm)
        self.overflowed = True
        return float("inf")

    monkeypatch.setattr(ModelEngine, "clip", overflowing)
    monkeypatch.setattr(ModelEngine, "loss_scale", property(lambda self: 0.5))
    words = [*words, "train.dtype=fp16", "train.eval_every=0", f"out={tmp_path / 'run'}"]
    with pytest.raises(NonFiniteLoss, match="overflows fp16"):
        train(compose(words))


@pytest.fixture
def labels(sums, tmp_path):
    """Words of a run on labeled answers with weights."""
    file = tmp_path / "labels.jsonl"
    rows = [
        {"prompt": f"{n}+1=", "completion": f"{n + n % 2}", "label": n % 2 == 1, "w": 1 + n % 3}
        for n in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [word for word in sums if not word.startswith("data.path")]
    return [
        *kept,
        f"data.path={file}",
        "data.weight_field=w",
        "preference.undesirable=0.7",
        "optimizer.lr=1e-2",
        "plan.packs_per_step=4",
    ]


def test_labels_are_learned(labels, tmp_path, capsys):
    whole = tmp_path / "whole"
    train(compose_run([*labels, "train.steps=4", f"out={whole}"]))
    assert re.search(
        r"final validation loss \S+, reward accuracy \S+, reward margin", capsys.readouterr().out
    )
    expected = [record for record in RunDirectory(whole).records() if "loss" in record]
    assert expected[0]["kl"] == pytest.approx(0.0, abs=1e-5)  # the model is the reference
    assert any(abs(each["kl"]) > 1e-3 for each in expected)
    assert expected[-1]["loss"] < expected[0]["loss"]
    assert expected[-1]["reward_margin"] > 0


def test_kinds_of_items_are_not_mixed_up(labels, sums, tmp_path):
    out, plain = f"out={tmp_path / 'run'}", [word for word in labels if "undesirable" not in word]
    with pytest.raises(
        ValueError, match=r"preference\.loss=ipo reads pairs .* are labeled answers .*use kto"
    ):
        train(compose([*plain, "train.steps=1", "preference.loss=ipo", out]))
    with pytest.raises(ValueError, match=r"preference\.loss=kto reads labeled answers .*use sigmoid, robust"):
        train(compose([*sums, "train.steps=1", "preference.loss=kto", out]))
    with pytest.raises(
        ValueError, match=r"preference\.undesirable=0\.7 is of preference\.loss=kto, got sigmoid"
    ):
        train(compose([*sums, "train.steps=1", "preference.undesirable=0.7", out]))


@pytest.fixture
def base(words, tmp_path):
    """A run of one step on next tokens, whose model has a head of its own."""
    few = [word for word in words if not word.startswith("train.steps")]
    path = tmp_path / "base"
    train(compose([*few, "train.steps=1", "train.eval_every=0", "model.tied=false", f"out={path}"]))
    return path


def scores_of(path, texts):
    """Scores of a padded batch of token ids in transformers."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    width, pad = max(map(len, texts)), model.config.pad_token_id
    ids = torch.tensor([[*text, *[pad] * (width - len(text))] for text in texts])
    with torch.no_grad():
        return model(ids).logits


def test_a_reward_model_is_trained_exported_and_refused_where_text_is_wanted(base, sums, tmp_path, capsys):
    run, start = tmp_path / "run", [*sums, "model.tied=false", "preference.loss=reward", "train.steps=4"]
    train(compose_run([*start, "optimizer.lr=1e-2", f"train.init_from={base}", f"out={run}"]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "the head of scores is new and starts at 0" in printed
    assert "reward accuracy" in printed
    records = [record for record in RunDirectory(run).records() if "loss" in record]
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["reward_margin"] > 0
    resumed = compose_run([f"out={run}", "train.resume=true", "train.steps=5"])
    assert resumed.model.scores == 1
    train(resumed)
    assert dict(export(run, tmp_path / "out"))["model"].startswith("LlamaForSequenceClassification")
    assert "AutoModelForSequenceClassification" in loading_code(tmp_path / "out")
    model, texts = load_model(run), [[*b"7+1=8", 256], [*b"31+1=!!", 256], [65, 256]]
    packed = PackedCollator(3, 16)(
        [Document(np.array(text, np.uint16), np.zeros((0, 2), np.int64)) for text in texts]
    )
    with torch.no_grad():
        expected = model.logits(packed)[packed.cu_seqlens[1:].long() - 1]
    torch.testing.assert_close(scores_of(tmp_path / "out", texts), expected, rtol=1e-5, atol=1e-6)
    again = load_model(tmp_path / "out")
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in model.state_dict().items())
    with pytest.raises(ValueError, match=r"model\.scores=1, a reward model.*generates no text"):
        print_completions(run, ["7+1="], Sampling(4), "cpu")
    for words in (["preference.loss=ipo"], ["preference.loss=sigmoid", "preference.reference=" + str(run)]):
        first = (
            [f"train.init_from={run}"] if words == ["preference.loss=ipo"] else [f"train.init_from={base}"]
        )
        with pytest.raises(ValueError, match=r"model\.scores=1 is a reward model's, which has no logits"):
            train(
                compose_run(
                    [*sums, "model.tied=false", *first, *words, "train.steps=1", f"out={tmp_path / words[0]}"]
                )
            )
    corpus = SimpleNamespace(train=SimpleNamespace(store=SimpleNamespace(kind="pairs")))
    for words, message in (
        (["parallel.tensor=2"], r"parallel\.tensor=2 divides the head"),
        (["preference.beta=1"], r"preference\.beta=1\.0 is of preference\.loss=sigmoid.*, got reward"),
        ([f"preference.reference={base}"], "reward has no reference model"),
    ):
        with pytest.raises(ValueError, match=message):
            Preferences(compose([*start, *words]), corpus)


@pytest.mark.slow
def test_adapters_of_a_reward_model_are_trained_beside_a_whole_head(base, sums, tmp_path):
    export(base, tmp_path / "model")
    words = [
        *sums,
        "model.tied=false",
        "preference.loss=reward",
        "adapter=lora",
        "adapter.rank=2",
        f"train.init_from={tmp_path / 'model'}",
    ]
    train(compose_run([*words, "train.steps=2", "optimizer.lr=1e-2", f"out={tmp_path / 'run'}"]))
    trained = load_checkpoint(RunDirectory(tmp_path / "run").latest_checkpoint()).source.shapes("model")
    assert {name for name in trained if "lora" not in name} == {"score.weight"}
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    export(tmp_path / "run", tmp_path / "adapter")
    texts = [[*b"7+1=8", 256], [*b"31+1=!!", 256]]
    merged = scores_of(tmp_path / "merged", texts)
    assert merged.abs().min() > 1e-4
    state = load_model(tmp_path / "merged").state_dict()
    for name, value in load_model(tmp_path / "adapter").state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=1e-6)
    again = [word for word in words if not word.startswith(("model", "train.init_from"))]
    again.append(f"train.init_from={tmp_path / 'adapter'}")
    continued = compose_run([*again, "train.steps=1", f"out={tmp_path / 'again'}"])
    assert continued.model.scores == 1
    train(continued)
    assert "SequenceClassification" in loading_code(tmp_path / "adapter")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    for text, expected in zip(texts, merged, strict=True):
        with torch.no_grad():
            found = adapted(torch.tensor([text])).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_an_objective_is_a_row(sums, tmp_path, monkeypatch):
    """One that is registered here trains through the public trainer: nothing else knows its name."""

    def squared(scores):
        return (1.0 - scores.beta * difference(scores.means)).square()

    row = PreferenceLoss("squared", squared, {"beta": 2.0}, uses_reference=False)
    monkeypatch.setitem(LOSSES, row.name, row)
    words = [*sums, "preference.loss=squared", "preference.beta=0.5", "train.steps=3", "optimizer.lr=1e-2"]
    train(compose_run([*words, f"out={tmp_path / 'run'}"]))
    losses = [record["loss"] for record in RunDirectory(tmp_path / "run").records() if "loss" in record]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match=r"preference\.sft=1\.0 is of .*, got squared"):
        compose([*words, "preference.sft=1"])
