"""What padding costs: packed and padded training steps on the same documents, alternating in one process.

    python benchmarks/padding.py --steps 10
    python benchmarks/padding.py --pairs ../shared/data/text/dpo_en_demo_300.json.gz

Both ways train the same decoder on the documents of the same global steps: forward, backward, clipping and optimizer
with learning rate 0. Padded batches are `--batch-size` random documents of the step, padded to their longest. The ratio
is that of real tokens per second over all steps, packed over padded; the pad factor (slots over real tokens) is what
equal cost per slot would give, and so the limit for everything but attention. Optimizer, clipping and the loss of
targets cost the same both ways, and lower it.

Two padded trainers are timed: one with this project's loss, which never projects a slot without a target, and one that
projects every slot onto the vocabulary, as padded trainers do.

Documents are the embedded corpus; results go to results/padding.json. With --pairs they are preference pairs, trained
by DPO: both ways use the same reference values, a padded batch holds random pairs with all answers padded to the
longest, as TRL's collator makes it, and packs hold the longest pair. The steps are those of one epoch of the smallest
preset, which takes minutes on one core; results go to results/preferences.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from multipack.data.packs.collate import PackedCollator, PreferenceBatch, PreferenceCollator, PreferencePair
from multipack.ops.loss import linear_cross_entropy
from multipack.parallel.joining import choose_device
from multipack.parallel.world import World
from multipack.reports.console import Console
from multipack.training.assemble import assemble
from multipack.training.compare import Comparison, compare_with_padding, timed_step
from multipack.training.run_config import compose
from multipack.training.trainer import Trainer
from result import RESULTS, parser_of, write_result

PAIRS = ["data=jsonl", "data.overlong=drop", "data.validation=0", "model=tiny", "plan.capacity=16384"]
"""Settings of a run on preference pairs."""


def every_slot(hidden: Tensor, weight: Tensor, targets: Tensor, num_targets: int | None = None) -> Tensor:
    """The loss as a padded trainer computes it: logits for every slot, −100 ignored afterwards."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=-100, reduction="sum")


def every_probability(
    hidden: Tensor, weight: Tensor, targets: Tensor, num_targets: int | None = None
) -> Tensor:
    """Log-probabilities of targets from logits of every slot, as padded trainers compute them."""
    logits = F.linear(hidden, weight).float()
    return -F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")


def pad(pairs: Sequence[PreferencePair]) -> PreferenceBatch:
    """The answers of pairs, each padded to the longest of them."""
    width = max(len(answer.tokens) for pair in pairs for answer in (pair.first, pair.second))
    return PreferenceCollator(PackedCollator(2 * len(pairs), width, align=width))(pairs)


def compare_pairs(
    trainer: Trainer, size: int, clock: Callable[[], float], loss: Callable[..., Tensor] | None
) -> Comparison:
    """`compare_with_padding` for preference pairs; `loss` replaces that of padded steps."""
    plan, model = trainer.feed.plan, trainer.engine.model
    assert plan is not None
    pairs, collate, own = trainer.feed.loader.documents, PreferenceCollator.of(plan), model.log_probabilities
    found = np.zeros(4)  # seconds packed and padded, tokens, slots
    for index in range(plan.num_steps + 1):
        step = max(index - 1, 0)
        numbers = np.random.default_rng(step).permutation(plan.documents(step))
        packed = [collate([pairs[int(n)] for n in pack]) for pack in plan.packs(step)]
        padded = [
            pad([pairs[int(n)] for n in numbers[at : at + size]]) for at in range(0, len(numbers), size)
        ]
        packed_seconds = timed_step(trainer.engine, packed, clock)
        model.log_probabilities = loss or own
        padded_seconds = timed_step(trainer.engine, padded, clock)
        model.log_probabilities = own
        sizes = [sum(getattr(batch, each) for batch in padded) for each in ("num_tokens", "num_slots")]
        found += [packed_seconds, padded_seconds, *sizes] if index else 0.0  # the first one warms up
    packed_total, padded_total, tokens, slots = found.tolist()
    rates = tokens / packed_total, tokens / padded_total
    return Comparison(padded_total / packed_total, *rates, slots / tokens, plan.num_steps, size)


def measure(words: list[str], options: argparse.Namespace) -> dict[str, Comparison]:
    """Compare under one configuration, with either padded loss."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        config = compose([*words, "train.eval_every=0", f"out={folder}/run"])
        world = World(device=choose_device(config.train.device, 0))
        trainer = Trainer(assemble(config, world, Console(), time.perf_counter), Console())
        if options.pairs:
            losses = {"same loss": None, "every slot": every_probability}
            found = {
                name: compare_pairs(trainer, options.batch_size, clock, loss) for name, loss in losses.items()
            }
        else:
            found = {
                name: compare_with_padding(
                    trainer.engine,
                    trainer.corpus.train,
                    trainer.feed.plan,
                    batch_size=options.batch_size,
                    steps=options.steps,
                    seconds=options.seconds,
                    padded_loss=loss,
                    clock=clock,
                )
                for name, loss in (("same loss", linear_cross_entropy), ("every slot", every_slot))
            }
        trainer.close()
    return found


def main() -> None:
    parser = parser_of(__doc__, "padding")
    parser.set_defaults(out=None)
    parser.add_argument("--pairs", help="records with chosen and rejected, instead of the embedded corpus")
    parser.add_argument("--steps", type=int, default=10, help="pairs of steps, after one that is not timed")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no further pair after this")
    parser.add_argument("--batch-size", type=int, default=8, help="documents or pairs in a padded batch")
    parser.add_argument(
        "--dtype", nargs="+", help="precisions: auto, bf16, fp32; auto and fp32, or fp32 of pairs"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of all threads, on a busy machine"
    )
    parser.add_argument("words", nargs="*", help="more settings, e.g. plan.capacity=8192 model=small")
    options = parser.parse_args()
    base = [*PAIRS, f"data.path={options.pairs}"] if options.pairs else []
    rows: list[dict[str, Any]] = []
    print(
        f"{'dtype':6}{'packed':>14}{'padded':>14}{'loss of the padded':>22}{'ratio':>9}{'factor':>9}{'share':>9}"
    )
    for dtype in options.dtype or (["fp32"] if options.pairs else ["auto", "fp32"]):
        for name, found in measure([*base, *options.words, f"train.dtype={dtype}"], options).items():
            share = found.ratio / found.pad_factor
            print(
                f"{dtype:6}{found.packed_tokens_per_second:>8,.0f} tok/s{found.padded_tokens_per_second:>8,.0f} tok/s"
                f"{name:>22}{found.ratio:>8.2f}x{found.pad_factor:>9.2f}{share:>9.1%}",
                flush=True,
            )
            rows.append(
                {"dtype": dtype, "padded_loss": name, "ratio_over_pad_factor": share, **asdict(found)}
            )
    out = options.out or RESULTS / f"{'preferences' if options.pairs else 'padding'}.json"
    write_result(out, {"rows": rows, "words": options.words})


if __name__ == "__main__":
    main()
