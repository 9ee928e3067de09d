"""Real tokens per second of whole training runs: ours packed and padded, and the trainers people use, by turns.

    pip install "multipack[bench]"          # transformers, trl, accelerate, datasets
    python benchmarks/training.py

Every contender trains a Llama of the same shape in fp32 on the same documents for one epoch, with AdamW and clipping.
Its steps are timed from the end of the first to the end of the last, waiting for data included. Rounds alternate; the
best of each contender counts. The pad factor is slots over real tokens of our own padded run; padded speed times pad
factor is what equal cost per slot would give: the limit of packing.

    ours packed               the project's trainer: packs of about as many tokens as a padded batch holds
    ours padded               the same decoder, loss and optimizer on random batches padded to their longest
    transformers              Trainer, random batches padded to their longest
    transformers, grouped     the same with group_by_length
    trl bfd                   SFTTrainer with packing="bfd" (padding-free, sdpa)

Lengths come from ../shared/data/lengths where that folder is there; the embedded corpus always is.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from host_runs import SETS, Speed, Stopwatch, run
from multipack.data.packs.collate import pad_documents
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import StoreWriter
from multipack.data.text.stdlib import library_files, parse_file
from multipack.data.text.tokenizer import byte_tokenizer
from multipack.data.views.documents import Documents
from multipack.models.decoder import Decoder
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.shapes import ModelShape
from multipack.training.optimizer import build_optimizer
from multipack.training.settings import OptimizerConfig
from planning_tables.lengths import ABSENT, load
from result import parser_of, records_of, write_result

LONGEST = 2048
SHAPE_WORDS = ("layers", "heads", "kv_heads", "d_model", "d_ff", "vocabulary_size", "tied")


def documents_of(lengths: Any, count: int, vocabulary: int) -> list[list[int]]:
    """`count` documents of random tokens, with lengths from a seeded shuffle, at most `LONGEST`."""
    chosen = np.minimum(np.random.default_rng(1).permutation(lengths)[:count], LONGEST)
    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, int(length)).tolist() for length in chosen]


def capacity_of(documents: list[list[int]], batch: int) -> int:
    """About as many tokens as a padded batch holds, and at least the longest document."""
    return max(int(batch * sum(map(len, documents)) / len(documents)), max(map(len, documents)))


def sets(count: int, vocabulary: int) -> dict[str, list[list[int]]]:
    """Name → documents."""
    found = {}
    for name, file in SETS.items():
        lengths = load(file)
        if lengths is not None:
            found[name] = documents_of(lengths, count, vocabulary)
        else:
            print(f"{name}: {ABSENT}")
    folder, files = library_files()
    sizes = [
        len(f"{prompt}{completion}".encode()) // 4  # about the tokens of a byte-pair vocabulary
        for name in files[:: max(len(files) // 60, 1)]
        for _, prompt, completion in parse_file(folder / name) or ()
    ]
    found["embedded corpus"] = documents_of(np.maximum(sizes, 2), count, vocabulary)
    return found


def ours(documents: list[list[int]], shape: ModelShape, batch: int, folder: Path, packed: bool) -> Speed:
    """The project's own trainer on a token store of these documents."""
    store = folder / "store"
    if not store.exists():
        with StoreWriter(store, byte_tokenizer()) as writer:
            for number, tokens in enumerate(documents):
                writer.add(str(number), [(tokens, True)])
    if not packed:
        return ours_padded(store, shape, batch)
    words = [
        *("data=store", f"data.path={store}", "data.validation=0", "train.eval_every=0"),
        *(f"plan.capacity={capacity_of(documents, batch)}", "train.dtype=fp32", "plan.packs_per_step=1"),
        *(f"model.{name}={value}" for name, value in shape.to_dict().items() if name in SHAPE_WORDS),
    ]
    records = records_of(words)[1:]
    seconds = sum(record["dt"] for record in records)
    tokens = sum(record["tps"] * record["dt"] for record in records)
    slots = sum(record["tps"] * record["dt"] / (1 - record["padding"]) for record in records)
    return Speed(round(tokens), round(slots), seconds)


