"""One attention call with the bounds of its pack, and with those of the whole plan.

Kernels launch blocks for `max_seqlen` tokens of every entry of `cu_seqlens`, whether or not there is such a document.
The pack has 18 documents of lognormal length in 8,192 tokens, 32 heads of width 64. The bounds of the plan are its
longest document, 8,192 tokens, and 326 entries; those of the pack are what the collator gives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from attention import Way, measure
from gpu_parts.common import options_of, write_part
from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.ops.attention import attention, select

HEADS, WIDTH, ENTRIES = 32, 64, 326


def main() -> None:
    options = options_of(__doc__)
    tokens, repeats = (128, 1) if options.small else (8192, 20)
    device, dtype = torch.device(options.device), torch.float32 if options.device == "cpu" else torch.bfloat16
    weights = np.random.default_rng(0).lognormal(0, 0.9, 18)
    lengths = np.maximum(1, weights / weights.sum() * tokens * 0.99).astype(int)
    lengths[lengths.argmax()] += tokens - lengths.sum()
    none = np.zeros((0, 2), dtype=np.int64)
    documents = [Document(np.zeros(length, dtype=np.uint16), none) for length in lengths]
    # A collator of a plan whose packs hold up to 324 documents, and documents up to the capacity.
    pack = PackedCollator(ENTRIES - 2, tokens)(documents).to(device)
    filler = torch.full((max(ENTRIES - len(pack.cu_seqlens), 0),), tokens, dtype=torch.int32, device=device)
    plan = replace(pack, max_seqlen=tokens, cu_seqlens=torch.cat([pack.cu_seqlens, filler]))
    q, k, v = (
        torch.randn(tokens, HEADS, WIDTH, device=device, dtype=dtype).requires_grad_() for _ in range(3)
    )
    backend = select("auto", q).name
    batches = {"pack": pack, "plan": plan}
    ways = [
        Way(name, [q, k, v], partial(attention, batch=batch, backend=backend))
        for name, batch in batches.items()
    ]
    forward, both = (measure(ways, repeats, backward) for backward in (False, True))
    rows = [
        {
            "bounds": name,
            "max_seqlen": batch.max_seqlen,
            "entries": len(batch.cu_seqlens),
            "forward_ms": 1e3 * forward[name]["median_seconds"],
            "forward_backward_ms": 1e3 * both[name]["median_seconds"],
        }
        for name, batch in batches.items()
    ]
    print("\n".join(map(str, rows)), flush=True)
    ratio = rows[1]["forward_backward_ms"] / rows[0]["forward_backward_ms"]
    write_part(
        options, {"backend": backend, "rows": rows, "plan_over_pack": ratio, "lengths": lengths.tolist()}
    )


if __name__ == "__main__":
    main()
