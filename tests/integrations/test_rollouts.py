"""GRPO groups whose prompt is computed once equal rows that repeat it, in models of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.integrations.attention_interface import register
from multipack.integrations.rollouts import log_probabilities, model_inputs

transformers = pytest.importorskip("transformers", "5.2", reason="transformers >= 5.2 is not installed")
VOCABULARY = 61


@pytest.mark.parametrize("min_prefix", [None, 4])
def test_log_probabilities_of_groups_equal_those_of_rows(min_prefix):
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    rng, documents = np.random.default_rng(3), []
    for prompt, sizes in ((12, (3, 5, 1)), (8, (2, 4))):
        begin = rng.integers(0, VOCABULARY, prompt)
        for size in sizes:
            tokens = np.append(begin, rng.integers(0, VOCABULARY, size)).astype(np.uint32)
            documents.append(Document(tokens, np.array([[prompt, prompt + size]])))
    advantages = torch.from_numpy(rng.standard_normal(len(documents)))

    def gradients(logs):
        loss = sum(a * each.mean() for a, each in zip(advantages, logs, strict=True))
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = []
    for document in documents:
        tokens = torch.from_numpy(document.tokens.astype(np.int64))
        logs = model(tokens[None], use_cache=False).logits[0].log_softmax(-1)
        first = int(document.spans[0, 0])
        expected.append(logs[:-1].gather(1, tokens[1:, None])[first - 1 :, 0])
    wanted = gradients(expected)
    register(model)
    batch = PackedCollator(5, 20, pad_to=90, min_prefix=min_prefix)(documents)
    assert (batch.tree is not None) == (min_prefix is not None)
    hidden = model.model(**model_inputs(batch)).last_hidden_state[0]
    found = log_probabilities(hidden, model.lm_head.weight, batch)
    assert [len(each) for each in found] == [3, 5, 1, 2, 4]
    for each, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(each, reference, rtol=1e-10, atol=1e-12)
    for each, reference in zip(gradients(found), wanted, strict=True):  # norms of transformers are float32
        torch.testing.assert_close(each, reference, rtol=1e-4, atol=1e-6)
