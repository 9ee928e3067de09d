"""GPT-2 (124 M) through the trainer beside a plain loop, by turns: tokens per second, and their ratio.

Both compute 4 micro-batches of 16,384 tokens a step in bf16, compiled, with the vocabulary rounded up to 50,304. The
trainer packs documents of at most 1,024 tokens (lognormal, mean 300), which the plain loop (plain_loop.py) cuts into
rows of 1,024 tokens whatever they hold. The best of two rounds counts.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from gpu_parts.common import at_least, options_of, random_corpus, timed_run, write_part
from gpu_parts.plain_loop import Sizes, tokens_per_second

SMALL = Sizes(layers=2, heads=2, width=32, vocabulary=512, row=64, rows=4, micro_batches=2)


def main() -> None:
    options = options_of(__doc__)
    sizes, steps, skipped, rounds = (SMALL, 4, 2, 1) if options.small else (Sizes(), 60, 20, 2)
    capacity = sizes.rows * sizes.row
    shape = {"layers": sizes.layers, "heads": sizes.heads, "kv_heads": sizes.heads, "context": sizes.row}
    shape |= {"d_model": sizes.width, "d_ff": 4 * sizes.width, "vocabulary_size": sizes.vocabulary}
    words = ["model=gpt2", *(f"model.{name}={value}" for name, value in shape.items())]
    words.append(f"train.steps={steps}")
    words += [] if options.small else ["train.compile=true", "train.dtype=bf16"]
    torch.set_float32_matmul_precision("high")  # as plain loops do; both compute in bf16
    ours, plain = [], []
    vocabulary = min(sizes.vocabulary, 50_257)
    corpus = random_corpus(options, capacity, sizes.micro_batches, steps, vocabulary, longest=sizes.row)
    with corpus as (common, stream):
        for _ in range(rounds):
            plain.append(tokens_per_second(stream, sizes, options.device, steps, skipped))
            if options.device == "cuda":
                torch.cuda.empty_cache()
            ours.append(timed_run([*common, *words], skipped))
            print(f"plain {plain[-1]:,.0f} tokens/s, ours {ours[-1].tokens_per_second:,.0f}", flush=True)
    best = max(ours, key=lambda run: run.tokens_per_second)
    ratio = best.tokens_per_second / max(plain)
    figures = {"plain_tokens_per_second": plain, "ours": [asdict(run) for run in ours], "ratio": ratio}
    asked = at_least("GPT-2, tokens per second over those of a plain loop", ratio, 1.0, options)
    write_part(options, {**figures, "sizes": asdict(sizes)}, asked)


if __name__ == "__main__":
    main()
