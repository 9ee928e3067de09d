"""Draws docs/tree_mask.svg: the mask, positions and targets of a pack whose documents share their beginnings.

    python docs/tree_mask.py

The values are those of the batch that the collator makes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from multipack.data.packs.batch import PackedBatch
from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.ops.attention.masks import document_mask

TEXTS = (
    ("You are brief . Red or blue ?", "Red ."),
    ("You are brief . Red or blue ?", "Blue , always ."),
    ("You are brief . Why ?", "Because ."),
)
"""Prompt and answer of each document; the answers are targets."""
OUT = Path(__file__).parent / "tree_mask.svg"
COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2"]
CELL, LEFT, TOP, GAP = 17, 96, 84, 30


def batch_of() -> tuple[PackedBatch, list[str]]:
    """The pack, and its words."""
    words = sorted({word for prompt, answer in TEXTS for word in f"{prompt} {answer}".split()})
    documents = []
    for prompt, answer in TEXTS:
        tokens = [words.index(word) for word in f"{prompt} {answer}".split()]
        span = np.array([[len(prompt.split()), len(tokens)]])
        documents.append(Document(np.array(tokens, dtype=np.uint16), span))
    return PackedCollator(len(TEXTS), 64, min_prefix=1)(documents), words


def text(x: float, y: float, words: object, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{words}</text>'


def draw(batch: PackedBatch, words: list[str]) -> str:
    """The picture: a row for each slot as a query, a column for each as a key, and its targets on the right."""
    tree, visible = batch.tree, document_mask(batch).tolist()
    assert tree is not None
    node = np.repeat(np.arange(len(batch.lengths)), batch.lengths).tolist()
    names = [words[token] for token in batch.input_ids.tolist()]
    rows = tree.target_slots.tolist()
    targets: dict[int, list[str]] = {}
    for row, target in zip(rows, batch.targets.tolist(), strict=True):
        targets.setdefault(row, []).append(words[target])
    slots, parts = batch.num_slots, []
    side, small = slots * CELL, 'font-size="10" fill="#777"'
    for i, name in enumerate(names):
        y, color = TOP + i * CELL, COLORS[node[i] % len(COLORS)]
        parts.append(text(LEFT - 24, y + 12.5, name, 'text-anchor="end"'))
        parts.append(text(LEFT - 6, y + 12.5, int(batch.position_ids[i]), f'text-anchor="end" {small}'))
        x = LEFT + i * CELL + 12
        parts.append(text(x, TOP - 6, name, f'transform="rotate(-60 {x} {TOP - 6})"'))
        parts.append(text(LEFT + side + GAP, y + 12.5, ", ".join(targets.get(i, [])), f'fill="{color}"'))
        for j in range(slots):
            fill = COLORS[node[j] % len(COLORS)] if visible[i][j] else "#f2f2f2"
            place = f'x="{LEFT + j * CELL}" y="{y}" width="{CELL - 1}" height="{CELL - 1}"'
            parts.append(f'<rect {place} fill="{fill}"/>')
    bold = 'font-weight="bold"'
    head = [
        text(LEFT + side + GAP, TOP - 8, "targets", bold),
        text(LEFT - 24, TOP - 8, "slots", f'text-anchor="end" {bold}'),
        text(
            LEFT,
            TOP + side + 20,
            f"{batch.num_tokens} tokens of {batch.num_documents} documents in {slots} slots;",
        ),
        text(LEFT, TOP + side + 36, "the color of a slot is that of its node, and the number its position"),
    ]
    width, height = LEFT + side + GAP + 130, TOP + side + 48
    open_tag = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12" fill="#333">'
    )
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([open_tag, background, *parts, *head, "</svg>"]) + "\n"


def main() -> None:
    OUT.write_text(draw(*batch_of()))
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
