"""The header of a token store: what is in the folder, checked before anything of it is believed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from multipack.data.fit import FitPolicy
from multipack.data.vocabularies import CHAT_TEMPLATE

FORMAT = "multipack-token-store"
VERSION = 2
"""Newest version: 1 is a store without optional files, and is still written where there are none."""
HEADER = "header.json"
DTYPES = {"uint16": 2, "uint32": 4}
"""Token types and their bytes."""
FILES = {
    *("tokens.bin", "offsets.bin", "spans.bin", "span_offsets.bin", "names.bin", "name_offsets.bin"),
    "tokenizer.json",
}
"""What every store holds beside its header."""
BORDERS = "borders.bin"
OPTIONAL_FILES = {BORDERS, CHAT_TEMPLATE}
"""What stores of pairs, and of chats, hold too."""
_LARGEST = 1 << 24


def dtype_of(vocabulary_size: int) -> str:
    """Type of a token: the smallest that holds every token of the vocabulary."""
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class StoreHeader:
    """What `header.json` says.

    Attributes:
        dtype: type of a token, "uint16" or "uint32".
        documents: how many, and
        tokens: of how many tokens in all, and
        spans: how many ranges of targets.
        vocabulary_size: every token is less than this.
        end_id: the token after each document, or None.
        tokenizer: the tokenizer's name.
        tokenizer_hash: the tokenizer's hash.
        source_hash: hash of the corpus and of how it was divided into documents.
        description: one line for people.
        python: version of Python that wrote the store.
        split_by: "document", or "position" for a stream, which is one document.
        overlong: what becomes of documents longer than a pack, where nobody says otherwise.
        skipped: what the source left out: reason → how many.
        files: name → {"bytes", "sha256"}.
    """

    dtype: str
    documents: int
    tokens: int
    spans: int
    vocabulary_size: int
    end_id: int | None
    tokenizer: str
    tokenizer_hash: str
    source_hash: str
    description: str
    python: str
    split_by: str
    overlong: FitPolicy
    skipped: dict[str, int]
    files: dict[str, dict[str, Any]]

    @property
    def version(self) -> int:
        """Version of the format that holds these files."""
        return 2 if OPTIONAL_FILES & self.files.keys() else 1

    @property
    def checksum(self) -> str:
        """Sha256 of all of this: as it holds the hash of every file, it identifies the store's content."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": self.version, **asdict(self)}

    def to_json(self) -> str:
        """The content of `header.json`."""
        return json.dumps({**self._content(), "checksum": self.checksum}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> StoreHeader:
        """The header of the store in `folder`.

        Raises:
            ValueError: no store is there, or a newer one, or its header is damaged.
        """
        file = folder / HEADER
        if not file.is_file():
            raise ValueError(
                f"{folder} is not a token store (it has no {HEADER}); `multipack prepare` makes one from text"
            )
        if file.stat().st_size > _LARGEST:
            raise ValueError(f"{file} is too large for the header of a token store")
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{file} is not JSON ({error}): the store is damaged; prepare it again"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{folder} is not a token store ({HEADER} is of another format)")
        version = content.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ValueError(
                f"{folder} has version {version} of the token store's format, and this multipack reads "
                f"versions up to {VERSION}: update multipack, or prepare the store again"
            )
        return cls._from_content(content, file)

    @classmethod
    def _from_content(cls, content: dict[str, Any], file: Path) -> StoreHeader:
        try:
            header = cls(**{field.name: content[field.name] for field in fields(cls)})
            checksum = content["checksum"]
        except KeyError as error:
            raise ValueError(f"{file} lacks {error}: the store is damaged; prepare it again") from error
        files = header.files
        if not isinstance(files, dict) or not FILES <= files.keys() <= FILES | OPTIONAL_FILES:
            raise ValueError(f"{file} does not name the files of a token store: prepare the store again")
        if header.checksum != checksum:
            raise ValueError(f"{file} was edited (its checksum differs): prepare the store again")
        header._check(file)
        return header

    def _check(self, file: Path) -> None:
        counts = (self.documents, self.tokens, self.spans, self.vocabulary_size)
        right = (
            self.dtype in DTYPES
            and all(type(count) is int and count >= 0 for count in counts)
            and self.split_by in ("document", "position")
            and self.overlong in get_args(FitPolicy)
            and all(type(entry.get("bytes")) is int for entry in self.files.values())
            and {name: entry["bytes"] for name, entry in self.files.items()}.items() >= self.sizes().items()
        )
        if not right:
            raise ValueError(f"{file} contradicts itself: prepare the store again")

    def sizes(self) -> dict[str, int]:
        """Bytes of the files whose size follows from the counts."""
        borders = {BORDERS: 8 * self.documents} if BORDERS in self.files else {}
        return {
            **borders,
            "tokens.bin": DTYPES[self.dtype] * self.tokens,
            "offsets.bin": 8 * (self.documents + 1),
            "spans.bin": 16 * self.spans,
            "span_offsets.bin": 8 * (self.documents + 1),
            "name_offsets.bin": 8 * (self.documents + 1),
        }
