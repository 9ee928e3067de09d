"""The small files of the model that a run starts with, and its chat template: checkpoints and exports keep them.

FOLDER/config.json, tokenizer_config.json, … ─▶ RUN/checkpoints/step-…/ ─▶ export
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multipack.data.text.chat import ChatTemplate
from multipack.data.text.texts import CHAT_TEMPLATE
from multipack.data.text.tokenizer import Tokenizer
from multipack.data.text.vocabularies import read_text
from multipack.models.huggingface import decoder_shape
from multipack.models.peft_format import tokenizer_folder
from multipack.run import weights_folder
from multipack.shapes import ModelShape

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
KEPT = (CONFIG, GENERATION, TOKENIZER_CONFIG, "special_tokens_map.json", TEMPLATE)
"""Names of these files, beside tokenizer.json."""


def source_files(folder: Path | None, tokenizer: Tokenizer) -> dict[str, str]:
    """File name → text of the small files in a Hugging Face folder, a checkpoint, or the base of an adapter.

    tokenizer.json is included if it defines `tokenizer`, because it may have settings that training does not use.
    """
    if folder is None:
        return {}
    folder = tokenizer_folder(folder)
    found = {name: read_text(folder / name) for name in KEPT if (folder / name).is_file()}
    if (folder / TOKENIZER).is_file() and Tokenizer.load(folder).hash == tokenizer.hash:
        found[TOKENIZER] = read_text(folder / TOKENIZER)
    return found


def source_dtype(files: Mapping[str, str]) -> str:
    """The dtype of the source's weights, as its config.json says: fp32, bf16 or fp16; fp32 if it does not."""
    config = read_object(files, CONFIG)
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(name.removeprefix("torch."), "fp32")


def merged_config(files: Mapping[str, str], config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The source's config.json, if it describes this model but for its vocabulary; else `config`, which does."""
    kept = read_object(files, CONFIG)
    if shape.architecture:
        same = not (kept.get("text_config") or kept.get("quantization_config"))
    else:
        try:
            before = decoder_shape(kept).to_dict()
        except (ValueError, ArithmeticError):
            before = {}
        free = ("vocabulary_size", "dropout", *(() if shape.family else ("family",)))
        wanted = shape.to_dict() | {name: before.get(name) for name in free}
        same = before == wanted and "text_config" not in kept
    if not kept or not same:
        return config
    dtype = "torch_dtype" if "torch_dtype" in kept else "dtype"
    return kept | {"vocab_size": config["vocab_size"], dtype: config["dtype"]}


def read_object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """The JSON object in one of the files; empty if there is no such file."""
    try:
        found = json.loads(files.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} of the model that the run started with is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} of the model that the run started with is no JSON object")
    return found


def find_template(path: Path) -> ChatTemplate | None:
    """The chat template of a run, a checkpoint or an export; None if there is none."""
    folder = weights_folder(path)
    if (folder / CHAT_TEMPLATE).is_file():
        return ChatTemplate.from_json(read_text(folder / CHAT_TEMPLATE))
    own = Tokenizer.load(tokenizer_folder(folder))
    if own.chat_template:
        return ChatTemplate(own.chat_template, own.special_tokens, own.bos_token, own.eos_token)
    return None


def chat_template_of(folder: Path) -> str:
    """The chat template of a checkpoint or export, as the text of its file; empty if it has none."""
    template = find_template(folder)
    return template.to_json() if template else ""
