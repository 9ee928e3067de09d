"""Tokenizers: characters, bytes, byte-pair encoding trained on the corpus, or what others have made.

All are `tokenizers.Tokenizer`s saved as `tokenizer.json`, which other tools load as it is. Text never turns
into a special token: a document that spells `<|endoftext|>` is tokenized letter by letter, so that nobody but
us can end a document, and nobody but a chat template can end a turn.

The library works with threads of its own; in a process forked after its use it says so and goes on with one
thread. We fork nothing and leave the environment alone: `TOKENIZERS_PARALLELISM` is the user's to set.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from multipack.atomic import write_atomically
from multipack.data.cache import locked
from multipack.data.source import Part, Source
from multipack.data.vocabularies import (
    END,
    END_NAMES,
    TokenizerFacts,
    byte_alphabet,
    facts_of_file,
    gpt2_definition,
    load_transformers,
    mistral_definition,
    mistral_special_tokens,
    tekken_path,
    without_prefix,
)

TokenizerKind = Literal["auto", "char", "byte", "bpe", "file", "transformers", "gpt2", "mistral"]
Progress = Callable[[int, int | None, str], None]
"""`progress(done, total, unit)`: told while something long is under way; total None = not known."""


@dataclass
class TokenizerConfig:
    """How text becomes tokens."""

    kind: TokenizerKind = "auto"
    """Kind of tokenizer; auto: that of the token store or of train.init_from, else byte pairs of the corpus."""
    path: str = ""
    """A tokenizer.json (kind=file), folder or name (transformers), tekken.json (mistral; empty: the package's own)."""
    vocabulary_size: int = 2048
    """Tokens of a byte-pair vocabulary to train, the 256 bytes and the special tokens included."""

    PRESET_HINT: ClassVar[str] = " or the path of a tokenizer.json"

    @staticmethod
    def preset(name: str) -> dict[str, str] | None:
        """The values of `tokenizer=PATH`; None for names that are no path."""
        named = resources.files("multipack") / "presets" / "tokenizer" / f"{name}.yaml"
        is_path = name.endswith(".json") or Path(name).exists()
        return {"kind": "file", "path": name} if is_path and not named.is_file() else None

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
        if self.kind in ("file", "transformers") and not self.path:
            raise ValueError(f"tokenizer.kind={self.kind} needs tokenizer.path=FILE_OR_FOLDER")
        if self.path and self.kind not in ("file", "transformers", "mistral"):
            raise ValueError(
                f"tokenizer.path={self.path!r} goes with tokenizer.kind=file, transformers or mistral, not with "
                f"tokenizer.kind={self.kind}"
            )
        if self.vocabulary_size < 257:
            raise ValueError(
                f"tokenizer.vocabulary_size={self.vocabulary_size}: at least 257 (256 bytes, an end token)"
            )

    @property
    def name(self) -> str:
        """For people, and to tell our own tokenizers apart: `char`, `byte`, `bpe 2048`, `file a.json`, `gpt2`."""
        if self.path:
            return f"{self.kind} {Path(self.path).name}"
        return f"bpe {self.vocabulary_size}" if self.kind in ("auto", "bpe") else self.kind

    @property
    def is_trained(self) -> bool:
        """Whether it is made from a corpus; all others are there before any document is read."""
        return self.kind in ("auto", "char", "bpe")


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
        self._special = {
            token["content"]: vocabulary[token["content"]]
            for token in fields.get("added_tokens", ())
            if token.get("special", False)
        }
        self._characters = _characters_of(fields, vocabulary.keys() - self._special.keys())
        self._going_on, self._prefix_after_special = without_prefix(fields)

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

    def encode_parts(self, documents: Sequence[Sequence[Part]]) -> list[list[tuple[list[int], bool]]]:
        """Token ids of each part of each document, and whether they are targets, in parallel threads.

        A part that is special becomes the one token of that name; all other text becomes text. Tokenizers that put
        a space before a text (as SentencePiece's do) put none into the middle of a document.

        Raises:
            ValueError: a special token that this tokenizer does not have; see also `encode`.
        """
        texts: tuple[list[str], list[str]] = ([], [])
        for parts in documents:
            for number, part in enumerate(parts):
                if not part.is_special:
                    texts[self._goes_on(parts, number)].append(part.text)
        self._check_characters(texts[0])
        self._check_characters(texts[1])
        libraries = (self._library, self._going_on or self._library)
        encoded = [
            iter(library.encode_batch_fast(batch, add_special_tokens=False))
            for library, batch in zip(libraries, texts, strict=True)
        ]
        return [
            [
                (
                    [self.special_id(part.text)]
                    if part.is_special
                    else next(encoded[self._goes_on(parts, number)]).ids,
                    part.is_target,
                )
                for number, part in enumerate(parts)
            ]
            for parts in documents
        ]

    def _goes_on(self, parts: Sequence[Part], number: int) -> bool:
        """Whether part `number` is text in the middle of a text, for a tokenizer that makes a difference."""
        if self._going_on is None or number == 0:
            return False
        return not (parts[number - 1].is_special and self._prefix_after_special)

    def special_id(self, name: str) -> int:
        """The id of the special token `name`.

        Raises:
            ValueError: there is no such special token.
        """
        if name not in self._special:
            is_text = self._library.token_to_id(name) is not None
            raise ValueError(
                f"the tokenizer ({self.name}) has "
                + (f"{name!r} as a token that any text can spell, " if is_text else f"no token {name!r}, ")
                + "but the chat template writes it as a special one; take data.chat_template=plain, a template of "
                "special tokens that it has, or a tokenizer that is trained with them (tokenizer.kind=bpe)"
            )
        return self._special[name]

    def grown(self, special_tokens: Sequence[str]) -> Tokenizer:
        """The same tokenizer with special tokens behind its last one: those that it has no token for at all."""
        lacking = [name for name in special_tokens if self._library.token_to_id(name) is None]
        if not lacking:
            return self
        library = tokenizers.Tokenizer.from_str(self._definition)
        library.add_special_tokens(_special_tokens(lacking))
        return Tokenizer(library.to_str(), self.name)

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


def _characters_of(fields: dict[str, Any], ordinary: Set[str]) -> frozenset[str] | None:
    """The characters of a character tokenizer; None for others, which take unknown text in their own way."""
    model = fields.get("model", {})
    if model.get("type") != "WordLevel" or model.get("unk_token") in ordinary:
        return None
    return frozenset(ordinary) if all(len(token) == 1 for token in ordinary) else None


def character_tokenizer(texts: Iterator[str], special_tokens: Sequence[str] = ()) -> Tokenizer:
    """One token for each distinct character of `texts`, in the order of Unicode; then the special tokens, if any."""
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
    library.add_special_tokens(_special_tokens(special_tokens))
    return Tokenizer(library.to_str(), "char")


def byte_tokenizer(special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Token b is byte b of the text in UTF-8; token 256 ends a document; then the other special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    _make_byte_level(library)
    library.add_special_tokens(_special_tokens((END, *special_tokens)))
    return Tokenizer(library.to_str(), "byte")


def train_bpe(texts: Iterator[str], vocabulary_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Byte-level byte-pair encoding trained on `texts`: the same texts give the same tokenizer.

    The end token and the other special tokens are its first tokens. A small corpus may give fewer tokens than
    `vocabulary_size`.

    Raises:
        ValueError: `vocabulary_size` has no room for the bytes and the special tokens.
    """
    special = _special_tokens((END, *special_tokens))
    if vocabulary_size < 256 + len(special):
        raise ValueError(
            f"tokenizer.vocabulary_size={vocabulary_size}: at least {256 + len(special)} (256 bytes, and the special "
            f"tokens {', '.join(token.content for token in special)})"
        )
    library = tokenizers.Tokenizer(models.BPE())
    _make_byte_level(library)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return Tokenizer(library.to_str(), f"bpe {vocabulary_size}")


def _make_byte_level(library: tokenizers.Tokenizer) -> None:
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()


def _special_tokens(names: Sequence[str]) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in dict.fromkeys(names)]


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
    if not config.is_trained:
        return load_tokenizer(config, source.special_tokens)
    recipe = f"multipack tokenizer 1, {config.name}, {source.hash}"
    path = cache / "tokenizers" / f"{hashlib.sha256(recipe.encode()).hexdigest()[:32]}.json"
    if not path.exists():
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                _train(config, source, progress).save(path)
    return Tokenizer.load(path, config.name)


def load_tokenizer(config: TokenizerConfig, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer that needs no corpus.

    Args:
        config: of a kind that is not trained.
        special_tokens: what chats need beside the end token; `kind=byte` and `kind=file` get those that they lack.

    Raises:
        ImportError: a package that `config.kind` needs is not installed.
        ValueError: the kind is trained on a corpus, or there is no tokenizer at its path.
    """
    config.check()
    if config.is_trained:
        raise ValueError(
            f"tokenizer.kind={config.kind} is made from a corpus that is there as a whole; take one that is made "
            "already: tokenizer.kind=file (tokenizer.path=…/tokenizer.json), transformers, gpt2, mistral or byte"
        )
    if config.kind == "byte":
        return byte_tokenizer(special_tokens)
    if config.kind == "gpt2":
        return Tokenizer(gpt2_definition(), config.name)
    if config.kind == "mistral":
        return Tokenizer(mistral_definition(tekken_path(config.path)), config.name)
    if config.kind == "transformers":
        return Tokenizer(load_transformers(config.path)[0], config.name)
    return Tokenizer.load(Path(config.path).expanduser(), config.name).grown(special_tokens)


def tokenizer_facts(config: TokenizerConfig) -> TokenizerFacts:
    """What the tokenizer that `config` names says about chats; one that is trained has an end token and no more.

    Raises:
        ImportError: see `load_tokenizer`.
        ValueError: see `load_tokenizer`.
    """
    config.check()
    if config.kind == "transformers":
        return load_transformers(config.path)[1]
    if config.kind == "file":
        return facts_of_file(Path(config.path).expanduser())
    if config.kind == "mistral":
        return TokenizerFacts(mistral_special_tokens(tekken_path(config.path)), "<s>", "</s>")
    return TokenizerFacts((END,), "", END)


def _train(config: TokenizerConfig, source: Source, progress: Progress | None) -> Tokenizer:
    texts = _texts(source, progress)
    if config.kind == "char":
        return character_tokenizer(texts, source.special_tokens)
    return train_bpe(texts, config.vocabulary_size, source.special_tokens)


def _texts(source: Source, progress: Progress | None) -> Iterator[str]:
    unit = f"{source.unit} read for the tokenizer"
    for number, document in enumerate(source):
        for part in document.parts:
            if not part.is_special:
                yield part.text
        if progress is not None and number % 256 == 0:
            progress(source.done, source.total, unit)
    if progress is not None:
        progress(source.total, source.total, unit)
