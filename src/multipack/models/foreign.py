"""Models of transformers inside `Decoder`: any causal language model, by its own code, with our attention and loss.

    model of transformers      Decoder
      embed_tokens         ─▶    embedding      these three move, so that rules, adapters, sharding and the loss find
      layers               ─▶    blocks         them under the names of other decoders
      lm_head              ─▶    head           (not there, if it is tied to the embedding)
      everything else      ─▶    model          positions, the last norm, and the code that joins them

A `ModelShape` with `architecture=FOLDER` describes such a model: its numbers are for cost and reports, and the model is
the one of the folder's config.json. Code in the folder is not run. Auxiliary losses of routers, which transformers
adds to its own loss only, are not computed.

Weights are read by transformers, which knows the formats of files (experts are stored one by one, and joined in
memory). Buffers that files hold, such as the routing biases of DeepSeek-V3, become frozen parameters; other buffers are
constants.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from multipack.data.packs.batch import PackedBatch, check_tokens
from multipack.machine import import_extra
from multipack.ops.attention.foreign_attention import register
from multipack.ops.attention.model_inputs import check_rotations, model_inputs
from multipack.shapes import SIZES, ModelShape, RotationLimit, rotation_limit
from multipack.shapes.config_json import check_sizes
from multipack.shapes.json_values import read_json
from multipack.untrusted import config_from_folder, foreign_errors, from_folder, reason_of

MXFP4 = "mxfp4"
"""The quantization of gpt-oss, which transformers can undo."""
LANGUAGE = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}
"""Beginnings of tensors' names in a model with images, in newer and in older files → in its language model."""
PREFIX = "hf:"
"""Prefix of `model=hf:FOLDER`."""
FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Setting of a configuration that multiplies (1) or divides (-1) the logits."""
# Settings of models without a table of learned positions.
_ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct", "alibi")


def read_config(folder: str) -> Any:
    """The configuration of the language model in a folder; of a model with images, of its part for text.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no causal language model for it, its weights are quantized otherwise than in
            MXFP4, it needs code, or the file is damaged.
    """
    with _errors(folder):
        whole = _saved_config(folder)
        quantized, config = getattr(whole, "quantization_config", None), whole.get_text_config()
        if type(config) not in _library(folder).AutoModelForCausalLM._model_mapping:
            raise ValueError(f"transformers has no causal language model of model_type={config.model_type!r}")
        given = quantized if isinstance(quantized, dict) else getattr(quantized, "__dict__", {})
        if quantized and given.get("quant_method") != MXFP4:
            raise ValueError(
                f"quantization_config={quantized!r:.60} is not supported; save a copy with weights in bf16"
            )
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # weights in MXFP4 are read as they are computed with, in bf16
    return config


def _errors(folder: str) -> AbstractContextManager[None]:
    """Context in which errors of any kind name the model of a folder."""
    return foreign_errors(f"model={PREFIX}{folder}: config.json")


def _saved_config(folder: str) -> Any:
    """The configuration in a folder, also of a model with images."""
    file = Path(folder).expanduser() / "config.json"
    if not file.is_file():
        raise ValueError("there is no such file")
    check_sizes(read_json(file))  # transformers makes a list with an entry for each layer
    return config_from_folder(_library(folder), folder, local_files_only=True)


def _new_model(shape: ModelShape, **options: Any) -> Any:
    """A model of the configuration and the vocabulary of a shape, with new weights."""
    folder, config = shape.architecture, read_config(shape.architecture)
    config.vocab_size = shape.vocabulary_size
    with _errors(folder):
        return _library(folder).AutoModelForCausalLM.from_config(config, **options)


def foreign_settings(folder: str) -> dict[str, Any]:
    """The content of a config.json of the language model in a folder, as `save_foreign` writes it."""
    config = read_config(folder)
    kind = _library(folder).AutoModelForCausalLM._model_mapping[type(config)]
    return {**config.to_dict(), "architectures": [kind.__name__]}


def foreign_shape(folder: str) -> ModelShape:
    """The shape of the model in a folder: numbers for cost, memory and reports, and `architecture`.

    Models whose cost is not known count as dense decoders of their width, with sizes of one where their configuration
    states none.

    Raises:
        ImportError, ValueError: see `read_config`.
    """
    config = read_config(folder)
    with _errors(folder):
        values = config.to_dict()
        known: dict[str, Any]
        try:
            known = ModelShape.from_huggingface(values).to_dict()
        except (ValueError, ArithmeticError):
            stated = {
                field: [value for name in names if isinstance(value := getattr(config, name, None), int)]
                for field, names in SIZES.items()
            }
            known = {field: each[0] if each else 0 for field, each in stated.items()}
            heads, width = known["heads"] or 1, known["d_model"]
            known["heads"] = heads if width % (2 * heads) == 0 else 1
            known["d_ff"] = known["d_ff"] or 4 * width
            known["context"] = known["context"] or 1 << 20
        known |= {"architecture": folder, "family": "", "unsupported": "", "dropout": 0.0}
        known["tied"] = bool(getattr(config, "tie_word_embeddings", False))
        known["logit_cap"] = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        known["positions"] = "rope" if any(values.get(name) for name in _ROTARY) else "learned"
        return ModelShape(**known)


def build_body(decoder: nn.Module, shape: ModelShape) -> dict[str, str]:
    """Build the model of `shape.architecture` and move its modules into a decoder; parameters are on the meta device.

    The decoder also gets `logit_factor`, the product of `FACTORS`, and `rotation_limit`.

    Returns:
        Name of a parameter in the decoder → its name in the model of transformers.

    Raises:
        ValueError: it has its own attention code, no list of blocks, or no head that is a matrix.
    """
    with torch.device("cpu"), _parameters_on_meta():
        whole = _new_model(shape)
        _freeze_buffers(whole)
    try:
        register(whole)
    except ValueError as error:
        raise ValueError(
            f"model={PREFIX}{shape.architecture}: {type(whole).__name__} has an attention of its own, which takes no"
            " bounds of documents"
        ) from error
    names = {id(each): name for name, each in whole.named_parameters()}
    base, head, embedding = whole.base_model, whole.get_output_embeddings(), whole.get_input_embeddings()
    blocks = next((each for each in base.modules() if _is_blocks(each, whole.config.num_hidden_layers)), None)
    if (
        base is whole
        or blocks is None
        or not (isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding))
    ):
        raise ValueError(
            f"model={PREFIX}{shape.architecture}: {type(whole).__name__} has no list of blocks between an embedding and"
            " a linear head"
        )
    for module in base.modules():
        for name, child in list(module._modules.items()):
            if child is blocks or child is embedding:
                del module._modules[name]
                # The model's code finds them as attributes, but a module here would be a second owner of parameters,
                # which FSDP would shard and checkpoints save twice.
                module.__dict__[name] = child
    decoder.embedding, decoder.blocks, decoder.model = embedding, blocks, base
    if head.weight is not embedding.weight:
        decoder.head = head
    factors = (float(getattr(whole.config, name, None) or 1.0) ** power for name, power in FACTORS.items())
    decoder.__dict__["logit_factor"] = math.prod(factors)
    decoder.__dict__["rotation_limit"] = rotation_limit(whole.config)
    return {name: names[id(each)] for name, each in decoder.named_parameters()}


def _is_blocks(module: nn.Module, layers: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == layers


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which parameters of this thread's new modules are on the meta device; buffers have their values."""
    thread = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _freeze_buffers(model: nn.Module) -> None:
    """Turn buffers that files hold into frozen parameters, in place."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            saved = name not in module._non_persistent_buffers_set
            if buffer is not None and saved and buffer.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def body_hidden(decoder: Any, batch: PackedBatch) -> Tensor:
    """(T, d) inputs of the head, times the factor of the logits.

    For a head with a bias they are (T, d + 1): a column of ones (times the factor), which multiplies the bias, the last
    column of `Decoder.output_weight`. So losses know matrices only.
    """
    if batch.input_ids.device.type == "cpu":
        check_tokens(batch.input_ids, decoder.shape.vocabulary_size)
    if decoder.rotation_limit is not None:
        batch = _rotated_alike(batch, decoder.rotation_limit, decoder.shape.architecture)
    given = model_inputs(batch)
    takes = _arguments(decoder.model.__class__)
    if takes is not None:
        given = {name: value for name, value in given.items() if name in takes}
    x: Tensor = decoder.model(**given)[0][0] * decoder.logit_factor
    if getattr(getattr(decoder, "head", None), "bias", None) is None:
        return x
    return torch.cat([x, x.new_full((len(x), 1), decoder.logit_factor)], 1)


def check_documents(
    lengths: Sequence[int] | NDArray[np.int64], limit: RotationLimit | None, folder: str
) -> None:
    """Check that the model in a folder rotates no document of these lengths by the length of another one.

    Raises:
        ValueError: it does.
    """
    if limit is not None:
        instead = f"use plan.capacity={limit.tokens} with data.overlong=split or truncate"
        check_rotations(limit, np.asarray(lengths), f"model={PREFIX}{folder}", instead)


def _rotated_alike(batch: PackedBatch, limit: RotationLimit, folder: str) -> PackedBatch:
    """The pack with its padding in pieces of at most `limit`: a longer one would rotate all documents.

    Raises:
        ValueError: a document is longer than the limit; or padding is, in a pack that shares tokens.
    """
    if batch.longest > limit.tokens:
        lengths = batch.lengths[: batch.num_documents] if batch.tree is None else batch.tree.lengths_k
        check_documents(lengths, limit, folder)
    if max(batch.lengths) <= limit.tokens:
        return batch
    if batch.tree is not None:
        raise ValueError(f"model={PREFIX}{folder}: {limit}, and padding is one: use data.share_prefixes=off")
    *documents, padding = batch.lengths
    pieces = [*documents, *(min(limit.tokens, padding - at) for at in range(0, padding, limit.tokens))]
    bounds = torch.tensor([0, *accumulate(pieces)], dtype=torch.int32).to(batch.cu_seqlens.device)
    positions = batch.position_ids % limit.tokens
    return replace(batch, lengths=tuple(pieces), cu_seqlens=bounds, position_ids=positions)


@cache
def _arguments(kind: Any) -> frozenset[str] | None:
    """Names of the arguments of a model's forward pass; None = any."""
    found = inspect.signature(kind.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values())
    return None if takes_any else frozenset(found)


