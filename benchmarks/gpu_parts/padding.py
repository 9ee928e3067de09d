"""Packed over padded training steps of GPT-2 on one device, and the share of the pad factor that packing reaches.

As benchmarks/padding.py, on documents of lognormal length (mean 300, at most 2,048 tokens): packs of 16,384 tokens
beside random batches of 16 documents padded to their longest. The trainer chooses compilation and shapes.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import padding
from gpu_parts.common import at_least, options_of, random_corpus, write_part


def main() -> None:
    options = options_of(__doc__)
    capacity, packs, steps, batch, longest = (
        (256, 2, 2, 4, 128) if options.small else (16_384, 4, 12, 16, 2048)
    )
    shape = (
        ["model=tiny"] if options.small else ["model=gpt2", f"model.context={longest}", "train.dtype=bf16"]
    )
    timed = argparse.Namespace(batch_size=batch, steps=steps, seconds=60.0, cpu_time=False)
    vocabulary = 512 if options.small else 50_257
    with random_corpus(options, capacity, packs, steps, vocabulary, longest / 7, longest) as (words, _):
        found = padding.measure([*words, *shape], timed)
    rows = [
        {"padded_loss": name, "share_of_pad_factor": each.ratio / each.pad_factor, **asdict(each)}
        for name, each in found.items()
    ]
    print("\n".join(map(str, rows)))
    share = rows[0]["share_of_pad_factor"]
    write_part(options, {"rows": rows}, at_least("packed over padded / pad factor", share, 0.95, options))


if __name__ == "__main__":
    main()
