"""Losses, rewards and gradients of objectives, packed, against TRL's own functions on padded batches."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from multipack.data.packs.collate import PreferenceCollator, PreferencePair
from multipack.data.views.documents import Document
from multipack.models.huggingface import to_huggingface
from multipack.models.preference import PreferenceDecoder
from multipack.shapes import ModelShape
from multipack.shapes.config_json import config_of

trl = pytest.importorskip("trl", reason="trl is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.slow  # importing trl takes 10 seconds

SIZES = ((2, 5, 3), (4, 1, 6), (1, 7, 7), (3, 2, 9))
"""Tokens of prompt, chosen and rejected answer; of labels, of prompt, answer and mismatched answer."""
DESIRABLE = torch.tensor([True, False, False, True])
PAD = 49
PLAN = SimpleNamespace(most_documents=4, longest=64, min_prefix=None, loss_weighting="document")


@pytest.fixture
def pairs():
    made = []
    for seed, (prompt, *sizes) in enumerate(SIZES):
        draw = np.random.default_rng(seed)
        begin = draw.integers(0, PAD, prompt)
        answers = [np.concatenate([begin, draw.integers(0, PAD, size)]).astype(np.uint16) for size in sizes]
        documents = [Document(tokens, np.array([[prompt, len(tokens)]])) for tokens in answers]
        made.append(PreferencePair(*documents, -3.0 * draw.random(2) * sizes, 1.0, bool(DESIRABLE[seed])))
    return made


@pytest.fixture
def models():
    """Name and settings of an objective → our decoder, and transformers' model with the same weights."""

    def make(loss, **options):
        torch.manual_seed(1)
        scores = int(loss == "reward")
        shape = ModelShape(2, 2, 1, 16, 24, vocabulary_size=50, tied=False, context=64, scores=scores)
        ours = PreferenceDecoder(shape, loss=loss, **options)
        config = config_of(shape) | {"pad_token_id": PAD, "attn_implementation": "eager"}
        family = transformers.LlamaForSequenceClassification if scores else transformers.LlamaForCausalLM
        theirs = family(transformers.LlamaConfig(**config))
        theirs.load_state_dict(to_huggingface(shape, ours.state_dict()))
        return ours, theirs

    return make


def padded(documents, side=""):
    """What TRL's collators make of documents, one a row."""
    width = max(len(each.tokens) for each in documents)
    ids = torch.full((len(documents), width), PAD)
    attention, completion = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, each in enumerate(documents):
        ids[row, : len(each.tokens)] = torch.from_numpy(each.tokens.astype(np.int64))
        attention[row, : len(each.tokens)] = 1
        completion[row, int(each.spans[0, 0]) : len(each.tokens)] = 1
    return {f"{side}input_ids": ids, f"{side}attention_mask": attention, f"{side}completion_mask": completion}


