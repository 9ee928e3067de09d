"""Rollouts with common prompts, such as GRPO groups: inputs of a model of transformers, and log-probabilities.

    register(model)                                                  attention_interface.py
    batch = PackedCollator(…, min_prefix=16)(documents)              Document(tokens, spans of the completion)
    hidden = model.model(**model_inputs(batch)).last_hidden_state[0]
    each = log_probabilities(hidden, model.lm_head.weight, batch)    a tensor for each document

The prompt of a group is computed once, and gradients equal the gradients of rows that repeat it. Any loss of the host
is computed from the log-probabilities of each document's targets.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.data.views.documents import IGNORE
from multipack.ops.attention.model_inputs import model_inputs as model_inputs
from multipack.ops.loss import linear_log_probabilities


def log_probabilities(hidden: Tensor, weight: Tensor, batch: PackedBatch, **options: Any) -> list[Tensor]:
    """Log-probabilities of each document's targets, differentiable; logits exist for a chunk of the slots at a time.

    Args:
        hidden: (T, d) inputs of the head.
        weight: (V, d) matrix of the head.
        batch: the pack.
        **options: of `linear_log_probabilities`, such as `logit_cap`.

    Returns:
        For each document (its targets,) float32 (float64 for float64 inputs), in the order of its tokens.
    """
    tree, targets = batch.tree, batch.targets
    if tree is not None:
        found = linear_log_probabilities(hidden, weight, targets, rows=tree.target_slots, **options)
        return list(found.split(tree.target_bounds.diff().tolist()))  # type: ignore[no-untyped-call]
    found = linear_log_probabilities(hidden, weight, targets, **options)
    each = zip(found.split(batch.lengths), targets.split(batch.lengths), strict=True)  # type: ignore[no-untyped-call]
    return [logs[own != IGNORE] for logs, own in each][: batch.num_documents]
