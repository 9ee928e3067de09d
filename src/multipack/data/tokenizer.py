"""Tokenizers: characters, bytes, byte-pair encoding trained on the corpus, or any `tokenizer.json`.

All are `tokenizers.Tokenizer`s saved as `tokenizer.json`, which other tools load as it is. Text never turns
into a special token: a document that spells `<|endoftext|>` is tokenized letter by letter, so that nobody but
us can end a document.

The library works with threads of its own; in a process forked after its use it says so and goes on with one
thread. We fork nothing and leave the environment alone: `TOKENIZERS_PARALLELISM` is the user's to set.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from multipack.atomic import write_atomically
from multipack.data.cache import locked
from multipack.data.source import Source

TokenizerKind = Literal["auto", "char", "byte", "bpe", "file"]
Progress = Callable[[int, int | None, str], None]
"""`progress(done, total, unit)`: told while something long is under way; total None = not known."""

END = "<|endoftext|>"
END_NAMES = (END, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "<|eot_id|>")
"""Names under which tokenizers keep the token that ends a document; the first one found is taken."""


@dataclass
class TokenizerConfig:
    """How text becomes tokens."""

    kind: TokenizerKind = "auto"
    """Kind of tokenizer; auto: byte-pair encoding trained on the corpus, or that of the token store."""
    path: str = ""
    """A tokenizer.json (kind=file)."""
    vocabulary_size: int = 2048
    """Tokens of a byte-pair vocabulary to train, the 256 bytes and the end token included."""

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: names the field, what it holds, and what to do instead.
        """
        choices = get_args(TokenizerKind)
        if self.kind not in choices:
            near = difflib.get_close_matches(str(self.kind), choices, 1, 0.0)
            raise ValueError(
                f"tokenizer.kind={self.kind!r}: one of {', '.join(choices)} (nearest: {near[0]})"
            )
        if (self.kind == "file") != bool(self.path):
            raise ValueError(
                f"tokenizer.kind={self.kind} with tokenizer.path={self.path!r}: "
                "a path, and only a path, goes with tokenizer.kind=file"
            )
        if self.vocabulary_size < 257:
            raise ValueError(
                f"tokenizer.vocabulary_size={self.vocabulary_size}: at least 257 (256 bytes, an end token)"
            )

    @property
    def name(self) -> str:
        """For people, and to tell our own tokenizers apart: `char`, `byte`, `bpe 2048`, `file a.json`."""
        if self.kind == "file":
            return f"file {Path(self.path).name}"
        return f"bpe {self.vocabulary_size}" if self.kind in ("auto", "bpe") else self.kind


