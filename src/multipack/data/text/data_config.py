"""`DataConfig` and `TokenizerConfig`: the settings of a run's documents, and their checks. Imports no library."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from multipack.planning.options import check_choice
from multipack.ranges import Count, Positive, Range, Share, check_ranges

SourceName = Literal["stdlib", "text", "jsonl", "parquet", "huggingface", "store", "mixture"]
RECORDS = ("jsonl", "parquet", "huggingface")
"""Sources whose documents are records with named fields."""
BUILT_IN_TEMPLATES = ("chatml", "llama3", "plain")
"""Values of `data.chat_template` that name a template of the package, not a file."""
TextDivision = Literal["auto", "file", "blank_line", "separator", "stream"]
RecordFormat = Literal["auto", "text", "completion", "alpaca", "chat", "preference", "label"]
TokenizerKind = Literal["auto", "char", "byte", "bpe", "file", "transformers", "gpt2", "mistral"]
Sharing = Literal["off", "pairs", "groups", "all"]
ItemKind = Literal["documents", "pairs", "labels"]
"""Items of a store: single documents; preference pairs, the chosen and the rejected answer; or labeled answers, each
followed by another record's answer to its prompt."""
ITEM_NAMES: dict[ItemKind, str] = {
    "documents": "single documents",
    "pairs": "preference pairs",
    "labels": "labeled answers",
}
Overlong = Literal["auto", "error", "truncate", "truncate_left", "split", "drop"]


SUFFIXES = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".py"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet", ".pq"),
}
"""Source → suffixes of the files that are read in a folder, which may be followed by `.gz`."""


def source_of(path: str) -> str:
    """The source of the documents at a path, by its suffix or as a token store; empty if unknown."""
    if (Path(path).expanduser() / "header.json").is_file():
        return "store"
    name = path.lower().removesuffix(".gz")
    if name.endswith(".json"):
        return "jsonl"
    return next((source for source, suffixes in SUFFIXES.items() if name.endswith(suffixes)), "")


