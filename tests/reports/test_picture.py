"""The picture of a step: letters where the tokens are, padding where it would be."""

import numpy as np

from multipack.planning.plan import plan
from multipack.planning.report import seeded_order
from multipack.reports.picture import LETTERS, draw_step


def test_a_whole_picture():
    lengths = np.array([11, 6, 7, 4, 8, 4, 3, 4]) * 256
    made = plan(lengths, capacity=64 * 256, packs_per_step=1, order="given")
    assert draw_step(made, columns=16).splitlines() == [
        "step 0 of 1: 8 documents of 12,032 tokens; a character is 256 tokens, X is padding",
        "",
        "in order, in batches of 4",
        "  ┌ AAAAAAAAAAA",
        "  │ BBBBBB",
        "  │ CCCCCCC",
        "  └ DDDD",
        "  … and 4 more documents",
        "",
        "padded to the longest of each batch: 19,456 slots, 38.2 % padding",
        "  ┌ AAAAAAAAAAA",
        "  │ BBBBBBXXXXX",
        "  │ CCCCCCCXXXX",
        "  └ DDDDXXXXXXX",
        "  … and 4 more documents",
        "",
        "packed, 1 pack of at most 16,384 tokens: 16,384 slots, 26.6 % free",
        "  [ AAAAAAAAAAAEEEEE",
        "    EEECCCCCCCBBBBBB",
        "    DDDDFFFFHHHHGGGX",
        "    XXXXXXXXXXXXXXXX ]",
        "    cu_seqlens 0 2816 4864 6656 8192 … 12032",
    ]


def test_what_is_left_out_is_counted():
    lengths = np.random.default_rng(0).integers(10, 400, 900)
    made = plan(lengths, capacity=1024, packs_per_step=20)
    text = draw_step(made, 1)
    documents = len(made.documents(1))
    assert text.count(f"… and {documents - 4} more documents") == 2
    assert f"… and {len(made.packs(1)) - 4} more packs" in text
    assert f"{documents} documents of {made.tokens(1):,} tokens" in text
    assert draw_step(made, -1).startswith(f"step {made.num_steps - 1} of {made.num_steps}:")


def test_it_fits_the_columns():
    lengths = np.random.default_rng(0).integers(1, 4000, 300)
    for capacity in (4000, 4096, 10_000, 32_768, 5003):
        made = plan(lengths, capacity=capacity, packs_per_step=5)
        for columns in (40, 72, 100):
            lines = draw_step(made, columns=columns).splitlines()
            rows = [line for line in lines if line.startswith("  [ ") and line.endswith(" ]")]
            assert len(rows) == 4
            width = len(rows[0]) - 6
            assert columns / 2.6 <= width <= columns
            assert all(len(row) == width + 6 for row in rows)
            assert all(len(line) <= columns + 20 for line in lines if line.startswith("  "))


def test_one_pack_fills_four_rows():
    lengths = np.random.default_rng(2).integers(50, 900, 60)
    made = plan(lengths, capacity=8192, packs_per_step=1)
    lines = draw_step(made).splitlines()
    assert "a character is 32 tokens" in lines[0]
    first = next(i for i, line in enumerate(lines) if line.startswith("packed")) + 1
    rows = lines[first : first + 4]
    assert [len(row) for row in rows] == [68, 68, 68, 70]
    assert rows[0].startswith("  [ ")
    assert rows[3].endswith(" ]")
    letters = "".join(row[4:68] for row in rows)
    drawn = {letter: letters.count(letter) for letter in set(letters) - {"X"}}
    assert len(drawn) == len(made.documents(0))
    counts = (drawn[letter] for letter in LETTERS if letter in drawn)
    for document, count in zip(seeded_order(made, 0), counts, strict=True):
        assert abs(count - lengths[document] / 32) <= 1
    assert lines[first + 4].startswith("    cu_seqlens 0 ")
    assert lines[-1].endswith(f" {made.tokens(0)}")


def test_letters_leave_out_x():
    assert "X" not in LETTERS.upper()
    assert len(set(LETTERS)) == len(LETTERS) == 60
