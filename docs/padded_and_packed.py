"""Draws docs/padded_and_packed.svg: the same documents padded and packed, to one scale.

    python docs/padded_and_packed.py

Lengths are those of a global step of the embedded corpus, so the picture shows real proportions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import multipack

COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b"]
OUT = Path(__file__).parent / "padded_and_packed.svg"
CAPACITY, BATCH, ROW, GAP = 2048, 8, 9, 3
SCALE = 0.2  # pixels a token
LEFT, TOP, MIDDLE = 12, 46, 40


def rectangle(x: float, y: float, tokens: float, color: str, extra: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{max(tokens * SCALE - 0.8, 0.4):.1f}" height="{ROW}" fill="{color}" {extra}/>'


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


def draw(lengths: list[int]) -> str:
    """The picture of one step's documents."""
    width = max(CAPACITY, max(lengths)) * SCALE
    parts, y, slots = [], TOP, 0
    for first in range(0, len(lengths), BATCH):
        batch = lengths[first : first + BATCH]
        longest = max(batch)
        slots += longest * len(batch)
        for i, length in enumerate(batch):
            parts.append(rectangle(LEFT, y, length, COLORS[(first + i) % len(COLORS)]))
            if longest > length:
                parts.append(rectangle(LEFT + length * SCALE, y, longest - length, "url(#x)"))
            y += ROW + GAP
        y += 8
    bottom, right = y, LEFT + width + MIDDLE
    packs = multipack.pack(lengths, CAPACITY)
    y = TOP
    for pack in packs:
        x = right
        for number in pack:
            parts.append(rectangle(x, y, lengths[number], COLORS[number % len(COLORS)]))
            x += lengths[number] * SCALE
        left_over = CAPACITY - sum(lengths[number] for number in pack)
        if left_over:
            parts.append(rectangle(x, y, left_over, "url(#x)"))
        y += ROW + GAP
    tokens = sum(lengths)
    bold = 'font-weight="bold" font-size="13"'
    head = [
        text(LEFT, 18, "padded", bold),
        text(
            LEFT,
            34,
            f"{len(lengths)} documents in batches of {BATCH}: {slots:,} slots, {tokens / slots:.0%} real",
        ),
        text(right, 18, "packed", bold),
        text(
            right,
            34,
            f"{len(packs)} packs of {CAPACITY:,}: {len(packs) * CAPACITY:,} slots, "
            f"{tokens / len(packs) / CAPACITY:.0%} real",
        ),
        text(right, y + 24, "every document attends to itself alone;"),
        text(right, y + 40, "cu_seqlens says where each begins"),
    ]
    total = right + width + LEFT
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {bottom}" font-family="sans-serif" '
                'font-size="12" fill="#333">',
                '<defs><pattern id="x" width="5" height="5" patternUnits="userSpaceOnUse"><rect width="5" height="5" '
                'fill="#eee"/><path d="M0 5L5 0" stroke="#bbb" stroke-width="0.8"/></pattern></defs>',
                f'<rect width="{total:.0f}" height="{bottom}" fill="white"/>',
                *parts,
                *head,
                "</svg>",
            ]
        )
        + "\n"
    )


def main() -> None:
    from multipack.data.views.corpus import load_corpus
    from multipack.training.run_config import compose

    config = compose([])
    corpus = load_corpus(config.data, config.tokenizer, limit=CAPACITY)
    plan = multipack.plan(corpus.train.lengths, options=config.plan.for_ranks(1))
    # A step with as many documents as steps have in the middle.
    counts = [len(plan.documents(step)) for step in range(plan.num_steps)]
    step = int(np.argsort(counts, kind="stable")[len(counts) // 2])
    documents = plan.documents(step)
    order = np.random.default_rng(0).permutation(documents)
    OUT.write_text(draw([int(plan.lengths[number]) for number in order]))
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
