"""Training runs inside hosts: transformers' Trainer and TRL's SFTTrainer on padded rows, on TRL's packs and on ours."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from planning_tables.lengths import ABSENT, load
from planning_tables.table import Table, missing

Integers = NDArray[np.int64]

SETS = {"instructlab": "instructlab_sdg_24k", "natural_instructions": "natural_instructions_193k"}
MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "vocab_size": 2056}
"""Fields of the configuration of a Llama, beside 4 heads."""
LONGEST = 1024
"""Longer documents are left out of every run: 0.2 % of either set."""
WAYS = ("multipack", "TRL bfd", "padded", "group_by_length")


@dataclass
class Stopwatch:
    """Counts every batch, and times steps from the end of the first on."""

    clock: Callable[[], float] = time.perf_counter
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    """Documents, real tokens and slots of each."""
    ends: list[float] = field(default_factory=list)

    def count(self, batch: dict[str, Any]) -> None:
        """Count a collated batch: a padded one with its mask, or a row whose positions start anew at documents."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        documents = len(ids) if mask is not None else int((batch["position_ids"] == 0).sum())
        self.batches.append((documents, ids.numel() if mask is None else int(mask.sum()), ids.numel()))

    def speed(self) -> Speed:
        """Everything after the first step."""
        _, tokens, slots = (sum(column) for column in zip(*self.batches[1 : len(self.ends)], strict=True))
        documents = sum(batch[0] for batch in self.batches)
        return Speed(tokens, slots, self.ends[-1] - self.ends[0], len(self.ends) - 1, documents)


@dataclass(frozen=True)
class Speed:
    """Real tokens, computed slots, seconds and number of the steps that were timed; documents of all steps."""

    tokens: int
    slots: int
    seconds: float
    steps: int = 0
    documents: int = 0

    @property
    def rate(self) -> float:
        """Real tokens per second."""
        return self.tokens / self.seconds


def llama(fields: dict[str, int]) -> Any:
    """A Llama of transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**fields, **special, num_attention_heads=4, use_cache=False))


def tokenizer_of(tokens: int) -> Any:
    """A tokenizer, which SFTTrainer asks for: a word a token."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{token}": token for token in range(tokens)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    return PreTrainedTokenizerFast(tokenizer_object=library, eos_token="t1", pad_token="t0")