@dataclass
class DataConfig:
    """The documents of a run: their source, their form and their division."""

    source: SourceName = "stdlib"
    """Source of the documents."""
    path: str = ""
    """File, folder or pattern (`data/*.jsonl.gz`) of text or records; a token store; a Hugging Face data set's name."""
    subset: str = ""
    """Configuration (`name`) of a data set on the Hugging Face hub."""
    part: str = "train"
    """Part (`split`) of a Hugging Face data set."""
    documents: TextDivision = "auto"
    """Division of text into documents; auto: a stream with block_size, by separator if given, else by file."""
    separator: str = ""
    """Text between two documents of a file; part of neither."""
    block_size: Count = 0
    """Tokens of a document cut from a stream (0: as many as a pack and the context hold)."""
    format: RecordFormat = "auto"
    """Kind of record: text, completion, alpaca, chat, preference (pairs), label (answers); auto: by its fields."""
    fields: list[str] = field(default_factory=list)
    """Fields of a record: text; prompt, completion; instruction, input, output; messages; prompt, chosen, rejected."""
    weight_field: str = ""
    """Name of the field with a record's weight in the loss, a number from 0; empty: all records weigh 1."""
    between: str = "\n"
    """Text between prompt and completion of a record, part of the prompt; empty joins them as they are."""
    drop_system: bool = False
    """Leave out the system message that begins a chat."""
    as_chat: bool = False
    """Write prompts and answers that are text as turns of user and assistant, by the chat template."""
    chat_template: str = ""
    """Template of chats: `chatml`, `llama3`, `plain`, or a Jinja file; empty: the tokenizer's own, else chatml."""
    template_date: str = ""
    """Day that chat templates write where they name today's date, YYYY-MM-DD; empty = the day when a run starts."""
    special_tokens: list[str] = field(default_factory=list)
    """Special tokens in the template of a Jinja file; built-in templates and tokenizers name theirs."""
    train_on_prompt: bool = False
    """Make the tokens of prompts (in chats: of all roles) targets too."""
    broken: Literal["error", "skip"] = "error"
    """Records that cannot be read: refuse their file and name them, or leave them out, counted and named."""
    dedup: bool = False
    """Leave out documents with the text of an earlier one."""
    paths: list[str] = field(default_factory=list)
    """Token stores of a mixture."""
    weights: list[float] = field(default_factory=list)
    """Share of each store in the tokens of a mixture, in any unit (small stores repeat); empty = by their sizes."""
    validation: Share = 0.1
    """Share of the documents (of a stream: of its last tokens) kept for validation."""
    validation_path: list[str] = field(default_factory=list)
    """Validation documents in place of a share: files or folders of the same source, or token stores; each a set."""
    validation_part: str = ""
    """Part of a Hugging Face data set (data.path, or each of validation_path) to validate on, in place of a share."""
    split_seed: int = 0
    """Seed of the choice of validation documents and of the documents of a mixture."""
    overlong: Overlong = "auto"
    """Documents longer than a pack or the context; auto: split with source=stdlib, else an error."""
    overlap: Count = 0
    """Tokens that a split piece repeats from the previous one, as context: they are targets once."""
    repeat_prompt: bool = False
    """Begin each piece of a split document with the document's prompt."""
    share_prefixes: Sharing = "off"
    """Compute common beginnings once: of `pairs`, of `groups` with one prompt, of `all` documents of a window."""
    min_prefix: Positive = 16
    """Least number of tokens that documents share; shorter common beginnings are repeated."""
    stream: bool = False
    """Train while documents arrive: from a token store that is still growing, or from a streamed data set."""
    patience_seconds: Annotated[float, Range(above=0)] = 300.0
    """Seconds that a stream waits for the next shard of an incomplete store before the run stops."""
    verify: Literal["size", "full"] = "size"
    """Check of a token store before use: sizes, or hashes too (`full`: once a host; of a stream by each reader)."""
    stage: str = ""
    """Copy token stores first, to this folder of the host, such as /dev/shm; empty = read in place."""
    readers: Count = 0
    """Data-parallel ranks that read tokens and scatter packs to the others; 0 = every rank reads its own."""
    cache: str = ""
    """Folder for trained tokenizers and stores (empty: the user's cache folder)."""

    EXCLUSIVE: ClassVar[tuple[str, ...]] = ("validation_path", "validation")
    RETIRED: ClassVar[dict[str, Any]] = {
        "alpaca_prompt": "instruct",
        "weigh_by": "tokens",
        "mixture_ends": "all",
    }

    @staticmethod
    def preset(name: str) -> dict[str, Any] | None:
        """The settings of `data=SOURCE`, or of nanoGPT's and wordplay's run on characters; None for other names."""
        if name == "shakespeare_char":
            stream = {"source": "text", "documents": "stream", "block_size": 1024}
            return {**stream, "tokenizer.kind": "char"}
        return {"source": name} if name in get_args(SourceName) else None

    @staticmethod
    def preset_names() -> list[str]:
        """The names that `data=` accepts."""
        return sorted((*get_args(SourceName), "shakespeare_char"))

    def check(self) -> None:
        """Check every setting and the combinations that contradict each other.

        Raises:
            ValueError: names the setting, its value, and what to do instead.
        """
        for name, kind in get_type_hints(DataConfig).items():
            if get_origin(kind) is Literal:
                check_choice(f"data.{name}", getattr(self, name), kind)
        check_ranges(self, "data.")
        self._check_source()
        self._check_validation()
        self._check_text()
        self._check_records()
        if self.source == "mixture":
            self._check_mixture()
        if self.share_prefixes != "off" and self.stream:
            raise ValueError(
                f"data.share_prefixes={self.share_prefixes} needs all documents at once: use data.share_prefixes=off"
                " with data.stream=true"
            )
        if (self.overlap or self.repeat_prompt) and self.overlong not in ("auto", "split"):
            raise ValueError(
                f"data.overlap={self.overlap} and data.repeat_prompt={self.repeat_prompt} are for split documents:"
                f" set data.overlong=split (now {self.overlong})"
            )

    def _check_source(self) -> None:
        """Check that each setting that was changed has an effect with this source."""
        for names, sources, hint in _ONLY_WITH:
            changed = [name for name in names if getattr(self, name) != getattr(_DEFAULTS, name)]
            if changed and self.source not in sources:
                if changed == ["path"] and (source := source_of(self.path)):
                    hint = f"set data={source} to read {self.path}"
                raise ValueError(
                    f"data.{changed[0]}={getattr(self, changed[0])} has no effect with data.source={self.source}, only"
                    f" with {', '.join(sources)}: {hint}"
                )
        if self.stage == "memory":  # of earlier versions
            raise ValueError(
                "data.stage=memory is gone: name a folder; data.stage=/dev/shm is memory, once a host"
            )
        if self.source not in ("stdlib", "mixture") and not self.path:
            raise ValueError(f"data.source={self.source} needs data.path=FILE_OR_FOLDER")
        for name in ("stage", "readers", "dedup", "weight_field"):
            if self.stream and (value := getattr(self, name)):
                raise ValueError(
                    f"data.{name}={value} needs all documents at once: leave it out with data.stream=true"
                )

    def _check_validation(self) -> None:
        if not all(self.validation_path):
            raise ValueError(f"data.validation_path={self.validation_path}: one of the paths is empty")
        if self.validation_sets and self.validation not in (0, _DEFAULTS.validation):
            name = "validation_path" if self.validation_path else "validation_part"
            raise ValueError(
                f"data.validation={self.validation} takes a share of the training documents, and data.{name}="
                f"{getattr(self, name)} names others: leave one of them out"
            )

    def _check_text(self) -> None:
        if self.block_size == 1:
            raise ValueError("data.block_size=1: at least 2 tokens (or 0: as many as fit)")
        if self.separator and self.documents not in ("auto", "separator"):
            raise ValueError(f"data.separator={self.separator!r} contradicts data.documents={self.documents}")
        if "\\n" in self.separator or "\\t" in self.separator:
            raise ValueError(
                f"data.separator={self.separator!r} holds a backslash, not a line end: write data.separator=$'\\n\\n'"
            )
        if self.documents == "separator" and not self.separator:
            raise ValueError("data.documents=separator needs data.separator=TEXT")
        if self.block_size and (self.separator or self.documents not in ("auto", "stream")):
            raise ValueError(
                f"data.block_size={self.block_size} cuts a stream: set data.documents=stream and no data.separator"
            )

    def _check_records(self) -> None:
        if self.template_date and not _is_date(self.template_date):
            raise ValueError(
                f"data.template_date={self.template_date}: a day such as 2026-01-31 (or empty: today)"
            )
        if self.special_tokens and self.chat_template in ("", *BUILT_IN_TEMPLATES):
            raise ValueError(
                f"data.special_tokens={self.special_tokens} are for data.chat_template=FILE; those of"
                f" {self.chat_template or 'a tokenizer'} are known: leave them out"
            )
        for name in ("special_tokens", "fields"):
            names = getattr(self, name)
            if not all(isinstance(each, str) and each for each in names) or len(set(names)) < len(names):
                raise ValueError(f"data.{name}={names}: names are texts that differ and are not empty")
        if self.fields and len(self.fields) not in _FIELD_COUNTS[self.format]:
            raise ValueError(
                f"data.fields={self.fields} with data.format={self.format}: one name (text, or messages), two"
                " (prompt, completion; or messages, tools) or three (prompt, chosen, rejected; with data.format=alpaca"
                " instruction, input, output; with data.format=label prompt, completion, label)"
            )

    def _check_mixture(self) -> None:
        places = [Path(path).expanduser().resolve() for path in self.paths]
        overlap = any(one == other or one in other.parents for one, other in permutations(places, 2))
        if len(places) < 2 or overlap:
            raise ValueError(
                f"data.paths={self.paths}: a mixture needs two token stores or more, each once and none inside another"
            )
        are_positive = all(0 < weight < math.inf for weight in self.weights)
        if self.weights and not (are_positive and len(self.weights) == len(self.paths)):
            raise ValueError(
                f"data.weights={self.weights}: one positive number for each of the {len(self.paths)} data.paths"
            )

    def dated(self) -> DataConfig:
        """These settings with today as the date of templates, where none is given and the documents are records."""
        if self.template_date or self.source not in RECORDS:
            return self
        return replace(self, template_date=datetime.date.today().isoformat())

    @property
    def validation_sets(self) -> list[str]:
        """Paths of the validation documents; empty = they are a share of the training documents."""
        return self.validation_path or ([self.path] if self.validation_part else [])

    @property
    def validation_share(self) -> float:
        """Share of the training documents that is kept for validation."""
        return 0.0 if self.validation_sets else self.validation

    @property
    def division(self) -> TextDivision:
        """`documents`, with auto resolved."""
        if self.documents != "auto":
            return self.documents
        return "stream" if self.block_size else "separator" if self.separator else "file"


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


