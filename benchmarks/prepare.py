"""How fast documents become a token store, against the `tokenizers` library alone, by turns in one run.

    python benchmarks/prepare.py

The documents are prompts and completions of the running Python's standard library (and of ../shared/data's
conversations, where they are at hand), repeated; the tokenizer is a byte-pair encoding trained on them. A round
tokenizes all texts twice: with `encode_batch_fast` of the library, all cores, tokens thrown away; and with `multipack
prepare`: read from JSONL, hashed, tokenized, written and synced. The ratio is that of tokens per second of the same
round; also that of tokens per CPU second, which other work on the machine disturbs less.

Then short lines of several kinds, a quarter of a million and twice as many, each file in a process of its own and on
one core: lines per CPU second of each pass (read for the tokenizer; tokenized) beside what the `tokenizers` library
takes alone for the same texts in the same batches, and bytes of memory a line: the larger file's peak minus the smaller
one's. (The library counts the different words of a corpus to train on; these have 5,000.) Results go to
results/prepare.json.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers

from multipack.data.stores.prepare import batches, items_of, prepare
from multipack.data.stores.store import TokenStore
from multipack.data.text.data_config import DataConfig
from multipack.data.text.sources import Source
from multipack.data.text.tokenizer import TokenizerConfig, build_tokenizer, train_bpe
from result import parser_of, write_result

CONVERSATIONS = Path(__file__).parents[2] / "shared" / "data" / "text" / "instructlab_sdg_6000.jsonl.gz"
MEGABYTES, ROUNDS, VOCABULARY, BATCH = 50, 3, 32_768, 4096
"""Of the corpus: size, rounds after one that is not counted, tokens of the encoding, texts of the library's batch."""
LINES = 250_000
"""Short lines of the smaller file."""
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "text": (("text",), {}),
    "text without duplicates": (("text",), {"dedup": True}),
    "prompts and completions": (("prompt", "completion"), {}),
    "preference pairs": (("prompt", "chosen", "rejected"), {}),
    "chats": (("messages",), {}),
}
"""Kind of short lines → fields, and settings of `DataConfig`."""
WORDS = 5000
RATES = ("tokens_per_second", "tokens_per_cpu_second")


def pairs() -> list[tuple[str, str]]:
    """Prompts and completions."""
    found = [(document.parts[0].text, document.parts[-1].text) for document in Source(DataConfig())]
    if CONVERSATIONS.is_file():
        with gzip.open(CONVERSATIONS, "rt", encoding="utf-8") as file:
            for line in file:
                texts = [message["content"] for message in json.loads(line)["messages"]]
                found.append(("\n".join(texts[:-1]), texts[-1]))
    return found


def write_corpus(path: Path, given: list[tuple[str, str]], size: int) -> list[str]:
    """Write the pairs as JSONL, repeated until the file has `size` bytes; returns all texts."""
    texts: list[str] = []
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            for prompt, completion in given:
                file.write(
                    json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False) + "\n"
                )
                texts += (prompt + "\n", completion)
    return texts


def timed(function: Callable[[], int]) -> dict[str, float]:
    """Tokens, seconds and CPU seconds of a call, those of the processes that it started among them."""
    began, cpu = time.perf_counter(), _cpu_seconds()
    tokens = function()
    seconds, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
    rates = zip(RATES, (tokens / seconds, tokens / cpu), strict=True)
    return {"tokens": tokens, "seconds": seconds, **dict(rates)}


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in used)


