"""Which chat template is meant: one of ours, a file, or the tokenizer's own."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from multipack.data.chat import ChatTemplate
from multipack.data.data_config import BUILT_IN_TEMPLATES, DataConfig
from multipack.data.header import CHAT_TEMPLATE
from multipack.data.tokenizer import TokenizerConfig, load_tokenizer, tokenizer_facts

_SPECIAL = {
    "chatml": (("<|im_start|>", "<|im_end|>"), "", "<|im_end|>"),
    "llama3": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
}
"""Special tokens, bos_token and eos_token of the built-in templates; `plain` has the tokenizer's end token alone."""
_LOOKS_SPECIAL = re.compile(r"<\|\w+\|>")


def resolve_template(data: DataConfig, tokenizer: TokenizerConfig) -> ChatTemplate:
    """The template that writes the chats of `data`: of the name, of the file, the tokenizer's own, or else chatml.

    The own one of a tokenizer in a checkpoint is the run's.

    Raises:
        ImportError: a package that the tokenizer needs is not installed.
        ValueError: no such template or file; a file that writes special tokens which nobody has named.
    """
    name = data.chat_template
    if name and name not in BUILT_IN_TEMPLATES:
        return _of_file(Path(name).expanduser(), data.special_tokens, tokenizer)
    if tokenizer.kind == "file" and not name:
        beside = Path(tokenizer.path).expanduser()
        beside = (beside if beside.is_dir() else beside.parent) / CHAT_TEMPLATE
        if beside.is_file():
            return ChatTemplate.from_json(beside.read_text("utf-8"))
    facts = tokenizer_facts(tokenizer) if name in ("", "plain") else None
    if facts is not None and not name:
        if facts.chat_template:
            return ChatTemplate(
                facts.chat_template,
                facts.special_tokens,
                facts.bos_token,
                facts.eos_token,
                f"the template of {tokenizer.name}",
            )
        name = "chatml"
    return built_in_template(name, facts.eos_token if facts is not None else "")


def built_in_template(name: str, end_token: str = "") -> ChatTemplate:
    """One of multipack's own templates.

    Args:
        name: `chatml`, `llama3` or `plain`.
        end_token: the special token that ends an answer in `plain`.

    Raises:
        ValueError: no such template, or `plain` without an end token.
    """
    if name not in BUILT_IN_TEMPLATES:
        raise ValueError(
            f"there is no built-in chat template {name!r}: one of {', '.join(BUILT_IN_TEMPLATES)}"
        )
    special, bos, eos = _SPECIAL.get(name, ((), "", end_token))
    if not eos:
        raise ValueError(
            "data.chat_template=plain ends each answer with the tokenizer's end token, but the tokenizer names none"
        )
    source = (resources.files("multipack") / "presets" / "chat" / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(source, special, bos, eos, name)


def _of_file(file: Path, special_tokens: list[str], tokenizer: TokenizerConfig) -> ChatTemplate:
    try:
        source = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.chat_template={file}: one of {', '.join(BUILT_IN_TEMPLATES)}, or a Jinja file "
            f"that can be read: {error}"
        ) from error
    facts = tokenizer_facts(tokenizer)
    special = tuple(special_tokens) or facts.special_tokens
    template = ChatTemplate(source, special, facts.bos_token, facts.eos_token, file.name)
    forgotten = sorted(set(_LOOKS_SPECIAL.findall(source)) - set(template.special_tokens))
    if forgotten and not (tokenizer.kind in ("file", "transformers") and _are_text(forgotten, tokenizer)):
        raise ValueError(
            f"data.chat_template={file} writes {', '.join(forgotten)}, which would be text: name the special tokens of "
            "the template in data.special_tokens=[NAME,NAME,…]"
        )
    return template


def _are_text(names: list[str], tokenizer: TokenizerConfig) -> bool:
    """Whether the tokenizer has tokens of these names that are no special ones: text, on purpose."""
    vocabulary = load_tokenizer(tokenizer)
    return all(len(vocabulary.encode(name)) == 1 for name in names)
