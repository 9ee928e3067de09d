"""The run header: what anyone would ask of a log a month later."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import numpy as np
import torch

import multipack
from multipack.ops.attention import select
from multipack.parallel.world import hosts
from multipack.training.calibrate import cost_rows
from multipack.training.optimizer import described, optimizer_text
from multipack.training.precision import DTYPES
from multipack.training.schedule import schedule_text

if TYPE_CHECKING:
    from multipack.training.session import Session


def header_rows(session: Session) -> list[tuple[str, str]]:
    """The run header: what anyone would ask of a log a month later."""
    world, config, shape = session.world, session.config, session.shape
    parameters = described(session.engine.shapes)
    threads = torch.get_num_threads()
    cpu = f"{threads} thread{'s' if threads > 1 else ''}"
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else cpu
    family = "Llama" if shape.positions == "rope" else "GPT-2"
    return [
        ("device", f"{world.device} ({name})"),
        ("backend", f"{world.backend}, attention {_attention_row(session)}"),
        ("world size", f"{world.size} process{'es' if world.size > 1 else ''}"),
        ("parallel", config.parallel.text(world.size)),
        ("hosts", ", ".join(hosts(world))),
        ("launcher", f"{world.launcher}: {world.command}"),
        (
            "versions",
            f"multipack {multipack.__version__}, Python {platform.python_version()}, torch {torch.__version__},"
            f" numpy {np.__version__}",
        ),
        (
            "model",
            f"{family} style, {shape.layers} layers, width {shape.d_model}, {shape.heads} heads"
            f" ({shape.kv_heads} kv), feed-forward {shape.d_ff}, vocabulary {shape.vocabulary_size:,}",
        ),
        (
            "parameters",
            f"{sum(parameter.numel() for parameter in parameters.values()):,} ({config.train.dtype})",
        ),
        ("optimizer", optimizer_text(parameters, config.optimizer)),
        ("learning rate", schedule_text(config.optimizer, session.steps, session.targets_per_step)),
        *cost_rows(session.cost_model),
        ("seed", str(config.train.seed)),
        ("corpus", session.corpus.description),
        ("corpus hash", session.corpus.corpus_hash[:16]),
        (
            "tokenizer",
            f"{session.corpus.tokenizer.vocabulary_size:,} tokens, hash {session.corpus.tokenizer.hash[:16]}",
        ),
        ("run directory", str(session.run.path)),
    ]


def _attention_row(session: Session) -> str:
    """The attention backend in effect, `auto` resolved."""
    parallel = session.config.parallel
    if parallel.context > 1 and parallel.context_method == "ring":
        return "ring"
    shape, device = session.shape, session.world.device
    dtype = DTYPES[session.config.train.dtype]
    q = torch.empty(1, shape.heads, shape.head_width, device=device, dtype=dtype, requires_grad=True)
    kv = torch.empty(1, shape.kv_heads, shape.head_width, device=device, dtype=dtype)
    return select(session.config.model.attention, q, kv, kv, shape.window or None).name
