"""Export of a trained model as a Hugging Face folder, which is written completely or not at all.

FOLDER/
  model.safetensors       weights under transformers' names
  config.json             the architecture in transformers, of a family in shapes/families.py
  generation_config.json  the tokens at which generation ends
  tokenizer.json          the run's tokenizer, unchanged
  tokenizer_config.json   special tokens, longest document, chat template

A run that started with a Hugging Face folder writes that folder's settings again: sampling parameters, padding token
and others, special_tokens_map.json, and the dtype of its weights unless `dtype` names one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast

import tokenizers
import torch
from torch import Tensor

from multipack.atomic import atomic_folder, is_free, write_atomically
from multipack.data.text.chat import ChatTemplate
from multipack.data.text.tokenizer import Tokenizer
from multipack.hub import hub_name, model_folder
from multipack.models.foreign import foreign_settings, save_foreign
from multipack.models.huggingface import scores_of, to_huggingface
from multipack.models.peft_format import PEFT_CONFIG, PEFT_WEIGHTS, peft_base, to_peft
from multipack.models.pretrained import CONFIG, WEIGHTS, stored_dtypes
from multipack.planning.options import check_choice
from multipack.run import is_export, is_peft
from multipack.shapes import ModelShape, read_json
from multipack.shapes.config_json import config_of
from multipack.training.checkpoint_tensors import save_safetensors
from multipack.training.precision import DTYPES
from multipack.training.run_config import trained_shape
from multipack.training.source_files import (
    GENERATION,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    find_template,
    merged_config,
    read_object,
    source_dtype,
    source_files,
)
from multipack.training.weights import (
    TrainedAdapter,
    TrainedWeights,
    Weights,
    find_weights,
    vocabulary_of,
)

Dtype = Literal["auto", "fp32", "bf16", "fp16"]


def export(
    path: Path, folder: Path, weights: str = "latest", dtype: str = "auto", merge: bool = False
) -> list[tuple[str, str]]:
    """Write a run, or one of its checkpoints, as a folder that transformers loads, or peft if it trained adapters.

    `dtype` auto is the dtype of the model that the run started with, or fp32; without a run, each tensor's own. `merge`
    writes the whole model with its adapters merged into the weights.

    Returns:
        Rows of a report: (name, value).

    Raises:
        FileExistsError: `folder` is not empty.
        FileNotFoundError: there is no complete checkpoint at `path`, or no best one.
        ValueError: transformers has no model of this shape; the weights are missing, not finite, or too large for
            fp16; an unknown choice.
    """
    check_choice("--weights", weights, Weights)
    check_choice("--dtype", dtype, Dtype)
    if not is_free(folder):
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder, or move it away")
    trained = find_weights(path, cast(Weights, weights))
    shape, tokenizer = trained.shape, trained.tokenizer
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json, which an export needs")
    template, adapter = find_template(trained.folder), None if merge else trained.adapter
    files = source_files(trained.folder, tokenizer)
    of_files = (
        dtype == "auto" and is_export(trained.folder) and not (is_peft(trained.folder) or shape.architecture)
    )
    own_dtypes = stored_dtypes(trained.folder) if of_files else {}
    dtype = source_dtype(files) if dtype == "auto" else dtype
    # Raises if transformers has no such model, before anything is written.
    own = foreign_settings(shape.architecture) if shape.architecture else config_of(shape)
    named = {"vocab_size": shape.vocabulary_size, "dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    config = merged_config(files, own | named, shape)
    texts, file = _texts(shape, tokenizer, template, config, files), WEIGHTS
    if adapter is None:
        tensors = to_huggingface(shape, trained.state())
    else:
        settings, tensors = _peft(trained, adapter)
        file, config = PEFT_WEIGHTS, {"architectures": ["adapter of peft"]}
        del texts[CONFIG], texts[GENERATION]
        texts[PEFT_CONFIG] = json.dumps(settings, indent=2) + "\n"
    foreign = bool(shape.architecture) and adapter is None
    if not foreign:
        tensors = _converted(tensors, DTYPES[dtype], own_dtypes, trained.folder)
    with atomic_folder(folder) as partial:
        if foreign:
            save_foreign(shape, tensors, partial, DTYPES[dtype])
        else:
            save_safetensors(partial / file, tensors, {"format": "pt"})
        for name, text in texts.items():
            write_atomically(partial / name, text.encode())
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return [
        ("folder", str(folder)),
        ("weights of", str(trained.folder)),
        ("model", f"{config['architectures'][0]}, {parameters:,} parameters in {dtype}"),
        *((each.name, f"{each.stat().st_size:,} bytes") for each in sorted(folder.iterdir())),
        ("chat template", template.name if template is not None else "none"),
        *([("frozen weights", " at ".join(filter(None, hub_name(adapter.config.base))))] if adapter else []),
        *(("note", note) for note in _notes(shape, tokenizer) + _quantized_notes(trained, adapter)),
    ]


def _peft(trained: TrainedWeights, adapter: TrainedAdapter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and tensors of an adapter in peft's format, checked for a base that peft can load."""
    base, rows = model_folder(adapter.config.base, "adapter.base"), trained.shape.vocabulary_size
    if not is_export(base) or is_peft(base):
        raise ValueError(
            f"the adapter's frozen weights are those of {base}, which is no folder of a Hugging Face model: export the"
            " whole model with --merge"
        )
    if (before := trained_shape(base, bool(trained.shape.architecture)).vocabulary_size) != rows:
        raise ValueError(
            f"the run has {rows:,} rows of the vocabulary and its base {before:,}, which peft would not load:"
            " export the whole model with --merge"
        )
    tensors = {name: adapter.read(name) for name in adapter.names}
    return to_peft(trained.shape, adapter.config, tensors, adapter.alphas)