def open_foreign(shape: ModelShape, seed: int | None = None) -> Callable[[str], Tensor]:
    """A function that reads a parameter of the model of `shape.architecture`, in float32.

    transformers reads all weights at the first call, in the dtype of the files.

    Args:
        shape: of the model.
        seed: of random weights, for a folder without weights; None = the folder's weights.

    Raises:
        ValueError: from the function: the weights cannot be read, or some are missing.
    """
    names, folder = foreign_names(shape), shape.architecture

    @cache
    def state() -> dict[str, Tensor]:
        library = _library(folder)
        if seed is not None:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(seed)
                return dict(_new_model(shape).state_dict())
        given = _saved_config(folder)
        more: dict[str, Any] = {"config": given}
        if given.get_text_config() is not given:
            more = {"config": read_config(folder), "key_mapping": LANGUAGE}
        elif getattr(given, "quantization_config", None):
            more |= {"quantization_config": library.Mxfp4Config(dequantize=True)}
        try:
            model, report = from_folder(
                library.AutoModelForCausalLM,
                folder,
                **more,
                local_files_only=True,
                use_safetensors=True,
                dtype="auto",
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"{folder}: the weights cannot be read ({reason_of(error)})") from error
        if missing := sorted({*report["missing_keys"], *report["mismatched_keys"]}, key=str):
            raise ValueError(f"{folder}: the weights lack {missing[0]} ({len(missing)} in all)")
        return dict(model.state_dict())

    def read(name: str) -> Tensor:
        with torch.device("cpu"):
            return state()[names[name]].to(torch.float32)

    return read


def foreign_names(shape: ModelShape) -> dict[str, str]:
    """Name of a parameter in the decoder → its name in the model of transformers."""
    return build_body(nn.Module(), shape)


def save_foreign(shape: ModelShape, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Write a model as transformers saves it: config.json, and weights in one or several files.

    Args:
        shape: of the model.
        tensors: by transformers' names. Routing biases and the like, which are buffers there, keep their dtype.
        folder: to write to.
        dtype: of the parameters.
    """
    with torch.device("meta"):
        whole = _new_model(shape, dtype=dtype)
    parameters = {name for name, _ in whole.named_parameters()}
    values = {name: each.to(dtype) if name in parameters else each for name, each in tensors.items()}
    whole.load_state_dict(values, strict=False, assign=True)
    whole.tie_weights()
    whole.save_pretrained(folder)


def _library(folder: str) -> Any:
    library = import_extra("transformers", f"model={PREFIX}{folder}", "transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library
