"""Files of a token store: shards and the header, which are validated when they are read.

A shard is a safetensors file of flat, little-endian arrays; a document is a slice of each:

    tokens         |AAAAAAAA|BBBB|CCCCCC|     uint16 (vocabulary ≤ 65,536) or uint32
    offsets        0        8    12     18    int64, documents + 1
    spans          [3,8) [0,4) [1,3) [4,6)    int64 pairs: ranges of targets within their document
    span_offsets   0     1     2          4   int64, documents + 1
    names, name_offsets                       UTF-8, and int64, documents + 1
    weights                                   float64, documents; empty if all are 1

Its metadata holds a hash of the documents that does not depend on their division into shards, the number of documents
that were read for it, and in the last shard of a part what the source skipped and noted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from multipack.atomic import read_file, with_advice, write_atomically
from multipack.data.text.data_config import ItemKind
from multipack.data.text.skipped import MOST_PLACES, Noted
from multipack.planning.lengths import Integers, check_integer

FORMAT, VERSION = "multipack-token-store", 6
HEADER, TOKENIZER = "header.json", "tokenizer.json"
SHARDS = "shard-*.safetensors"
_ARRAYS = ("name_offsets", "offsets", "span_offsets", "spans", "weights", "tokens", "names")
"""In the order in which the safetensors library writes them: the largest items first, then by name."""
_OFFSETS = {"name_offsets": "names", "offsets": "tokens", "span_offsets": "spans"}
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I64": "<i8", "F64": "<f8"}
_NAMES = {np.dtype(text): name for name, text in _DTYPES.items()}
_BLOCK_DOCUMENTS, _BLOCK_BYTES = 1 << 12, 1 << 20
"""Documents that are hashed, and bytes that are copied, at once."""
_MOST_PARTS = 9999
_PRIME = (1 << 127) - 1
_BASE = 0x5A17_93C4_E6B8_0D2F_1E8B_37D6_94A5_C263


def shard_name(part: int, number: int) -> str:
    """File name of shard `number` of a part."""
    return f"shard-{part:04}-{number:05}.safetensors"


@dataclass(frozen=True)
class Shard:
    """Documents as flat arrays, in memory or mapped from a file.

    Attributes:
        offsets, span_offsets, name_offsets: (documents + 1,) int64.
        spans: (spans, 2) int64 [start, stop) ranges of targets, counted from the first token of their document.
        tokens: (tokens,) uint16 or uint32.
        names: (bytes,) uint8.
        weights: (documents,) float64 weights in the loss, of a labeled answer negative if it is undesirable; empty if
            all are 1.
        content: result of `hash` when the shard was built.
        read: number of documents (or pairs) read from the source for this shard, including those without tokens.
        noted: in the last shard of a part, about the records of the part; None: another shard follows.
        file: the file; None = in memory.
        bytes: size of the file.
        label: prefix of the names of the documents.
    """

    offsets: Integers
    span_offsets: Integers
    name_offsets: Integers
    spans: Integers
    tokens: NDArray[np.unsignedinteger]
    names: NDArray[np.uint8]
    weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    content: int = 0
    read: int = 0
    noted: Noted | None = None
    file: Path | None = None
    bytes: int = 0
    label: str = ""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def tokens_of(self, document: int) -> NDArray[np.unsignedinteger]:
        """Tokens of a document, not copied."""
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    def spans_of(self, document: int) -> Integers:
        """(k, 2) ranges of targets of a document, not copied."""
        return self.spans[self.span_offsets[document] : self.span_offsets[document + 1]]

    def name(self, document: int) -> str:
        """Name of a document."""
        raw = self.names[self.name_offsets[document] : self.name_offsets[document + 1]]
        return self.label + raw.tobytes().decode("utf-8", "replace")

    def count_targets(self, starts: Integers, stops: Integers) -> Integers:
        """(n,) number of targets among the shard's tokens `starts[i]` to `stops[i]`, for n ranges."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.span_offsets))
        edges = np.append((self.spans + self.offsets[owner, None]).ravel(), self.offsets[-1])
        inside = np.diff(edges, prepend=0)
        inside[::2] = 0  # tokens between two ranges are not targets
        before = np.interp([starts, stops], edges, np.cumsum(inside))  # exact: positions are below 2**53
        return (before[1] - before[0]).astype(np.int64)

    def hash(self) -> int:
        """Hash of tokens, targets, names and weights of the documents; see `chain`."""
        return chain((digest, 1) for digest in self._digests())

    def _digests(self) -> Iterator[int]:
        """The hash of each document."""
        names, tokens, spans = self.names.data, self.tokens.data, self.spans.data
        weights = self.weights if len(self.weights) else np.ones(len(self))
        for first in range(0, len(self), _BLOCK_DOCUMENTS):
            last = first + _BLOCK_DOCUMENTS
            ends = (getattr(self, name)[first : last + 1].tolist() for name in _OFFSETS)
            for *ranges, weight in zip(*map(pairwise, ends), weights[first:last], strict=True):
                (name, name_end), (token, token_end), (span, span_end) = ranges
                begin = b"%d %d " % (token_end - token, span_end - span)
                digest = hashlib.blake2b(begin + names[name:name_end], digest_size=15)
                digest.update(tokens[token:token_end])
                digest.update(spans[span:span_end])
                if weight != 1.0:
                    digest.update(weight.tobytes())
                yield int.from_bytes(digest.digest(), "big")

    def check(self) -> None:
        """`ValueError` if offsets or weights do not match the arrays, or a weight is not finite."""
        if len(self.weights) not in (0, len(self)) or not np.isfinite(self.weights).all():
            raise ValueError("weights do not match the documents, or are not finite")
        for name, ends, values, min_length in (
            ("offsets", self.offsets, self.tokens, 1),
            ("span_offsets", self.span_offsets, self.spans, 0),
            ("name_offsets", self.name_offsets, self.names, 0),
        ):
            if not 0 < len(ends) == len(self.offsets) or ends[0] != 0 or ends[-1] != len(values):
                raise ValueError(f"{name} does not match the other arrays")
            lengths = np.diff(ends)
            if len(lengths) and lengths.min() < min_length:
                raise ValueError(f"{name} does not increase at document {int(np.argmin(lengths))}")

    def __reduce__(self) -> tuple[Any, ...]:
        """For other processes, which map the file again."""
        if self.file is not None:
            return open_shard, (self.file, self.label)
        return Shard, tuple(vars(self).values())