def loading_code(folder: Path) -> str:
    """Python lines that load an export with transformers or peft."""
    adapter = read_json(folder / PEFT_CONFIG) if is_peft(folder) else None
    if adapter is None:
        scores, place = bool(scores_of(read_json(folder / CONFIG))), repr(str(folder))
    else:
        base, revision = hub_name(str(peft_base(folder)))
        scores, place = adapter.get("task_type") == "SEQ_CLS", repr(base)
        place += ", num_labels=1" if scores else ""
        place += f", revision={revision!r}" if revision else ""
    kind = f"AutoModelFor{'SequenceClassification' if scores else 'CausalLM'}"
    if adapter is None:
        return (
            f"from transformers import {kind}, AutoTokenizer\n"
            f"model = {kind}.from_pretrained({place})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({place})"
        )
    return (
        f"from peft import PeftModel\nfrom transformers import {kind}\n"
        f"base = {kind}.from_pretrained({place})\n"
        f"model = PeftModel.from_pretrained(base, {str(folder)!r})"
    )


def _converted(
    tensors: dict[str, Tensor], dtype: torch.dtype, others: dict[str, torch.dtype], source: Path
) -> dict[str, Tensor]:
    """The tensors in their dtype in `others`, else in `dtype`; converted and removed from `tensors` one by one."""
    converted = {name: tensors.pop(name).to(others.get(name, dtype)) for name in list(tensors)}
    broken = [name for name, tensor in converted.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ValueError(
            f"{source}: {', '.join(broken[:3])} ({len(broken)} tensors in all) are not finite as {dtype}; export fp32"
            " or bf16, or an earlier checkpoint"
        )
    return converted


def _texts(
    shape: ModelShape,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    config: dict[str, Any],
    files: dict[str, str],
) -> dict[str, str]:
    """File name → content, without the weights; `files` are the files of the model that the run started with."""
    vocabulary = vocabulary_of(tokenizer)
    end = next((name for name, number in vocabulary.items() if number == tokenizer.end_id), "")
    begin, eos, turn = (
        (template.bos_token, template.eos_token or end, template.end_of_turn) if template else ("", end, "")
    )
    end_ids = list(dict.fromkeys(vocabulary[name] for name in (eos, end, turn) if name in vocabulary))
    special = {"bos_token_id": vocabulary.get(begin), "eos_token_id": vocabulary.get(eos)}
    generation = {**special, **({"eos_token_id": end_ids} if len(end_ids) > 1 else {})}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in (("bos_token", begin), ("eos_token", eos)) if token in vocabulary},
        **({"chat_template": template.source} if template else {}),
    }
    if shape.scores:
        config = config | _padding(config, tokenizer, end_ids)
    contents = {CONFIG: special | config, GENERATION: generation, TOKENIZER_CONFIG: settings}
    for name in (GENERATION, TOKENIZER_CONFIG):
        contents[name] |= read_object(files, name)
    kept, texts = dict(files), {TOKENIZER: tokenizer.to_json()}
    if template is not None and template.source not in (
        kept.get(TEMPLATE),
        read_object(files, TOKENIZER_CONFIG).get("chat_template"),
    ):
        contents[TOKENIZER_CONFIG]["chat_template"] = template.source
        known = contents[GENERATION].get("eos_token_id")
        known = known if isinstance(known, list) else [] if known is None else [known]
        both = list(dict.fromkeys([*known, *end_ids]))
        contents[GENERATION] |= {"eos_token_id": both if len(both) > 1 else both[0]} if both else {}
        kept.pop(TEMPLATE, None)
    elif TEMPLATE in kept:
        contents[TOKENIZER_CONFIG].pop("chat_template", None)
    for name, content in contents.items():
        if content != (read_object(files, name) or None):  # else the file itself
            kept[name] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return {**texts, **kept}


