"""The bytes that `prepare` writes, against a plain loop over documents, and the memory that it takes a document."""

import json
import tracemalloc

import pytest
from safetensors import safe_open
from safetensors.numpy import save

from multipack.data.stores import prepare as module
from multipack.data.stores import writer as writer_module
from multipack.data.stores.prepare import items_of, prepare
from multipack.data.stores.shards import FORMAT
from multipack.data.text.sources import Source
from multipack.data.text.tokenizer import TokenizerConfig, byte_tokenizer
from plain_shard import plain

BYTE = TokenizerConfig("byte")
RECORDS = {
    "text": (lambda n: {"text": "é" * (n % 5) + f"{n % 30}"}, {"dedup": True}),
    "weights": (lambda n: {"text": "a" * (n % 5 + 1), "w": 1 + (n % 40 == 39)}, {"weight_field": "w"}),
    "completion": (lambda n: {"prompt": "Q" * (n % 3), "completion": f"A{n}"}, {"between": ""}),
    "preference": (
        lambda n: {"prompt": f"{n % 9}", "chosen": "yes", "rejected": "n" * (n % 3)},
        {"dedup": True},
    ),
    "label": (lambda n: {"prompt": "same", "completion": f"{n % 20}", "label": n % 3 == 0}, {"dedup": True}),
    "chat": (lambda n: {"messages": turns(n)}, {}),
}


def turns(number):
    return [
        {"role": role, "content": f"{role} {number}"} for role in ("user", "assistant") * (number % 2 + 1)
    ]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Batches and pieces of shards that hold a few documents."""
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 9)
    monkeypatch.setattr(writer_module, "PIECE_DOCUMENTS", 16)


@pytest.mark.parametrize("kind", RECORDS)
def test_shards_have_the_bytes_of_a_plain_loop(config, text_file, tmp_path, kind):
    record, fields = RECORDS[kind]
    path = text_file("\n".join(json.dumps(record(number)) for number in range(90)), "r.jsonl")
    source = Source(config(source="jsonl", path=path, **{**fields, "dedup": False}), BYTE)
    (file,) = prepare(config(source="jsonl", path=path, **fields), BYTE, tmp_path / "out").glob("shard-*")
    with safe_open(file, "numpy") as shard:
        about = shard.metadata()
    tokenizer = byte_tokenizer(source.find_form().special_tokens)
    arrays, content = plain(items_of(source), tokenizer, "dedup" in fields, 1 if kind == "label" else 2)
    assert json.loads(about[FORMAT])["content"] == f"{content:032x}"
    assert file.read_bytes() == save(arrays, about)


def peak(config, text_file, tmp_path, lines, **fields):
    """Most bytes of Python and NumPy at once while short lines become a store."""
    path = text_file("\n".join(f'{{"text": "{number}"}}' for number in range(lines)), f"{lines}.jsonl")
    tracemalloc.start()
    try:
        prepare(config(source="jsonl", path=path, **fields), BYTE, tmp_path / f"{lines} {fields}")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fields", [{}, {"dedup": True}], ids=["plain", "dedup"])
def test_memory_grows_by_less_than_20_bytes_a_document(config, text_file, tmp_path, monkeypatch, fields):
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 128)
    peak(config, text_file, tmp_path, 100, **fields)  # what the first call keeps
    few, many = (peak(config, text_file, tmp_path, lines, **fields) for lines in (200, 1200))
    assert (many - few) / 1000 <= 20
