"""Inputs of models of transformers: the arguments of a forward pass over a pack, and which documents it may hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multipack.data.packs.batch import PackedBatch
from multipack.planning.lengths import name_documents
from multipack.shapes import RotationLimit


def model_inputs(batch: PackedBatch) -> dict[str, Any]:
    """Arguments of the forward pass of a model of transformers whose attention function is "multipack".

    `packed`, the batch itself, is one of them if documents share tokens. Code that does more with neighboring tokens
    than attention (convolutions, recurrent layers) is not for such packs; `seq_idx` has the number of each slot's
    document, or node.
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
    return inputs if tree is None else inputs | {"packed": batch}


def check_rotations(
    limit: RotationLimit | None,
    lengths: NDArray[np.int64],
    where: str,
    instead: str = "truncate or filter these documents",
) -> None:
    """Check that a model does not rotate documents of a row by the length of another one.

    Args:
        limit: of the model's rotary positions; None = they do not depend on lengths.
        lengths: (documents,) tokens of each document.
        where: what holds the documents, for the message.
        instead: what to do about longer ones, for the message.

    Raises:
        ValueError: a document is longer than the limit.
    """
    if limit is not None and (long := lengths > limit.tokens).any():
        raise ValueError(
            f"{where}: {name_documents(lengths, long)}, and {limit}, and with them the other documents of their rows:"
            f" {instead}, or use multipack train train.init_from=FOLDER, which rotates each by its own length"
        )
