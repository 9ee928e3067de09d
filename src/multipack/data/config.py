"""`DataConfig`: what is trained on, and how it becomes documents."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Literal, get_args

SourceName = Literal["stdlib", "text", "jsonl", "parquet", "huggingface", "store", "mixture"]
RECORDS = ("jsonl", "parquet", "huggingface")
"""Sources whose documents are records with named fields."""
BUILT_IN_TEMPLATES = ("chatml", "llama3", "plain")
"""Names of `data.chat_template` that are no file's."""
Division = Literal["auto", "file", "blank_line", "separator", "stream"]
RecordFormat = Literal["auto", "text", "completion", "chat", "preference"]
Overlong = Literal["auto", "error", "truncate", "truncate_left", "split", "drop"]


@dataclass
class DataConfig:
    """What is trained on, and how it becomes documents."""

    source: SourceName = "stdlib"
    """Where documents come from."""
    path: str = ""
    """File, folder or pattern (`data/*.jsonl.gz`) of text or records; a token store; a Hugging Face data set's name."""
    subset: str = ""
    """Configuration of a data set on the Hugging Face hub."""
    part: str = "train"
    """Which part (`split`) of a data set on the Hugging Face hub."""
    documents: Division = "auto"
    """How text becomes documents; auto: a stream with block_size, by separator if given, else by file."""
    separator: str = ""
    """Text between two documents of a file; belongs to neither."""
    block_size: int = 0
    """Tokens of a document cut from a stream (0: as long as a document may be)."""
    format: RecordFormat = "auto"
    """What a record is: text, prompt and completion, chat messages, or a preference pair; auto: by its fields."""
    fields: list[str] = field(default_factory=list)
    """A record's fields: text; prompt, completion; messages, tools; or prompt, chosen, rejected. Empty = these."""
    between: str = "\n"
    """Text between prompt and completion of a record, part of the prompt; empty joins them as they are."""
    chat_template: str = ""
    """Of chats: `chatml`, `llama3`, `plain`, or a Jinja file; empty: the tokenizer's own, else chatml."""
    special_tokens: list[str] = field(default_factory=list)
    """Special tokens that a Jinja file's template writes; those of built-in templates and tokenizers are known."""
    train_on_prompt: bool = False
    """Whether the tokens of prompts (in chats: of everybody) are targets too."""
    dedup: bool = False
    """Leave out documents whose text is that of an earlier one."""
    paths: list[str] = field(default_factory=list)
    """Token stores of a mixture."""
    weights: list[float] = field(default_factory=list)
    """Share of each store in a mixture, in any unit; empty = as large as they are."""
    weigh_by: Literal["documents", "tokens"] = "tokens"
    """What the weights of a mixture are shares of."""
    mixture_ends: Literal["all", "first"] = "all"
    """An epoch of a mixture ends when `all` stores were seen whole (small ones repeat), or with the `first` one."""
    validation: float = 0.1
    """Share of the documents (of a stream: of its last tokens) kept for validation."""
    split_seed: int = 0
    """Seed of the choice of validation documents, and of a mixture's."""
    overlong: Overlong = "auto"
    """Documents longer than a pack or the context; auto: split with source=stdlib, else an error."""
    overlap: int = 0
    """Tokens that a split piece repeats from the one before, as context: they are targets once."""
    repeat_prompt: bool = False
    """Whether each piece of a split document begins with the document's prompt."""
    workers: int = 0
    """Processes that tokenize; 0 = one a core, or this one alone where there is little to do."""
    stream: bool = False
    """Train while documents arrive: from a folder of stores that still grows, or a streamed data set."""
    patience_seconds: float = 300.0
    """How long a stream waits for the next store of a folder that is not complete before it is an error."""
    verify: bool = True
    """Whether the checksums of a token store are verified before it is used."""
    stage: str = ""
    """Copy token stores first: `memory` = into every process, or a folder of this host; empty = read in place."""
    readers: int = 0
    """Data-parallel ranks that open tokens, and scatter packs to the others; 0 = every rank reads its own."""
    cache: str = ""
    """Folder for trained tokenizers and stores (empty: the user's cache folder)."""

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: names the field, what it holds, and what to do instead.
        """
        for name, choices in (
            ("source", SourceName),
            ("documents", Division),
            ("format", RecordFormat),
            ("overlong", Overlong),
        ):
            check_choice(f"data.{name}", getattr(self, name), get_args(choices))
        check_choice("data.weigh_by", self.weigh_by, ("documents", "tokens"))
        check_choice("data.mixture_ends", self.mixture_ends, ("all", "first"))
        if not 0.0 <= self.validation < 1.0:
            raise ValueError(f"data.validation={self.validation} is a share: at least 0 and less than 1")
        self._check_path()
        self._check_text()
        self._check_records()
        self._check_mixture()
        self._check_fit()
        self._check_reading()
        if self.workers < 0:
            raise ValueError(f"data.workers={self.workers}: processes, 1 or more (or 0: as many as pay)")
        if not self.patience_seconds > 0:
            raise ValueError(f"data.patience_seconds={self.patience_seconds}: seconds, more than 0")
        if self.dedup and (self.stream or self.source in ("store", "mixture")):
            given = "data.stream=true" if self.stream else f"data.source={self.source}"
            raise ValueError(
                f"data.dedup=true leaves duplicates out of a store that is prepared, and {given} prepares none: give it"
                " to `multipack prepare`"
            )
        if self.stream and self.source not in ("store", "huggingface"):
            raise ValueError(
                f"data.stream=true follows a folder of stores or a streamed data set, not data.source={self.source}:"
                " set data.source=store (and data.path) or huggingface"
            )

    def _check_reading(self) -> None:
        if self.readers < 0:
            raise ValueError(
                f"data.readers={self.readers}: data-parallel ranks, 1 or more (or 0: every rank reads its own)"
            )
        for name, given in (("stage", self.stage), ("readers", self.readers)):
            if given and self.stream:
                raise ValueError(
                    f"data.{name}={given} is about documents that are all there, and with data.stream=true they arrive:"
                    f" leave data.{name} out"
                )

    def _check_path(self) -> None:
        if self.source == "stdlib" and self.path:
            raise ValueError(
                f"data.source=stdlib reads no files; for data.path={self.path} set data.source=text"
            )
        if self.source not in ("stdlib", "mixture") and not self.path:
            raise ValueError(f"data.source={self.source} needs data.path=FILE_OR_FOLDER")
        if self.source != "huggingface" and (self.subset or self.part != "train"):
            raise ValueError(
                f"data.subset={self.subset!r} and data.part={self.part!r} are of data sets on the Hugging Face hub,"
                f" but data.source={self.source}: leave them out"
            )

    def _check_text(self) -> None:
        if self.block_size < 0 or self.block_size == 1:
            raise ValueError(f"data.block_size={self.block_size}: at least 2 tokens (or 0: as many as fit)")
        if self.source != "text" and (self.documents != "auto" or self.separator):
            raise ValueError(
                f"data.documents={self.documents}, data.separator={self.separator!r} say how text is "
                f"divided, but data.source={self.source} has documents of its own: leave them out"
            )
        if self.separator and self.documents not in ("auto", "separator"):
            raise ValueError(f"data.separator={self.separator!r} contradicts data.documents={self.documents}")
        if "\\n" in self.separator or "\\t" in self.separator:
            raise ValueError(
                f"data.separator={self.separator!r} holds a backslash and a letter, not a line end or tab: let the"
                " shell write it, data.separator=$'\\n\\n'"
            )
        if self.documents == "separator" and not self.separator:
            raise ValueError("data.documents=separator needs data.separator=TEXT")
        if self.block_size:
            if self.source not in ("text", "store"):
                raise ValueError(
                    f"data.block_size={self.block_size} cuts a stream, which data.source={self.source} "
                    "is not; data.overlong=split cuts documents that are too long"
                )
            if self.separator or self.documents not in ("auto", "stream"):
                raise ValueError(
                    f"data.block_size={self.block_size} cuts a stream: set data.documents=stream (or auto) "
                    "and no data.separator"
                )

    def _check_records(self) -> None:
        if self.source not in RECORDS:
            for name in ("fields", "chat_template", "special_tokens"):
                if getattr(self, name):
                    raise ValueError(
                        f"data.{name}={getattr(self, name)} is about records (data.source={', '.join(RECORDS)});"
                        f" data.source is {self.source}"
                    )
            if self.format != "auto":
                raise ValueError(
                    f"data.format={self.format} is about records (data.source={', '.join(RECORDS)});"
                    f" data.source is {self.source}"
                )
            return
        if self.special_tokens and self.chat_template in ("", *BUILT_IN_TEMPLATES):
            raise ValueError(
                f"data.special_tokens={self.special_tokens} are those of a Jinja file (data.chat_template=FILE); those "
                f"of {self.chat_template or 'a tokenizer'} are known: leave them out"
            )
        if len(set(self.special_tokens)) < len(self.special_tokens) or not all(self.special_tokens):
            raise ValueError(f"data.special_tokens={self.special_tokens}: names that differ from each other")
        if len(set(self.fields)) < len(self.fields) or not all(self.fields):
            raise ValueError(f"data.fields={self.fields}: names that differ from each other")
        least = {"text": (1,), "completion": (2,), "chat": (1, 2), "preference": (2, 3), "auto": (1, 2, 3)}[
            self.format
        ]
        if self.fields and len(self.fields) not in least:
            raise ValueError(
                f"data.fields={self.fields} with data.format={self.format}: one name (text, or messages), two"
                " (prompt, completion; or messages, tools) or three (prompt, chosen, rejected)"
            )

    def _check_mixture(self) -> None:
        if self.source != "mixture":
            for name, usual in (
                ("paths", []),
                ("weights", []),
                ("weigh_by", "tokens"),
                ("mixture_ends", "all"),
            ):
                if (given := getattr(self, name)) != usual:
                    raise ValueError(f"data.{name}={given} is of a mixture: set data.source=mixture")
            return
        if self.path:
            raise ValueError(f"data.path={self.path}: a mixture has data.paths=[STORE,STORE,…]")
        places = [Path(path).expanduser().resolve() for path in self.paths]
        twice = any(one == other or one in other.parents for one, other in permutations(places, 2))
        if len(places) < 2 or twice:
            raise ValueError(
                f"data.paths={self.paths}: a mixture needs two token stores or more, each once and none inside another"
            )
        if self.weights and (len(self.weights) != len(self.paths) or min(self.weights) <= 0):
            raise ValueError(
                f"data.weights={self.weights}: one positive number for each of the {len(self.paths)} data.paths"
            )

    def _check_fit(self) -> None:
        if self.overlap < 0:
            raise ValueError(f"data.overlap must not be negative, got {self.overlap}")
        if (self.overlap or self.repeat_prompt) and self.overlong not in ("auto", "split"):
            raise ValueError(
                f"data.overlap={self.overlap} and data.repeat_prompt={self.repeat_prompt} are about pieces of split"
                f" documents: set data.overlong=split (now {self.overlong})"
            )

    @property
    def division(self) -> Division:
        """`documents` with auto decided."""
        if self.documents != "auto":
            return self.documents
        return "stream" if self.block_size else "separator" if self.separator else "file"


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of `choices`, naming the nearest.

    Raises:
        ValueError: it is none of them.
    """
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1, 0.0)
        raise ValueError(f"{name}={value!r}: one of {', '.join(choices)} (nearest: {near[0]})")
