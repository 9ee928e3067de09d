"""Mutants of every file that multipack reads: each is accepted, or refused by an error of one line.

A mutant is a valid file with random damage: bits, cut ends, values of other types, huge numbers, deep nesting, names of
files and commands. Each is opened in a forked process with limits of time and memory. Lost are mutants that hang, crash
the interpreter, run a command, or raise anything but the errors that the command line shows in one line.
"""

import gzip
import hashlib
import json
from dataclasses import fields

import numpy as np
import pytest
from mutation import of_bytes, of_json, of_npy, of_safetensors, of_text, of_tree

from multipack.data.stores.prepare import items_of
from multipack.data.stores.shards import HEADER, StoreHeader
from multipack.data.stores.store import TokenStore
from multipack.data.text.chat import ChatTemplate, built_in_template
from multipack.data.text.data_config import DataConfig
from multipack.data.text.sources import Source
from multipack.data.text.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer
from multipack.data.views.arriving import GrowingFolder
from multipack.data.views.documents import Documents
from multipack.data.views.stored_lengths import read_lengths

pytestmark = pytest.mark.timeout(1200)


def read_store(path, verify=True):
    store = TokenStore(path)
    if verify:
        store.verify()
    documents = Documents.whole(store)
    assert documents.target_counts is not None
    for number in range(len(documents)):
        documents[number].shifted_targets()
        documents.name(number)
    assert documents.fingerprint
    store.tokenizer.decode(documents[0].tokens.tolist())


def with_checksum(content, draw):
    """A header of other values whose checksum is right."""
    header = {**json.loads(content)}
    about = {key: header.pop(key) for key in ("format", "version", "checksum")}
    header = of_tree(header, draw)
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    about["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({**about, **header} if isinstance(header, dict) else header).encode()


def test_stores(drill, store):
    header, shard = store / HEADER, store / "shard-0000-00001.safetensors"
    drill(
        "header", header, [(of_bytes, 250), (of_json, 150), (with_checksum, 450)], lambda: read_store(store)
    )
    drill("shard", shard, [(of_bytes, 150), (of_safetensors, 350)], lambda: read_store(store))
    drill(
        "shard unverified", shard, [(of_bytes, 350), (of_safetensors, 150)], lambda: read_store(store, False)
    )
    assert {field.name for field in fields(StoreHeader)} <= json.loads(header.read_text()).keys()
    drill.check()


def test_positions_of_streams(drill, store, tmp_path):
    def of_state(content, draw):
        saved = json.loads(content)
        name = draw.choice(("stream", "item"))
        return json.dumps({**saved, name: of_tree(saved[name], draw)}).encode()

    data = DataConfig(source="store", path=str(store), stream=True, patience_seconds=0.1, validation=0.1)

    def read():
        stream = GrowingFolder(data, 2000)
        saved = json.loads((tmp_path / "state.json").read_bytes())
        stream.load_state_dict(saved["stream"])
        stream.document(saved["item"])
        for _, item in zip(range(3), stream, strict=False):
            stream.document(item)

    stream = GrowingFolder(data, 2000)
    items = [item for _, item in zip(range(20), stream, strict=False)]
    (tmp_path / "state.json").write_text(json.dumps({"stream": stream.state_dict(), "item": items[-1]}))
    drill("position", tmp_path / "state.json", [(of_state, 400)], read)
    drill.check()


def test_tokenizers(drill, tmp_path):
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"])
    file, beside = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    tokenizer.save(file)
    template = built_in_template("chatml")
    beside.write_text(json.dumps({"eos_token": {"content": "</s>"}, "chat_template": template.source}))

    def read():
        loaded = Tokenizer.load(tmp_path)
        loaded.decode(loaded.encode("some text, é\n\n")[:8])
        if loaded.chat_template:
            chat = ChatTemplate(
                loaded.chat_template, loaded.special_tokens, loaded.bos_token, loaded.eos_token
            )
            loaded.encode_parts([chat.parts([{"role": "user", "content": "a"}])])

    drill("tokenizer", file, [(of_bytes, 200), (of_json, 400)], read)
    drill("tokenizer_config", beside, [(of_bytes, 100), (of_json, 150)], read)
    chat = tmp_path / "chat_template.json"
    chat.write_text(template.to_json())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    drill(
        "chat_template.json",
        chat,
        [(of_json, 200)],
        lambda: ChatTemplate.from_json(chat.read_text()).parts(messages),
    )
    source = tmp_path / "template.jinja"
    source.write_text(template.source)
    drill(
        "template",
        source,
        [(of_bytes, 250), (of_text, 450)],
        lambda: ChatTemplate(source.read_bytes().decode("utf-8", "replace"), ["<|im_end|>"]).parts(messages),
    )
    drill.check()


RECORDS = {
    "text": {"text": "some text"},
    "completion": {"prompt": "a question", "completion": "an answer"},
    "chat": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [{"name": "f", "arguments": {"x": [1]}}]},
        ],
        "tools": [{"name": "f"}],
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]},
}


@pytest.mark.parametrize("form", RECORDS)
def test_records(drill, tmp_path, form):
    def read(file):
        config = DataConfig(source="jsonl", path=str(file), cache=str(tmp_path / "cache"))
        source = Source(config, TokenizerConfig("byte"))
        assert source.identity
        list(items_of(source))

    record = RECORDS[form]

    def of_record(content, draw):
        lines = [json.dumps(record), json.dumps(of_tree(record, draw)), json.dumps(record)]
        draw.shuffle(lines)
        return "\n".join(lines).encode()

    lines, listed, packed = tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "c.jsonl.gz"
    lines.write_text("\n".join([json.dumps(record)] * 3))
    listed.write_text(json.dumps([record] * 3))
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    drill(f"{form} lines", lines, [(of_record, 250), (of_bytes, 100)], lambda: read(lines))
    drill(f"{form} list", listed, [(of_json, 80), (of_bytes, 40)], lambda: read(listed))
    drill(f"{form} gz", packed, [(of_bytes, 50)], lambda: read(packed))
    drill.check()


def test_lengths(drill, tmp_path):
    file, counts = tmp_path / "lengths.npy", tmp_path / "counts.npy"
    np.save(file, np.arange(1, 50))
    np.save(counts, np.arange(50))
    drill("lengths", file, [(of_bytes, 300), (of_npy, 250)], lambda: read_lengths(file, 4096))
    drill(
        "counts", counts, [(of_bytes, 200), (of_npy, 150)], lambda: read_lengths(counts, 64, histogram=True)
    )
    drill.check()
