"""The loss of llama-1b alone, by the number of rows whose logits exist at a time: seconds and peak memory.

8,192 targets, width 2,048, a vocabulary of 128,256, bf16: three products of 4.3 TFLOP. `default` is the function's own
choice of rows.
"""

from __future__ import annotations

import statistics

import torch

from gpu_parts.common import options_of, write_part
from multipack.ops.loss import linear_cross_entropy
from result import by_turns


def main() -> None:
    options = options_of(__doc__)
    tokens, width, vocabulary = (256, 32, 512) if options.small else (8192, 2048, 128_256)
    device = torch.device(options.device)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    rows = []
    for chunk in (None, tokens // 8, tokens // 4, tokens // 2, tokens):
        chosen = {} if chunk is None else {"chunk_tokens": chunk}

        def work(chosen=chosen):
            loss = linear_cross_entropy(hidden, weight, targets, num_targets=tokens, **chosen)
            torch.autograd.grad(loss, (hidden, weight))

        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = by_turns({"": work}, 2 if options.small else 10, options.device, unmeasured=2)[""]
        row = {"rows": chunk or "default", "ms": 1e3 * statistics.median(seconds)}
        if options.device == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(row, flush=True)
        rows.append(row)
    write_part(options, {"rows": rows, "tokens": tokens, "width": width, "vocabulary": vocabulary})


if __name__ == "__main__":
    main()
