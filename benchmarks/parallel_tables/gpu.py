"""On a GPU: what share of its peak a run reaches, beside a plain loop on it, and whether attention's kernels agree."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from multipack.data.tokenizer import byte_tokenizer
from multipack.data.writer import StoreWriter
from multipack.planning.cost import CostModel
from multipack.run import RunDirectory
from multipack.shapes import PLANNING_ONLY, SHAPES, ModelShape
from multipack.training.peak import matmul_peak
from multipack.training.run_config import compose
from multipack.training.trainer import train
from planning_tables.table import Table
from wordplay import PlainModel, synchronize

ABSENT = "left out: torch sees no GPU here"
ATTENTION = Path(__file__).parents[1] / "attention.py"
LETTERS = 257
"""Tokens of the byte tokenizer, which random documents are made of: their text does not matter to speed."""


@dataclass(frozen=True)
class Setting:
    """What all contenders train.

    Attributes:
        shape: of the decoder, GPT-2's kind.
        batch: blocks of a plain step; a pack has as many slots.
        steps: of a run; the last half is timed.
        device, dtype, compiled: of all.
    """

    shape: ModelShape
    batch: int
    steps: int
    device: torch.device
    dtype: torch.dtype
    compiled: bool

    @property
    def slots(self) -> int:
        """Of a pack."""
        return self.batch * self.shape.context


def table(quick: bool) -> Table:
    """MFU and tokens per second of the gpt2 preset, by this trainer and by a plain loop."""
    made = Table(
        "gpu",
        "the preset gpt2 (12 layers, width 768, context 1,024) in packs, bf16, compiled, beside a plain loop",
        {
            "way": "",
            "tokens a step": ",.0f",
            "seconds a step": ".4f",
            "tokens / s": ",.0f",
            "MFU": ".1%",
            "over plain": ".3f",
        },
    )
    if not torch.cuda.is_available():
        made.notes.append(ABSENT)
        return made
    shape = SHAPES["gpt2"].with_vocabulary(50_304)
    device = torch.device("cuda")
    setting = Setting(shape, 16, 40 if quick else 100, device, torch.bfloat16, True)
    add_rows(made, setting, rounds=1 if quick else 3)
    made.notes.append(
        f"{torch.cuda.get_device_name(device)}; plain: blocks of 1,024 tokens in (batch, block) tensors, the whole"
        " model compiled; ours: the trainer, the same blocks as documents, and lognormal documents; rounds alternate"
    )
    return made


def add_rows(made: Table, setting: Setting, rounds: int) -> None:
    """A row for each way: the median over rounds of each one's median step."""
    context = setting.shape.context
    blocks = [context] * (setting.batch * 8)
    drawn = np.random.default_rng(0).lognormal(np.log(context / 4), 0.8, setting.batch * 64)
    documents = drawn.clip(2, context).astype(np.int64).tolist()
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        for name, run in (
            ("plain loop", lambda: plain(setting)),
            ("ours, blocks", lambda: ours(setting, blocks)),
            ("ours, documents", lambda: ours(setting, documents)),
        ):
            found.setdefault(name, []).append(run())
    rates = {name: median(tokens / seconds for tokens, seconds, _ in each) for name, each in found.items()}
    for name, each in found.items():
        tokens, seconds, mfu = (median(column) for column in zip(*each, strict=True))
        made.row(name, tokens, seconds, rates[name], mfu, rates[name] / rates["plain loop"])


def plain(setting: Setting) -> tuple[float, float, float]:
    """The loop that people write first, as in wordplay.py: tokens and seconds of a step, MFU."""
    shape, device = setting.shape, setting.device
    torch.manual_seed(0)
    model: Any = PlainModel(
        shape.layers, shape.d_model, shape.heads, shape.context, shape.vocabulary_size
    ).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    run = torch.compile(model) if setting.compiled else model
    seconds = []
    for _ in range(setting.steps):
        rows = torch.randint(LETTERS, (setting.batch, shape.context + 1), device=device)
        synchronize(device)
        began = time.perf_counter()
        exact = setting.dtype == torch.float32
        with nullcontext() if exact else torch.autocast(device.type, setting.dtype):
            loss = run(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    step = median(seconds[setting.steps // 2 :])
    flops = CostModel.from_shape(shape).flops([shape.context] * setting.batch)
    return float(setting.slots), step, flops / step / matmul_peak(device, setting.dtype)


def ours(setting: Setting, lengths: list[int]) -> tuple[float, float, float]:
    """A whole run of the trainer on documents of these lengths: the same, as it logs it."""
    with tempfile.TemporaryDirectory() as folder:
        draw = np.random.default_rng(0)
        with StoreWriter(Path(folder) / "store", byte_tokenizer()) as writer:
            for number, length in enumerate(lengths):
                writer.add(str(number), [(draw.integers(0, LETTERS, length).tolist(), True)])
        with contextlib.redirect_stdout(io.StringIO()):
            train(compose([*_words(setting), f"data.path={folder}/store", f"out={folder}/run"]))
        records = [each for each in RunDirectory.at(f"{folder}/run").records() if "dt" in each]
    timed = records[len(records) // 2 :]
    step = median(each["dt"] for each in timed)
    return (
        median(each["tps"] * each["dt"] for each in timed),
        step,
        median(each["mfu"] for each in timed) / 100,
    )


def _words(setting: Setting) -> Iterator[str]:
    yield from ("data=store", "data.validation=0", "train.eval_every=0", "train.compare_padding=false")
    yield from ("log.every=0", "train.sample_tokens=1", "train.fixed_shape=true", "plan.packs_per_step=1")
    yield f"plan.capacity={setting.slots}"
    yield f"train.steps={setting.steps}"
    yield f"train.device={setting.device.type}"
    yield f"train.dtype={'fp32' if setting.dtype == torch.float32 else 'bf16'}"
    yield f"train.compile={str(setting.compiled).lower()}"
    for name, value in setting.shape.to_dict().items():
        if name not in PLANNING_ONLY:
            yield f"model.{name}={str(value).lower() if isinstance(value, bool) else value}"


def kernels(quick: bool) -> Table:
    """Every attention kernel of this GPU by attention.py: whether results agree to bf16's rounding."""
    made = Table(
        "kernels",
        "attention over 88 documents in 32,768 tokens, 32 query and 8 key heads, bf16 (benchmarks/attention.py)",
        {"kernel": "", "ms forward and backward": ".2f", "largest difference": ".2g"},
    )
    if not torch.cuda.is_available():
        made.notes.append(ABSENT)
        return made
    most = add_kernels(
        made,
        "--device cuda --dtype bfloat16 --tokens 32768 --documents 88 --heads 32 --kv-heads 8 --without dense",
    )
    # Values reach 4 … 8, where neighbors in bf16 are 1/32 apart: two rounded results differ by up to two of these.
    made.at_most("kernels: largest difference from the loop", most, 1 / 16, ".2g")
    return made


def add_kernels(made: Table, options: str) -> float:
    """A row for each kernel, from attention.py with these options; the largest difference of all."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "attention.json"
        subprocess.run([sys.executable, str(ATTENTION), *options.split(), "--out", str(out)], check=True)
        result = json.loads(out.read_text(encoding="utf-8"))
    differences: dict[str, float] = result["largest_difference"]
    for name, both in result["forward_backward"].items():
        made.row(name, 1e3 * both["median_seconds"], differences.get(name))
    return max(differences.values())
