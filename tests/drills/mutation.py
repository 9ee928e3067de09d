"""Mutants of files and of saved states: damaged bytes, values of other types and sizes, hostile texts."""

import copy
import json
import os
import re
import struct
from pathlib import Path

from multipack.data.stores.shards import FORMAT

MARKER = Path("/tmp") / f"multipack-mutant-{os.getpid()}"
"""A file that a mutant makes if a part of it is run as a command."""
WRONG = json.loads(
    """[null, true, false, -1, 0, 1, 2, 7, 0.5, 1e300, NaN,
        "", "7", "a", "keep", "\\ud800", "../../etc/passwd", "/etc/passwd", "${oc.env:HOME}", "\\u0000", "\\n", "1e9",
        [], {}, ["a"], [0], [5], [[]], [1, 2, 3], [null, "a", 1.5], [9007199254740992, 1], [[[[[[]]]]]], [1e400],
        {"a": 1}, {"a": null}, {"": {}}, {"positions": 2}]"""
)
WRONG += [2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), [2**70], [0] * 500]
WRONG += ["x" * 5000, float("inf"), f"$(touch {MARKER})"]
"""Values that may be of a wrong type or size."""


HOSTILE = ["${oc.env:HOME}", "!!python/object/apply:os.system", "*a", "&a", "[" * 3000, "- " * 3000, "1e999"]
HOSTILE += [
    "10**10**9",
    "range(99999)",
    "{% for a in range(99999) %}",
    "{% endfor %}",
    "(" * 300,
    "~",
    "*",
    "|",
]
"""Words of texts that are read as settings, patterns or templates."""


def of_bytes(content, draw):
    """Bits, zeros, cut ends, doubled or inserted pieces."""
    raw = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        at, end = sorted(draw.randrange(len(raw) + 1) for _ in range(2)) if raw else (0, 0)
        piece = draw.choice((b"\0", b"\xff" * 8, b"[" * 5000, b"{" * 50, b'"', b"9" * 400, b"\n", b"${a}"))
        kind = draw.randrange(6)
        if kind == 0 and raw:
            raw[min(at, len(raw) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del raw[at : min(end, at + 64)]
        elif kind == 2:
            raw = raw[:at]
        elif kind == 3:
            raw[at:at] = piece
        elif kind == 4:
            raw[at:at] = raw[at : min(end, at + 64)]
        else:
            raw[at : at + 8] = bytes(min(8, len(raw) - at))
    return bytes(raw)


def of_tree(tree, draw):
    """Values of other types and sizes; missing, moved and added entries, at one to three places of plain data."""
    tree = copy.deepcopy(tree)
    if draw.random() < 0.02:
        return draw.choice(WRONG)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = [(None, None), *_places(tree)]
        holder, key = draw.choice(places[1:] or places)
        if holder is None:
            return draw.choice(WRONG)
        kind = draw.randrange(10)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = copy.deepcopy(draw.choice(places[1:])[0])
        elif kind == 2 and isinstance(holder[key], int | float):
            holder[key] = holder[key] * draw.choice((-1, 2, 1000, 1e18)) + draw.choice((-1, 1))
        elif kind == 3 and isinstance(holder[key], list):
            holder[key] = holder[key] * draw.choice((0, 2, 30))
        elif kind == 4:
            for _ in range(draw.choice((3, 60))):
                holder[key] = [holder[key]]
        elif kind == 5 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == 5:
            holder[f"{key}x"] = draw.choice(WRONG)
        elif kind == 6 and hasattr(holder[key], "flip"):  # a tensor
            holder[key] = holder[key].flip(0) if draw.random() < 0.5 else holder[key].double()
        else:
            holder[key] = copy.deepcopy(draw.choice(WRONG))
    return tree


def _places(tree):
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def of_json(content, draw):
    return json.dumps(of_tree(json.loads(content), draw)).encode()


def of_text(content, draw):
    """Words of a text exchanged, repeated or replaced by hostile ones."""
    words = re.split(r"(\W)", content.decode())
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(words))
        words[at] = draw.choice((draw.choice(words), draw.choice(HOSTILE), "", str(draw.choice(WRONG))))
    return "".join(words).encode("utf-8", "surrogatepass")


def of_safetensors(content, draw):
    """The JSON header of a safetensors file, and of a shard the JSON inside it."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    about = header.get("__metadata__", {})
    if FORMAT in about and draw.random() < 0.5:
        about[FORMAT] = json.dumps(of_tree(json.loads(about[FORMAT]), draw))
    else:
        header = of_tree(header, draw)
    text = json.dumps(header).encode().ljust(size)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def of_npy(content, draw):
    """The header of a .npy file, an expression in Python."""
    size = struct.unpack("<H", content[8:10])[0]
    header = content[10 : 10 + size]
    pieces = [
        b"(1000000000000,)",
        b"(-1,)",
        b"(1 << 70,)",
        b"()",
        b"'|O'",
        b"'<f8'",
        b"'<M8'",
        b"(" * 3000,
        b"",
    ]
    header = re.sub(rb"\([^)]*\)|'<i8'", lambda found: draw.choice((found[0], *pieces)), header)
    header = of_bytes(header, draw) if draw.random() < 0.4 else header
    return content[:8] + struct.pack("<H", len(header)) + header + content[10 + size :]
