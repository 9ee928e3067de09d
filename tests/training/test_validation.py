"""The validation loss of a mixture, by source: equal to that of each source alone."""

import json
import math

import pytest

from multipack.data.stores.prepare import prepare
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.training.evaluate import evaluate
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train


@pytest.fixture
def stores(tmp_path):
    """Stores of 40 long and 30 short documents."""
    found = {}
    for name, count, size in (("long", 40, 40), ("short", 30, 7)):
        file = tmp_path / f"{name}.jsonl"
        rows = [{"prompt": f"{name} {n}:", "completion": "ab c" * (size + n % 5)} for n in range(count)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[name] = tmp_path / f"{name}.store"
        prepare(DataConfig("jsonl", str(file)), TokenizerConfig("byte"), found[name])
    return found


def test_each_source_has_the_loss_that_it_has_alone(stores, words, tmp_path, files, changed, capsys):
    paths = ",".join(map(str, stores.values()))
    out = tmp_path / "run"
    mixed = ["data=mixture", f"data.paths=[{paths}]", "data.validation=0.4", "data.path=", "train.steps=2"]
    mixed += ["train.eval_every=2", "train.checkpoint_every=0", f"out={out}"]
    train(compose(changed(words, *mixed)))
    last = files(out).evaluations[-1]
    final = " ".join(
        capsys.readouterr().out.partition("final validation loss")[2].split()
    )  # of several lines
    for name in ("long", "short"):
        (own,) = (each for each in evaluate(out).sets if each.name == f"{name}.store")
        assert last[f"val_loss/{name}.store"] == pytest.approx(own.loss, rel=1e-6)
        assert f"val_loss/{name}.store {own.loss:.4f}" in final


def test_the_loss_of_all_follows_from_the_sources(stores, trainer):
    paths = ",".join(str(stores[name]) for name in ("long", "short"))
    run = trainer("data=mixture", f"data.paths=[{paths}]", "data.validation=0.4", "data.path=")
    found = run.feeds.validation.losses()
    counts, numbers = run.corpus.validation.target_counts, [count for _, count in run.corpus.sources]
    targets = [counts[: numbers[0]].sum(), counts[numbers[0] :].sum()]
    expected = sum(
        found[f"/{name}.store"] * share for name, share in zip(("long", "short"), targets, strict=True)
    )
    assert found[""] == pytest.approx(expected / sum(targets), rel=1e-6)
    few = trainer(
        "data=mixture", f"data.paths=[{paths}]", "data.validation=0.4", "data.path=", "train.eval_packs=1"
    )
    assert few.feeds.validation.steps == 2  # at least one step of each


def test_validation_files_of_pairs_and_mixtures(stores, words, tmp_path, files, changed, capsys):
    pairs, held = tmp_path / "pairs.jsonl", tmp_path / "held.jsonl"
    for file, count in ((pairs, 20), (held, 6)):
        rows = [{"prompt": f"{n}:", "chosen": "yes" * (1 + n % 4), "rejected": "no"} for n in range(count)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, more = tmp_path / "dpo", ["train.steps=2", "train.eval_every=2", "train.sample_tokens=0"]
    given = [f"data.path={pairs}", f"data.validation_path={held}", *more, f"out={out}"]
    train(compose(changed(words, *given)))
    shown = " ".join(capsys.readouterr().out.split())
    assert "20 documents (prompt → chosen | rejected); 6 for validation" in shown
    assert files(out).evaluations[0]["val_loss"] == pytest.approx(math.log(2), rel=1e-6)
    # The file is checked on resume.
    held.write_text(held.read_text().replace("yes", "Yes"))
    with pytest.raises(ValueError, match="the run was trained with other validation documents"):
        train(compose_run([f"out={out}", "train.resume=true", "train.steps=3"]))
    paths = ",".join(map(str, stores.values()))
    mixed = ["data=mixture", f"data.paths=[{paths}]", f"data.validation_path=[{paths}]", "data.path=", *more]
    train(compose(changed(words, *mixed, f"out={tmp_path / 'mixed'}")))
    assert {name for name in files(tmp_path / "mixed").evaluations[0] if "/" in name} == {
        "val_loss/long.store",
        "val_loss/short.store",
    }
