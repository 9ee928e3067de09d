"""What sharing common beginnings gains: steps on packs that share and on packs that do not, alternating in one process.

    python benchmarks/prefix_sharing.py

Both train the same decoder on the same documents, whose completions are targets: collator, forward, backward and
optimizer. A row
has groups of documents that begin with one prompt. The token ratio is that of slots; the ratio over it is 1 where a
slot costs the same, and less where attention is a large part, which keeps the pairs of a completion and its prompt. In
the last row no documents begin alike: a collator that looks for common beginnings is compared with one that does not,
and the batches are equal. Seconds are the CPU's, for busy machines; of all rounds the fastest counts, and the median of
the ratios of rounds is given beside it. Results go to results/prefix_sharing.json.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.shapes import ModelShape
from result import parser_of, write_result


class Row(NamedTuple):
    """Groups of documents: their number, documents in each, and tokens of the prompt and of a completion."""

    name: str
    groups: int
    documents: int
    prompt: int
    completion: int


ROWS = (
    Row("8 completions of 128 on a prompt of 512", 1, 8, 512, 128),
    Row("8 completions of 128 on a prompt of 128", 1, 8, 128, 128),
    Row("pairs of 200 on a prompt of 400", 2, 2, 400, 200),
    Row("nothing in common", 4, 1, 0, 512),
)


def documents_of(row: Row, vocabulary: int) -> list[Document]:
    """Random documents of a row, group after group."""
    rng, made = np.random.default_rng(0), []
    for _ in range(row.groups):
        begin = rng.integers(0, vocabulary, row.prompt)
        for _ in range(row.documents):
            tokens = np.append(begin, rng.integers(0, vocabulary, row.completion)).astype(np.uint32)
            made.append(Document(tokens, np.array([[row.prompt, len(tokens)]])))
    return made


def seconds(
    model: Decoder, optimizer: torch.optim.Optimizer, collate: PackedCollator, documents: list[Document]
) -> float:
    """CPU seconds of a step."""
    began = time.process_time()
    batch = collate(documents)
    (model(batch) / batch.denominator).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - began


def main() -> None:
    parser = parser_of(__doc__, "prefix_sharing")
    parser.add_argument(
        "--rounds", type=int, default=5, help="steps of each kind, after one that is not counted"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=1024)
    options = parser.parse_args()
    heads, found = options.width // 64, []
    shape = ModelShape(
        layers=options.layers,
        heads=heads,
        kv_heads=heads,
        d_model=options.width,
        d_ff=4 * options.width,
        vocabulary_size=options.vocabulary,
        context=2048,
    )
    model = Decoder(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for row in ROWS:
        documents = documents_of(row, options.vocabulary)
        collators = [PackedCollator(len(documents), 2048, min_prefix=least) for least in (None, 16)]
        times = np.zeros((options.rounds + 1, 2))
        for number, each in enumerate(times):
            for kind in (0, 1) if number % 2 else (1, 0):
                each[kind] = seconds(model, optimizer, collators[kind], documents)
        alone, shared = times[1:].min(axis=0).tolist()
        before, after = (collate(documents).num_slots for collate in collators)
        tokens = before / after
        found.append(
            {
                **row._asdict(),
                "token_ratio": tokens,
                "step_ratio": alone / shared,
                "step_over_token_ratio": alone / shared / tokens,
                "median_step_ratio": float(np.median(times[1:, 0] / times[1:, 1])),
                "seconds": alone,
                "seconds_shared": shared,
            }
        )
        print(
            f"{row.name:<42}{tokens:>6.2f} x fewer tokens{alone / shared:>8.2f} x faster:"
            f"{alone / shared / tokens:>7.2f}",
            flush=True,
        )
    keys = ("layers", "width", "vocabulary", "rounds")
    write_result(options.out, {"rows": found, **{key: getattr(options, key) for key in keys}})


if __name__ == "__main__":
    main()