def measure(folder: Path) -> dict[str, Any]:
    """Both ways by turns, the first round not counted."""
    given = pairs()
    texts = write_corpus(folder / "corpus.jsonl", given, MEGABYTES * 10**6)
    trained = train_bpe((text for pair in given for text in pair), VOCABULARY)
    trained.save(folder / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True

    def alone() -> int:
        tokens = 0
        for at in range(0, len(texts), BATCH):
            encodings = library.encode_batch_fast(texts[at : at + BATCH], add_special_tokens=False)
            tokens += sum(map(len, encodings))
        return tokens

    def whole() -> int:
        data = DataConfig("jsonl", str(folder / "corpus.jsonl"), cache=str(folder / "cache"))
        out = folder / f"{time.monotonic_ns()}.store"
        prepare(data, TokenizerConfig("file", str(folder / "tokenizer.json")), out)
        return TokenStore(out).num_tokens

    rounds = []
    for number in range(ROUNDS + 1):
        found = {"library": timed(alone), "prepare": timed(whole)}
        if number:
            rounds.append(
                found | {f"{rate}_ratio": found["prepare"][rate] / found["library"][rate] for rate in RATES}
            )
            print(f"round {number}: {describe(rounds[-1])}", flush=True)
    return {"bytes": (folder / "corpus.jsonl").stat().st_size, "documents": len(texts) // 2, "rounds": rounds}


def write_lines(path: Path, fields: tuple[str, ...], lines: int) -> None:
    """Write records of about 12 words a field."""
    draw = random.Random(lines)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(WORDS)]
    with path.open("w") as file:
        for _ in range(lines):
            record: dict[str, Any] = {
                name: " ".join(draw.choices(words, k=draw.randint(5, 20))) for name in fields
            }
            if "messages" in record:
                roles = zip(("user", "assistant"), record["messages"].split(" ", 1), strict=True)
                record = {"messages": [{"role": role, "content": text} for role, text in roles]}
            file.write(json.dumps(record) + "\n")


def passes(folder: Path, kind: str, lines: int, vocabulary_size: int) -> dict[str, dict[str, float]]:
    """CPU seconds and peak memory of both passes over a file of short lines, in a process of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    fields, settings = KINDS[kind]
    path, most = folder / f"{kind} {lines}.jsonl", 0
    write_lines(path, fields, lines)
    data = DataConfig("jsonl", str(path), cache=str(folder / f"{kind} {lines}.cache"), **settings)
    source, config = Source(data), TokenizerConfig("bpe", "", vocabulary_size)

    def look(*_: object) -> None:
        nonlocal most
        status = Path("/proc/self/status").read_text()  # without pages of files, which the system takes back
        most = max(most, 1024 * int(status.partition("RssAnon:")[2].split()[0]))

    def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        nonlocal most
        most, begun = 0, time.process_time()
        result = work()
        return result, {"memory": float(most), "seconds": time.process_time() - begun}

    found = dict[str, dict[str, float]]()
    trained, found["read"] = measured(lambda: build_tokenizer(config, source, Path(data.cache), look))
    _, found["tokenized"] = measured(lambda: prepare(data, config, path.with_suffix(".store"), look))
    library = tokenizers.Tokenizer.from_str(trained.to_json())
    library.encode_special_tokens = True
    alone = {"read": 0.0, "tokenized": 0.0}
    for batch in batches(items_of(source)):
        parts = [part for item in batch for document in item for part in document.parts]
        texts = list(dict.fromkeys(part.text for part in parts if not part.is_special))
        begun = time.process_time()
        for encoding in library.encode_batch_fast(texts, add_special_tokens=False):
            _ = encoding.ids
        alone["tokenized"] += time.process_time() - begun
    corpus = [part.text for document in source for part in document.parts if not part.is_special]
    begun = time.process_time()
    train_bpe(iter(corpus), vocabulary_size, source.find_form().special_tokens)
    alone["read"] = time.process_time() - begun
    for name, seconds in alone.items():
        found[name]["library_seconds"] = seconds
    return found


def short_lines(folder: Path) -> list[dict[str, Any]]:
    """A row for each kind and pass."""
    rows = []
    for kind in KINDS:
        found = []
        for lines in (LINES, 2 * LINES):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found.append(pool.submit(passes, folder, kind, lines, 8192).result())
        for name, many in found[1].items():
            beside = many["seconds"] - many["library_seconds"]
            row = {
                "kind": kind,
                "pass": name,
                "lines": 2 * LINES,
                "lines_per_cpu_second_beside_the_library": 2 * LINES / beside,
                "bytes_per_line": (many["memory"] - found[0][name]["memory"]) / LINES,
                **many,
            }
            rows.append(row)
            print(
                f"{kind}, {name}: {row['lines_per_cpu_second_beside_the_library']:,.0f} lines a CPU second beside the"
                f" library, {row['bytes_per_line']:.1f} bytes a line",
                flush=True,
            )
    return rows


def describe(found: dict[str, Any]) -> str:
    """A round as text."""
    speed, ratio, of_cpu = found["prepare"][RATES[0]], *(found[f"{rate}_ratio"] for rate in RATES)
    return f"{speed / 1e6:.2f} M tokens/s, {ratio:.2f} × the library ({of_cpu:.2f} × per CPU second)"


def main() -> None:
    options = parser_of(__doc__, "prepare").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = short_lines(Path(folder))
        found = measure(Path(folder))
    middle = sorted(found["rounds"], key=lambda each: each[f"{RATES[0]}_ratio"])[ROUNDS // 2]
    print(f"median: {describe(middle)}")
    result = {"tokens_per_second": middle["prepare"][RATES[0]], "vocabulary_size": VOCABULARY}
    result |= {"ratio": middle[f"{RATES[0]}_ratio"], "cpu_ratio": middle[f"{RATES[1]}_ratio"]}
    # A load average above the number of cores: other work was under way.
    result |= {"cores": os.cpu_count(), "load_average": os.getloadavg(), **found, "short_lines": lines}
    write_result(options.out, result)


if __name__ == "__main__":
    main()
