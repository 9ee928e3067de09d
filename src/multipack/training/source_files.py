"""The small files of the model that a run starts with, and its chat template: checkpoints and exports keep them.

FOLDER/config.json, tokenizer_config.json, … ─▶ RUN/checkpoints/step-…/ ─▶ export
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multipack.data.text.tokenizer import Tokenizer, load_tokenizer
from multipack.data.text.vocabularies import read_text
from multipack.data.views.corpus import Corpus
from multipack.models.huggingface import decoder_shape
from multipack.models.peft_format import peft_base
from multipack.run import is_peft
from multipack.shapes import ModelShape
from multipack.training.inference import find_template
from multipack.training.run_config import Config

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
    if is_peft(folder) and not (folder / TOKENIZER).is_file():
        folder = peft_base(folder)
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
    """The source's config.json, if it describes this model but for its vocabulary; else `config`.

    Args:
        files: see `source_files`.
        config: content of a config.json that describes the model.
        shape: shape of the model.
    """
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
    """The object in one of the files; empty if there is no such file.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        found = json.loads(files.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} of the model that the run started with is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} of the model that the run started with is no JSON object")
    return found


def chat_template_of(corpus: Corpus, folder: Path | None) -> str:
    """The chat template of the documents, or of the checkpoint or export in `folder`; empty if neither has one."""
    if corpus.chat_template or folder is None:
        return corpus.chat_template
    template = find_template(folder)
    return template.to_json() if template else ""


def outside_template(config: Config, corpus: Corpus, template: str) -> list[str]:
    """A note if prompts and answers are text, though the initial weights or the tokenizer have a chat template."""
    documents = corpus.train if len(corpus.train) else corpus.validation
    if corpus.chat_template or config.data.source == "stdlib" or not len(documents):
        return []
    if not (documents.store.item_size > 1 or documents.prompt_length(0)):
        return []
    if not template and (not config.tokenizer.path or not load_tokenizer(config.tokenizer).chat_template):
        return []
    where = "when the store is prepared" if config.data.source in ("store", "mixture") else "here"
    return [
        "prompts and answers are trained as text, outside of the chat template that the weights or the tokenizer have:"
        f" data.as_chat=true {where} writes them as turns of it"
    ]