def _padding(config: dict[str, Any], tokenizer: Tokenizer, ends: list[int]) -> dict[str, Any]:
    """`pad_token_id` of a model with scores, which reads them at the last token that is not padding.

    The initial model's token, or else a special one if possible, that ends no document.
    """
    if config.get("pad_token_id") is not None and config["pad_token_id"] not in ends:
        return {}
    added = json.loads(tokenizer.to_json()).get("added_tokens", [])
    special = [entry["id"] for entry in added if "pad" in entry["content"].lower()]
    special += [entry["id"] for entry in added]
    choices = [*special, *range(tokenizer.vocabulary_size)]
    return {"pad_token_id": next(number for number in choices if number not in ends)}


def _quantized_notes(trained: TrainedWeights, adapter: TrainedAdapter | None) -> list[str]:
    """Notes on an adapter that was trained with quantized frozen weights."""
    if trained.adapter is None or trained.adapter.config.format is None:
        return []
    config, form = trained.adapter.config, trained.adapter.config.format
    if adapter is None:
        return [
            f"merged into the values of the {form.title} weights that it was trained beside, not into the originals"
        ]
    equal = form.equal_outputs(config.double_quantize)
    notes = [f"trained beside {form.title} weights: for equal outputs {equal}"]
    if not all(name.endswith(".weight") for name in trained.adapter.quantized):
        notes.append(
            "BitsAndBytesConfig leaves experts as they are, which training quantized: for equal outputs use --merge"
        )
    return notes


def _notes(shape: ModelShape, tokenizer: Tokenizer) -> list[str]:
    """Differences between the exported model in transformers and the trained one, for the report."""
    notes = []
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    if added := library.encode("", add_special_tokens=True).tokens:
        notes.append(
            f"transformers puts {' '.join(added)} around text, which training did not: call the tokenizer with"
            " add_special_tokens=False"
        )
    if shape.scores:
        notes.append(
            "the score is read at the last token that is no padding (pad_token_id of config.json): end texts as the"
            " documents end, with the end token, or by the chat template"
        )
    return notes
