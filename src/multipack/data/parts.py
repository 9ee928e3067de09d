"""Finished parts of a store that is being prepared: what an interrupted `prepare` need not do again.

    books.store                          not there before the end
    .books.store.parts/00000-3f2a….part  8 M tokens or more each, whole or not at all, in the order of the source

A part belongs to one corpus, tokenizer and version, which its name says. Corpora smaller than a part write none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from multipack.atomic import write_atomically
from multipack.data.blocks import TokenBlock

PART_TOKENS = 8 << 20
"""Tokens of a part: what a kill costs at most, and what is kept in memory (as 2 or 4 bytes each)."""


class Parts:
    """The parts of one store.

    Args:
        store: where the store will be.
        key: hash of everything that decides what is in the parts.
    """

    def __init__(self, store: Path, key: str) -> None:
        self._folder = folder_of_parts(store)
        self._key = key[:32]
        self._number = 0
        self._blocks: list[TokenBlock] = []
        self._tokens = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05}-{self._key}.part"

    def finished(self) -> Iterator[TokenBlock]:
        """Parts that an interrupted `prepare` of the same corpus left, in order; others are removed."""
        while self._path(self._number).is_file():
            try:
                block = TokenBlock.from_bytes(self._path(self._number).read_bytes())
            except ValueError:
                break  # what is damaged is made again
            self._number += 1
            yield block
        kept = {self._path(number) for number in range(self._number)}
        _remove(self._folder, kept)

    def add(self, block: TokenBlock) -> None:
        """Take the next documents; a part is written when there are enough of them."""
        self._blocks.append(block)
        self._tokens += len(block.tokens)
        if self._tokens >= PART_TOKENS:
            write_atomically(self._path(self._number), TokenBlock.joined(self._blocks).to_bytes())
            self._number += 1
            self._blocks, self._tokens = [], 0

    def remove(self) -> None:
        """Remove all parts."""
        _remove(self._folder, set())


def folder_of_parts(store: Path) -> Path:
    """Where the parts of a store are kept until it is whole."""
    return store.with_name(f".{store.name}.parts")


def _remove(folder: Path, kept: set[Path]) -> None:
    """Remove parts, and what killed writers left of them; nothing else that may be in the folder."""
    for pattern in ("*.part", ".*.part.*.partial"):
        for file in folder.glob(pattern):
            if file not in kept:
                file.unlink(missing_ok=True)
    with suppress(OSError):  # it is not there, or not empty
        folder.rmdir()
