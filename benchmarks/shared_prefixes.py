"""What sharing common beginnings gains: slots, steps, and how long 1 G tokens take to sort.

    python benchmarks/shared_prefixes.py --data ../shared/data          # every table
    python benchmarks/shared_prefixes.py --table steps

slots   InstructLab as plain fine-tuning, in random packs of 32,768 bytes (data.share_prefixes=all); the 300 preference
        pairs (pairs); groups of eight documents that begin with one question of GSM8K and go on with answers of others
        (groups). Each is planned as in training, with bytes as tokens: `computed` are the real tokens over the slots
        that items take, `efficiency` those over all slots of full packs, and `most` follows from the proven bound
sort    random documents of 200 tokens behind one of 16 prompts of 60 tokens
steps   a decoder trained on packs that share and on packs that do not, alternating in one process: collator, forward,
        backward and optimizer. A row has groups of documents that begin with one prompt, whose completions are
        targets. The token ratio is that of slots; the ratio over it is 1 where a slot costs the same, and less where
        attention is a large part, which keeps the pairs of a completion and its prompt. In the last row no documents
        begin alike: a collator that looks for common beginnings is compared with one that does not, and the batches
        are equal. CPU seconds, for busy machines; of all rounds the fastest counts

Results go to results/shared_prefixes.json; of tables that are left out the file keeps the last ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.data.stores.prepare import prepare
from multipack.data.stores.store import TokenStore
from multipack.data.text.data_config import DataConfig, TokenizerConfig
from multipack.data.views.common_prefix import common_prefixes, cut, shared, sort_by_tokens
from multipack.data.views.documents import Document, Documents
from multipack.data.views.shared_prefixes import SharedPrefixes
from multipack.models.decoder import Decoder
from multipack.planning.options import PlanOptions
from multipack.planning.plan import plan
from multipack.planning.report import report
from multipack.shapes import ModelShape
from result import by_turns, parser_of, write_result

CAPACITY = 32_768
GROUP = 8
PROMPTS, PROMPT, LENGTH = 16, 60, 200
SORTED, ROUNDS = 100_000_000, 12
"""Tokens that are sorted, and steps of each kind."""
VOCABULARY = 1024
SHAPE = ModelShape(
    layers=3, heads=3, kv_heads=3, d_model=192, d_ff=768, vocabulary_size=VOCABULARY, context=2048
)


def read(path: Path) -> Any:
    """The value of a JSON file, or the list of those of its lines."""
    with gzip.open(path, "rt") as file:
        return json.load(file) if path.name.endswith(".json.gz") else [json.loads(line) for line in file]


def pairs(data: Path) -> Iterator[dict[str, Any]]:
    """Records of the preference pairs."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    for record in read(data / "text" / "dpo_en_demo_300.json.gz"):
        turns = [{"role": roles[each["from"]], "content": each["value"]} for each in record["conversations"]]
        answers = {
            name: [{"role": "assistant", "content": record[name]["value"]}] for name in ("chosen", "rejected")
        }
        yield {"prompt": turns, **answers}


def groups(data: Path) -> Iterator[dict[str, Any]]:
    """Records of groups with one question and answers of eight records."""
    records = read(data / "text" / "gsm8k_train.jsonl.gz")
    for number in range(0, len(records), 4):
        for other in range(GROUP):
            answer = records[(number + 911 * other) % len(records)]["answer"]
            yield {"prompt": records[number]["question"], "completion": answer}


def planned(path: Path, share: str, folder: Path) -> dict[str, Any]:
    """What a plan of these records reaches."""
    data = DataConfig(source="jsonl", path=str(path), share_prefixes=share)  # type: ignore[arg-type]
    store = TokenStore(prepare(data, TokenizerConfig(kind="byte"), folder / f"{path.name}.store"))
    options = PlanOptions(capacity=CAPACITY, packs_per_step=4, tail="carry")
    documents = Documents.whole(store).fit(CAPACITY, "drop")[0]
    began = time.perf_counter()
    items = SharedPrefixes.of(documents, share, options).items()
    made = plan(items, options=options)
    found = report(made, 4)
    return {
        "share": share,
        "documents": found.documents,
        "items": len(made.order),
        "computed": found.tokens / found.slots,
        "efficiency": found.efficiency,
        "most": found.tokens / found.minimum_slots,
        "cost_utilization_of_4_ranks": found.cost_utilization,
        "displacement_p99": found.displacement_p99,
        "seconds": time.perf_counter() - began,
    }


