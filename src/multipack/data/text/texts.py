"""Documents as text (`SourceDocument`), the files that hold them, and the division of text into documents."""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections.abc import Callable, Iterator
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple, TextIO

CHUNK = 1 << 20
"""Characters of a text that are read at once."""
MOST_LINE, MOST_LIST = 1 << 28, 1 << 31
"""Most bytes of a line, and of a file that holds a list. A document of 256 MiB has some 60 million tokens; gzip packs
a thousand times as much into a file that looks small, and a line is read whole."""
WORD_END = re.compile(r"(?s).*[^\W_](?=\s)")
"""Matches up to the last letter or digit that white space follows."""


CHAT_TEMPLATE = "chat_template.json"
"""Name of the file of a chat template, beside a tokenizer."""


class BrokenRecord(ValueError):
    """A record that cannot become a document; the message names its place and the fault."""


Message = dict[str, Any]
"""`role`, `content` (text), and other entries that a template may read: `tool_calls`, `tool_call_id`, `name`, …"""


class TextPart(NamedTuple):
    """A piece of a document's text, tokenized separately.

    Attributes:
        text: the text.
        is_target: whether its tokens are targets.
        is_special: whether the text is the name of one special token (`<|im_end|>`) and means that token. In all
            other parts such a name is plain text.
    """

    text: str
    is_target: bool
    is_special: bool = False


class SourceDocument(NamedTuple):
    """A document, or in a stream a stretch of it, as text."""

    name: str  # origin, for messages: `functools.py:reduce`, `train.jsonl:17`
    parts: tuple[TextPart, ...]  # its text in pieces, in order
    # whether an end token is added: not after a stretch of a file that continues in the next document, nor
    # after a chat, whose template marks the end
    takes_end: bool = True
    weight: float = 1.0  # weight in the loss; of a labeled answer negative if it is undesirable


Item = tuple[SourceDocument, ...]
"""One document, or the two answers of a preference pair."""


class Skip(NamedTuple):
    """An entry that is left out: the reason, its name, and if it is broken the message that says how."""

    reason: str
    name: str
    fault: str = ""


Found = SourceDocument | Skip


def find_files(path: str, suffixes: tuple[str, ...]) -> tuple[Path, list[str], int]:
    """A file, the files that match a pattern, or all files of a folder and its subfolders with one of `suffixes`.

    Patterns are the shell's (`*`, `?`, `[…]`), and `**` matches any folders; matching files may have any suffix.
    Hidden files and folders are left out. A suffix may be followed by `.gz`.

    Returns:
        The root, the sorted paths relative to it ("" for a root that is a file), and the number of ignored files.
    """

    def is_hidden(name: str) -> bool:
        return name.startswith(".")

    root = Path(path).expanduser()
    if root.is_file():
        return root, [""], 0
    if root.is_dir():
        found = [name for name in files_below(root, is_hidden) if not is_hidden(Path(name).name)]
        names = [name for name in found if name.lower().removesuffix(".gz").endswith(suffixes)]
        if not names:
            raise ValueError(
                f"data.path={root}: no {', '.join(suffixes)} file (or .gz of one) in this folder ({len(found):,} files"
                f" of other kinds); for files with other suffixes give a file or a pattern: data.path={root}/*"
            )
        return root, names, len(found) - len(names)
    if not glob.has_magic(path):
        # A run may be evaluated from another folder.
        where = "" if root.is_absolute() else f" in {Path.cwd()}"
        reason = "it is a pipe or a device" if root.exists() else f"there is no such file or folder{where}"
        raise ValueError(f"data.path={path}: {reason}")
    fixed = next(number for number, part in enumerate(root.parts) if glob.has_magic(part))
    folder = Path(*root.parts[:fixed])
    matches = glob.glob(str(Path(*root.parts[fixed:])), root_dir=folder, recursive=True)
    names = sorted({Path(name).as_posix() for name in matches if (folder / name).is_file()})
    if not names:
        raise ValueError(f"data.path={path}: no file matches this pattern (`**` matches any folders)")
    return folder, names, 0