def chain(parts: Iterable[tuple[int, int]]) -> int:
    """Hash of a sequence of documents from the (hash, number of documents) of its parts.

    The result is the same for every division into parts: Σ h(d) · BASE^(documents after d) modulo a prime (Karp and
    Rabin 1987). It detects accidental changes, not forged documents.
    """
    total = 0
    for value, documents in parts:
        total = (total * pow(_BASE, documents, _PRIME) + value) % _PRIME
    return total


def damaged(place: object, reason: str) -> ValueError:
    """The error for a damaged store, for the caller to raise."""
    return ValueError(f"{place}: {reason}: the store is damaged; remove it and prepare it again")


class ShardFile:
    """A shard that grows by pieces on disk, in a file for each array: its documents take no memory.

    The files have no names, so that a process that is killed leaves nothing of them.

    Args:
        path: file of the shard; the others are in its folder.

    Attributes:
        path: as given.
        documents, tokens, read: numbers so far, see `Shard`.
        content: hash of the documents so far.
    """

    def __init__(self, path: Path) -> None:
        self._files = {name: TemporaryFile(dir=path.parent) for name in _ARRAYS}  # noqa: SIM115 - see `close`
        self._sizes, self._dtypes = dict.fromkeys(_ARRAYS, 0), dict[str, np.dtype[Any]]()
        self.path, self._is_weighted = path, False
        self.documents = self.tokens = self.read = self.content = 0

    def append(self, piece: Shard) -> None:
        """Add the documents of a shard in memory."""
        begin = 1 if self._dtypes else 0  # the last offset so far is in the file
        try:
            for name, file in self._files.items():
                values = getattr(piece, name)
                if name in _OFFSETS:  # these files come first: the others do not have this piece yet
                    values = values[begin:] + self._sizes[_OFFSETS[name]]
                elif name == "weights" and not len(values):
                    values = np.ones(len(piece))
                file.write(values.data)
                self._sizes[name] += len(values)
                self._dtypes[name] = values.dtype
        except OSError as error:
            raise with_advice(error, self.path) from error
        self._is_weighted |= len(piece.weights) > 0
        self.content = chain([(self.content, self.documents), (piece.content, len(piece))])
        self.documents, self.tokens = self.documents + len(piece), self._sizes["tokens"]
        self.read += piece.read

    def write(self, noted: Noted | None) -> None:
        """Write the shard atomically; see `Shard`."""
        about = {"version": VERSION, "content": f"{self.content:032x}", "read": self.read}
        about |= {"skipped": None, "notes": {}, "places": {}} if noted is None else vars(noted)
        layout, end = dict[str, Any](__metadata__={FORMAT: json.dumps(about)}), 0
        if not self._is_weighted:
            self._sizes["weights"] = 0
        for name, size in self._sizes.items():
            shape = [size, 2] if name == "spans" else [size]
            begin, end = end, end + math.prod(shape) * self._dtypes[name].itemsize
            layout[name] = {"dtype": _NAMES[self._dtypes[name]], "shape": shape, "data_offsets": [begin, end]}
        head = json.dumps(layout, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)

        def blocks() -> Iterator[bytes]:
            yield len(head).to_bytes(8, "little") + head
            for file in [file for name, file in self._files.items() if self._sizes[name]]:
                file.seek(0)
                yield from iter(partial(file.read, _BLOCK_BYTES), b"")

        write_atomically(self.path, blocks())

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            with suppress(OSError):  # a full disk
                file.close()


