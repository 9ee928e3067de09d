"""Text from a decoder, one token at a time, by running the whole document again for each."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt_ids: list[int],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    end_id: int | None = None,
    generator: torch.Generator | None = None,
    vocabulary_size: int | None = None,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: left in the mode (train or eval) in which it came.
        prompt_ids: at least one token. Only the last `model.shape.context` tokens are ever looked at.
        max_tokens: most tokens to add.
        temperature: logits are divided by it; 0 = always the likeliest token.
        top_k: draw among the k likeliest only; 0 = among all.
        end_id: stop at this token, which is not returned.
        generator: a CPU generator to draw from; None = a fresh one with torch's default seed, so that two
            calls give the same. The global generator is never touched.
        vocabulary_size: draw among the first so many tokens only: those that the tokenizer has, where the model's
            vocabulary is larger; None = among all.

    Returns:
        The new tokens, without the prompt.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or a negative option.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: give at least one token (the end token starts a document)")
    for name, value in (("max_tokens", max_tokens), ("temperature", temperature), ("top_k", top_k)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if generator is None:
        generator = torch.Generator()
    ids, device = list(prompt_ids), model.embedding.weight.device
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_tokens):
            batch = single_document(ids[-model.shape.context :]).to(device)
            logits = F.linear(model.hidden(batch)[-1], model.output_weight)
            token = _draw(logits[:vocabulary_size].float().cpu(), temperature, top_k, generator)
            if token == end_id:
                break
            ids.append(token)
    finally:
        model.train(was_training)
    return ids[len(prompt_ids) :]


def single_document(ids: list[int]) -> PackedBatch:
    """A pack of one document, without targets."""
    document = Document(np.asarray(ids, dtype=np.uint32), np.zeros((0, 2), dtype=np.int64))
    return PackedCollator(max_documents=1, max_seqlen=len(ids))([document])


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token from (V,) logits."""
    if temperature == 0:
        return int(logits.argmax())
    candidates = torch.arange(logits.numel())
    if 0 < top_k < logits.numel():
        logits, candidates = logits.topk(top_k)
    # The largest logit becomes 0 before the division, so that no temperature overflows.
    probabilities = F.softmax((logits - logits.max()) / temperature, dim=-1)
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])
