import gzip
import json
import os
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from multipack.data import batches, ray_engine
from multipack.data.batches import Batch, KeptDocuments
from multipack.data.blocks import TokenBlock, encode
from multipack.data.prepare import prepare
from multipack.data.sources import open_source
from multipack.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer, byte_tokenizer

BPE, CHAR = TokenizerConfig("bpe", "", 300), TokenizerConfig("char")
CHAT = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]


def content(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def arrays(block):
    return {name: (value.dtype.str, value.tolist()) for name, value in vars(block).items()}


class HereEngine:
    """What `RayEngine` is for `reads`, with all tasks in this process."""

    def __init__(self, tokenizer):
        ray_engine._tokenizers[tokenizer.hash] = tokenizer
        self.encoder = ray_engine._Encoder(tokenizer.hash, tokenizer.name, [])
        self.units = 0

    def reads(self, source, tokenizes=True):
        return ray_engine._RaySource(source, self, tokenizes)

    def rows(self, source, tokenizes):
        shell = pickle.loads(pickle.dumps(source.of(source.files.only([], Path.cwd()))))
        for unit in ray_engine._units(source):
            self.units += 1
            for row in ray_engine._Reader(shell, tokenizes).rows(unit):
                yield self.encoder.row(row) if tokenizes else row


def told(source, dedup):
    """Each document's name with what was skipped before it, and what was skipped in all; or what is wrong."""
    documents = KeptDocuments(source, dedup)
    seen = []
    try:
        for document in documents:
            seen.append((document.name, documents.skipped))
    except ValueError as error:
        return seen, str(error)
    return seen, list(documents.skipped.items()), source.done


def block_of(engine, documents):
    """All of them as one block, by an engine, in uneven batches."""
    parts = iter(lambda: list(islice(documents, 7)), [])
    found = [
        ray_engine._gathered(Batch(part, 0, 0)) if isinstance(engine, HereEngine) else part for part in parts
    ]
    if isinstance(engine, HereEngine):
        return TokenBlock.joined([block for _, block in found])
    given = engine.encode(Batch(part, 0, 0) for part in found)
    return TokenBlock.joined([block for _, block in given])


def records(count):
    for number in range(count):
        yield {"prompt": f"Q{number % 30} é", "completion": "" if number % 11 == 7 else "w " * (number % 5)}


@pytest.fixture
def folders(tmp_path):
    """Folders with files of every kind."""
    jsonl = tmp_path / "records"
    (jsonl / "more").mkdir(parents=True)
    for number in range(4):
        lines = [json.dumps(record) for record in records(20 + number)]
        lines.insert(3, "")
        text = ("\n".join(lines) + "\n\n").encode()
        name = f"more/{number}.jsonl" if number % 2 else f"{number}.jsonl.gz"
        (jsonl / name).write_bytes(text if number % 2 else gzip.compress(text))
    (jsonl / "1-empty.jsonl").write_bytes(b"")
    (jsonl / "2-blank.jsonl").write_bytes(b"\n\n")
    (jsonl / "notes.md").write_text("of another kind")
    chats = tmp_path / "chats"
    chats.mkdir()
    for number in range(3):
        rows = [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": [*CHAT, *CHAT]}]
        (chats / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(5):
        (texts / f"{number}.txt").write_text("a b\n\n\nc\n\n" * number + "x")
    return {"records": jsonl, "chats": chats, "texts": texts}


CASES = [
    {"source": "jsonl", "path": "records"},
    {"source": "jsonl", "path": "chats", "chat_template": "chatml"},
    {"source": "text", "path": "texts"},
    {"source": "text", "path": "texts", "documents": "blank_line"},
    {"source": "text", "path": "texts", "separator": "\n\n"},
    {"source": "text", "path": "texts", "documents": "stream"},
]


@pytest.mark.parametrize("unit_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()).replace("\n", "|"))
def test_tasks_read_what_this_process_reads(config, folders, case, unit_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 5)
    data = config(**{**case, "path": str(folders[case["path"]])})
    tokenizer = build_tokenizer(BPE, open_source(data), tmp_path / "cache")
    engine = HereEngine(tokenizer)
    for dedup in (False, True)[: 1 if case.get("documents") == "stream" else 2]:
        here = open_source(data)
        expected = told(here, dedup)
        remote = engine.reads(open_source(data))
        assert told(remote, dedup) == expected
        assert told(remote, dedup) == expected  # also when it is iterated again
        assert told(engine.reads(open_source(data), tokenizes=False), dedup) == expected
        assert (remote.hash, remote.total, remote.is_stream) == (here.hash, here.total, here.is_stream)
        assert remote.describe(3) == here.describe(3)
        found = block_of(engine, KeptDocuments(remote, dedup))
        assert arrays(found) == arrays(encode(list(KeptDocuments(here, dedup)), tokenizer))
    assert engine.units > (4 if unit_bytes == 1 else 0)


def test_rows_of_parquet_are_read_by_tasks(config, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason='needs `pip install "multipack[parquet]"`')
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(ray_engine, "UNIT_BYTES", 1)
    for number in range(3):
        parquet.write_table(
            pyarrow.Table.from_pylist(list(records(9 + number))), tmp_path / f"{number}.parquet"
        )
    data, engine = config(source="parquet", path=str(tmp_path)), HereEngine(byte_tokenizer())
    expected = told(open_source(data), True)
    assert told(engine.reads(open_source(data)), True) == expected
    assert expected[-1] == 30


def test_units_are_contiguous_ranges_of_files(config, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "UNIT_BYTES", 10)
    for number, size in enumerate([3, 4, 5, 20, 1, 0]):
        (tmp_path / f"{number}.txt").write_text("a" * size)
    (tmp_path / "other.bin").write_text("")
    source = open_source(config(source="text", path=str(tmp_path)))

    def units():
        rows = [json.loads(row["unit"]) for row in ray_engine._units(source)]
        return [([name for name, *_ in found], ignored) for found, ignored in rows]

    assert units() == [(["0.txt", "1.txt", "2.txt"], 1), (["3.txt"], 0), (["4.txt", "5.txt"], 0)]
    monkeypatch.setattr(ray_engine, "MOST_UNITS", 1)
    assert len(units()) == 2  # of 33 bytes at least, so that there are about as many


def test_documents_without_tokens_are_counted_where_they_are(config, text_file, tmp_path):
    definition = json.loads(byte_tokenizer().to_json())
    definition["normalizer"] = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    tokenizer = Tokenizer(json.dumps(definition), "no x")
    engine = HereEngine(tokenizer)
    data = config(source="text", path=text_file("x\n\nab\n\nx\n\nab\n\ncx\n\nx"), documents="blank_line")
    for dedup, left_out in ((False, 3), (True, 1)):
        expected = encode(list(KeptDocuments(open_source(data), dedup)), tokenizer)
        found = block_of(engine, KeptDocuments(engine.reads(open_source(data)), dedup))
        assert arrays(found) == arrays(expected)
        assert found.num_left_out == left_out


def test_some_documents_are_taken_out_of_a_block():
    block = TokenBlock(
        tokens=np.arange(6, dtype=np.uint16),
        lengths=np.array([1, 2, 3]),
        spans=np.array([[0, 1], [0, 1], [2, 3]]),
        span_counts=np.array([1, 0, 2]),
        borders=np.array([0, 1, 2]),
        names=np.frombuffer(b"abbccc", dtype=np.uint8),
        name_lengths=np.array([1, 2, 3]),
        left_out=np.array([0]),
    )
    taken = ray_engine._taken(block, np.array([0, -1, 2]))
    assert taken.tokens.tolist() == [0, 3, 4, 5]
    assert taken.lengths.tolist() == [1, 3]
    assert taken.spans.tolist() == [[0, 1], [0, 1], [2, 3]]
    assert taken.span_counts.tolist() == [1, 2]
    assert taken.borders.tolist() == [0, 2]
    assert taken.names.tobytes() == b"accc"
    assert taken.name_lengths.tolist() == [1, 3]
    assert taken.num_left_out == 1


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("1.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("1.jsonl", b'{"text": "a"}\n{"words": "b"}\n'),
        ("1.jsonl", b'{"text": "\xff"}\n'),
        ("1.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9]),
    ],
)
def test_what_is_wrong_is_said_as_here(config, tmp_path, monkeypatch, name, bad):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_engine, "UNIT_BYTES", 1)
    Path("records").mkdir()
    for number in (0, 2):
        Path(f"records/{number}.jsonl").write_text('{"text": "fine"}\n')
    Path("records", name).write_bytes(bad)
    data, engine = config(source="jsonl", path="records"), HereEngine(byte_tokenizer())
    assert told(engine.reads(open_source(data)), False)[1] == told(open_source(data), False)[1]


def test_files_that_change_or_vanish_are_errors(config, tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("abc")
    engine = HereEngine(byte_tokenizer())
    source = engine.reads(open_source(config(source="text", path=str(tmp_path))))
    (tmp_path / "1.txt").write_text("abcd")
    with pytest.raises(ValueError, match=r"1\.txt has changed"):
        list(source)
    os.remove(tmp_path / "1.txt")
    with pytest.raises(
        ValueError, match=r"1\.txt'; with --engine ray, each machine of the cluster must see the files"
    ):
        list(source)


def test_a_template_of_another_day_is_refused(config, tmp_path):
    (tmp_path / "day.jinja").write_text("{{ strftime_now('%d') }}{{ messages[0].content }}")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}))
    source = open_source(
        config(source="jsonl", path=str(tmp_path / "a.jsonl"), chat_template=str(tmp_path / "day.jinja")),
        CHAR,
    )
    assert list(pickle.loads(pickle.dumps(source))) == list(source)
    shape, (template, identity) = source.__getstate__()["_reader"]
    with pytest.raises(ValueError, match=r"day\.jinja writes the day, which has changed"):
        source.__setstate__({**source.__getstate__(), "_reader": (shape, (template, identity + "0"))})


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason='needs `pip install "multipack[ray]"`')
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_gives_what_this_machine_gives(cluster, config, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "UNIT_BYTES", 300)
    for case, dedup, shards in (
        (CASES[0], False, 0),
        (CASES[0], True, 0),
        (CASES[0], True, 3),
        (CASES[1], True, 2),
        (CASES[5], False, 0),
    ):
        data = config(**{**case, "path": str(folders[case["path"]]), "dedup": dedup})
        name = f"{case['path']}{dedup}{shards}"
        local = prepare(data, BPE, tmp_path / f"local{name}", shards=shards)
        on_ray = prepare(data, BPE, tmp_path / f"ray{name}", shards=shards, engine="ray")
        assert content(on_ray) == content(local)
    assert cluster.is_initialized()  # whoever connected it goes on with it