class Tokenizer:
    """Text to token ids and back.

    Args:
        definition: the content of a `tokenizer.json`. Truncation and padding in it are removed: documents
            stay whole.
        name: for people.

    Attributes:
        name: for people.
        vocabulary_size: one more than the largest token id.
        end_id: the token that ends a document, or None when there is none.
        hash: sha256 of the definition in canonical JSON.

    Raises:
        ValueError: `definition` is no tokenizer.
    """

    def __init__(self, definition: str, name: str = "file") -> None:
        try:
            fields = json.loads(definition)
            fields["truncation"] = fields["padding"] = None
            self._definition = json.dumps(fields, ensure_ascii=False)
            self._library = tokenizers.Tokenizer.from_str(self._definition)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"not a tokenizer.json: {error}") from error
        canonical = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        self._library.encode_special_tokens = True  # leaves special tokens in text unrecognized
        self.name = name
        self.hash = hashlib.sha256(canonical.encode()).hexdigest()
        vocabulary = self._library.get_vocab()
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self.end_id: int | None = next((vocabulary[end] for end in END_NAMES if end in vocabulary), None)
        self._characters = _characters_of(fields, vocabulary)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without any added at its start or end.

        Raises:
            ValueError: a character tokenizer meets a character that it does not have.
        """
        self._check_characters((text,))
        return self._library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in parallel threads; the same as `encode` of each."""
        self._check_characters(texts)
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens, the end token among them, have none.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        outside = [token for token in ids if not 0 <= token < self.vocabulary_size]
        if outside:
            raise ValueError(
                f"token {outside[0]} is outside the vocabulary of {self.vocabulary_size:,} tokens"
            )
        return self._library.decode([int(token) for token in ids], skip_special_tokens=True)

    def to_json(self) -> str:
        """The content of its `tokenizer.json`."""
        return self._definition

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` to the file `path`, whole or not at all."""
        write_atomically(path, self._definition.encode())

    @classmethod
    def load(cls, path: Path, name: str = "") -> Tokenizer:
        """Read a `tokenizer.json`; `path` may also be a folder that holds one.

        Raises:
            ValueError: there is none, or it is none.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path}: there is no tokenizer.json")
        try:
            return cls(file.read_text(encoding="utf-8"), name or f"file {path.name}")
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def _check_characters(self, texts: Sequence[str]) -> None:
        if self._characters is None:
            return
        unknown = sorted(set().union(*texts) - self._characters)
        if unknown:
            shown = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in unknown[:5])
            raise ValueError(
                f"the character tokenizer does not know {shown}: its {len(self._characters)} characters are "
                "those of the corpus it was made from; tokenizer.kind=byte knows every text"
            )

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocabulary_size={self.vocabulary_size}, hash={self.hash[:12]})"


def _characters_of(fields: dict[str, Any], vocabulary: dict[str, int]) -> frozenset[str] | None:
    """The characters of a character tokenizer; None for others, which take unknown text in their own way."""
    model = fields.get("model", {})
    if model.get("type") != "WordLevel" or model.get("unk_token") in vocabulary:
        return None
    return frozenset(vocabulary) if all(len(token) == 1 for token in vocabulary) else None


def character_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """One token for each distinct character of `texts`, in the order of Unicode; no other tokens."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise ValueError("there is no text to take characters from")
    library = tokenizers.Tokenizer(
        models.WordLevel({character: token for token, character in enumerate(sorted(characters))})
    )
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    return Tokenizer(library.to_str(), "char")


def byte_tokenizer() -> Tokenizer:
    """Token b is byte b of the text in UTF-8; token 256 ends a document."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    _make_byte_level(library)
    library.add_special_tokens([END])
    return Tokenizer(library.to_str(), "byte")


def train_bpe(texts: Iterator[str], vocabulary_size: int) -> Tokenizer:
    """Byte-level byte-pair encoding trained on `texts`: the same texts give the same tokenizer.

    A small corpus may give fewer tokens than `vocabulary_size`.
    """
    library = tokenizers.Tokenizer(models.BPE())
    _make_byte_level(library)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return Tokenizer(library.to_str(), f"bpe {vocabulary_size}")


def _make_byte_level(library: tokenizers.Tokenizer) -> None:
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`).

    Printable bytes stand for themselves; the others follow from U+0100 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def build_tokenizer(
    config: TokenizerConfig, source: Source, cache: Path, progress: Progress | None = None
) -> Tokenizer:
    """The tokenizer that `config` asks for, made from `source` where its kind needs a corpus.

    What was made is kept in `cache/tokenizers`, under a hash of corpus and settings. One process makes it
    while others that want the same one wait for it.

    Raises:
        ValueError: an impossible configuration, a corpus without text, no tokenizer at its path.
    """
    config.check()
    if config.kind == "file":
        return Tokenizer.load(Path(config.path).expanduser(), config.name)
    if config.kind == "byte":
        return byte_tokenizer()
    recipe = f"multipack tokenizer 1, {config.name}, {source.hash}"
    path = cache / "tokenizers" / f"{hashlib.sha256(recipe.encode()).hexdigest()[:32]}.json"
    if not path.exists():
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                _train(config, source, progress).save(path)
    return Tokenizer.load(path, config.name)


def _train(config: TokenizerConfig, source: Source, progress: Progress | None) -> Tokenizer:
    texts = _texts(source, progress)
    if config.kind == "char":
        return character_tokenizer(texts)
    return train_bpe(texts, config.vocabulary_size)


def _texts(source: Source, progress: Progress | None) -> Iterator[str]:
    unit = f"{source.unit} read for the tokenizer"
    for number, document in enumerate(source):
        for text, *_ in document.parts:
            yield text
        if progress is not None and number % 256 == 0:
            progress(source.done, source.total, unit)
    if progress is not None:
        progress(source.total, source.total, unit)
