"""Text from a trained run."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from multipack.data.tokenizer import Tokenizer
from multipack.models.decoder import Decoder
from multipack.models.generate import generate
from multipack.run import find_run
from multipack.shapes import ModelShape


def load_run(path: Path) -> tuple[Decoder, Tokenizer]:
    """The model and tokenizer of a run's latest checkpoint, or of the checkpoint that `path` names.

    Raises:
        FileNotFoundError: there is no run or no complete checkpoint at `path`.
        ValueError: the checkpoint's files do not fit together.
    """
    run, named = find_run(path)
    checkpoint = named or run.latest_checkpoint()
    from omegaconf import OmegaConf

    model_config = dict(OmegaConf.load(checkpoint / "config.yaml").model)
    attention = model_config.pop("attention")
    model = Decoder(ModelShape(**model_config), attention=attention)
    weights = load_file(checkpoint / "model.safetensors")
    model.load_state_dict(weights, strict=False)
    missing = {name for name, _ in model.named_parameters()} - weights.keys()
    if missing or len(weights) != len(list(model.named_parameters())):
        raise ValueError(f"{checkpoint} does not hold the weights of its own config.yaml")
    return model.eval(), Tokenizer.load(checkpoint / "tokenizer.json")


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> str:
    """What a model writes after `prompt`; its random numbers are its own, so a run's stay untouched.

    Raises:
        ValueError: the prompt has no tokens, or characters that the tokenizer does not know.
    """
    prompt_ids = tokenizer.encode(prompt)
    if not prompt_ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens; give some text to go on from")
    new = generate(
        model,
        prompt_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        end_id=tokenizer.end_id,
        generator=torch.Generator().manual_seed(seed),
    )
    return tokenizer.decode(new)