def open_shard(path: Path, label: str = "") -> Shard:
    """Map a shard; its hash is not compared. `label` is a prefix of the names of its documents.

    Raises:
        ValueError: the file is not a shard, truncated or damaged.
    """
    try:
        with safe_open(path, "numpy"):  # checks the layout, and that it covers the file
            pass
        with open(path, "rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            layout = json.loads(file.read(begin - 8))
        about = json.loads(layout["__metadata__"][FORMAT])
        if about["version"] != VERSION:
            raise ValueError("another version")
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=begin).view(np.ndarray)
        shard = Shard(
            **{name: _array(data, name, layout[name]) for name in _ARRAYS},
            content=int(about["content"], 16),
            read=check_integer("read", about["read"], 0),
            noted=_noted(about),
            file=path,
            bytes=begin + len(data),
            label=label,
        )
        shard.check()
        return shard
    except (SafetensorError, FileNotFoundError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, f"not a shard ({' '.join(str(error).split())})") from error


def _noted(about: dict[str, Any]) -> Noted | None:
    """What the metadata of the last shard of a part say about its records; None: another shard follows.

    Raises:
        LookupError, TypeError, ValueError: they say something else. (Those of earlier versions lack notes or places.)
    """
    if about["skipped"] is None:
        return None
    skipped, notes, places = (dict(about.get(name, {})) for name in ("skipped", "notes", "places"))
    return Noted(
        Counter({str(reason): check_integer(reason, n, 0) for reason, n in skipped.items()}),
        {str(text): (check_integer(text, n, 0), str(name)) for text, (n, name) in notes.items()},
        {str(reason): [str(name) for name in names][:MOST_PLACES] for reason, names in places.items()},
    )


