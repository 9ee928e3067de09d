"""The validation loss of each source of a mixture on ranks: equal to that of one process."""

import json

import pytest
import sharding as tiny

from multipack.data.stores.prepare import prepare
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.run import RunDirectory
from multipack.training.run_config import compose
from multipack.training.train import train


@pytest.fixture
def mixture(tmp_path, words):
    """More words → those of a run that evaluates a mixture once."""
    stores = []
    for name, count, size in (("long", 12, 40), ("short", 9, 5)):
        file = tmp_path / f"{name}.jsonl"
        rows = [{"prompt": f"{name} {n}:", "completion": "ab c" * (size + n % 5)} for n in range(count)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        stores.append(tmp_path / f"{name}.store")
        prepare(DataConfig("jsonl", str(file)), TokenizerConfig("byte"), stores[-1])
    given = ["data=mixture", f"data.paths=[{','.join(map(str, stores))}]", "data.validation=0.5"]
    given += [
        "train.eval_every=1",
        "train.steps=1",
        "train.fixed_shape=true",
        "model.kv_heads=2",
        "model.vocabulary_size=264",
    ]
    kept = [word for word in words if not word.startswith(("data", "train.eval"))]
    return lambda *more: [*kept, *given, *more]


def _evaluation(out):
    record, *_ = (record for record in RunDirectory(out).records() if "val_loss" in record)
    return {name: loss for name, loss in record.items() if name.startswith("val_loss")}


@pytest.mark.slow  # the losses of all documents are compared in test_strategies.py
@pytest.mark.parametrize(
    "parallel", ["data=zero3", "data=ddp", "data=zero1", "tensor=2", "context=2", "pipeline=2"]
)
def test_ranks_find_the_losses_of_one_process(pools, mixture, tmp_path, parallel):
    train(compose(mixture(f"out={tmp_path / 'one'}")))
    expected = _evaluation(tmp_path / "one")
    assert len(expected) == 3
    words = mixture(f"out={tmp_path / 'two'}", f"parallel.{parallel}")
    pools(2).run(tiny.train_here, words, str(tmp_path / "cache"))
    assert _evaluation(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
