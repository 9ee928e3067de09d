"""Tokenizers: characters, bytes, byte-pair encoding trained on the corpus, or existing vocabularies.

All are `tokenizers.Tokenizer`s saved as `tokenizer.json`, which other tools load. Text never becomes a special token: a
document that spells `<|endoftext|>` is tokenized as ordinary text, so that only multipack ends documents, and only a
chat template ends turns.

The tokenizers library starts threads; in a process that was forked after their use it prints a warning and continues
with one thread. multipack forks no process and leaves `TOKENIZERS_PARALLELISM` to the user.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from multipack.atomic import locked, write_atomically
from multipack.data.text.data_config import TokenizerConfig as TokenizerConfig
from multipack.data.text.texts import TextPart
from multipack.data.text.vocabularies import (
    READERS,
    byte_alphabet,
    byte_level,
    check_bounds,
    read_file,
    without_prefix,
)
from multipack.untrusted import foreign_errors, reason_of

END = "<|endoftext|>"
END_NAMES = (END, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "<|eot_id|>")
"""Names of the token that ends a document; the first one that a vocabulary has is taken."""
Progress = Callable[[int, int | None, str], None]
"""`progress(done, total, unit)` is called during long work; total None = unknown."""


def silent(*_: object) -> None:
    """A `Progress` that shows nothing."""


class Tokenizer:
    """Encodes text as token ids and decodes them.

    Args:
        definition: the content of a `tokenizer.json`. Its truncation and padding are removed, so that documents
            stay whole.
        name: name of the tokenizer in messages.
        config: the fields of a `tokenizer_config.json`, if there is one.

    Attributes:
        name: as given.
        vocabulary_size: one more than the largest token id.
        end_id: id of the token that ends a document, or None.
        hash: sha256 of the definition in canonical JSON.
        special_tokens: names of the special tokens.
        bos_token: name of the one that begins a document; empty = none.
        eos_token: name of the one that ends a document or a turn; empty = none.
        chat_template: Jinja template of chats; empty = none.

    Raises:
        ValueError: `definition` is not a tokenizer.
    """

    def __init__(self, definition: str, name: str = "file", config: Mapping[str, Any] | None = None) -> None:
        with foreign_errors("not a tokenizer.json"):
            fields = json.loads(definition)
            fields["truncation"] = fields["padding"] = None
            check_bounds(fields)
            self._definition = json.dumps(fields, ensure_ascii=False)
            self._library = tokenizers.Tokenizer.from_str(self._definition)
        canonical = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        self._library.encode_special_tokens = True  # special tokens in text stay text
        self.name, self._config = name, config or {}
        self.hash = hashlib.sha256(canonical.encode()).hexdigest()
        vocabulary = self._library.get_vocab()
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self.end_id: int | None = next((vocabulary[end] for end in END_NAMES if end in vocabulary), None)
        added = [token["content"] for token in fields.get("added_tokens", ()) if token.get("special", False)]
        # The library leaves out an added token without characters.
        self._special = {content: vocabulary[content] for content in added if content in vocabulary}
        self._special_names = {token: name for name, token in self._special.items()}
        self.special_tokens = tuple(self._special)
        self.bos_token, eos = (_token(self._config.get(key)) for key in ("bos_token", "eos_token"))
        self.eos_token = eos or next((end for end in END_NAMES if end in self._special), "")
        self.chat_template = _template(self._config.get("chat_template"))
        with foreign_errors("not a tokenizer.json"):
            self._continued, self._prefix_after_special = without_prefix(fields) or (self._library, False)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no special token is added. See `encode_parts`."""
        return self._encode_batch(self._library, [text])[0]

    def encode_parts(self, documents: Sequence[Sequence[TextPart]]) -> list[list[tuple[list[int], bool]]]:
        """Encode each part of each document, in parallel threads.

        A special part becomes the one token of its name; all other parts are ordinary text. Tokenizers that put a
        space before a text (such as SentencePiece's) put none before a part that continues a text.

        Returns:
            For each document, for each part: its token ids, and whether they are targets.

        Raises:
            ValueError: this tokenizer lacks a special token or, if it is one of characters, a character of the text.
        """
        # Whether each part continues a text, before which no space is put.
        puts_spaces = self._continued is not self._library
        flat = [
            (
                part,
                puts_spaces
                and number > 0
                and not (self._prefix_after_special and parts[number - 1].is_special),
            )
            for parts in documents
            for number, part in enumerate(parts)
        ]
        # Equal texts, such as the prompt of two answers, are encoded once.
        known: dict[bool, dict[str, list[int]]] = {False: {}, True: {}}
        for part, continues in flat:
            if not part.is_special:
                known[continues][part.text] = []
        for library, texts in zip((self._library, self._continued), known.values(), strict=True):
            texts.update(zip(texts, self._encode_batch(library, list(texts)), strict=True))
        ids = iter(
            [self.special_id(part.text)] if part.is_special else known[continues][part.text]
            for part, continues in flat
        )
        return [[(next(ids), part.is_target) for part in parts] for parts in documents]

    def _encode_batch(self, library: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exceptions, and panics
            if not isinstance(library.model, models.WordLevel):
                raise ValueError(f"the tokenizer ({self.name}) fails: {reason_of(error)}") from error
            unknown = sorted(set().union(*texts) - library.get_vocab().keys())
            shown = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in unknown[:5])
            raise ValueError(
                f"the tokenizer ({self.name}) does not know {shown} ({error}): a character tokenizer has the characters"
                " of the corpus it was made from; tokenizer.kind=byte encodes every text"
            ) from error

    def special_id(self, name: str) -> int:
        """The id of the special token `name`; `ValueError` if there is none."""
        if name not in self._special:
            is_text = self._library.token_to_id(name) is not None
            found = f"{name!r} as a token that any text can spell" if is_text else f"no token {name!r}"
            raise ValueError(
                f"the tokenizer ({self.name}) has {found}, but the chat template writes it as a special token; set"
                " data.chat_template=plain, or take a tokenizer that is trained with it (tokenizer.kind=bpe)"
            )
        return self._special[name]

    def special_name(self, token: int) -> str:
        """The name of a special token; empty if `token` is not special."""
        return self._special_names.get(int(token), "")

    def grown(self, special_tokens: Sequence[str]) -> Tokenizer:
        """This tokenizer, with the `special_tokens` that it lacks appended to the vocabulary."""
        lacking = [name for name in special_tokens if self._library.token_to_id(name) is None]
        if not lacking:
            return self
        library = tokenizers.Tokenizer.from_str(self._definition)
        library.add_special_tokens(_special_tokens(lacking))
        return Tokenizer(library.to_str(), self.name, self._config)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens; `ValueError` if an id is outside the vocabulary."""
        outside = [token for token in ids if not 0 <= token < self.vocabulary_size]
        if outside:
            raise ValueError(
                f"token {outside[0]} is outside the vocabulary of {self.vocabulary_size:,} tokens"
            )
        with foreign_errors(f"the tokenizer ({self.name})"):
            return self._library.decode([int(token) for token in ids], skip_special_tokens=True)

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self._definition

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` to the file `path`, atomically."""
        write_atomically(path, self._definition.encode())

    @classmethod
    def load(cls, path: Path, name: str = "") -> Tokenizer:
        """Read a `tokenizer.json`, or the one in a folder, and the files beside it; `ValueError` if it is malformed."""
        definition, config = read_file(str(path))
        try:
            return cls(definition, name or f"file {path.name}", config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _token(value: Any) -> str:
    """The name of a token in tokenizer_config.json: text, or an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _template(value: Any) -> str:
    """A chat template: text, or the one named `default` among several."""
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else ""


def character_tokenizer(texts: Iterator[str], special_tokens: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer with one token per distinct character of `texts`, in Unicode order, then the special tokens."""
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
    """A tokenizer of UTF-8 bytes: token b is byte b, token 256 ends a document, then the other special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    library = byte_level(models.BPE(vocabulary, []))
    library.add_special_tokens(_special_tokens((END, *special_tokens)))
    return Tokenizer(library.to_str(), "byte")


def train_bpe(texts: Iterator[str], vocabulary_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train byte-level byte-pair encoding on `texts`; equal texts give equal tokenizers.

    The end token and the other special tokens come first. A small corpus may give fewer tokens than
    `vocabulary_size`.
    """
    special = _special_tokens((END, *special_tokens))
    if vocabulary_size < 256 + len(special):
        raise ValueError(
            f"tokenizer.vocabulary_size={vocabulary_size}: at least {256 + len(special)} (256 bytes, and the special "
            f"tokens {', '.join(token.content for token in special)})"
        )
    library = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return Tokenizer(library.to_str(), f"bpe {vocabulary_size}")


def _special_tokens(names: Sequence[str]) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in dict.fromkeys(names)]


