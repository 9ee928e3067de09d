"""NEFTune (Jain et al. 2023, arXiv:2310.05914) in packed rows: noise of each document's own size.

alone     noise of a document of L tokens     uniform in ±alpha / √(L · d)
packed    transformers' hook                  ±alpha / √(T · d), T the tokens of the row: too weak by √(T / L)
          `document_noise`                    ±alpha / √(L · d) again
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def document_noise(model: Any, alpha: float | None, position_ids: Tensor) -> Iterator[None]:
    """Context of a training pass over packed rows: embeddings have the noise that each document would have alone.

    Args:
        model: a model of transformers, not wrapped for ranks.
        alpha: `neftune_noise_alpha`; None = no noise.
        position_ids: (rows, T) positions, which start anew with every document.
    """
    if alpha is None:
        yield
        return
    documents = (position_ids == 0).flatten().cumsum(0) - 1
    counts = torch.zeros_like(documents).scatter_add_(0, documents, torch.ones_like(documents))
    lengths = counts[documents].view(*position_ids.shape, 1)

    def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
        size = (alpha * (lengths * output.shape[-1]).rsqrt()).to(output.dtype)
        return output + torch.zeros_like(output).uniform_(-1, 1) * size

    hook = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
