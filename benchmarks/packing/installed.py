"""Tools whose packages run: what they are given and what is read from them. One function a row of `tools.py`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from multipack.planning.plan import plan
from packing.epoch import Epoch, Integers, flat, repeated, shuffled, whole_steps


def ours(lengths: Integers, capacity: int, ranks: int, seed: int | None, **options: Any) -> Epoch:
    """`multipack.plan` with its defaults, one pack a rank and step, dealt to the ranks."""
    order = {"order": "given"} if seed is None else {"seed": seed}
    made = plan(lengths, capacity=capacity, packs_per_step=ranks, **options, **order)
    dealt = [made.deal(step, ranks) for step in range(made.num_steps)]
    starts = np.cumsum([0, *(len(step.order) for step in dealt)])
    offsets = np.concatenate(
        [[0], *(step.offsets[1:] + start for step, start in zip(dealt, starts, strict=False))]
    )
    return Epoch(np.concatenate([step.order for step in dealt]), offsets)


def ours_wider(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """`multipack.plan` with a window of 16 steps: fuller and better balanced, further from the order."""
    return ours(lengths, capacity, ranks, seed, window=16)


def ours_random(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """`multipack.plan` where documents of similar length do not share steps: more random, less balanced."""
    return ours(lengths, capacity, ranks, seed, group=False)


def axolotl(
    lengths: Integers, capacity: int, ranks: int, seed: int | None, sequential: bool = False
) -> Epoch:
    """Axolotl's MultipackBatchSampler with its trainer's arguments and defaults: bins of at most 200 documents.

    Its batches are one bin; accelerate gives batch b to rank b % ranks and leaves out an incomplete last round, since
    the sampler has `drop_last`.
    """
    import logging

    from axolotl.utils.samplers import multipack

    logging.getLogger(multipack.__name__).setLevel(logging.ERROR)  # it warns of `sequential` with a list
    sampler = multipack.MultipackBatchSampler(
        shuffled(len(lengths), seed).tolist(), 1, capacity, lengths, 200, drop_last=True, sequential=sequential,
        num_processes=1,
    )  # fmt: skip
    return Epoch(*flat(whole_steps([batch[0] for batch in sampler.generate_batches()], ranks)))


def axolotl_sequential(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """Axolotl with `sample_packing_sequentially`: next fit in the order of the sampler."""
    return axolotl(lengths, capacity, ranks, seed, sequential=True)


def trl(lengths: Integers, capacity: int, ranks: int, seed: int | None, strategy: str = "bfd") -> Epoch:
    """TRL's pack_dataset in the batches of 1,000 rows that SFTTrainer uses; the packs are shuffled by the trainer.

    Every token is the number of its document, so that packs can be read back.
    """
    import datasets
    import pyarrow

    datasets.disable_progress_bars()
    from trl import pack_dataset

    numbers = pyarrow.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    ends = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    rows = pyarrow.LargeListArray.from_arrays(ends, numbers)
    data = datasets.Dataset(pyarrow.table({"input_ids": rows}))
    start = time.process_time()
    packed = pack_dataset(data, capacity, strategy)
    seconds = time.process_time() - start
    column = packed.with_format("arrow")[:]["input_ids"].combine_chunks()
    tokens = column.flatten().to_numpy()
    ends = np.concatenate([[0], np.cumsum(column.value_lengths().to_numpy())])
    changes = np.flatnonzero(np.diff(tokens)) + 1
    starts = np.unique(np.concatenate([ends[:-1], changes]))  # of the pieces
    sizes = np.diff(np.append(starts, len(tokens)))
    pieces = np.split(np.arange(len(starts)), np.searchsorted(starts, ends[1:-1]))
    order, offsets = flat(repeated(pieces, ranks, seed))
    rows_are = "joined" if strategy == "wrapped" else "documents"
    return Epoch(tokens[starts][order].astype(np.int64), offsets, rows_are, sizes[order], seconds=seconds)


def trl_wrapped(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """TRL's `wrapped`: documents are joined and cut every `capacity` tokens; a row is one sequence."""
    return trl(lengths, capacity, ranks, seed, "wrapped")


def lightbinpack(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """LightBinPack's ogbfd: best fit, a group of packs a step. It keeps no order and draws none."""
    from lightbinpack import ogbfd

    values = lengths.tolist()
    start = time.process_time()
    groups = ogbfd(values, capacity, ranks)
    return Epoch(*flat(pack for group in groups for pack in group), seconds=time.process_time() - start)


def random_rows(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """The default of transformers: a fixed number of rows, as many as fit if all have the longest document's length."""
    return _padded(shuffled(len(lengths), seed), lengths, capacity, ranks)


def grouped_rows(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch | None:
    """`group_by_length` of transformers: rows of similar length share a batch. It always draws an order."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if seed is None:
        return None
    size, generator = _rows(lengths, capacity), torch.Generator().manual_seed(seed)
    sampler = LengthGroupedSampler(size, lengths=lengths.tolist(), generator=generator)
    return _padded(np.array(list(sampler)), lengths, capacity, ranks)


def rebalanced_rows(lengths: Integers, capacity: int, ranks: int, seed: int | None) -> Epoch:
    """`batch_rebalance` of transformers: batches of equal padded cost, without a limit of tokens."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    together = _rows(lengths, capacity) * ranks
    how = {"dp_size": ranks, "grad_accum": 1, "shuffle": seed is not None, "seed": seed or 0}
    start = time.process_time()
    each = [
        list(BatchRebalanceSampler(lengths.tolist(), together, rank=rank, **how)) for rank in range(ranks)
    ]
    seconds = (time.process_time() - start) / ranks
    packs = (each[rank][step] for step in range(len(each[0])) for rank in range(ranks))
    return Epoch(*flat(packs), rows="padded", seconds=seconds)


def _rows(lengths: Integers, capacity: int) -> int:
    return max(1, capacity // int(lengths.max()))


def _padded(order: Integers, lengths: Integers, capacity: int, ranks: int) -> Epoch:
    """Rows in this order, the first again until every rank has a whole last batch (accelerate's `even_batches`)."""
    size = _rows(lengths, capacity)
    order = np.resize(order, -(-len(order) // (size * ranks)) * size * ranks)
    return Epoch(order, np.arange(0, len(order) + 1, size), rows="padded")