_DEFAULTS = DataConfig()
_FIELD_COUNTS = {"text": (1,), "completion": (2,), "chat": (1, 2), "label": (3,), "auto": (1, 2, 3)}
_FIELD_COUNTS |= dict.fromkeys(("alpaca", "preference"), (2, 3))
_OUT = "leave it out"
_ONLY_WITH: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("path",), ("text", *RECORDS, "store"), "set data.source=text, or data.paths=[STORE,…] for a mixture"),
    (("subset", "part", "validation_part"), ("huggingface",), _OUT),
    (("stream",), ("store", "huggingface"), "documents arrive as a growing store or a streamed data set"),
    (("documents", "separator"), ("text",), _OUT),
    (("block_size",), ("text", "store"), "data.overlong=split cuts documents that are too long"),
    (
        (
            *("broken", "format", "fields", "weight_field", "drop_system", "as_chat"),
            *("chat_template", "template_date", "special_tokens"),
        ),
        RECORDS,
        _OUT,
    ),
    (("dedup",), ("stdlib", "text", *RECORDS), "give it to `multipack prepare`"),
    (("paths", "weights"), ("mixture",), "set data.source=mixture"),
)
"""Settings, the sources with which they have an effect, and what to do with the others."""


@dataclass
class TokenizerConfig:
    """The tokenizer of a run."""

    kind: TokenizerKind = "auto"
    """Kind of tokenizer; auto: the one of the token store or of train.init_from, else byte pairs of the corpus."""
    path: str = ""
    """A tokenizer.json (kind=file), folder or name (transformers), tekken.json (mistral; empty: the package's own)."""
    vocabulary_size: int = 2048
    """Tokens of a byte-pair vocabulary to train, including 256 bytes and the special tokens."""

    PRESET_HINT: ClassVar[str] = " or the path of a tokenizer.json"

    @staticmethod
    def preset(name: str) -> dict[str, str] | None:
        """The settings of `tokenizer=KIND` and `tokenizer=PATH`; None for other names."""
        if name in get_args(TokenizerKind):
            return {"kind": name}
        return {"kind": "file", "path": name} if name.endswith(".json") or Path(name).exists() else None

    @staticmethod
    def preset_names() -> list[str]:
        """The kinds that `tokenizer=` accepts."""
        return list(get_args(TokenizerKind))

    def check(self) -> None:
        """Check every setting and their combination; raises `ValueError`."""
        check_choice("tokenizer.kind", self.kind, TokenizerKind)
        if self.kind in ("file", "transformers") and not self.path:
            raise ValueError(f"tokenizer.kind={self.kind} needs tokenizer.path=FILE_OR_FOLDER")
        if self.path and self.kind not in ("file", "transformers", "mistral"):
            raise ValueError(
                f"tokenizer.path={self.path!r} goes with tokenizer.kind=file, transformers or mistral, not with "
                f"tokenizer.kind={self.kind}"
            )

    @property
    def name(self) -> str:
        """Name in messages, such as `char`, `bpe 2048`, `file a.json` or `gpt2`; without a path it is unique."""
        if self.path:
            return f"{self.kind} {Path(self.path).name}"
        return f"bpe {self.vocabulary_size}" if self.kind in ("auto", "bpe") else self.kind

    @property
    def is_trained(self) -> bool:
        """Whether it is trained on the corpus; all other kinds exist before any document is read."""
        return self.kind in ("auto", "char", "bpe")
