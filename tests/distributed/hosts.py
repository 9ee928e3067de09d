"""A tiny Llama and documents for the tests of hosts, and training every document alone: their reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

VOCABULARY, ROW, RATE = 96, 96, 0.3
CASES = [
    (2, 2, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1, False), (1, 2, True), (2, 1, True))),
]
"""(processes, accumulation, lora): every two of them meet."""


class Texts:
    """40 documents, some with prompts that are no targets; the first two tokens are the document's number."""

    def __init__(self, first=40):
        draw = np.random.default_rng(3)
        self.lengths = np.clip(draw.lognormal(2.8, 0.6, 40), 4, ROW).astype(int)
        tokens = [draw.integers(12, VOCABULARY, length) for length in self.lengths]
        for number, values in enumerate(tokens):
            values[:2] = divmod(number, 10)
        self.rows = [{"input_ids": values.tolist(), "labels": values.tolist()} for values in tokens]
        for number in range(0, 40, 3):
            self.rows[number]["labels"][:3] = [-100] * 3
        self.rows, self.lengths = self.rows[:first], self.lengths[:first]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def tiny_llama(lora=False, attention="sdpa"):
    """The same weights on every call; with an adapter, only it is trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=ROW,
        pad_token_id=0,
        attn_implementation=attention,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"]))


def collator():
    """Rows of this package; with their masks where transformers (before 4.53) makes none of documents."""
    from multipack.integrations.collator import PackedDataCollator, makes_document_masks

    return PackedDataCollator("flattened" if makes_document_masks() else "4d_mask", window=None)


def weights(model):
    """All trained weights, in one flat array."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return torch.cat([trained[name].detach().flatten() for name in sorted(trained)]).double().numpy()


def train_alone(model, texts, steps):
    """Train on the documents of each step one by one; the loss is divided by the targets of the step."""
    model.train()
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    for step in steps:
        rows = [texts.rows[number] for number in step]
        targets = sum(label != -100 for row in rows for label in row["labels"][1:])
        for row in rows:
            (alone_loss(model, row) / targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def alone_loss(model, row):
    """Summed loss of one document."""
    logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), torch.tensor(row["labels"][1:]), reduction="sum")


def numbers_of(inputs):
    """Numbers of the documents in a flattened row."""
    starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
    tokens = inputs["input_ids"][0].tolist()
    return [10 * tokens[start] + tokens[start + 1] for start in starts if len(tokens) > 1]


def steps_of(ranks, micro_batches):
    """Documents of each step, from what every rank read: rank → micro-batches."""
    length = len(ranks[0])
    assert {len(read) for read in ranks} == {length}
    assert length % micro_batches == 0
    return [
        sorted(number for read in ranks for row in read[first : first + micro_batches] for number in row)
        for first in range(0, length, micro_batches)
    ]


def check_ranks(found, accumulation, lora):
    """Every document once per epoch, in another order; weights of documents alone; resumed as if uninterrupted.

    Args:
        found: by rank, `rows` and `weights` of a whole run, and of one that was resumed.
        accumulation: micro-batches of a step.
        lora: the runs trained an adapter.

    Returns: number of steps.
    """
    steps = steps_of([rank["rows"][0] for rank in found], accumulation)
    first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    for epoch in (first, second):
        assert sorted(number for step in epoch for number in step) == list(range(40))
    assert first != second
    model = tiny_llama(lora)
    before = weights(model)
    alone = train_alone(model, Texts(), steps)
    assert np.abs(alone - before).max() > 1e-2
    for rank in found:
        assert np.abs(rank["weights"][0] - alone).max() <= 1e-6
        assert rank["rows"][0] == rank["rows"][1]
        assert np.array_equal(*rank["weights"])
    return len(steps)
