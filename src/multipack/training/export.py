"""Export of a trained model as a Hugging Face folder, which is written completely or not at all.

FOLDER/
  model.safetensors       weights under transformers' names
  config.json             the architecture in transformers: Llama, Mistral or GPT-2
  generation_config.json  the tokens at which generation ends
  tokenizer.json          the run's tokenizer, unchanged
  tokenizer_config.json   special tokens, longest document, chat template
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import tokenizers
import torch
from torch import Tensor

from multipack.atomic import atomic_folder, is_free
from multipack.data.chat import ChatTemplate
from multipack.data.tokenizer import Tokenizer
from multipack.models.families import config_of, to_huggingface
from multipack.models.pretrained import CONFIG, WEIGHTS
from multipack.shapes import ModelShape
from multipack.training.checkpoint_tensors import save_safetensors
from multipack.training.inference import load_template
from multipack.training.precision import DTYPES
from multipack.training.weights import Weights, initial_weights, vocabulary_of


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        folder: its folder.
        source: the checkpoint of the weights.
        architecture: the model class of transformers.
        parameters: number of parameters.
        dtype: their type, as `train.dtype` names it.
        files: (name, bytes) of every file.
        notes: further remarks for the user.
    """

    folder: Path
    source: Path
    architecture: str
    parameters: int
    dtype: str
    files: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Rows of a report: (name, value)."""
        return [
            ("folder", str(self.folder)),
            ("weights of", str(self.source)),
            ("model", f"{self.architecture}, {self.parameters:,} parameters in {self.dtype}"),
            *((name, f"{size:,} bytes") for name, size in self.files),
            *(("note", note) for note in self.notes),
        ]

    @property
    def loading(self) -> str:
        """Python lines that load it with transformers."""
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            f"model = AutoModelForCausalLM.from_pretrained({str(self.folder)!r})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({str(self.folder)!r})"
        )


def export(path: Path, folder: Path, weights: str = "latest", dtype: str = "fp32") -> Exported:
    """Write a run, or one of its checkpoints, as a folder that transformers loads.

    Args:
        path: the run or the checkpoint.
        folder: to write; it must not exist, or be empty.
        weights: which of the run's weights: latest, best or ema.
        dtype: fp32, bf16 or fp16.

    Raises:
        FileExistsError: `folder` is not empty.
        FileNotFoundError: there is no complete checkpoint at `path`.
        ValueError: transformers has no model of this shape; the weights are missing, not finite, or too large for
            fp16; an unknown choice.
    """
    for name, value, choices in (("weights", weights, get_args(Weights)), ("dtype", dtype, tuple(DTYPES))):
        if value not in choices:
            raise ValueError(f"--{name} {value}: one of {', '.join(choices)}")
    if not is_free(folder):
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder, or move it away")
    initial = initial_weights(path, cast(Weights, weights))
    if initial.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json, which an export needs")
    # Raises if transformers has no such model, before anything is written.
    config = config_of(initial.shape)
    tensors = _converted(to_huggingface(initial.shape, initial.state), DTYPES[dtype], initial.folder)
    template, note = _template(initial.folder)
    texts = _texts(
        initial.shape, initial.tokenizer, template, {**config, "dtype": _torch_name(DTYPES[dtype])}
    )
    with atomic_folder(folder) as partial:
        save_safetensors(partial / WEIGHTS, tensors, {"format": "pt"})
        for name, text in texts.items():
            with (partial / name).open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        sizes = tuple((name, (partial / name).stat().st_size) for name in (WEIGHTS, *texts))
    return Exported(
        folder=folder,
        source=initial.folder,
        architecture=config["architectures"][0],
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        dtype=dtype,
        files=sizes,
        notes=(note, *_notes(initial.shape, initial.tokenizer)),
    )


def _converted(tensors: dict[str, Tensor], dtype: torch.dtype, source: Path) -> dict[str, Tensor]:
    """The tensors in another type, converted one by one to save memory."""
    converted = {name: tensors.pop(name).to(dtype) for name in list(tensors)}
    broken = [name for name, tensor in converted.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ValueError(
            f"{source}: {', '.join(broken[:3])} ({len(broken)} tensors in all) are not finite as {_torch_name(dtype)};"
            " export fp32 or bf16, or an earlier checkpoint"
        )
    return converted


def _template(source: Path) -> tuple[ChatTemplate | None, str]:
    """The chat template of the run, and a note that names it or says why there is none."""
    try:
        template = load_template(source)
    except ValueError as error:
        return None, f"no chat template: {error}"
    return template, f"chat template: {template.name}"


def _texts(
    shape: ModelShape, tokenizer: Tokenizer, template: ChatTemplate | None, config: dict[str, Any]
) -> dict[str, str]:
    """Contents of all files but the weights."""
    vocabulary = vocabulary_of(tokenizer)
    names = {number: name for name, number in vocabulary.items()}
    end = names.get(tokenizer.end_id, "") if tokenizer.end_id is not None else ""
    begin = template.bos_token if template is not None else ""
    eos = (template.eos_token if template is not None else "") or end
    ends = [eos, end, template.end_of_turn if template is not None else ""]
    end_ids = list(dict.fromkeys(vocabulary[name] for name in ends if name in vocabulary))
    special = {"bos_token_id": vocabulary.get(begin), "eos_token_id": vocabulary.get(eos)}
    several = end_ids if len(end_ids) > 1 else special["eos_token_id"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in (("bos_token", begin), ("eos_token", eos)) if token in vocabulary},
    }
    if template is not None:
        settings["chat_template"] = template.source
    contents = {
        CONFIG: {**config, **special},
        "generation_config.json": {**special, "eos_token_id": several},
        "tokenizer_config.json": settings,
    }
    texts = {
        name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in contents.items()
    }
    return {**texts, "tokenizer.json": tokenizer.to_json()}


def _notes(shape: ModelShape, tokenizer: Tokenizer) -> list[str]:
    notes = []
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    added = library.encode("", add_special_tokens=True).tokens
    if added:
        notes.append(
            f"transformers puts {' '.join(added)} around text, which training did not: call the tokenizer with"
            " add_special_tokens=False"
        )
    if shape.positions == "learned" and not shape.bias:
        notes.append("GPT-2 has biases in transformers: they are zeros, because this model has none")
    return notes


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
