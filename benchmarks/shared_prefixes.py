"""How many slots shared beginnings save, and how long 1 G tokens take to sort.

    python benchmarks/shared_prefixes.py --data ../shared/data

Rows: InstructLab as plain fine-tuning, in random packs of 32,768 bytes (data.share_prefixes=all); the 300 preference
pairs (pairs); groups of eight documents that begin with one question of GSM8K and go on with answers of others
(groups). Each is planned as in training, with bytes as tokens: `computed` are the real tokens over the slots that items
take, `efficiency` those over all slots of full packs, and `most` follows from the proven bound. The sort is timed with
random documents of 200 tokens behind one of 16 prompts of 60 tokens. Results go to results/shared_prefixes.json.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from multipack.data.stores.prepare import prepare
from multipack.data.stores.store import TokenStore
from multipack.data.text.data_config import DataConfig, TokenizerConfig
from multipack.data.views.common_prefix import common_prefixes, cut, shared, sort_by_tokens
from multipack.data.views.documents import Documents
from multipack.data.views.shared_prefixes import SharedPrefixes
from multipack.planning.options import PlanOptions
from multipack.planning.plan import plan
from multipack.planning.report import report
from result import parser_of, write_result

CAPACITY = 32_768
GROUP = 8
PROMPTS, PROMPT, LENGTH = 16, 60, 200


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
        began, cpu = time.perf_counter(), time.process_time()
        order = sort_by_tokens(*each)
        again = shared(common_prefixes(*each, order), 16)
        cut(each[2][order], again, CAPACITY // 4)
    taken = time.process_time() - cpu
    return {
        "tokens": count * LENGTH,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": taken,
        "cpu_seconds_of_1e9_tokens": taken * 1e9 / (count * LENGTH),
    }


def main() -> None:
    """Measure all rows, and write them."""
    parser = parser_of(__doc__, "shared_prefixes")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with text/")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens to sort")
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, records in (("pairs", pairs), ("groups", groups)):
            lines = (json.dumps(record) + "\n" for record in records(arguments.data))
            (folder / f"{name}.jsonl").write_text("".join(lines))
        rows["InstructLab"] = planned(
            arguments.data / "text" / "instructlab_sdg_6000.jsonl.gz", "all", folder
        )
        rows["300 preference pairs"] = planned(folder / "pairs.jsonl", "pairs", folder)
        rows["GSM8K in groups of eight"] = planned(folder / "groups.jsonl", "groups", folder)
    for name, row in rows.items():
        print(
            f"{name}: {row['computed']:.3f} computed, {row['efficiency']:.3f} of all slots, at most {row['most']:.3f}"
        )
    result = {"rows": rows, "sort": sorting(arguments.tokens)}
    print(result["sort"])
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