def files_below(root: Path, is_skipped: Callable[[str], bool]) -> list[str]:
    """The sorted paths, relative to a folder, of the regular files below it whose names are not skipped."""
    names = []
    for parent, folders, files in os.walk(root):
        folders[:] = [folder for folder in folders if not is_skipped(folder)]
        paths = [Path(parent) / file for file in files]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def divided(text: TextIO, name: str, division: str, separator: str) -> Iterator[tuple[str, str, bool]]:
    """Documents of one file: name, text, and whether the document ends there; see `data.documents`."""
    if division == "blank_line":  # documents are runs of other lines, named by the first one's number
        for is_text, run in groupby(enumerate(text, 1), key=lambda line: bool(line[1].strip())):
            if is_text:
                numbers, lines = zip(*run, strict=True)
                yield f"{name}:{numbers[0]}", "".join(lines).rstrip("\r\n"), True
    elif division == "separator":
        for number, content in enumerate(separated(text, separator), 1):
            yield f"{name}#{number}", content, True
    elif division == "stream":
        yield from ((name, content, ended) for content, ended in stretches(text))
    else:
        yield name, text.read(), True


def separated(text: TextIO, separator: str) -> Iterator[str]:
    """The texts between separators, without them."""
    rest = ""
    while chunk := text.read(CHUNK):
        *whole, rest = (rest + chunk).split(separator)
        yield from whole
    yield rest


def stretches(text: TextIO) -> Iterator[tuple[str, bool]]:
    """Stretches of about `CHUNK` characters, each with whether it is the last.

    They are cut between a letter or digit and white space, where the pre-tokenizers of GPT-2, Llama 3 and similar
    models cut anyway: the tokens are the same as of the whole text. (Text without such a place in 16 chunks is cut at
    its end; a tokenizer without a pre-tokenizer may see the cut.)
    """
    rest = ""
    while chunk := text.read(CHUNK):
        rest += chunk
        word_end = WORD_END.match(rest, max(len(rest) - 65_536, 0))
        cut = word_end.end() if word_end else len(rest) - 1 if len(rest) >= 16 * CHUNK else 0
        if cut:
            yield rest[:cut], False
            rest = rest[cut:]
    if rest:
        yield rest, True


def json_records(content: Any, path: Path) -> Iterator[tuple[int, str, dict[str, Any] | BrokenRecord | None]]:
    """Records of a file: number, place for messages, and the object, its fault, or None for a blank line."""
    begin = content.peek(16).removeprefix(codecs.BOM_UTF8).lstrip()
    if path.name.lower().removesuffix(".gz").endswith(".json") and begin.startswith(b"["):
        listed = content.read(MOST_LIST + 1)
        if len(listed) > MOST_LIST:
            raise ValueError(
                f"{path}: a list of more than {MOST_LIST:,} bytes, which is read whole; store one record a line"
            )
        if isinstance(entries := _parsed(listed, str(path)), BrokenRecord):
            raise entries
        for number, record in enumerate(entries, 1):
            where = f"{path}, record {number}"
            yield number, where, _object(record, where)
        return
    for number in count(1):
        where = f"{path}, line {number}"
        if not (line := content.readline(MOST_LINE + 1)):
            return
        if len(line) > MOST_LINE:
            while line and not line.endswith(b"\n"):  # the rest of the line, in pieces
                line = content.readline(CHUNK)
            yield number, where, BrokenRecord(f"{where}: longer than {MOST_LINE:,} bytes")
        else:
            yield number, where, _object(_parsed(line, where), where) if line.strip() else None


def _parsed(content: bytes, where: str) -> Any:
    try:
        if content.startswith(b'{"'):  # UTF-8, which the library would find out by itself
            return json.loads(content.decode("utf-8", "surrogatepass"))
        return json.loads(content.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError) as error:
        return BrokenRecord(f"{where}: not JSON: {error}")


def _object(record: Any, where: str) -> dict[str, Any] | BrokenRecord:
    if isinstance(record, dict | BrokenRecord):
        return record
    kind = type(record).__name__
    return BrokenRecord(f"{where}: a JSON {kind}, not an object; jsonl has one object a line")