@pytest.mark.slow
def test_on_ray_other_processes_read(cluster, config, folders, monkeypatch):
    monkeypatch.setattr(ray_engine, "UNIT_BYTES", 1)
    data, tokenizer = config(source="jsonl", path=str(folders["records"])), byte_tokenizer()
    expected = told(open_source(data), True)
    block = encode(list(KeptDocuments(open_source(data), True)), tokenizer)
    engine = ray_engine.RayEngine(tokenizer)
    source = open_source(data)
    assert source.shape is not None  # the first record is read here
    monkeypatch.setattr(type(source), "_read", lambda *_: pytest.fail("read in this process"))
    assert told(engine.reads(source, tokenizes=False), True) == expected
    given = list(engine.encode(batches.batches(KeptDocuments(engine.reads(source), True), lambda: 0)))
    assert arrays(TokenBlock.joined([block for _, block in given])) == arrays(block)
    assert given[-1][0].done > 0
    engine.close()
    assert cluster.is_initialized()


@pytest.mark.slow
def test_on_ray_bad_input_is_one_line_and_nothing_is_left(cluster, config, text_file, tmp_path):
    prepare(config(source="text", path=text_file("abc")), CHAR, tmp_path / "abc")
    file = TokenizerConfig("file", str(tmp_path / "abc" / "tokenizer.json"))
    other = config(source="text", path=text_file("ab\n\nax", "other.txt"), documents="blank_line")
    bad = config(source="jsonl", path=text_file('{"text": "a"}\n{\n', "bad.jsonl"))
    for data, message in (
        (other, r"^other\.txt:3: .* does not know 'x'"),
        (bad, r"bad\.jsonl, line 2: not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(data, file, tmp_path / "out", engine="ray")
        assert list(tmp_path.glob("*out*")) == []


@pytest.mark.slow
def test_on_ray_what_is_no_files_is_read_here_and_tokenized_there(cluster):
    class Listed(batches.Source):
        hash, done = "list", 0

        def __iter__(self):
            return iter(documents)

        def describe(self, documents):
            return f"{documents}"

    documents = [
        batches.SourceDocument(f"{number}", (ray_engine.Part("é" * number, True),)) for number in range(9)
    ]
    engine, source = ray_engine.RayEngine(byte_tokenizer()), Listed()
    assert engine.reads(source) is source
    assert arrays(block_of(engine, iter(source))) == arrays(encode(documents, byte_tokenizer()))


def test_without_ray_the_extra_is_named(config, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r'pip install "multipack\[ray\]"'):
        prepare(config(source="text", path=text_file("abc")), CHAR, tmp_path / "out", engine="ray")
    assert list(tmp_path.glob("*out*")) == []
