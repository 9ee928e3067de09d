"""What packing gains for preference pairs: packed and padded DPO steps on the same pairs, alternating in one process.

    python benchmarks/preferences.py ../shared/data/text/dpo_en_demo_300.json.gz

Both ways train the same decoder on the pairs of the same global steps against the same reference values: forward,
backward, clipping and optimizer. A padded batch holds `--batch-size` random pairs of the step, all answers padded to
the longest, as TRL's collator does. The ratio is that of real tokens per second over all steps, packed over padded; the
pad factor (slots over real tokens) is what equal cost per slot would give. Two padded trainers are timed: one with this
project's loss, which never projects a slot without a target, and one that projects every slot onto the vocabulary.
The steps are those of one epoch, and the packs hold the longest pair, so that every pair is timed once. The model is
the smallest preset, with which that takes minutes on one core. Results go to results/preferences.json.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from multipack.data.packs.collate import PackedCollator, PreferenceBatch, PreferenceCollator, PreferencePair
from multipack.parallel.world import World, choose_device
from multipack.reports.console import Console
from multipack.training.assemble import assemble
from multipack.training.compare import timed_step
from multipack.training.run_config import compose
from multipack.training.trainer import Trainer
from result import parser_of, write_result


def every_slot(hidden: Tensor, weight: Tensor, targets: Tensor, num_targets: int | None = None) -> Tensor:
    """Log-probabilities of targets from logits of every slot, as padded trainers compute them."""
    logits = F.linear(hidden, weight).float()
    return -F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")


def pad(pairs: Sequence[PreferencePair]) -> PreferenceBatch:
    """The answers of pairs, each padded to the longest of them."""
    width = max(len(answer.tokens) for pair in pairs for answer in (pair.first, pair.second))
    return PreferenceCollator(PackedCollator(2 * len(pairs), width, align=width))(pairs)


def measure(trainer: Trainer, size: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Rows of figures, of both padded trainers."""
    plan, model = trainer.feed.plan, trainer.engine.model
    assert plan is not None
    pairs = trainer.feed.loader.documents
    collate, own, rows = PreferenceCollator.of(plan), model.log_probabilities, []
    for name, loss in (("same loss", own), ("every slot", every_slot)):
        found = np.zeros(5)  # seconds packed and padded, tokens, slots, pairs
        for index in range(plan.num_steps + 1):
            step = max(index - 1, 0)
            numbers = np.random.default_rng(step).permutation(plan.documents(step))
            packed = [collate([pairs[int(n)] for n in pack]) for pack in plan.packs(step)]
            padded = [
                pad([pairs[int(n)] for n in numbers[at : at + size]]) for at in range(0, len(numbers), size)
            ]
            packed_seconds = timed_step(trainer.engine, packed, clock)
            model.log_probabilities = loss
            padded_seconds = timed_step(trainer.engine, padded, clock)
            model.log_probabilities = own
            sizes = [sum(getattr(batch, each) for batch in padded) for each in ("num_tokens", "num_slots")]
            counted = [packed_seconds, padded_seconds, *sizes, len(numbers)]
            found += counted if index else 0  # the first one warms up
        ratio, factor = found[1] / found[0], found[3] / found[2]
        print(
            f"{found[2] / found[0]:>8,.0f} tok/s packed{found[2] / found[1]:>8,.0f} tok/s padded{name:>12}"
            f"{ratio:>8.2f}x, pad factor {factor:.2f}: {ratio / factor:.1%}",
            flush=True,
        )
        rows.append(
            {
                "padded_loss": name,
                "ratio": ratio,
                "pad_factor": factor,
                "ratio_over_pad_factor": ratio / factor,
                "packed_tokens_per_second": found[2] / found[0],
                "padded_tokens_per_second": found[2] / found[1],
                "steps": plan.num_steps,
                "pairs": int(found[4]),
            }
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__, "preferences")
    parser.add_argument("path", help="records with chosen and rejected")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs in a padded batch")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of all threads, on a busy machine"
    )
    parser.add_argument("words", nargs="*", help="more settings, e.g. preference.loss=orpo model=small")
    options = parser.parse_args()
    base = ["data=jsonl", f"data.path={options.path}", "data.overlong=drop", "data.validation=0"]
    fixed = ["model=tiny", "plan.capacity=16384", "train.dtype=fp32", "train.eval_every=0"]
    words = [*base, *fixed, *options.words]
    with tempfile.TemporaryDirectory() as folder:
        config = compose([*words, f"out={folder}/run"])
        world = World(device=choose_device(config.train.device, 0))
        trainer = Trainer(assemble(config, world, Console(), time.perf_counter), Console())
        clock = time.process_time if options.cpu_time else time.perf_counter
        rows = measure(trainer, options.batch_size, clock)
        documents = trainer.corpus.train
        trainer.close()
    data = {
        "pairs": len(documents),
        "tokens": documents.num_tokens,
        "longest_pair": int(documents.lengths.max()),
    }
    write_result(
        options.out, {"rows": rows, **data, "batch_size": options.batch_size, "words": options.words}
    )


if __name__ == "__main__":
    main()
