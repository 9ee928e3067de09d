"""Text from a trained run."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf

from multipack.data.tokenizer import Tokenizer
from multipack.models.decoder import Decoder
from multipack.models.generate import generate
from multipack.run import find_run
from multipack.shapes import ModelShape
from multipack.training.checkpoint import load_checkpoint


def load_run(path: Path) -> tuple[Decoder, Tokenizer]:
    """The model and tokenizer of a run's latest checkpoint, or of the checkpoint that `path` names.

    Raises:
        FileNotFoundError: there is no run or no complete checkpoint at `path`.
        ValueError: the checkpoint's files do not fit together.
    """
    run, named = find_run(path)
    checkpoint = load_checkpoint(named or run.latest_checkpoint())
    config = OmegaConf.load(checkpoint.path / "config.yaml").model
    values = {str(name): value for name, value in config.items()}
    attention = values.pop("attention")
    # Nothing is allocated before the weights on disk are known to have the sizes that the configuration claims.
    with torch.device("meta"):
        model = Decoder(ModelShape(**values), attention=attention)
    weights = checkpoint.tensors["model"]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if shapes != {name: weight.shape for name, weight in weights.items()}:
        raise ValueError(f"{checkpoint.path} does not hold the weights of its own config.yaml")
    model.load_state_dict(weights, assign=True)
    return model.eval(), Tokenizer.load(checkpoint.path / "tokenizer.json")


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
        vocabulary_size=tokenizer.vocabulary_size,
    )
    return tokenizer.decode(new)
