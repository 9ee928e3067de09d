"""wordplay's run: a character-level GPT on Shakespeare, by this trainer and by a plain loop on the same device.

    python benchmarks/wordplay.py --path tinyshakespeare.txt            # on a GPU the talk's size, on a CPU a small one
    python benchmarks/wordplay.py --path tinyshakespeare.txt --layers 6 --width 384 --heads 6 --block 256

The plain loop is what people write first: blocks drawn at random places, a (batch, block) tensor, causal attention,
the loss over all logits, AdamW. Both train a decoder of GPT-2's kind of the same size in the same precision; rounds
alternate and the median step counts. The talk "Parallel Training Methods" reports a validation loss of 1.71 after 300
steps and 46 % MFU on an A100 for 12 layers, 768 wide, 64 blocks of 1,024 characters.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multipack.planning.cost import CostModel
from multipack.shapes import ModelShape
from multipack.training.precision import DTYPES, matmul_peak, resolve_dtype
from plain_loop import Sizes, rows_of, train_plainly, wait
from result import device_name, parser_of, records_of, write_result

SIZE = {"layers": (12, 4), "width": (768, 128), "heads": (12, 4), "block": (1024, 128), "batch": (64, 16)}
DEFAULTS = {**SIZE, "steps": (300, 100), "warmup": (100, 20), "lr": (6e-4, 3e-3)}
"""Option → its value on a GPU and on a CPU."""


def plain(text: str, options: argparse.Namespace, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The plain loop: seconds of each step, and the validation loss at the end."""
    letters = sorted(set(text))
    ids = np.array([letters.index(letter) for letter in text])
    border = int(len(ids) * 0.9)
    sizes = Sizes(
        layers=options.layers,
        heads=options.heads,
        width=options.width,
        vocabulary=len(letters),
        row=options.block,
        rows=options.batch,
        micro_batches=1,
    )

    def rate(step: int) -> float:
        return options.lr * min((step + 1) / options.warmup, 1.0)

    training = train_plainly(ids[:border], sizes, device, dtype, rate, options.compile)
    seconds = []
    for _ in range(options.steps):
        began = wait(device)
        model = next(training)
        seconds.append(wait(device) - began)
    draw = np.random.default_rng(1)
    with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype != torch.float32):
        losses = [float(model(*rows_of(ids[border:], sizes, device, draw))) for _ in range(8)]
    return {"seconds": seconds, "val_loss": statistics.mean(losses)}


def shape_of(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of the decoder; the vocabulary comes from the text."""
    width = options.width
    size = {"layers": options.layers, "heads": options.heads, "d_model": width, "d_ff": 4 * width}
    kind = {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
    return {**size, **kind, "context": options.block}


def ours(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """This trainer on the same text: seconds of each step, validation curve, MFU."""
    settings = {
        "data": "shakespeare_char",
        "data.path": path,
        "data.block_size": options.block,
        **{f"model.{name}": str(value).lower() for name, value in shape_of(options).items()},
        "plan.capacity": options.batch * options.block,
        "plan.packs_per_step": 1,
        "train.fixed_shape": "true",
        "train.steps": options.steps,
        "train.eval_every": max(options.steps // 3, 1),
        "optimizer.lr": options.lr,
        "optimizer.warmup_steps": options.warmup,
        "optimizer.schedule": "constant",
        "train.dtype": options.dtype,
        "train.compile": str(options.compile).lower(),
        "train.eval_packs": 8,
        "train.sample_tokens": 1,
    }
    records = records_of([f"{name}={value}" for name, value in settings.items()])
    steps = [record for record in records if "dt" in record]
    curve = {record["step"]: record["val_loss"] for record in records if "val_loss" in record}
    return {"seconds": [record["dt"] for record in steps], "curve": curve}


def main() -> None:
    parser = parser_of(__doc__, "wordplay")
    cuda = torch.cuda.is_available()
    parser.add_argument("--path", type=Path, required=True, help="the text")
    for name, (on_gpu, on_cpu) in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(on_gpu), default=on_gpu if cuda else on_cpu)
    parser.add_argument("--dtype", default="auto", help="auto, fp32, bf16")
    parser.add_argument("--compile", action="store_true", help="torch.compile for both")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, in alternation")
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = resolve_dtype(options.dtype, device)
    options.dtype = next(name for name, value in DTYPES.items() if value == dtype)
    text = options.path.read_text(encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "ours": []}
    for _ in range(options.rounds):
        found["plain"].append(plain(text, options, device.type, dtype))
        found["ours"].append(ours(options.path, options))
    tokens = options.batch * options.block
    shape = ModelShape(**shape_of(options), vocabulary_size=65)
    flops = CostModel.from_shape(shape).flops([options.block] * options.batch)
    peak = matmul_peak(device, dtype)
    figures: dict[str, Any] = {"seconds_per_step": {}, "tokens_per_second": {}, "mfu": {}}
    for name, runs in found.items():
        seconds = min(statistics.median(run["seconds"][3:]) for run in runs)
        values = (seconds, tokens / seconds, flops / seconds / peak)
        for figure, value in zip(figures.values(), values, strict=True):
            figure[name] = value
        print(f"{name:6} {values[0]:.4f} s a step, {values[1]:,.0f} tokens/s, MFU {values[2]:.1%}")
    speed = figures["tokens_per_second"]
    figures["ours_over_plain"] = speed["ours"] / speed["plain"]
    figures["validation"] = {"ours": found["ours"][-1]["curve"], "plain": found["plain"][-1]["val_loss"]}
    print(
        f"ours over plain: {figures['ours_over_plain']:.2f} x tokens/s; validation loss {figures['validation']}"
    )
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("out", "path")}
    write_result(options.out, {"device": device_name(device.type), "settings": settings, **figures})


if __name__ == "__main__":
    main()
