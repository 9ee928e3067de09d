"""Files of a token store: shards and headers, which are validated when they are read.

A shard is a safetensors file of flat, little-endian arrays; a document is a slice of each:

    tokens         |AAAAAAAA|BBBB|CCCCCC|     uint16 (vocabulary ≤ 65,536) or uint32
    offsets        0        8    12     18    int64, documents + 1
    spans          [3,8) [0,4) [1,3) [4,6)    int64 pairs: ranges of targets within their document
    span_offsets   0     1     2          4   int64, documents + 1
    names, name_offsets                       UTF-8, and int64, documents + 1

Its metadata holds the sha256 of the arrays' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.atomic import write_atomically

Integers = NDArray[np.int64]
FORMAT, VERSION = "multipack-token-store", 3
RECIPE, HEADER, CHAT_TEMPLATE, TOKENIZER = (
    "recipe.json",
    "header.json",
    "chat_template.json",
    "tokenizer.json",
)
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I64": "<i8"}
_NAME = re.compile(r"shard-\d{4}-\d{5}\.safetensors")
_LARGEST_HEADER, _LARGEST_JSON = 1 << 16, 1 << 26


def token_dtype(vocabulary_size: int) -> str:
    """NumPy dtype of token ids: the smaller of uint16 and uint32 that holds every id, little endian."""
    return "<u2" if vocabulary_size <= 1 << 16 else "<u4"


def shard_name(part: int, number: int) -> str:
    """File name of shard `number` of a part."""
    return f"shard-{part:04}-{number:05}.safetensors"


def part_name(part: int) -> str:
    """File name of the header of a finished part."""
    return f"part-{part:04}.json"


@dataclass(frozen=True)
class Shard:
    """Documents as flat arrays, in memory or mapped from a file.

    Attributes:
        offsets: (documents + 1,) int64: document d is `tokens[offsets[d]:offsets[d + 1]]`.
        span_offsets: (documents + 1,) int64: `spans[span_offsets[d]:span_offsets[d + 1]]` are those of document d.
        name_offsets: (documents + 1,) int64: `names[name_offsets[d]:name_offsets[d + 1]]` is the name of document d.
        spans: (spans, 2) int64 [start, stop) ranges of targets, counted from the first token of their document.
        tokens: (tokens,) uint16 or uint32 token ids.
        names: (bytes,) uint8 names of all documents in UTF-8.
    """

    offsets: Integers
    span_offsets: Integers
    name_offsets: Integers
    spans: Integers
    tokens: NDArray[np.unsignedinteger]
    names: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def name(self, document: int) -> str:
        """Name of a document."""
        raw = self.names[self.name_offsets[document] : self.name_offsets[document + 1]]
        return raw.tobytes().decode("utf-8", "replace")

    def target_counts(self) -> Integers:
        """(documents,) int64 number of targets of each document; its first token is never a target."""
        targets = self.spans[:, 1] - self.spans[:, 0] - (self.spans[:, 0] == 0)
        return np.diff(np.concatenate(([0], np.cumsum(targets)))[self.span_offsets])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Name → array, little endian and contiguous, in the order of the file."""
        arrays = {entry.name: np.ascontiguousarray(getattr(self, entry.name)) for entry in fields(self)}
        return {
            name: values.astype(values.dtype.newbyteorder("<"), copy=False) for name, values in arrays.items()
        }

    def sha256(self) -> str:
        """Sha256 of the bytes of all arrays, in hexadecimal."""
        digest = hashlib.sha256()
        for values in self.arrays().values():
            digest.update(values.data)
        return digest.hexdigest()

    @classmethod
    def joined(cls, shards: Sequence[Shard]) -> Shard:
        """Concatenate one or more shards; a single shard is returned as it is."""
        if len(shards) == 1:
            return shards[0]
        joined: dict[str, Any] = {}
        for name in ("offsets", "span_offsets", "name_offsets"):
            lengths = [np.diff(getattr(shard, name)) for shard in shards]
            joined[name] = offsets_of(np.concatenate(lengths))
        for name in ("spans", "tokens", "names"):
            joined[name] = np.concatenate([getattr(shard, name) for shard in shards])
        return cls(**joined)

    def as_one_document(self, name: str) -> Shard:
        """A shard with one document of all tokens, named `name`; adjacent ranges of targets are merged."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.span_offsets))
        spans = self.spans + self.offsets[owner][:, None]
        begins = np.concatenate(([True], spans[1:, 0] != spans[:-1, 1]))[: len(spans)]
        stops = np.concatenate((begins[1:], [True]))[: len(spans)]
        spans = np.stack([spans[begins, 0], spans[stops, 1]], axis=1)
        raw = np.frombuffer(name.encode("utf-8", "replace"), dtype=np.uint8)
        ends = [np.array([0, size], dtype=np.int64) for size in (len(self.tokens), len(spans), len(raw))]
        return Shard(ends[0], ends[1], ends[2], spans, self.tokens, raw)

    def check(self, place: object) -> None:
        """Check that the offsets match the arrays.

        Raises:
            ValueError: they do not; the message begins with `place`.
        """
        for name, ends, values, min_length in (
            ("offsets", self.offsets, self.tokens, 1),
            ("span_offsets", self.span_offsets, self.spans, 0),
            ("name_offsets", self.name_offsets, self.names, 0),
        ):
            if len(ends) != len(self.offsets) or ends[0] != 0 or ends[-1] != len(values):
                raise damaged(place, f"{name} does not match the other arrays")
            lengths = np.diff(ends)
            if len(lengths) and lengths.min() < min_length:
                raise damaged(place, f"{name} does not increase at document {int(np.argmin(lengths))}")


def offsets_of(lengths: Integers) -> Integers:
    """(n + 1,) int64: 0 and the cumulative sums of (n,) lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def damaged(place: object, reason: str) -> ValueError:
    """The error for a damaged store, for the caller to raise."""
    return ValueError(f"{place}: {reason}: the store is damaged; remove it and prepare it again")


