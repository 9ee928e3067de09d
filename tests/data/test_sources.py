"""Sources: files, text, JSON, Parquet, Hugging Face data sets and the standard library as documents."""

import gzip
import io
import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.stores.prepare import prepare
from multipack.data.stores.store import TokenStore
from multipack.data.text import texts as room
from multipack.data.text.data_config import DataConfig
from multipack.data.text.sources import Source, open_dataset
from multipack.data.text.stdlib import library_files, parse_file
from multipack.data.text.texts import divided, separated, stretches
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.data.views.corpus import load_corpus

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
CHATS = [
    {"messages": [USER, ANSWER], "tools": None, "score": 1.0},
    {"messages": [USER, CALL, {"role": "tool", "content": "3"}, ANSWER], "tools": [{"name": "f"}]},
    {"messages": [USER]},
]


def texts(source):
    return ["".join(part.text for part in document.parts) for document in source]


def names(source):
    return [document.name for document in source]


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def write_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="writes Parquet files")
    from pyarrow import parquet

    def make(records, name="a.parquet", **options):
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / name, **options)
        return str(tmp_path / name)

    return make


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="makes a Hugging Face data set")


# --- files --------------------------------------------------------------------------------------------


def test_files_of_a_folder_are_sorted_documents(tmp_path, config):
    for name, text in {"b.txt": "B", "a/z.md": "Z", "a.txt": "A", ".hidden/x.txt": "X", "c.bin": "C"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    source = Source(config(source="text", path=str(tmp_path / "in")))
    assert names(source) == ["a.txt", "a/z.md", "b.txt"]
    assert texts(source) == ["A", "Z", "B"]
    assert source.noted.skipped == {"files of other kinds": 1}
    assert source.done == source.total == 3
    assert source.describe() == "in, {documents} documents by file"


def test_patterns_select_files(tmp_path, config, monkeypatch):
    for name in ("a/x.jsonl", "a/b/y.jsonl.gz", "a/b/z.log", "a/.hidden.jsonl", "c[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        record = b'{"text": "T"}'
        (tmp_path / name).write_bytes(gzip.compress(record) if name.endswith("gz") else record)

    def found(pattern):
        return names(Source(config(source="jsonl", path=pattern)))

    assert found(str(tmp_path / "a/**/*.jsonl*")) == ["b/y.jsonl.gz:1", "x.jsonl:1"]
    assert found(str(tmp_path / "c[1].txt")) == ["c[1].txt:1"]  # a file of this name is no pattern
    monkeypatch.chdir(tmp_path)
    assert found("**/[yz].*") == ["a/b/y.jsonl.gz:1", "a/b/z.log:1"]
    with pytest.raises(ValueError, match=r"data\.path=a/\*\.txt: no file"):
        found("a/*.txt")


def test_unreadable_files_are_named(config, text_file, tmp_path):
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        list(Source(config(source="text", path=text_file(b"caf\xe9", "latin.txt"))))
    for kind in ("text", "jsonl"):
        for broken in (b"", b"not gzip", gzip.compress(bytes(100_000))[:60]):
            with pytest.raises(ValueError, match=r"b\.txt\.gz: broken gzip"):
                list(Source(config(source=kind, path=text_file(broken, "b.txt.gz"))))
    with pytest.raises(ValueError, match=r"data\.path=.*nowhere"):
        Source(config(source="text", path=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no \.txt, .* file .*1 files of other kinds"):
        Source(config(source="text", path=str(tmp_path / "empty")))
    with pytest.raises(ValueError, match="already tokenized"):
        Source(config(source="store", path="x"))


def test_pipes_are_refused_and_left_out_of_folders(tmp_path, config):
    """Opening one would wait for its writer."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl: it is a pipe or a device"):
        Source(config(source="jsonl", path=str(tmp_path / "a.jsonl")))
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    for path in (tmp_path, tmp_path / "*.jsonl"):
        source = Source(config(source="jsonl", path=str(path)))
        assert [file.name for file in source.files] == ["b.jsonl"]


def test_the_identity_depends_on_settings_and_on_size_and_time_of_files(config, text_file, monkeypatch):
    def of(**fields):
        return Source(config(source="text", path=path, **fields)).identity

    path = text_file("a\n\nb")
    first = of()
    assert of() == of(validation=0.5, split_seed=3) == first
    assert len({first, of(documents="blank_line"), of(separator="b"), of(block_size=2)}) == 4
    os.utime(path, (1, 1))
    touched = of()
    assert touched not in (first, text_file("a\n\nbc") and of())
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("a file was opened"))
    assert of()  # no document is read


# --- text ---------------------------------------------------------------------------------------------


def test_blank_lines_and_separators_divide_text(config, text_file):
    path = text_file("\n\none\ntwo\n\n \t\n\nthree\r\n\r\nfour")
    source = Source(config(source="text", path=path, documents="blank_line"))
    assert texts(source) == ["one\ntwo", "three", "four"]
    assert names(source) == ["text.txt:3", "text.txt:8", "text.txt:10"]
    source = Source(config(source="text", path=text_file("a<end>b\n<end><end> \n<end>c"), separator="<end>"))
    assert texts(source) == ["a", "b\n", "c"]
    assert names(source) == ["text.txt#1", "text.txt#2", "text.txt#5"]
    assert source.noted.skipped == {"empty documents": 2}


@settings(deadline=None, max_examples=15)
@given(st.text(alphabet="ab<>\n ", max_size=60), st.integers(1, 7))
def test_the_size_of_chunks_changes_nothing(text, chunk):
    before, room.CHUNK = room.CHUNK, chunk
    try:
        assert list(separated(io.StringIO(text, newline=""), "<>")) == text.split("<>")
        pieces = list(stretches(io.StringIO(text, newline="")))
    finally:
        room.CHUNK = before
    assert "".join(piece for piece, _ in pieces) == text
    if len(text) < 16 * chunk:  # longer texts are cut anywhere
        before, after = [piece[-1] for piece, _ in pieces[:-1]], [piece[0] for piece, _ in pieces[1:]]
        assert all(a.isalnum() and b.isspace() for a, b in zip(before, after, strict=True))
    assert [ended for _, ended in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    expected = [part for part in text.split("\n") if part.strip()]
    paragraphs = divided(io.StringIO(text, newline=""), "", "blank_line", "")
    assert [line for _, part, _ in paragraphs for line in part.split("\n")] == expected


def test_a_stream_marks_the_ends_of_files(tmp_path, config):
    for name, text in {"a.txt": "one", "b.txt": "", "c.txt": " "}.items():
        (tmp_path / name).write_text(text)
    source = Source(config(source="text", path=str(tmp_path), block_size=8))
    assert source.is_stream
    assert [(document.parts[0].text, document.takes_end) for document in source] == [
        ("one", True),
        (" ", True),
    ]
    assert source.noted.skipped == {"empty files": 1}


def test_gzip_and_byte_order_marks_are_removed_and_a_changed_file_is_refused(config, text_file):
    path = text_file(gzip.compress(b"\xef\xbb\xbfline one\r\nline two"), "t.txt.gz")
    source = Source(config(source="text", path=path))
    assert texts(source) == ["line one\r\nline two"]
    text_file(gzip.compress(b"another"), "t.txt.gz")
    with pytest.raises(ValueError, match="has changed since"):
        list(source)


# --- JSON ---------------------------------------------------------------------------------------------


def test_a_file_holds_lines_or_a_list(config, text_file):
    content = json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode()
    for name, stored in {"a.json": b"\xef\xbb\xbf\n" + content, "b.json.gz": gzip.compress(content)}.items():
        source = Source(config(source="jsonl", path=text_file(stored, name)))
        assert list(zip(names(source), texts(source), strict=True)) == [
            (f"{name}:1", "a"),
            (f"{name}:2", "b"),
        ]
        assert source.done == source.total
    lines = Source(config(source="jsonl", path=text_file('{"text": "a"}\n\n{"text": "b"}\n', "c.json")))
    for _ in range(2):
        assert names(lines) == ["c.json:1", "c.json:3"]
        assert lines.noted.skipped == {"blank lines": 1}


MALFORMED = [
    (b'{"text": "a"', "not JSON"),
    (b'["text"]', "a JSON list, not an object"),
    (b"[" * 100_000, "not JSON"),
    (b'{"txt": "a"}', r"no field 'text', or null in it \(it has txt\)"),
    (b'{"text": 3}', "field 'text' is a int, not text"),
    (b'{"text": "\\ud800"}', "unpaired surrogate"),
    (b'{"text": "\xff"}', "not JSON: 'utf-8' codec"),
]


def test_malformed_records_are_named_by_file_and_place(config, text_file):
    def read(content, name):
        return list(Source(config(source="jsonl", path=text_file(content, name))))

    for line, complaint in MALFORMED:
        with pytest.raises(ValueError, match=rf"bad\.jsonl, line 2: .*{complaint}"):
            read(b'{"text": "good"}\n' + line + b"\n", "bad.jsonl")
        if not complaint.startswith("not JSON"):
            with pytest.raises(ValueError, match=rf"bad\.json, record 2: .*{complaint}"):
                read(b'[{"text": "good"}, ' + line + b"]", "bad.json")
    for content in (b'[{"text": "a"}, {"text": ', b'[{"text": "a"}]\n[{"text": "b"}]', b'[{"text": "\xff"}]'):
        with pytest.raises(ValueError, match=r"bad\.json: not JSON"):
            read(content, "bad.json")


# --- Parquet ------------------------------------------------------------------------------------------


def test_only_used_columns_are_read_row_group_by_row_group(write_parquet, config):
    import pyarrow

    rows = [{"text": f"{number:09}" * 1000, "vector": [0.5] * 9} for number in range(2000)]  # 18 MB
    path = write_parquet(rows, row_group_size=50, compression="none", use_dictionary=False)
    source = Source(config(source="parquet", path=path))
    before, most = pyarrow.total_allocated_bytes(), 0
    for document, row in zip(source, rows, strict=True):
        assert document.parts[0].text == row["text"]
        most = max(most, pyarrow.total_allocated_bytes() - before)
        assert 0 <= source.done <= source.total
    assert 0 < most < 1024 * 9000 * 2
    assert document.name == "a.parquet:2000"
    assert source.reader.columns(["text", "vector"]) == ["text"]
    assert source.describe() == "a.parquet, {documents} documents (text)"


def test_chats_are_the_same_in_parquet_and_jsonl(write_parquet, config, text_file):
    lines = text_file(jsonl(*CHATS), "a.jsonl")
    for template in ("", "llama3"):
        table = Source(config(source="parquet", path=write_parquet(CHATS), chat_template=template))
        objects = Source(config(source="jsonl", path=lines, chat_template=template))
        assert [document.parts for document in table] == [document.parts for document in objects]
        assert table.noted.skipped == objects.noted.skipped == {"conversations without an answer": 1}
        assert table.find_form().chat_template == objects.find_form().chat_template
        assert table.done == table.total


def test_a_line_beyond_the_limit_is_named_and_skipped_unread(config, text_file, monkeypatch):
    monkeypatch.setattr(room, "MOST_LINE", 50)
    monkeypatch.setattr(room, "MOST_LIST", 50)
    monkeypatch.setattr(room, "CHUNK", 10)
    whole = '{"text": "' + "a" * (50 - len('{"text": ""}\n')) + '"}\n'
    assert len(whole) == 50
    long = whole.replace('"a', '"aa')
    for name, stored in (("a.jsonl", whole + long + whole), ("b.jsonl", long[:-1] + "b" * 300)):
        packed = text_file(gzip.compress(stored.encode()), f"{name}.gz")
        with pytest.raises(
            ValueError, match=rf"{name}\.gz, line {1 + (name[0] == 'a')}: longer than 50 bytes"
        ):
            list(Source(config(source="jsonl", path=packed)))
    source = Source(config(source="jsonl", path=text_file(whole + long + whole, "a.jsonl"), broken="skip"))
    assert (names(source), source.noted.skipped) == (["a.jsonl:1", "a.jsonl:3"], {"broken lines": 1})
    with pytest.raises(ValueError, match=r"c\.json: a list of more than 50 bytes"):
        list(Source(config(source="jsonl", path=text_file("[" + " " * 60 + "]", "c.json"))))


def test_bad_parquet_files_and_rows_are_named(write_parquet, config, tmp_path, monkeypatch):
    def read(path, **fields):
        list(Source(config(source="parquet", path=str(path), **fields)))

    (tmp_path / "no.parquet").write_bytes(b"PAR1 not a file PAR1")
    with pytest.raises(ValueError, match=r"no\.parquet, after row 0: not a complete Parquet file") as caught:
        read(tmp_path / "no.parquet")
    assert "\n" not in str(caught.value)
    whole, faults = Path(write_parquet([{"text": "a" * 500}] * 9)).read_bytes(), []
    for at in range(len(whole) - 240, len(whole) - 8, 2):  # of the footer, whose faults have several lines
        damaged = bytearray(whole)
        damaged[at] ^= 4
        (tmp_path / "cut.parquet").write_bytes(damaged)
        try:
            read(tmp_path / "cut.parquet")
        except ValueError as error:
            faults.append(str(error))
    assert faults
    assert "\n" not in "".join(faults)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: .*'text'"):
        read(write_parquet([{"text": "a"}, {"text": None}]))
    path = write_parquet([{"prompt": "p", "answer": "a", "id": 1}])
    with pytest.raises(ValueError, match=r"row 1: neither .*\(prompt, answer, id\).*data\.fields"):
        read(path)
    with pytest.raises(ValueError, match=r"no field 'reply', .*\(it has prompt, answer, id\)"):
        read(path, fields=["prompt", "reply"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"data\.source=parquet needs .*\[parquet\]"):
        read(path)


# --- Hugging Face data sets ---------------------------------------------------------------------------


def test_a_saved_data_set_is_read_row_by_row(datasets, config, tmp_path):
    datasets.Dataset.from_list(CHATS[::2]).save_to_disk(tmp_path / "set")
    datasets.Dataset.from_list(CHATS).save_to_disk(tmp_path / "other")

    def read(name="set", **fields):
        return Source(config(source="huggingface", path=str(tmp_path / name), **fields))

    source = read()
    (document,) = source
    assert document.name == "set:1"
    assert "".join(part.text for part in document.parts if part.is_target) == "Hello<|im_end|>"
    assert source.noted.skipped == {"conversations without an answer": 1}
    assert (source.done, source.total, source.unit) == (2, 2, "rows")
    assert source.describe() == "set, {documents} documents (messages, chatml)"
    assert source.identity == read().identity
    assert len({source.identity, read(chat_template="llama3").identity, read("other").identity}) == 3
    with pytest.raises(ValueError, match=r"data\.stream=true is for training"):
        prepare(config(source="huggingface", path="set", stream=True), TokenizerConfig(kind="byte"))
    stream = open_dataset(config(source="huggingface", path=str(tmp_path / "set"), stream=True))
    assert [row["score"] for row in stream] == [1.0, None]


def test_parts_of_a_data_set_are_selected_by_name(datasets, config, tmp_path, monkeypatch):
    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")

    def read(**fields):
        return Source(config(source="huggingface", path=str(tmp_path / "set"), **fields))

    assert texts(read(part="test")) == ["test"]
    with pytest.raises(ValueError, match=r"data\.part='dev'.* the parts train, test"):
        read(part="dev")
    with pytest.raises(ValueError, match=r"data\.subset='x'.* without subsets"):
        read(subset="x")
    (tmp_path / "set" / "dataset_dict.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.path=.*set, "):
        read()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"data\.source=huggingface needs .*\[huggingface\]"):
        read()


# --- the standard library -----------------------------------------------------------------------------

SOURCE = '''
import os

class Box:
    """A box."""

    def open(self, force=False):
        """Open it.

        Gently.
        """
        if force:
            return 1
        return 2  # ünicode

    @property
    def size(self): "How big."; return 3

    def only_docstring(self):
        """Nothing follows."""

    def no_docstring(self):
        return 4

async def outer(
    a,
    b,
):
    "Outer."
    def inner():
        """Inner."""
        return a
    return inner
'''


def test_a_function_becomes_signature_with_docstring_and_body(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    names, prompts, completions = zip(*parse_file(tmp_path / "a.py"), strict=True)
    assert names == ("Box.open", "outer", "outer.inner")
    assert prompts[0] == 'def open(self, force=False):\n    """Open it.\n\n    Gently.\n    """\n'
    assert completions[0] == "    if force:\n        return 1\n    return 2  # ünicode\n"
    assert prompts[1] == 'async def outer(\n    a,\n    b,\n):\n    "Outer."\n'
    assert completions[2] == "    return a\n"
    latin = '# -*- coding: latin-1 -*-\r\ndef f():\r\n    "é"\r\n    return 1\r\n'
    (tmp_path / "b.py").write_bytes(latin.encode("latin-1"))
    assert parse_file(tmp_path / "b.py") == [("f", 'def f():\n    "é"\n', "    return 1\n")]


def test_the_library_of_this_python_has_many_pairs():
    source = Source(DataConfig())
    assert source.total > 1e6
    assert len(source.files) > 300
    assert not [file for file in source.files if file.name.startswith(("test/", "site-packages/"))]
    assert source.identity == Source(DataConfig()).identity
    source.files = [file for file in source.files if file.name[0] in "fh"]
    documents = list(source)
    assert len(documents) > 100
    assert all([part.is_target for part in document.parts] == [False, True] for document in documents)
    assert "functools.py:wraps" in (found := [document.name for document in documents])
    assert names(source) == found  # a second pass is the same


def test_tests_and_packages_are_left_out_and_broken_files_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"no standard library sources in .*data\.source=text"):
        Source(DataConfig())
    for name in ("a.py", "site-packages/b.py", "test/c.py", "tests/d.py", "config-3/e.py", "pkg/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "encoding.py").write_bytes(b"# coding: utf-8\nx = '\xff'\n")
    assert library_files()[1] == ["a.py", "broken.py", "encoding.py", "pkg/f.py"]
    source = Source(DataConfig())
    for _ in range(2):
        assert len(list(source)) == 6
        assert source.noted.skipped == {"files that do not parse": 2}


BROKEN = {3: '{"prompt": "a"', 5: '{"prompt": 1, "completion": "b"}', 9: "[1]", 11: '{"completion": "b"}'}


def test_broken_records_are_all_named_or_left_out(config, text_file):
    lines = [json.dumps({"prompt": f"Q{n}", "completion": "" if n == 7 else "yes"}) for n in range(1, 13)]
    path = text_file("\n".join(BROKEN.get(n, line) for n, line in enumerate(lines, 1)), "chats.jsonl")
    with pytest.raises(ValueError, match=r"line 3: not JSON") as caught:
        list(Source(config(source="jsonl", path=path)))
    assert "4 broken lines: chats.jsonl:3, 5, 9, 11; data.broken=skip leaves them out" in str(caught.value)
    store = TokenStore(prepare(config(source="jsonl", path=path, broken="skip"), TokenizerConfig("byte")))
    assert (store.num_documents, store.noted.skipped) == (7, {"broken lines": 4, "empty completions": 1})
    corpus = load_corpus(config(source="jsonl", path=path, broken="skip"), TokenizerConfig("byte"), limit=99)
    assert corpus.skipped == ["4 broken lines: chats.jsonl:3, 5, 9, 11", "1 empty completion: chats.jsonl:7"]
    with pytest.raises(ValueError, match="not JSON"):  # the store of `skip` is not that of `error`
        prepare(config(source="jsonl", path=path), TokenizerConfig("byte"))


def test_many_broken_records_are_abbreviated(config, text_file):
    good = json.dumps({"text": "a"})
    path = text_file("\n".join([good, *["{"] * 50, good]), "many.jsonl")
    with pytest.raises(
        ValueError, match=r"20 \(or more\) broken lines: many.jsonl:2, 3, .* 21; data.broken=skip"
    ):
        list(Source(config(source="jsonl", path=path)))
    corpus = load_corpus(config(source="jsonl", path=path, broken="skip"), TokenizerConfig("byte"), limit=99)
    assert corpus.skipped[0].endswith("20, 21 and 30 more")
    only = text_file("\n".join(['{"question": 1}'] * 30), "only.jsonl")
    with pytest.raises(ValueError, match="line 1: neither `text` nor") as caught:
        list(Source(config(source="jsonl", path=only)))
    assert "data.broken" not in str(caught.value)
    with pytest.raises(ValueError, match=r"30 broken lines: .* and 10 more; the first: .*neither `text` nor"):
        prepare(config(source="jsonl", path=only, broken="skip"), TokenizerConfig("byte"))
