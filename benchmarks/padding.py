"""What padding costs: packed and padded training steps on the same documents, alternating in one process.

    python benchmarks/padding.py --steps 10

Both ways train the same decoder on the documents of the same global steps: forward, backward, clipping and optimizer
with learning rate 0. Padded batches are 8 random documents of the step, padded to their longest. The ratio
is that of real tokens per second over all steps, packed over padded; the pad factor (slots over real tokens) is what
equal cost per slot would give, and so the limit for everything but attention. Optimizer, clipping and the loss of
targets cost the same both ways, and lower it.

Two padded trainers are timed: one with this project's loss, which never projects a slot without a target, and one that
projects every slot onto the vocabulary, as padded trainers do.

Documents are the embedded corpus; results go to results/padding.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from multipack.ops.loss import linear_cross_entropy
from multipack.parallel.joining import choose_device
from multipack.parallel.world import World
from multipack.reports.console import Console
from multipack.training.assemble import assemble
from multipack.training.compare import Comparison, compare_with_padding
from multipack.training.run_config import compose
from multipack.training.trainer import Trainer
from result import parser_of, write_result

BATCH_SIZE = 8


def every_slot(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
    """The loss as a padded trainer computes it: logits for every slot, −100 ignored afterwards."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=-100, reduction="sum")


def measure(words: list[str], options: argparse.Namespace) -> dict[str, Comparison]:
    """Compare under one configuration, with either padded loss."""
    with tempfile.TemporaryDirectory() as folder:
        config = compose([*words, "train.eval_every=0", f"out={folder}/run"])
        world = World(device=choose_device(config.train.device, 0))
        trainer = Trainer(assemble(config, world, Console(), time.perf_counter), Console())
        found = {
            name: compare_with_padding(
                trainer.engine,
                trainer.corpus.train,
                trainer.feed.plan,
                batch_size=BATCH_SIZE,
                steps=options.steps,
                seconds=120.0,
                padded_loss=loss,
            )
            for name, loss in (("same loss", linear_cross_entropy), ("every slot", every_slot))
        }
        trainer.close()
    return found


def main() -> None:
    parser = parser_of(__doc__, "padding")
    parser.add_argument("--steps", type=int, default=10, help="pairs of steps, after one that is not timed")
    parser.add_argument("words", nargs="*", help="more settings, e.g. plan.capacity=8192 model=small")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        f"{'dtype':6}{'packed':>14}{'padded':>14}{'loss of the padded':>22}{'ratio':>9}{'factor':>9}{'share':>9}"
    )
    for dtype in ("auto", "fp32"):
        for name, found in measure([*options.words, f"train.dtype={dtype}"], options).items():
            share = found.ratio / found.pad_factor
            print(
                f"{dtype:6}{found.packed_tokens_per_second:>8,.0f} tok/s{found.padded_tokens_per_second:>8,.0f} tok/s"
                f"{name:>22}{found.ratio:>8.2f}x{found.pad_factor:>9.2f}{share:>9.1%}",
                flush=True,
            )
            rows.append(
                {"dtype": dtype, "padded_loss": name, "ratio_over_pad_factor": share, **asdict(found)}
            )
    write_result(options.out, {"rows": rows, "words": options.words})


if __name__ == "__main__":
    main()