def _array(data: NDArray[np.uint8], name: str, place: dict[str, Any]) -> NDArray[Any]:
    types = {"tokens": ("U16", "U32"), "names": ("U8",), "weights": ("F64",)}
    if place["dtype"] not in types.get(name, ("I64",)):
        raise ValueError(f"{name} of type {place['dtype']}")
    start, stop = place["data_offsets"]
    values = data[start:stop].view(_DTYPES[place["dtype"]])
    return values.reshape(-1, 2) if name == "spans" else values


@dataclass(frozen=True)
class StoreHeader:
    """Content of `header.json`: what determines the documents of a store."""

    vocabulary_size: int  # every token id is less than this
    tokenizer: str
    tokenizer_hash: str
    chat_template: str = ""  # template of the documents' chats, as JSON; empty without chats
    key: str = ""  # hash of source, settings and tokenizer; a store with an equal key is reused
    # how validation data is split off: `document`, or `position` for one stream of text, of which each shard is a
    # contiguous range
    split_by: str = "document"
    overlong: str = "error"  # policy for documents longer than a pack if `data.overlong` is auto
    # whether documents 2i and 2i + 1 are one item; see `kind`
    pairs: bool = False
    labels: bool = False  # whether the items are labeled answers; needs `pairs`
    parts: int = 1  # number of parts that are prepared separately
    # one line about the source; `{documents}` in it is replaced by the number of documents
    description: str = ""

    @property
    def kind(self) -> ItemKind:
        """Kind of the store's items."""
        return "labels" if self.labels else "pairs" if self.pairs else "documents"

    @property
    def item_size(self) -> int:
        """Number of neighboring documents of an item."""
        return 2 if self.pairs else 1

    def _check(self) -> None:
        """Check the types of all fields; `TypeError` or `ValueError`."""
        for entry in fields(self):
            if type(value := getattr(self, entry.name)).__name__ != entry.type:
                raise TypeError(f"{entry.name} is {value!r:.60}, not {entry.type}")
        check_integer("vocabulary_size", self.vocabulary_size, 0, 1 << 32)
        check_integer("parts", self.parts, 1, _MOST_PARTS)
        if self.labels and not self.pairs:
            raise ValueError("labels without pairs")

    def _checksum(self) -> str:
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write the header and its checksum to a store's folder, atomically."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self), "checksum": self._checksum()}
        write_atomically(folder / HEADER, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def find(cls, folder: Path) -> StoreHeader | None:
        """The header of the store in a folder, complete or not; None if there is no valid one."""
        try:
            return cls.read(folder)
        except ValueError:
            return None

    @classmethod
    def read(cls, folder: Path) -> StoreHeader:
        """The header of a store, complete or not; `ValueError` if it is missing, of another version, or damaged."""
        file = folder / HEADER
        if not file.is_file():
            raise ValueError(
                f"{folder} is not a token store (it has no {HEADER}): `multipack prepare` makes one"
            )
        try:
            content = json.loads(read_file(file))
            version = content.pop("format"), content.pop("version")
            if version == (FORMAT, VERSION):
                checksum, header = content.pop("checksum"), cls(**content)
                header._check()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(file, f"not the header of a token store ({error})") from error
        if version != (FORMAT, VERSION):
            raise ValueError(
                f"{folder} has version {version[1]!r:.20} of the token store's format, and this multipack reads version"
                f" {VERSION}: prepare the store again (or update multipack)"
            )
        if header._checksum() != checksum:
            raise damaged(file, "it was edited (its checksum differs)")
        return header


def find_shards(folder: Path, parts: Iterable[int], known: Sequence[Shard] = ()) -> Iterator[Shard]:
    """The shards of some parts of a store in order, up to the first that is missing.

    Shards in `known` are not opened again.

    Raises:
        ValueError: a shard is damaged.
    """
    opened = {shard.file: shard for shard in known}
    for part in parts:
        for number in count():
            file = folder / shard_name(part, number)
            if file not in opened and not file.is_file():
                return
            shard = opened[file] if file in opened else open_shard(file)
            yield shard
            if shard.noted is not None:  # the last one of its part
                break