def build_tokenizer(
    config: TokenizerConfig, source: Any, cache: Path, progress: Progress = silent
) -> Tokenizer:
    """The tokenizer of `config`, trained on the `Source` if its kind needs a corpus.

    A trained tokenizer is kept in `cache/tokenizers`, under a hash of corpus and settings. One process trains it while
    others that need the same one wait.

    Raises:
        ImportError, ValueError: see `load_tokenizer`; a vocabulary too small for its special tokens; a corpus
            without text, if the kind is `char`.
    """

    def texts() -> Iterator[str]:
        for number, document in enumerate(source):
            yield from (part.text for part in document.parts if not part.is_special)
            if number % 256 == 0:
                progress(source.done, source.total, f"{source.unit} read for the tokenizer")

    special_tokens = source.find_form().special_tokens
    if not config.is_trained:
        return load_tokenizer(config, special_tokens)
    recipe = f"multipack tokenizer 1, {config.name}, {source.identity}"
    path = cache / "tokenizers" / f"{hashlib.sha256(recipe.encode()).hexdigest()[:32]}.json"
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            if config.kind == "char":
                trained = character_tokenizer(texts(), special_tokens)
            else:
                trained = train_bpe(texts(), config.vocabulary_size, special_tokens)
            trained.save(path)
            progress(source.total, source.total, f"{source.unit} read for the tokenizer")
    return Tokenizer.load(path, config.name)


def load_tokenizer(config: TokenizerConfig, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Load a tokenizer that is not trained; `kind=byte` and `kind=file` add the `special_tokens` that they lack.

    Raises:
        ImportError: a package that `config.kind` needs is not installed.
        ValueError: the kind is trained on a corpus, or there is no tokenizer at its path.
    """
    config.check()
    if config.is_trained:
        raise ValueError(
            f"tokenizer.kind={config.kind} is trained on a complete corpus; here take an existing tokenizer:"
            " tokenizer.kind=file (tokenizer.path=…/tokenizer.json), transformers, gpt2, mistral or byte"
        )
    if config.kind == "byte":
        return byte_tokenizer(special_tokens)
    definition, fields = READERS[config.kind](config.path)
    tokenizer = Tokenizer(definition, config.name, fields)
    return tokenizer.grown(special_tokens) if config.kind == "file" else tokenizer