def ours_padded(store: Path, shape: ModelShape, batch: int) -> Speed:
    """The same decoder and engine on padded batches."""
    documents = Documents.whole(TokenStore(store))
    torch.manual_seed(0)
    model = Decoder(shape)
    engine = ModelEngine([model], build_optimizer(model, OptimizerConfig()), Mesh(World()))
    order = np.random.default_rng(0).permutation(len(documents))
    watch = Stopwatch()
    for start in range(0, len(order), batch):
        padded = pad_documents([documents[int(number)] for number in order[start : start + batch]])
        watch.batches.append((batch, padded.num_tokens, padded.num_slots))
        engine.forward_backward([padded], padded.denominator)
        engine.clip(1.0)
        engine.step(1e-3)
        watch.ends.append(time.perf_counter())
    return watch.speed()


def hugging_face(documents: list[list[int]], shape: ModelShape, batch: int, folder: Path, way: str) -> Speed:
    """The Trainer of transformers, or TRL's SFTTrainer."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    if way == "group_by_length":
        order = get_length_grouped_indices(list(map(len, documents)), batch)
        documents = [documents[number] for number in order]
    return run(way, documents, shape, capacity_of(documents, batch), batch, time.perf_counter)


def contenders(*given: Any) -> dict[str, Callable[[], Speed]]:
    """Name → one timed run on the given documents, shape, batch size and folder."""
    found = {
        "ours packed": partial(ours, *given, packed=True),
        "ours padded": partial(ours, *given, packed=False),
    }
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"):
        found["transformers"] = partial(hugging_face, *given, "padded")
        found["transformers, grouped"] = partial(hugging_face, *given, "group_by_length")
        if importlib.util.find_spec("trl"):
            found["trl bfd"] = partial(hugging_face, *given, "TRL bfd")
    return found


def compare(
    name: str, documents: list[list[int]], shape: ModelShape, options: argparse.Namespace
) -> dict[str, Any]:
    """One table: every contender on one set of documents."""
    with tempfile.TemporaryDirectory() as temporary:
        runs = contenders(documents, shape, options.batch_size, Path(temporary))
        rounds = [{contender: run() for contender, run in runs.items()} for _ in range(options.rounds)]
    speeds = {contender: [round_[contender] for round_ in rounds] for contender in runs}
    best = {contender: max(each, key=lambda speed: speed.rate) for contender, each in speeds.items()}
    padded, packed = best["ours padded"], best["ours packed"]
    factor = padded.slots / padded.tokens
    limit = padded.rate * factor
    tokens = sum(map(len, documents))
    print(
        f"\n{name}: {len(documents)} documents, {tokens:,} tokens, pad factor {factor:.2f}, limit {limit:,.0f} tok/s"
    )
    rows = []
    for contender, found in best.items():
        row = {
            "contender": contender,
            "tokens_per_second": found.rate,
            "every_round": [speed.rate for speed in speeds[contender]],
            "slots_per_token": found.slots / found.tokens,
            "packed_over_this": packed.rate / found.rate,
            "share_of_limit": found.rate / limit,
        }
        rows.append(row)
        print(
            f"  {contender:24}{found.rate:>9,.0f} tok/s{row['slots_per_token']:>7.2f} slots/token"
            f"{row['packed_over_this']:>8.2f} x ours packed over it{row['share_of_limit']:>8.1%} of the limit",
            flush=True,
        )
    figures = {"number_of_documents": len(documents), "tokens": tokens, "pad_factor": factor, "limit": limit}
    return {"documents": name, **figures, "rows": rows}


def main() -> None:
    parser = parser_of(__doc__, "training")
    parser.add_argument("--documents", type=int, default=192, help="documents of each set")
    parser.add_argument("--batch-size", type=int, default=8, help="documents in a padded batch")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each contender, in alternation")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    shape = ModelShape(layers=4, heads=4, d_model=256, d_ff=704, vocabulary_size=257 * 8)
    named = sets(options.documents, 257)
    peers = [compare(name, documents, shape, options) for name, documents in named.items()]
    write_result(options.out, {"peers": peers, "shape": shape.to_dict()})


if __name__ == "__main__":
    main()
