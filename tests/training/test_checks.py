"""The rules on settings, asked as functions: every row of the table refuses, and names its setting."""

import re
from types import SimpleNamespace

import pytest
import torch

from multipack.training import checks
from multipack.training.assemble import open_model
from multipack.training.blueprint import open_engine
from multipack.training.checks import check, check_kind
from multipack.training.objective import Objective
from multipack.training.preferences import Preferences
from multipack.training.run_config import compose

SHARED = "data=jsonl data.path=x data.share_prefixes=all"
REFUSED = [
    ("adapter=lora", 1, "adapter.name=lora"),
    ("data=store data.path=x data.stream=true", 1, "train.steps"),
    ("train.patience=2 data.validation=0", 1, "train.patience=2"),
    ("parallel.context=2 parallel.context_method=planned model.attention=loop", 2, "model.attention=loop"),
    (f"{SHARED} parallel.context=2 parallel.context_method=planned", 2, "parallel.context_method=planned"),
    (f"{SHARED} model.rope_type=dynamic model.rope_factor=2 model.context=64", 1, "model.rope_type=dynamic"),
    (f"{SHARED} plan.max_documents=8", 1, "plan.max_documents=8"),
    (f"{SHARED} parallel.context=2 model.heads=1", 2, "parallel.context=2 (ulysses)"),
    ("log.gradient_noise=true parallel.data=zero3", 2, "log.gradient_noise=true"),
    ("log.gradient_noise=true plan.packs_per_step=1", 1, "plan.packs_per_step"),
    ("plan.packs_per_step=2", 3, "plan.packs_per_step=2"),
    ("plan.packs_per_step=1 parallel.tensor=2 model.kv_heads=2", 4, "at least 2"),
    ("data.readers=4", 2, "data.readers=2"),
    ("parallel.tensor=2 plan.capacity=255 train.fixed_shape=true", 2, "plan.capacity=254"),
]
"""Words, number of processes, and a part of the message: the setting."""
OF_KINDS = [
    ("data.share_prefixes=pairs data=jsonl data.path=x", "documents", "data.share_prefixes=pairs"),
    ("preference.beta=0.5", "documents", "preference."),
    ("parallel.pipeline=2", "pairs", "parallel.pipeline=2"),
    ("parallel.context=2", "labels", "parallel.context=2"),
    ("train.label_smoothing=0.1", "pairs", "train.label_smoothing=0.1"),
    ("train.z_loss=1e-4", "labels", "train.z_loss=0.0001"),
]


@pytest.mark.parametrize(("words", "processes", "named"), REFUSED)
def test_settings_that_cannot_be_combined(words, processes, named):
    config = compose(["model=tiny", *words.split()])
    with pytest.raises(ValueError, match=re.escape(named)):
        check(config, processes)


@pytest.mark.parametrize(("words", "kind", "named"), OF_KINDS)
def test_settings_that_are_not_for_these_documents(words, kind, named):
    config = compose(["model=tiny", *words.split()])
    with pytest.raises(ValueError, match=re.escape(named)):
        check_kind(config, kind)
    for other in {"documents", "pairs", "labels"} - (
        {"documents"} if kind == "documents" else {"pairs", "labels"}
    ):
        check_kind(config, other)


def test_a_head_of_scores_is_not_divided():
    config = compose(["parallel.tensor=2", "preference.loss=reward"])
    check_kind(config, "pairs")
    with pytest.raises(ValueError, match=r"parallel\.tensor=2 .*preference\.loss=reward"):
        check_kind(config, "pairs", reads_values=True)


def test_every_name_in_a_message_is_there():
    """Of all rows, whether they apply or not."""
    facts = checks._facts(compose([]), kind="pairs", **checks._facts_of_ranks(compose([]), 1))
    for rule in (*checks.RULES, *checks.OF_RANKS, *checks.OF_KINDS):
        if "rotation_limit" not in rule.message:  # of models that have one
            assert rule.message.format_map(vars(facts))


def test_objectives_ask_for_their_kind():
    with pytest.raises(ValueError, match=r"preference\."):
        Objective(compose(["preference.beta=0.5"]), None)
    for kind in ("pairs", "labels"):
        corpus = SimpleNamespace(train=SimpleNamespace(store=SimpleNamespace(kind=kind)))
        with pytest.raises(ValueError, match=r"train\.z_loss"):
            Preferences(compose(["train.z_loss=1e-4"]), corpus)


def test_ranks_divide_the_vocabulary_of_the_tokenizer():
    """Settings leave it open, so that it is checked again when the tokenizer is there."""
    config = compose(["model=tiny", "model.kv_heads=2", "parallel.tensor=2"])
    check(config, 2)
    start, mesh = (
        SimpleNamespace(shape=config.shape_with(257)),
        SimpleNamespace(world=SimpleNamespace(size=2)),
    )
    with pytest.raises(ValueError, match=r"model\.vocabulary_size=257: use model\.vocabulary_size=258"):
        open_model(config, None, start, mesh)


@pytest.mark.parametrize("rules", ["[embedding freeze,blocks.0 freeze]", "[blocks.0 freeze]"])
def test_the_first_stage_has_trained_parameters(rules):
    words = ["model.tied=false", "model.layers=2", "parallel.pipeline=2", f"optimizer.rules={rules}"]
    config = compose(["model=tiny", *words])
    mesh = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")))
    refused = pytest.raises(ValueError, match=r"optimizer\.rules .*parallel\.pipeline=1")
    goes_on = pytest.raises(AttributeError, match="size")  # the next check asks for the other ranks
    with refused if "embedding" in rules else goes_on:
        open_engine(config, None, config.shape_with(257), None, mesh, torch.float32)
