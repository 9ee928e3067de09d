"""Why short bfloat16 documents are attended to in float32 on a CPU: both ways, by length, in one process.

    python benchmarks/precision.py

Forward and backward of equally many tokens in documents of one length: torch's bfloat16 kernel, and the same
bfloat16 tensors attended to in float32 (casts included), by turns. Ratios are medians of bfloat16's time over
float32's; above 1, float32 is faster. Results go to results/precision.json.
"""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from result import by_turns, median_ratio, parser_of, write_result

TOKENS, HEADS, WIDTH, REPEATS = 8192, 4, 48, 9
LENGTHS = (64, 200, 500, 1000, 2000, 4000)


def attend(parts: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype) -> None:
    """Attend to all documents in `dtype` and back."""
    for q, k, v in parts:
        out = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True)
        torch.autograd.grad(out.to(q.dtype).sum(), (q, k, v))


def main() -> None:
    options, rows = parser_of(__doc__, "precision").parse_args(), []
    torch.manual_seed(0)
    for length in LENGTHS:
        size = (1, HEADS, length, WIDTH)
        parts = [
            tuple(torch.randn(size).bfloat16().requires_grad_() for _ in range(3))
            for _ in range(TOKENS // length)
        ]
        ways = {name: partial(attend, parts, getattr(torch, name)) for name in ("bfloat16", "float32")}
        found = by_turns(ways, REPEATS, clock=time.perf_counter)
        ratio = median_ratio(found["bfloat16"], found["float32"])
        print(f"{length:>6,} tokens a document: bfloat16 takes {ratio:.2f} × the time of float32", flush=True)
        rows.append({"length": length, "bfloat16_over_float32": ratio})
    write_result(options.out, {"rows": rows, "heads": HEADS, "head_width": WIDTH})


if __name__ == "__main__":
    main()
