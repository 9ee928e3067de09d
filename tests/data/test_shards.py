import json

import numpy as np
import pytest

from multipack.data.header import HEADER
from multipack.data.prepare import prepare
from multipack.data.shards import ShardsHeader, is_shards, list_shards
from multipack.data.store import TokenStore
from multipack.data.tokenizer import TokenizerConfig

BYTE = TokenizerConfig("byte")


@pytest.fixture
def corpus(text_file):
    """Twenty documents, one of them twice, between blank lines and an empty one."""
    lines = [json.dumps({"text": "a" * (n % 19 + 1)}) for n in range(20)]
    return text_file("\n\n".join([*lines[:5], json.dumps({"text": " "}), *lines[5:]]) + "\n\n", "c.jsonl")


def documents(stores):
    return [
        (
            store.name(number),
            store.tokens_of(number).tolist(),
            store.spans_of(number).tolist(),
            store.border(number),
        )
        for store in stores
        for number in range(store.num_documents)
    ]


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("count", [1, 3, 19])
def test_shards_hold_the_documents_of_one_store(config, corpus, tmp_path, count, dedup):
    data = config(source="jsonl", path=corpus, dedup=dedup)
    whole = TokenStore(prepare(data, BYTE, tmp_path / "whole"))
    folder = prepare(data, BYTE, tmp_path / "shards", shards=count)
    paths, is_complete = list_shards(folder)
    assert is_complete
    shards = [TokenStore(path) for path in paths]
    assert len(shards) == count
    assert documents(shards) == documents([whole])
    sizes = [shard.num_documents for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    header = ShardsHeader.read(folder)
    assert (header.documents, header.tokens) == (whole.num_documents, whole.num_tokens)
    assert (header.source_hash, header.skipped) == (whole.header.source_hash, whole.header.skipped)
    assert header.description == whole.header.description
    reasons = {reason for shard in shards for reason in shard.header.skipped}
    summed = {reason: sum(shard.header.skipped.get(reason, 0) for shard in shards) for reason in reasons}
    assert summed == whole.header.skipped


def test_shards_appear_one_by_one_and_the_header_last(config, corpus, tmp_path):
    seen = []

    def look(done, total, unit):
        if unit == "bytes tokenized":
            paths, is_complete = list_shards(tmp_path / "out")
            seen.append((len(paths), is_complete, is_shards(tmp_path / "out")))

    prepare(config(source="jsonl", path=corpus), BYTE, tmp_path / "out", progress=look, shards=3)
    assert seen == [(0, False, False), (1, False, True), (2, False, True)]
    assert list_shards(tmp_path / "out")[1]
    assert is_shards(tmp_path / "out")


def test_shards_are_made_once(config, corpus, tmp_path, text_file):
    data, out = config(source="jsonl", path=corpus), tmp_path / "out"
    prepare(data, BYTE, out, shards=2)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert prepare(data, BYTE, out, shards=2) == out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(ValueError, match="or another number of shards"):
        prepare(data, BYTE, out, shards=3)
    other = config(source="text", path=text_file("abc\n\ndef"), documents="blank_line")
    with pytest.raises(
        ValueError, match="holds other documents, another tokenizer or another number of shards"
    ):
        prepare(other, BYTE, out, shards=2)
    with pytest.raises(ValueError, match="holds a token store of other documents"):
        prepare(data, BYTE, out)
    (out / HEADER).unlink()
    with pytest.raises(ValueError, match="folder of shards that is not complete: go on with --shards"):
        prepare(data, BYTE, out)
    with pytest.raises(ValueError, match=r"shard-00000 holds other documents; remove .*out"):
        prepare(other, BYTE, out, shards=2)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.bin")}.items() <= before.items()


def test_what_was_left_out_after_the_last_document_is_counted_also_when_all_shards_are_there(
    config, text_file, tmp_path
):
    lines = [json.dumps({"text": f"t{number}"}) for number in range(4)] + ['{"text": ""}', '{"text": "t0"}']
    data, out = (
        config(source="jsonl", path=text_file("\n".join(lines), "a.jsonl"), dedup=True),
        tmp_path / "out",
    )
    prepare(data, BYTE, out, shards=2)
    header = (out / HEADER).read_bytes()
    assert json.loads(header)["skipped"] == {"empty documents": 1, "duplicates": 1}
    (out / HEADER).unlink()  # as after a kill between the last shard and the header
    prepare(data, BYTE, out, shards=2)
    assert (out / HEADER).read_bytes() == header


def test_impossible_shards(config, corpus, tmp_path, text_file):
    data = config(source="jsonl", path=corpus)
    with pytest.raises(ValueError, match="--shards 2 needs a folder: name it with --store"):
        prepare(data, BYTE, shards=2)
    with pytest.raises(ValueError, match="--shards 21 of 20 documents"):
        prepare(data, BYTE, tmp_path / "out", shards=21)
    with pytest.raises(ValueError, match="--shards -1"):
        prepare(data, BYTE, tmp_path / "out", shards=-1)
    with pytest.raises(ValueError, match=r"--engine='rey': one of local, ray \(nearest: ray\)"):
        prepare(data, BYTE, tmp_path / "out", engine="rey")
    stream = config(source="text", path=text_file("abc"), documents="stream")
    with pytest.raises(ValueError, match="--shards 2 divides documents, and a stream is one"):
        prepare(stream, BYTE, tmp_path / "out", shards=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists and is not a token store"):
        prepare(data, BYTE, tmp_path / "mine", shards=2)
    with open(corpus, "a") as file:
        file.write("{")
    with pytest.raises(ValueError, match=r"c\.jsonl, line \d+: not JSON"):
        prepare(data, BYTE, tmp_path / "out", shards=2)
    assert not (tmp_path / "out").exists()


def test_damaged_folders(config, corpus, tmp_path):
    out = prepare(config(source="jsonl", path=corpus), BYTE, tmp_path / "out", shards=2)
    content = json.loads((out / HEADER).read_text())
    for field, value, found in (
        ("documents", 3, "was edited"),
        ("shards", [*content["shards"], {"name": "../x", "checksum": ""}], "was edited"),
        ("shards", 7, "lacks"),
        ("version", 2, "version 2 .* reads version 1"),
        ("format", "x", "of another format"),
    ):
        (out / HEADER).write_text(json.dumps({**content, field: value}))
        with pytest.raises(ValueError, match=found):
            list_shards(out)
    (out / HEADER).write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        list_shards(out)
    (out / HEADER).write_text(json.dumps(content))
    (out / "shard-00001").rename(out / "elsewhere")
    with pytest.raises(ValueError, match="shard-00001 is not a token store"):
        list_shards(out)
    (out / "shard-00000").rename(out / "shard-00001")
    (out / "elsewhere").rename(out / "shard-00000")
    with pytest.raises(ValueError, match="shard-00000 is not the shard that"):
        list_shards(out)
    with pytest.raises(ValueError, match="there is no such folder"):
        list_shards(tmp_path / "nowhere")
    assert not is_shards(tmp_path)


def test_a_folder_that_grows_is_listed_up_to_the_first_gap(config, corpus, tmp_path):
    out = prepare(config(source="jsonl", path=corpus), BYTE, tmp_path / "out", shards=3)
    (out / HEADER).unlink()
    (out / "shard-00001").rename(out / ".shard-00001.1a2b.partial")
    assert list_shards(out) == ([out / "shard-00000"], False)
    assert np.all(TokenStore(out / "shard-00000").lengths > 0)
