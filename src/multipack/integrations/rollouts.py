"""Rollouts with common prompts, such as GRPO groups: inputs of a model of transformers, and log-probabilities.

    register(model)                                                  attention_interface.py
    batch = PackedCollator(…, min_prefix=16)(documents)              Document(tokens, spans of the completion)
    hidden = model.model(**model_inputs(batch)).last_hidden_state[0]
    each = log_probabilities(hidden, model.lm_head.weight, batch)    a tensor for each document

The prompt of a group is computed once, and gradients are those of rows that repeat it. Any loss of the host is computed
from the log-probabilities of each document's targets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multipack.data.batch import IGNORE, PackedBatch
from multipack.ops.loss import linear_log_probabilities
from multipack.ops.target_rows import TargetRows


def model_inputs(batch: PackedBatch) -> dict[str, Any]:
    """Arguments of the forward pass of a model of transformers whose attention function is "multipack".

    `key_slots` is one of them if documents share tokens. Code that does more with neighboring tokens than attention
    (convolutions, recurrent layers) is not for such packs; `seq_idx` has the number of each slot's document, or node.
    """
    bounds, tree = batch.cu_seqlens, batch.tree
    slots = torch.arange(batch.num_slots, device=bounds.device)
    inputs = {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "use_cache": False,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds if tree is None else tree.cu_seqlens_k,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen if tree is None else tree.max_seqlen_k,
        "seq_idx": torch.bucketize(slots, bounds[1:], right=True, out_int32=True)[None],
    }
    return inputs if tree is None else inputs | {"key_slots": tree.key_slots}


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
        shared = TargetRows(tree.loss_slots, tree.target_rows)
        found = linear_log_probabilities(hidden, weight, targets, shared=shared, **options)
        return list(found.split(tree.target_bounds.diff().tolist()))  # type: ignore[no-untyped-call]
    found = linear_log_probabilities(hidden, weight, targets, **options)
    each = zip(found.split(batch.lengths), targets.split(batch.lengths), strict=True)  # type: ignore[no-untyped-call]
    return [logs[own != IGNORE] for logs, own in each][: batch.num_documents]
