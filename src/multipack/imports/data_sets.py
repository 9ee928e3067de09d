"""Data sets of Axolotl → settings `data.*`, and the commands that prepare stores where there are several."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from multipack.data.text.data_config import BUILT_IN_TEMPLATES
from multipack.data.text.records import ROLES, SHAREGPT_ROLES
from multipack.imports.outcome import NotHonored
from multipack.training.other_names import by_name
from multipack.words import as_text

Entry = Mapping[str, Any]
Settings = dict[str, Any]

_KEYS = """
    path name split revision type ds_type data_files field text_column field_messages field_tools field_chosen
    field_rejected field_instruction field_input field_output message_property_mappings message_field_role
    message_field_content roles roles_to_train train_on_eos chat_template chat_template_jinja field_thinking
    template_thinking_key drop_system_message preprocess_shards trust_remote_code strict
"""
_READ = frozenset(_KEYS.split())
"""Keys of a data set that are read, or have no effect on its documents."""
_MAPPED = {"role": ("role", "from"), "content": ("content", "value")}
"""Property of a message → its names in records."""
FAMILY_TEMPLATES = by_name(
    {
        "gemma": ("gemma", "gemma2"),
        "gemma3": ("gemma3_text",),
        "qwen_25": ("qwen2",),
        "qwen3": ("qwen3", "qwen3_moe"),
        "qwen3_5": ("qwen3_5", "qwen3_5_moe"),
        "phi_3 phi_35 phi_4": ("phi3",),
        "cohere": ("cohere", "cohere2"),
        "command_a": ("cohere2",),
        "llama3": ("llama",),
        "mistral_v7_tekken": ("mistral", "ministral3"),
    }
) | {
    name: (name,)
    for name in ("gemma3n", "gemma4", "gemma4_unified", "deepseek_v2", "llama4", "jamba", "falcon_h1")
}
"""Template of Axolotl → types of models whose tokenizers come with it."""
_WITHOUT_TEMPLATE = ("gemma-2-2b", "gemma-2-9b", "gemma-2-27b", "gemma-4-26b-a4b")
"""Models of these families whose tokenizers have no template, because they are not tuned for chats."""
_PAIRS = by_name({"prompt_pairs ultra": "prompt", "intel": "question", "icr": "input"})
"""Kind of preference records in Axolotl, as in chatml.intel → the field of the prompt."""


def data_settings(entries: list[Entry], keys: Entry, kind: str) -> tuple[Settings, list[str]]:
    """Settings of all data sets for a model of type `kind`, without the prefix `data.`, and the commands to run first.

    Raises:
        NotHonored: a data set cannot be read as Axolotl reads it.
    """
    found = [_one(entry, keys, kind) for entry in entries]
    if keys.get("dataset_exact_deduplication") and all(each == found[0] for each in found):
        found = found[:1]  # the same documents again
    if len(found) == 1:
        return found[0], []
    if any(each.get("stream") for each in found):
        raise NotHonored("several streams cannot be mixed: prepare stores of them")
    commands, stores = [], []
    tokenizer = ["tokenizer.kind=transformers", f"tokenizer.path={keys.get('base_model')}"]
    late = ("overlong", "train_on_prompt")  # settings of a run, not of a store
    for number, each in enumerate(found, 1):
        stores.append(f"{number}-{Path(str(each['path'])).stem}.store")
        words = [f"data.{name}={as_text(value)}" for name, value in each.items() if name not in late]
        commands.append(shlex.join(["multipack", "prepare", *words, *tokenizer, "--store", stores[-1]]))
    if len({each.get("overlong") for each in found}) > 1:
        raise NotHonored("documents of one data set are cut and those of another dropped where they are long")
    shared = {name: found[0][name] for name in late if name in found[0]}
    return {"source": "mixture", "paths": stores, **shared}, commands


def _one(entry: Entry, keys: Entry, kind: str) -> Settings:
    """The settings of one data set."""
    given = {name: value for name, value in entry.items() if value not in (None, False)}
    if unread := sorted(given.keys() - _READ):
        raise NotHonored(f"{unread[0]}={given[unread[0]]} of {given.get('path')} has no equivalent")
    settings = _place(given)
    form = given.get("type", "pretrain" if "text_column" in given else "")
    if not isinstance(form, str):
        raise NotHonored("prompts in a format of one's own: write `prompt` and `completion` into the records")
    # NAME, NAME:VARIANT (completion:FIELD) or NAME.DETAIL (chatml.intel)
    name, _, variant = form.partition(":")
    name, _, detail = name.partition(".")
    if keys.get("rl") or keys.get("reward_model"):
        return settings | _pairs(given, form, name, detail, keys, kind)
    variants: Settings = {}
    if name == "completion" and variant:
        variants = {"fields": [variant]}
    if name == "alpaca" and variant:
        raise NotHonored(
            f"type: {form} has another prompt than Stanford Alpaca's: write `prompt` and `completion` into the records"
        )
    if name not in FORMS or (variant and not variants) or (detail and name == "alpaca"):
        raise NotHonored(f"type: {form or 'none'} has no equivalent in data.format")
    return settings | FORMS[name](given, keys, kind) | variants


def _place(given: Entry) -> Settings:
    """Source and path: files of this machine, or a data set of the hub."""
    path, files, kind = str(given.get("path", "")), given.get("data_files"), given.get("ds_type")
    if path in ("json", "parquet", "text") and files:
        kind, path = path, files if isinstance(files, str) else files[0]
        if not isinstance(files, str) and len(files) > 1:
            raise NotHonored("several data_files: give a folder or a pattern as data.path")
    elif files:
        raise NotHonored(f"data_files={files} of {path}: download them, and give data.path")
    plain = path.lower().removesuffix(".gz")
    for source, suffixes, kinds in (
        ("jsonl", (".jsonl", ".json", ".ndjson"), ("json", "jsonl")),
        ("parquet", (".parquet",), ("parquet",)),
        ("text", (".txt", ".md"), ("text",)),
    ):
        if plain.endswith(suffixes) or (kind in kinds and (path.count("/") != 1 or Path(path).exists())):
            return {"source": source, "path": path}
    if given.get("revision"):
        raise NotHonored(f"revision={given['revision']} of {path}: download it, and give data.path")
    settings: Settings = {"source": "huggingface", "path": path}
    if given.get("name"):
        settings["subset"] = str(given["name"])
    if given.get("split", "train") != "train":
        settings["part"] = str(given["split"])
    return settings


# --- forms of records -----------------------------------------------------------------------------------


def _completion(given: Entry, keys: Entry, kind: str) -> Settings:
    field = given.get("field") or given.get("text_column") or "text"
    return {"format": "text", "fields": [str(field)], "overlong": "split"}


def _chat(given: Entry, keys: Entry, kind: str) -> Settings:
    fields = [str(given.get("field_messages", "messages"))]
    if given.get("field_tools", "tools") != "tools":
        fields.append(str(given["field_tools"]))
    _check_messages(given, keys)
    dropped = {"drop_system": True} if given.get("drop_system_message") else {}
    return {"format": "chat", "fields": fields, **dropped, **template_settings(given, keys, kind)}


def _check_messages(given: Entry, keys: Entry) -> None:
    """Refuse keys about messages that would change what is read or trained."""
    mapped = given.get("message_property_mappings") or {
        "role": given.get("message_field_role", "role"),
        "content": given.get("message_field_content", "content"),
    }
    for name, value in mapped.items():
        if value not in _MAPPED.get(name, (name,)):
            raise NotHonored(
                f"messages have {name} in the field {value!r}: only role, content, from, value are read"
            )
    for target, sources in (given.get("roles") or {}).items():
        for source in sources:
            if SHAREGPT_ROLES.get(source, source if source in ROLES else "") != target:
                raise NotHonored(f"the role {source!r} is not read as {target}")
    trained = given.get("roles_to_train", keys.get("roles_to_train")) or ["assistant"]
    if not set(trained) <= {"assistant", "gpt"}:
        raise NotHonored(
            f"roles_to_train={trained}: the assistant is trained, or all roles (data.train_on_prompt)"
        )
    if (eos := given.get("train_on_eos", keys.get("train_on_eos")) or "turn") != "turn":
        raise NotHonored(
            f"train_on_eos={eos}: the token that ends an answer is a target, those of other turns are not"
        )
    thinking = given.get("field_thinking", "reasoning_content")
    if (wanted := given.get("template_thinking_key", thinking)) != thinking:
        raise NotHonored(f"field_thinking={thinking}: rename it in the records to {wanted}")


def _pairs(given: Entry, form: str, name: str, detail: str, keys: Entry, kind: str) -> Settings:
    """Preference pairs, or for KTO labeled answers."""
    if given.get("drop_system_message"):
        raise NotHonored("drop_system_message has no equivalent with preferences")
    if name in BUILT_IN_TEMPLATES and detail in _PAIRS:
        is_labeled = keys.get("rl") == "kto"
        answers = ("completion", "label") if is_labeled else ("chosen", "rejected")
        settings = {"format": "label" if is_labeled else "preference", "fields": [_PAIRS[detail], *answers]}
        return settings | {"as_chat": True, "chat_template": name}
    if "chat_template" in (name, detail if name == "bradley_terry" else ""):
        _check_messages(given, keys)
        names = {"field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected"}
        fields = [given.get(key, default) for key, default in names.items()]
        return {"format": "preference", "fields": fields, **template_settings(given, keys, kind)}
    raise NotHonored(
        f"type: {form or 'none'} of {keys.get('rl') or 'a reward model'} has no equivalent in data.format"
    )


def template_settings(given: Entry, keys: Entry, kind: str) -> Settings:
    """`chat_template`, or nothing where the tokenizer's own is meant; keys of the data set come first."""
    source = given if given.get("chat_template") or given.get("chat_template_jinja") else keys
    name, jinja = source.get("chat_template"), source.get("chat_template_jinja")
    if jinja and name in (None, "jinja"):
        if "\n" in jinja or "{" in jinja:
            raise NotHonored(
                "chat_template_jinja as text: write it to a file, and give data.chat_template=FILE"
            )
        return {"chat_template": jinja}
    name = str(name or "tokenizer_default")
    base = str(keys.get("base_model", "")).rpartition("/")[2].lower()
    if name == "tokenizer_default" or name.startswith("tokenizer_default_fallback_chatml"):
        return {}
    if name in BUILT_IN_TEMPLATES:
        return {"chat_template": name}
    if kind in FAMILY_TEMPLATES.get(name, ()) and base not in _WITHOUT_TEMPLATE:
        return {}
    raise NotHonored(
        f"chat_template={name} is not that of the tokenizer of {keys.get('base_model')}: give data.chat_template=FILE"
    )


FORMS: dict[str, Callable[[Entry, Entry, str], Settings]] = {
    "alpaca": lambda given, keys, kind: {"format": "alpaca"},
    "completion": _completion,
    "pretrain": lambda given, keys, kind: _completion(given, keys, kind) | {"stream": True},
    "chat_template": _chat,
}
"""`type` of a data set → its settings."""
