"""The files of a source: found, hashed, read with a watch on whether they change meanwhile, and divided."""

from __future__ import annotations

import copy
import glob
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TextIO, cast

from multipack.data.source import Source

CHUNK = 1 << 20
"""Characters read at once."""


class FoundFile(NamedTuple):
    """A file of a `FileSet`, as it travels to another process.

    Attributes:
        name: what people call it.
        path: where it is, as it was given.
        size: bytes, as stored.
        modified: when it changed last, in nanoseconds.
    """

    name: str
    path: str
    size: int
    modified: int


class FileSet:
    """A file, the files that a pattern names, or all files of a folder and its folders with one of `suffixes`.

    Patterns are the shell's (`*`, `?`, `[…]`), and `**` stands for any folders; what they name may have any suffix.
    Files are sorted by name; hidden files and folders are left out. With `.gz` after it, a suffix is the same.

    Attributes:
        root: the file or folder; of a pattern, the folder before its first wildcard.
        names: what people call each file: its path relative to the folder.
        paths: where each is.
        ignored: files of the folder with another suffix.
        total_bytes: size of all, as stored.
        here: the folder in which relative paths begin; of this process, unless another one made the set.

    Raises:
        ValueError: nothing is there.
    """

    def __init__(self, path: str, suffixes: tuple[str, ...]) -> None:
        root = Path(path).expanduser()
        self.root = root
        self.here = Path()
        self.ignored = 0
        if root.is_file():
            self.names = [root.name]
            self.paths = [root]
        elif root.is_dir():
            self.names = self._names(root, suffixes)
            self.paths = [root / name for name in self.names]
        elif glob.has_magic(path):
            self.root, self.names = self._matches(root)
            self.paths = [self.root / name for name in self.names]
        else:
            raise ValueError(f"data.path={path}: there is no such file or folder")
        self._seen = [self._state(path) for path in self.paths]
        self.total_bytes = sum(size for size, _ in self._seen)
        self._finished_bytes = 0
        self._raw: BinaryIO | None = None

    def _names(self, root: Path, suffixes: tuple[str, ...]) -> list[str]:
        names = []
        for parent, folders, files in os.walk(root):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            for file in files:
                if file.startswith("."):
                    continue
                if file.lower().removesuffix(".gz").endswith(suffixes):
                    names.append((Path(parent) / file).relative_to(root).as_posix())
                else:
                    self.ignored += 1
        if not names:
            raise ValueError(
                f"data.path={root}: no {', '.join(suffixes)} file (or .gz of one) in this folder "
                f"({self.ignored:,} files of other kinds); a single file may have any name, and so may those of a "
                f"pattern: data.path={root}/*"
            )
        return sorted(names)

    @staticmethod
    def _matches(pattern: Path) -> tuple[Path, list[str]]:
        fixed = next(number for number, part in enumerate(pattern.parts) if glob.has_magic(part))
        root = Path(*pattern.parts[:fixed])
        names = glob.glob(str(Path(*pattern.parts[fixed:])), root_dir=root, recursive=True)
        files = sorted({Path(name).as_posix() for name in names if (root / name).is_file()})
        if not files:
            raise ValueError(f"data.path={pattern}: no file has such a name (`**` stands for any folders)")
        return root, files

    @property
    def found(self) -> list[FoundFile]:
        """The files, as they were when this set was made."""
        return [
            FoundFile(name, str(path), *seen)
            for name, path, seen in zip(self.names, self.paths, self._seen, strict=True)
        ]

    def only(self, found: Sequence[FoundFile], here: Path, ignored: int = 0) -> FileSet:
        """A set of some of these files, which may be read by another process.

        Args:
            found: the files.
            here: the folder in which relative paths begin; errors name the paths without it.
            ignored: files of another kind that count as ignored here.
        """
        part = copy.copy(self)
        part.here, part.ignored = here, ignored
        part.names, part.paths = [file.name for file in found], [Path(file.path) for file in found]
        part._seen = [(file.size, file.modified) for file in found]
        part.total_bytes = sum(file.size for file in found)
        part.restart()
        return part

    def _state(self, path: Path) -> tuple[int, int]:
        state = (self.here / path).stat()
        return state.st_size, state.st_mtime_ns

    def digest(self) -> bytes:
        """Sha256 of names and contents (as stored, so that a gzipped file differs from itself unpacked)."""
        digest = hashlib.sha256()
        for name, path in zip(self.names, self.paths, strict=True):
            with open(self.here / path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + content)
        return digest.digest()

    @property
    def bytes_read(self) -> int:
        """Of `total_bytes`, since the last `restart`."""
        return self._finished_bytes + (self._raw.tell() if self._raw is not None else 0)

    def restart(self) -> None:
        """Count `bytes_read` from the start."""
        self._finished_bytes = 0

    @contextmanager
    def open(self, index: int) -> Iterator[BinaryIO]:
        """File `index`, unpacked.

        Raises:
            ValueError: it has changed since this set was made, or its gzip is broken.
        """
        path = self.paths[index]
        if self._state(path) != self._seen[index]:
            raise ValueError(f"{path} has changed since its hash was taken; start again when it is complete")
        with open(self.here / path, "rb") as raw:
            self._raw = raw
            try:
                if path.name.lower().endswith(".gz"):
                    with gzip.open(raw) as unpacked:
                        yield cast(BinaryIO, unpacked)
                else:
                    yield raw
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path}: broken gzip file: {error}") from error
            finally:
                self._finished_bytes += raw.tell()
                self._raw = None


class FileSource(Source):
    """A source whose documents are those of one file after another."""

    _files: FileSet

    @property
    def files(self) -> FileSet:
        """Where the documents are."""
        return self._files

    def of(self, files: FileSet) -> Self:
        """The same source of some of its files (but for `total`): those of contiguous ranges have all its documents."""
        part = copy.copy(self)
        part._files = files
        part.__dict__.pop("hash", None)  # it is cached, and that of all files
        return part


def paragraphs(text: TextIO) -> Iterator[tuple[int, str]]:
    """Runs of lines that are not blank, with the number of the first; without their last line end."""
    start, lines = 0, list[str]()
    for number, line in enumerate(text, 1):
        if line.strip():
            start = start if lines else number
            lines.append(line)
        elif lines:
            yield start, "".join(lines).rstrip("\r\n")
            lines = []
    if lines:
        yield start, "".join(lines).rstrip("\r\n")


def separated(text: TextIO, separator: str) -> Iterator[str]:
    """What stands between separators, without them."""
    rest = ""
    while chunk := text.read(CHUNK):
        *whole, rest = (rest + chunk).split(separator)
        yield from whole
    yield rest


def stretches(text: TextIO) -> Iterator[tuple[str, bool]]:
    """Stretches of about `CHUNK` characters, each with whether it is the last.

    They are cut between a letter or digit and white space, where the pre-tokenizers of GPT-2, Llama 3 and
    their kin cut anyway: the tokens are those of the whole text. (Text with no such place in 16 chunks is
    cut somewhere; a tokenizer without a pre-tokenizer may see the cut.)
    """
    rest = ""
    while chunk := text.read(CHUNK):
        rest += chunk
        cut = _word_end(rest)
        if cut == 0 and len(rest) >= 16 * CHUNK:
            cut = len(rest) - 1
        if cut:
            yield rest[:cut], False
            rest = rest[cut:]
    if rest:
        yield rest, True


def _word_end(text: str) -> int:
    for position in range(len(text) - 1, max(len(text) - 65_536, 0), -1):
        if text[position].isspace() and text[position - 1].isalnum():
            return position
    return 0
