"""A folder of token stores, each with a contiguous range of the documents, which may still grow.

books/
  shard-00000/  shard-00001/ …   token stores (see `data/store.py`): they appear one by one, in order, each whole
  header.json                    written last: names and checksums of all shards, counts; its own checksum
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from multipack.atomic import write_atomically
from multipack.data.header import HEADER, StoreHeader

FORMAT = "multipack-token-shards"
VERSION = 1
MOST_SHARDS = 100_000
_NAME = re.compile(r"shard-\d{5}")
_LARGEST = 1 << 26


@dataclass(frozen=True)
class ShardsHeader:
    """What the `header.json` of a complete folder of shards says.

    Attributes:
        shards: of each, in order: name, checksum, documents, tokens.
        documents: of all shards, and
        tokens: how many they have.
        source_hash: hash of the corpus: that of a single store of the same documents.
        tokenizer_hash: the tokenizer's hash.
        description: one line for people.
        skipped: what the source left out: reason → how many.
    """

    shards: list[dict[str, Any]]
    documents: int
    tokens: int
    source_hash: str
    tokenizer_hash: str
    description: str
    skipped: dict[str, int]

    @property
    def checksum(self) -> str:
        """Sha256 of all of this: it identifies the content of all shards."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def write(self, folder: Path) -> None:
        """Declare the folder complete."""
        content = {**self._content(), "checksum": self.checksum}
        write_atomically(folder / HEADER, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> ShardsHeader:
        """The header of a complete folder.

        Raises:
            ValueError: there is none, or a newer one, or it is damaged.
        """
        file = folder / HEADER
        if not file.is_file():
            raise ValueError(f"{folder} is not a complete folder of shards (it has no {HEADER})")
        if file.stat().st_size > _LARGEST:
            raise ValueError(f"{file} is too large for the header of a folder of shards")
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not JSON ({error}): the folder is damaged") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{folder} is not a folder of shards ({HEADER} is of another format)")
        if content.get("version") != VERSION:
            raise ValueError(
                f"{folder} has version {content.get('version')} of the format of shards, and this multipack reads"
                f" version {VERSION}: update multipack, or prepare the shards again"
            )
        try:
            header = cls(**{field.name: content[field.name] for field in fields(cls)})
            names = [entry["name"] for entry in header.shards]
            intact = header.checksum == content["checksum"] and [entry["checksum"] for entry in header.shards]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} lacks {error}: the folder is damaged") from error
        if not intact or names != [shard_name(number) for number in range(len(names))]:
            raise ValueError(f"{file} was edited: prepare the shards again")
        return header


def shard_name(number: int) -> str:
    """Name of a shard's folder."""
    return f"shard-{number:05}"


def is_shards(folder: Path) -> bool:
    """Whether `folder` is a folder of shards, complete or growing (with one shard, at least)."""
    file = folder / HEADER
    if file.is_file():
        try:
            ShardsHeader.read(folder)
        except ValueError:
            return False
        return True
    return (folder / shard_name(0) / HEADER).is_file()


def list_shards(folder: Path | str) -> tuple[list[Path], bool]:
    """The shards that are there, in order, each whole; and whether these are all that there will be.

    Nothing but headers is read. In a folder that grows, this may be asked again and again: shards are only added.

    Raises:
        ValueError: there is no such folder; a shard of a complete one is missing, damaged, or not the one that its
            header names.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder of shards")
    if (folder / HEADER).is_file():
        header = ShardsHeader.read(folder)
        for entry in header.shards:
            found = StoreHeader.read(folder / entry["name"]).checksum
            if found != entry["checksum"]:
                raise ValueError(
                    f"{folder / entry['name']} is not the shard that {folder / HEADER} names (its checksum differs):"
                    " prepare the shards again"
                )
        return [folder / entry["name"] for entry in header.shards], True
    shards = list[Path]()
    while (folder / shard_name(len(shards)) / HEADER).is_file():
        shards.append(folder / shard_name(len(shards)))
    return shards, False


def only_shards(folder: Path) -> bool:
    """Whether nothing but shards (and what is hidden) is in a folder: it may be one that still grows."""
    return folder.is_dir() and all(
        _NAME.fullmatch(entry.name) or entry.name.startswith(".") for entry in folder.iterdir()
    )