@dataclass(frozen=True)
class ShardEntry:
    """A header's description of one shard.

    Attributes:
        name: file name.
        bytes: size of the file in bytes.
        sha256: `Shard.sha256`.
        documents: number of documents; a preference pair counts as two.
        tokens: number of tokens.
        read: number of documents (or pairs) read from the source for this shard, including those without tokens.
    """

    name: str
    bytes: int
    sha256: str
    documents: int
    tokens: int
    read: int


def write_shard(path: Path, shard: Shard, read: int) -> ShardEntry:
    """Write a shard atomically.

    Args:
        path: file of the shard.
        shard: the documents.
        read: see `ShardEntry`.

    Raises:
        OSError: the file cannot be written; `filename` is its path.
    """
    arrays, layout, end = shard.arrays(), dict[str, Any](), 0
    for name, array in arrays.items():
        dtype = next(key for key, value in _DTYPES.items() if np.dtype(value) == array.dtype)
        layout[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    about = {"format": FORMAT, "version": str(VERSION), "sha256": shard.sha256(), "read": str(read)}
    header = json.dumps({"__metadata__": about, **layout}).encode()
    header += b" " * (-len(header) % 8)  # arrays begin at a multiple of 8
    content = (
        len(header).to_bytes(8, "little") + header + b"".join(array.tobytes() for array in arrays.values())
    )
    try:
        write_atomically(path, content)
    except OSError as error:
        error.filename = str(path)  # the error of a full disk names no file
        raise
    size = 8 + len(header) + end
    return ShardEntry(path.name, size, about["sha256"], len(shard), len(shard.tokens), read)


def open_shard(path: Path, in_memory: bool = False) -> tuple[Shard, ShardEntry, NDArray[np.uint8]]:
    """Open a shard without comparing its hash.

    Args:
        path: file of the shard.
        in_memory: read the arrays into memory instead of mapping the file.

    Returns:
        The shard, its entry, and the bytes of all its arrays (uint8).

    Raises:
        ValueError: the file is not a shard, truncated or damaged.
    """
    size = path.stat().st_size if path.is_file() else -1
    if size < 8:
        raise damaged(path, "the file is missing" if size < 0 else "the file is truncated")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LARGEST_HEADER):
            raise damaged(path, "the file is truncated")
        try:
            layout = json.loads(file.read(length))
            about = layout.pop("__metadata__")
            if about["format"] != FORMAT or about["version"] != str(VERSION):
                raise ValueError("another format or version")
            places = {entry.name: _place(layout[entry.name]) for entry in fields(Shard)}
            read = int(about["read"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(path, f"not a shard ({error})") from error
        begin = 8 + length
    ends = [place[1] for place in places.values()]
    if [place[0] for place in places.values()] != [0, *ends[:-1]] or begin + ends[-1] != size:
        raise damaged(path, f"the file has {size:,} bytes instead of {begin + max(ends):,}")
    if in_memory:
        data = np.fromfile(path, dtype=np.uint8, offset=begin)
        data.flags.writeable = False
    else:
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=begin).view(np.ndarray)
    arrays = {
        name: data[start:stop].view(dtype).reshape(shape)
        for name, (start, stop, dtype, shape) in places.items()
    }
    if arrays["spans"].shape[1:] != (2,) or any(
        array.ndim != 1 for key, array in arrays.items() if key != "spans"
    ):
        raise damaged(path, "not a shard (arrays of other shapes)")
    shard = Shard(**arrays)
    shard.check(path)
    return shard, ShardEntry(path.name, size, str(about["sha256"]), len(shard), len(shard.tokens), read), data


def _place(entry: dict[str, Any]) -> tuple[int, int, np.dtype[Any], tuple[int, ...]]:
    """Begin and end in bytes, dtype and shape of an array in a shard, checked against each other."""
    (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if any(type(number) is not int or number < 0 for number in (start, stop, *shape)):
        raise ValueError("a size is not an integer of at least 0")
    if stop - start != dtype.itemsize * int(np.prod(shape, dtype=object)):
        raise ValueError("a shape does not match its size")
    return start, stop, dtype, shape


@dataclass(frozen=True)
class StoreHeader:
    """Content of `header.json`, of `recipe.json` (without shards) and of `part-….json` (with the shards of one part).

    Attributes:
        vocabulary_size: every token id is less than this.
        end_id: id of the token that ends each document, or None.
        tokenizer: the tokenizer's name.
        tokenizer_hash: the tokenizer's hash.
        chat_template_hash: sha256 of `chat_template.json`; empty = there is none.
        key: hash of source, settings and tokenizer; a store with an equal key is reused.
        split_by: how validation data is split off: `document`, or `position` for one stream of text, of which each
            shard is a contiguous range.
        overlong: policy for documents longer than a pack if `data.overlong` is auto.
        pairs: whether documents 2i and 2i + 1 are the chosen and the rejected answer of preference pair i.
        parts: number of parts that are prepared separately.
        python: version of Python that wrote the store.
        description: one line about the source.
        skipped: reason → number of skipped entries of the source.
        shards: the shards, in order.
    """

    vocabulary_size: int
    end_id: int | None
    tokenizer: str
    tokenizer_hash: str
    chat_template_hash: str = ""
    key: str = ""
    split_by: str = "document"
    overlong: str = "error"
    pairs: bool = False
    parts: int = 1
    python: str = ""
    description: str = ""
    skipped: dict[str, int] = field(default_factory=dict)
    shards: tuple[ShardEntry, ...] = ()

    @property
    def documents(self) -> int:
        """Number of documents; a preference pair counts as one."""
        return sum(shard.documents for shard in self.shards) // (2 if self.pairs else 1)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def content_hash(self) -> str:
        """Sha256 that identifies tokens, targets, names and tokenizer, from the hashes in the header."""
        decisive = [self.tokenizer_hash, self.split_by, self.pairs, *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    def is_for(self, other: StoreHeader) -> bool:
        """Whether both headers describe the same store, whatever shards are finished."""
        rest = {"python": "", "description": "", "skipped": {}, "shards": ()}
        return replace(self, **rest) == replace(other, **rest)  # type: ignore[arg-type]

    def _checksum(self) -> str:
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def write(self, file: Path) -> None:
        """Write the header and its checksum to `file`, atomically."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self), "checksum": self._checksum()}
        write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def read(cls, file: Path) -> StoreHeader:
        """Read and check the header in `file`.

        Raises:
            ValueError: the file is missing, of another version, or damaged.
        """
        if not file.is_file():
            raise ValueError(
                f"{file.parent} is not a complete token store (it has no {file.name}); `multipack prepare` makes one"
            )
        if file.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"{file} is too large for the header of a token store")
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise damaged(file, f"not JSON ({error})") from error
        if not isinstance(content, dict) or not str(content.get("format")).startswith("multipack-token"):
            raise ValueError(f"{file.parent} is not a token store ({file.name} is of another format)")
        if content.get("version") != VERSION or content["format"] != FORMAT:
            raise ValueError(
                f"{file.parent} has version {content.get('version')} of the token store's format, and this multipack"
                f" reads version {VERSION}: prepare the store again (or update multipack)"
            )
        try:
            values = {entry.name: content[entry.name] for entry in fields(cls)}
            shards = tuple(ShardEntry(**shard) for shard in values.pop("shards"))
            header = cls(**values, shards=shards)
            is_valid = header._checksum() == content["checksum"] and header._is_consistent()
        except (KeyError, TypeError) as error:
            raise damaged(file, f"it lacks {error}") from error
        if not is_valid:
            raise damaged(file, "it was edited (its checksum differs)")
        return header

    def _is_consistent(self) -> bool:
        counts = [self.vocabulary_size, self.parts]
        for shard in self.shards:
            counts += [shard.bytes, shard.documents, shard.tokens, shard.read]
        return (
            all(type(count) is int and count >= 0 for count in counts)
            and all(_NAME.fullmatch(shard.name) and isinstance(shard.sha256, str) for shard in self.shards)
            and self.split_by in ("document", "position")
            and not (self.pairs and any(shard.documents % 2 for shard in self.shards))
            and isinstance(self.skipped, dict)
        )


def find_shards(folder: Path, known: Sequence[ShardEntry] = ()) -> tuple[StoreHeader, bool]:
    """Find the shards of a store that may still grow.

    Args:
        folder: folder of the store.
        known: shards that an earlier call has found; they are not opened again.

    Returns:
        The header with the shards that can be read now, in order; and whether the store is complete.

    Raises:
        ValueError: the folder has neither a header nor a recipe, or one is damaged.
    """
    if (folder / HEADER).is_file():
        return StoreHeader.read(folder / HEADER), True
    recipe, found = StoreHeader.read(folder / RECIPE), list[ShardEntry]()
    entries = {entry.name: entry for entry in known}
    for part in range(recipe.parts):
        if (folder / part_name(part)).is_file():
            found += StoreHeader.read(folder / part_name(part)).shards
            continue
        number = 0
        while (file := folder / shard_name(part, number)).is_file():
            found.append(entries[file.name] if file.name in entries else open_shard(file)[1])
            number += 1
        break
    return replace(recipe, shards=tuple(found)), False


def check_sizes(folder: Path, shards: Sequence[ShardEntry]) -> None:
    """Check that the shards exist and have the sizes in the header.

    Raises:
        ValueError: a shard is missing or has another size.
    """
    for shard in shards:
        file = folder / shard.name
        try:
            size = os.stat(file).st_size
        except OSError as error:
            raise damaged(file, "the file is missing") from error
        if size != shard.bytes:
            raise damaged(file, f"the file has {size:,} bytes instead of {shard.bytes:,}")