def sorting(tokens: int) -> dict[str, float]:
    """Seconds of the sort, the common prefixes and the cuts of this number of tokens."""
    random, count = np.random.default_rng(0), tokens // LENGTH
    flat = random.integers(0, 50_000, count * LENGTH, dtype=np.uint16).reshape(count, LENGTH)
    flat[:, :PROMPT] = random.integers(0, 50_000, (PROMPTS, PROMPT), dtype=np.uint16)[
        np.arange(count) % PROMPTS
    ]
    lengths = np.full(count, LENGTH)
    arrays = flat.ravel(), np.arange(count) * LENGTH, lengths
    small = flat[:8].ravel(), np.arange(8) * LENGTH, lengths[:8]
    for each in (small, arrays):  # the first compiles
        began = time.process_time()
        order = sort_by_tokens(*each)
        again = shared(common_prefixes(*each, order), 16)
        cut(each[2][order], again, CAPACITY // 4)
    taken = time.process_time() - began
    print(f"{count * LENGTH:,} tokens sorted in {taken:.2f} CPU seconds")
    return {"tokens": count * LENGTH, "cpu_seconds": taken}


def slots(options: argparse.Namespace) -> dict[str, Any]:
    """What plans of the real records reach."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, records in (("pairs", pairs), ("groups", groups)):
            lines = (json.dumps(record) + "\n" for record in records(options.data))
            (folder / f"{name}.jsonl").write_text("".join(lines))
        real = options.data / "text" / "instructlab_sdg_6000.jsonl.gz"
        rows["InstructLab"] = planned(real, "all", folder)
        rows["300 preference pairs"] = planned(folder / "pairs.jsonl", "pairs", folder)
        rows["GSM8K in groups of eight"] = planned(folder / "groups.jsonl", "groups", folder)
    for name, row in rows.items():
        print(
            f"{name}: {row['computed']:.3f} computed, {row['efficiency']:.3f} of all slots, at most {row['most']:.3f}"
        )
    return rows


class Row(NamedTuple):
    """Groups of documents: their number, documents in each, and tokens of the prompt and of a completion."""

    name: str
    groups: int
    documents: int
    prompt: int
    completion: int


ROWS = (
    Row("8 completions of 128 on a prompt of 512", 1, 8, 512, 128),
    Row("8 completions of 128 on a prompt of 128", 1, 8, 128, 128),
    Row("pairs of 200 on a prompt of 400", 2, 2, 400, 200),
    Row("nothing in common", 4, 1, 0, 512),
)


def documents_of(row: Row) -> list[Document]:
    """Random documents of a row, group after group."""
    rng, made = np.random.default_rng(0), []
    for _ in range(row.groups):
        begin = rng.integers(0, VOCABULARY, row.prompt)
        for _ in range(row.documents):
            tokens = np.append(begin, rng.integers(0, VOCABULARY, row.completion)).astype(np.uint32)
            made.append(Document(tokens, np.array([[row.prompt, len(tokens)]])))
    return made


def train(
    model: Decoder, optimizer: torch.optim.Optimizer, collate: PackedCollator, documents: list[Document]
) -> None:
    """A step."""
    batch = collate(documents)
    (model(batch) / batch.denominator).backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps on documents of each row, with their beginnings shared and not."""
    found, model = [], Decoder(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for row in ROWS:
        documents = documents_of(row)
        collators = {
            name: PackedCollator(len(documents), 2048, min_prefix=least)
            for name, least in (("alone", None), ("shared", 16))
        }
        ways = {
            name: partial(train, model, optimizer, collate, documents) for name, collate in collators.items()
        }
        seconds = by_turns(ways, ROUNDS)
        alone, shared = (min(seconds[name]) for name in ways)
        before, after = (collate(documents).num_slots for collate in collators.values())
        ratio, tokens = alone / shared, before / after
        figures = {"token_ratio": tokens, "step_ratio": ratio, "step_over_token_ratio": ratio / tokens}
        figures |= {"seconds": alone, "seconds_shared": shared}
        found.append(row._asdict() | figures)
        print(f"{row.name:<42}{tokens:>6.2f} x fewer tokens{ratio:>8.2f} x faster:{ratio / tokens:>7.2f}")
    return {"rows": found, "shape": SHAPE.to_dict(), "rounds": ROUNDS}


TABLES = {"slots": slots, "sort": lambda options: sorting(SORTED), "steps": steps}


def main() -> None:
    """Measure the tables that are asked for, and write them."""
    parser = parser_of(__doc__, "shared_prefixes")
    parser.add_argument(
        "--table", action="append", choices=list(TABLES), help="only this table; may be repeated"
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with text/")
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.table and options.out.is_file() else {}
    result |= {name: TABLES[name](options) for name in options.table or TABLES}
    write_result(options.out, result)


if __name__ == "__main__":
    main()