def run(
    way: str,
    documents: list[list[int]],
    fields: dict[str, int],
    slots: int,
    rows: int,
    clock: Callable[[], float],
) -> Speed:
    """An epoch of fp32 training with AdamW and clipping.

    Args:
        way: one of `WAYS`.
        documents: their tokens, in the order of group_by_length.
        fields: of the model's configuration.
        slots: of a row of packs.
        rows: documents of a padded batch.
        clock: what to time with.
    """
    from datasets import Dataset, disable_progress_bars
    from transformers import PrinterCallback, TrainerCallback

    disable_progress_bars()

    watch = Stopwatch(clock)

    class Ends(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.ends.append(watch.clock())

    dataset = Dataset.from_list([{"input_ids": tokens} for tokens in documents])
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(way, llama(fields), dataset, slots, rows, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Ends())
        collate = trainer.data_collator

        def counted(features: list[dict[str, Any]]) -> Any:
            watch.count(batch := collate(features))
            return batch

        trainer.data_collator = counted
        trainer.train()
    return watch.speed()


def _trainer(way: str, model: Any, dataset: Any, slots: int, rows: int, folder: str) -> Any:
    from torch.utils.data import SequentialSampler
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *given: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    common: dict[str, Any] = {"output_dir": folder, "num_train_epochs": 1, "learning_rate": 1e-3}
    common |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    common |= {"report_to": [], "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    if way == "multipack":
        from multipack.integrations.transformers import PackedTrainer

        arguments = TrainingArguments(**common, per_device_train_batch_size=1)
        return PackedTrainer(model, arguments, train_dataset=dataset, capacity=slots)
    tokenizer = tokenizer_of(model.config.vocab_size)
    if way == "TRL bfd":
        from trl import SFTConfig, SFTTrainer

        packing = {"packing": True, "packing_strategy": "bfd", "max_length": slots}
        return SFTTrainer(
            model,
            args=SFTConfig(**common, **packing, per_device_train_batch_size=1),
            train_dataset=dataset,
            processing_class=tokenizer,
        )
    arguments = TrainingArguments(**common, per_device_train_batch_size=rows)
    host = InOrder if way == "group_by_length" else Trainer
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # rows padded to the longest
    return host(model, arguments, data_collator=collate, train_dataset=dataset)


def grouped(lengths: Integers, rows: int) -> Integers:
    """(batches, rows) lengths in the batches of group_by_length."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    order = get_length_grouped_indices(lengths, rows, generator=torch.Generator().manual_seed(0))
    return lengths[order][: len(lengths) // rows * rows].reshape(-1, rows)


def shuffled(lengths: Integers, rows: int) -> Integers:
    """(batches, rows) lengths in random batches."""
    order = np.random.default_rng(0).permutation(len(lengths))
    return lengths[order][: len(lengths) // rows * rows].reshape(-1, rows)


def rows_of(batches: Callable[[Integers, int], Integers], lengths: Integers, slots: int) -> int:
    """Documents of a batch that has about `slots` slots when it is padded to its longest."""

    def mean_slots(rows: int) -> float:
        return float(rows * batches(lengths, rows).max(1).mean())

    rows = 1
    while mean_slots(rows + 1) <= slots:
        rows += 1
    return min(rows, rows + 1, key=lambda count: abs(mean_slots(count) - slots))


@dataclass(frozen=True)
class Sample:
    """Documents of a set, as whole batches of group_by_length over the set, and the documents of padded batches."""

    documents: list[list[int]]
    rows: dict[str, int]

    @classmethod
    def of(cls, name: str, count: int, slots: int) -> Sample | None:
        """About `count` documents for steps of `slots` slots; None where the set is not there."""
        lengths = load(SETS[name])
        if lengths is None:
            return None
        lengths = np.random.default_rng(1).permutation(lengths[lengths <= min(LONGEST, slots)])[:20_000]
        rows = {
            "padded": rows_of(shuffled, lengths, slots),
            "group_by_length": rows_of(grouped, lengths, slots),
        }
        batches = grouped(lengths, rows["group_by_length"])
        number = -(-count // batches.shape[1])
        by_length = np.argsort(
            batches.sum(1), kind="stable"
        )  # evenly, so that a small sample has all lengths
        chosen = by_length[((np.arange(number) + 0.5) * len(batches) / number).astype(int)]
        chosen = np.random.default_rng(2).permutation(chosen)
        draw = np.random.default_rng(0)
        ids = [
            draw.integers(2, MODEL["vocab_size"], int(length)).tolist() for length in batches[chosen].ravel()
        ]
        return cls(ids, rows)


def compare(sample: Sample, slots: int, rounds: int) -> dict[str, Any]:
    """Way → its speeds, one a round; every second round in the opposite order."""
    speeds: dict[str, list[Speed]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            rows = sample.rows.get(way, 1)
            speeds[way].append(run(way, sample.documents, MODEL, slots, rows, time.process_time))
    return speeds


def ratio(ours: list[Speed], theirs: list[Speed]) -> float:
    """Median over the rounds of our rate over theirs."""
    return statistics.median(one.rate / other.rate for one, other in zip(ours, theirs, strict=True))


COLUMNS = {
    "documents": "",
    "slots": ",",
    "way": "",
    "real tokens/s": ",.0f",
    "multipack over it": ".2f",
    "slots a step": ",.0f",
    "real": ".1%",
    "s a step": ".2f",
    "trained": ",",
    "of": ",",
}


def fill(table: Table, name: str, slots: int, count: int, rounds: int) -> dict[str, float]:
    """Add the rows of a set; way → how often ours is as fast. Nothing where the set is not there."""
    sample = Sample.of(name, count, slots)
    if sample is None:
        table.notes.append(f"{name} {ABSENT}")
        return {}
    speeds = compare(sample, slots, rounds)
    for way, found in speeds.items():
        one = found[0]
        table.row(
            *(name, slots, way, statistics.median(speed.rate for speed in found)),
            *(ratio(speeds["multipack"], found), one.slots / one.steps, one.tokens / one.slots),
            statistics.median(speed.seconds / speed.steps for speed in found),
            *(one.documents, len(sample.documents)),
        )
    return {way: ratio(speeds["multipack"], found) for way, found in speeds.items()}


def hosts_table(quick: bool) -> Table:
    """Real tokens per second of the same documents in each host."""
    slots = 512 if quick else 2048
    made = Table("hosts", "an epoch of a tiny Llama in transformers' Trainer and TRL's SFTTrainer", COLUMNS)
    if note := missing("transformers", "accelerate", "trl", "datasets"):
        made.notes.append(note)
        return made
    found = {name: fill(made, name, slots, *((24, 1) if quick else (144, 3))) for name in SETS}
    for way in WAYS[1:]:
        reached = {name: ratios[way] for name, ratios in found.items() if ratios}
        worst = min(reached, key=reached.__getitem__, default=None)
        least = 1.5 if way == "TRL bfd" else 1.0
        made.at_least(f"real tokens/s over {way}", reached.get(worst), least, ".2f", worst or "")
    return made
