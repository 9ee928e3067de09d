"""A plain training loop for GPT-2, as most people begin: rows of one length cut from a stream of tokens.

No documents, no packs and nothing of multipack: torch's causal attention over (rows, length) tokens, autocast, fused
AdamW, gradient clipping, gradient accumulation. Documents of a row see each other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Dimensions of the model and of a step."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50_304
    row: int = 1024
    rows: int = 16
    micro_batches: int = 4


class PlainBlock(nn.Module):
    """Attention and feed-forward, each added to its input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norms = nn.ModuleList([nn.LayerNorm(sizes.width) for _ in range(2)])
        self.inputs = nn.Linear(sizes.width, 3 * sizes.width)
        self.output = nn.Linear(sizes.width, sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) → the same shape."""
        split = self.inputs(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class PlainModel(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.row, sizes.width)
        self.blocks = nn.ModuleList([PlainBlock(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of (rows, length) tokens."""
        x = self.tokens(rows) + self.positions(torch.arange(rows.shape[1], device=rows.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def tokens_per_second(stream: np.ndarray, sizes: Sizes, device: str, steps: int, skipped: int) -> float:
    """Train on rows drawn from a stream of tokens; the steps after the first `skipped` count.

    On a GPU the model is compiled whole, and matrix products are in bf16.
    """
    torch.manual_seed(0)
    is_gpu = device == "cuda"
    model = PlainModel(sizes).to(device)
    call = torch.compile(model) if is_gpu else model
    fused = torch.optim.AdamW(model.parameters(), 6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draw, began = np.random.default_rng(0), 0.0
    following = rows_of(stream, sizes, device, draw)
    for step in range(steps):
        if step == skipped:
            began = wait(device)
        for _ in range(sizes.micro_batches):
            with torch.autocast(device, torch.bfloat16, enabled=is_gpu):
                loss = call(*following) / sizes.micro_batches
            following = rows_of(stream, sizes, device, draw)  # while the device computes
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fused.step()
        fused.zero_grad(set_to_none=True)
        if step % 10 == 0:
            loss.item()
    return (steps - skipped) * sizes.micro_batches * sizes.rows * sizes.row / (wait(device) - began)


def rows_of(
    stream: np.ndarray, sizes: Sizes, device: str, draw: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """(rows, length) tokens from random places of a stream, and the tokens that follow them."""
    starts = draw.integers(0, len(stream) - sizes.row - 1, sizes.rows)
    rows = torch.from_numpy(np.stack([stream[start : start + sizes.row + 1] for start in starts])).long()
    rows = rows.pin_memory().to(device, non_blocking=True) if device == "cuda" else rows
    return rows[:, :-1], rows[:, 1:]


def wait(device: str) -> float:
    """Seconds on the wall, once the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