def with_log_probs(model):
    """A model with the outputs that TRL adds to it."""

    def call(input_ids, attention_mask, labels, **_):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        targets = labels[:, 1:]
        each = F.log_softmax(logits, -1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
        zeros = torch.zeros_like(each)
        return SimpleNamespace(
            log_probs=each * (targets >= 0), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    return call


def trainer(**settings):
    """The attributes that TRL's losses read of their trainer."""

    def same(values):
        return values

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)
    common = {"accelerator": accelerator, "model": SimpleNamespace(training=True), "aux_loss_enabled": False}
    common |= {
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "alpha": 0.0,
    }
    return SimpleNamespace(**common, precompute_ref_logps=True, **settings)


def check(ours, theirs, batch, loss, distance):
    """Their mean loss and gradient are those of our sum over four items."""
    loss.backward()
    expected = {name: each.grad for name, each in theirs.named_parameters()}
    found = ours(batch) / 4
    found.backward()
    gradients = to_huggingface(ours.shape, {name: each.grad for name, each in ours.named_parameters()})
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    assert gradients.keys() == expected.keys()
    both = (torch.cat([each[name].flatten() for name in expected]) for each in (gradients, expected))
    assert distance(*both) < 1e-5


def check_rewards(ours, reported):
    """Their rewards are our metrics of the step."""
    found = ours.loss.means(ours.take_tally())
    names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
    seen = {f"reward_{name}": f"rewards/{key}" for name, key in names.items()} | {"kl": "kl"}
    for name, key in seen.items():
        if key in reported:
            assert found[name] == pytest.approx(reported[key][0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("loss", ["sigmoid", "robust", "hinge", "ipo"])
def test_pairs_with_a_reference(pairs, models, distance, loss):
    share = 0.2 if loss == "robust" else 0.0
    ours, theirs = models(loss, beta=0.3, **({"label_smoothing": share} if share else {}))
    settings = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False}
    given = trainer(beta=0.3, label_smoothing=share, loss_types=[loss], loss_weights=[1.0], **settings)
    reference = torch.from_numpy(np.stack([pair.reference for pair in pairs])).float()
    inputs = padded([pair.first for pair in pairs] + [pair.second for pair in pairs])
    inputs |= {"ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1]}
    found = trl.DPOTrainer._compute_loss(given, with_log_probs(theirs), inputs, False)
    batch = PreferenceCollator.of(PLAN)([pair._replace(is_desirable=True) for pair in pairs])
    check(ours, theirs, batch, found, distance)
    check_rewards(ours, given._metrics["train"])


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_pairs_without_a_reference(pairs, models, distance, loss, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    ours, theirs = models(loss, beta=0.3, **({"margin": 0.7} if loss == "simpo" else {}))
    inputs = padded([document for pair in pairs for document in (pair.first, pair.second)])
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    sums = with_log_probs(theirs)(inputs["input_ids"], inputs["attention_mask"], labels).log_probs.sum(1)
    chosen, rejected = (sums / inputs["completion_mask"].sum(1)).view(-1, 2).unbind(1)
    if loss == "simpo":
        from trl.experimental.cpo import CPOTrainer

        given = trainer(beta=0.3, loss_type="simpo", simpo_gamma=0.7, label_smoothing=0.0)
        losses, *rewards = CPOTrainer.cpo_loss(given, chosen, rejected)
    else:
        from trl.experimental.orpo import ORPOTrainer

        ratios, *rewards = ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), chosen, rejected)[:3]
        losses = -chosen - ratios
    check(
        ours,
        theirs,
        PreferenceCollator.of(PLAN)([pair._replace(is_desirable=True) for pair in pairs]),
        losses.mean(),
        distance,
    )
    names = "rewards/chosen", "rewards/rejected"
    check_rewards(ours, {name: [float(each.mean())] for name, each in zip(names, rewards, strict=True)})


def test_labeled_answers(pairs, models, distance):
    """With the divergence that TRL estimates from the same batch."""
    options = {"beta": 0.3, "desirable": 1.5, "undesirable": 0.5}
    ours, theirs = models("kto", **options)
    reference = torch.from_numpy(np.stack([pair.reference for pair in pairs])).float()
    inputs = padded([pair.first for pair in pairs]) | padded([pair.second for pair in pairs], "KL_")
    inputs |= {"label": DESIRABLE, "ref_logps": reference[:, 0], "ref_KL_logps": reference[:, 1]}
    given = trainer(
        beta=0.3, desirable_weight=1.5, undesirable_weight=0.5, calculate_KL=True, loss_type="kto"
    )
    given._compute_kl_logps = lambda model, batch: trl.KTOTrainer._compute_kl_logps(given, model, batch)
    # Higher references: the estimate is positive, and not cut off at 0.
    for key in ("ref_logps", "ref_KL_logps"):
        inputs[key] = inputs[key] - 60.0
    found = trl.KTOTrainer._compute_loss(given, with_log_probs(theirs), inputs, False)
    batch = PreferenceCollator.of(PLAN)([pair._replace(reference=pair.reference - 60.0) for pair in pairs])
    ours.last["kl"] = given._metrics["train"]["kl"][0]
    assert ours.last["kl"] > 1.0
    check(ours, theirs, batch, found, distance)
    check_rewards(ours, given._metrics["train"])


def test_rewards(pairs, models, distance):
    ours, theirs = models("reward")
    inputs = padded([pair.first for pair in pairs] + [pair.second for pair in pairs])
    del inputs["completion_mask"]
    given = trainer(args=SimpleNamespace(center_rewards_coefficient=None))
    found = trl.RewardTrainer.compute_loss(given, theirs, inputs)
    batch = PreferenceCollator.of(PLAN)([pair._replace(is_desirable=True) for pair in pairs])
    check(ours, theirs, batch, found, distance)
    reported = given._metrics["train"]
    check_rewards(ours, {"rewards/margins": reported["margin"], "rewards/accuracies": reported["accuracy"]})
