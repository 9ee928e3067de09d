import gzip
import io
import json
import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data import files
from multipack.data.files import paragraphs, separated, stretches
from multipack.data.sources import open_source


def texts(source):
    return ["".join(text for text, *_ in document.parts) for document in source]


def names(source):
    return [document.name for document in source]


# --- text ---------------------------------------------------------------------------------------------


def test_files_are_documents_sorted_and_recursive(tmp_path, config):
    for name, text in {"b.txt": "B", "a/z.md": "Z", "a.txt": "A", ".hidden/x.txt": "X", "c.bin": "C"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    source = open_source(config(source="text", path=str(tmp_path / "in")))
    assert names(source) == ["a.txt", "a/z.md", "b.txt"]
    assert texts(source) == ["A", "Z", "B"]
    assert source.skipped == {"files of other kinds": 1}
    assert source.done == source.total == 3
    assert source.describe(3) == "in, 3 documents by file"


def test_blank_lines_divide(config, text_file):
    path = text_file("\n\none\ntwo\n\n \t\n\nthree\r\n\r\nfour")
    source = open_source(config(source="text", path=path, documents="blank_line"))
    assert texts(source) == ["one\ntwo", "three", "four"]
    assert names(source) == ["text.txt:3", "text.txt:8", "text.txt:10"]


def test_a_separator_divides_and_empty_documents_are_counted(config, text_file):
    path = text_file("a<end>b\n<end><end> \n<end>c")
    source = open_source(config(source="text", path=path, separator="<end>"))
    assert texts(source) == ["a", "b\n", "c"]
    assert names(source) == ["text.txt#1", "text.txt#2", "text.txt#5"]
    assert source.skipped == {"empty documents": 2}


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ab<>\n ", max_size=60), st.integers(1, 7))
def test_reading_in_chunks_changes_nothing(text, chunk):
    before, files.CHUNK = files.CHUNK, chunk
    try:
        assert list(separated(io.StringIO(text, newline=""), "<>")) == text.split("<>")
        pieces = list(stretches(io.StringIO(text, newline="")))
    finally:
        files.CHUNK = before
    assert "".join(piece for piece, _ in pieces) == text
    assert [ended for _, ended in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    expected = [part for part in text.split("\n") if part.strip()]
    found = [line for _, part in paragraphs(io.StringIO(text, newline="")) for line in part.split("\n")]
    assert found == expected


def test_a_stream_is_cut_before_white_space_only(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 50)
    text = "the quick brown fox, jumps over.\nthe lazy dog   and on " * 20
    pieces = [piece for piece, _ in stretches(io.StringIO(text, newline=""))]
    assert len(pieces) > 5
    for before, after in pairwise(pieces):
        assert before[-1].isalnum()
        assert after[0].isspace()


def test_a_stream_marks_where_files_end(tmp_path, config):
    for name, text in {"a.txt": "one", "b.txt": "", "c.txt": " "}.items():
        (tmp_path / name).write_text(text)
    source = open_source(config(source="text", path=str(tmp_path), block_size=8))
    assert source.is_stream
    assert [(document.parts[0][0], document.ended) for document in source] == [("one", True), (" ", True)]
    assert source.skipped == {"empty files": 1}


def test_gzip_and_byte_order_marks_are_read_through(config, text_file):
    path = text_file(gzip.compress(b"\xef\xbb\xbfline one\r\nline two"), "t.txt.gz")
    assert texts(open_source(config(source="text", path=path))) == ["line one\r\nline two"]


def test_patterns_name_files(tmp_path, config):
    for name in ("a/x.jsonl", "a/b/y.jsonl.gz", "a/b/z.log", "a/.hidden.jsonl", "c[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        record = b'{"text": "T"}'
        (tmp_path / name).write_bytes(gzip.compress(record) if name.endswith("gz") else record)

    def found(pattern):
        return names(open_source(config(source="jsonl", path=str(tmp_path / pattern))))

    assert found("a/**/*.jsonl*") == ["b/y.jsonl.gz:1", "x.jsonl:1"]
    assert found("**/[yz].*") == ["a/b/y.jsonl.gz:1", "a/b/z.log:1"]
    assert found("a/?/*.log") == ["b/z.log:1"]
    assert found("c[1].txt") == ["c[1].txt:1"]  # a file of this name is no pattern
    with pytest.raises(ValueError, match=r"data\.path=.*/a/\*\.txt: no file has such a name"):
        found("a/*.txt")
    source = open_source(config(source="text", path=str(tmp_path / "a" / "*" / "*.log")))
    assert texts(source) == ['{"text": "T"}']


def test_patterns_are_relative_to_where_one_is(tmp_path, config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "T"}')
    source = open_source(config(source="jsonl", path="*.jsonl"))
    assert names(source) == ["x.jsonl:1"]
    assert source.describe(1).endswith("1 documents (text)")


def test_bad_text_files_are_named(config, text_file, tmp_path):
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        list(open_source(config(source="text", path=text_file(b"caf\xe9", "latin.txt"))))
    for broken in (b"not gzip", gzip.compress(b"a" * 100_000)[:60]):
        with pytest.raises(ValueError, match=r"b\.txt\.gz: broken gzip"):
            list(open_source(config(source="text", path=text_file(broken, "b.txt.gz"))))
    with pytest.raises(ValueError, match="no such file or folder"):
        open_source(config(source="text", path=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no \.txt, .* file .*1 files of other kinds"):
        open_source(config(source="text", path=str(tmp_path / "empty")))


def test_a_file_that_changes_meanwhile_is_noticed(config, text_file):
    path = text_file("one")
    source = open_source(config(source="text", path=path))
    assert source.hash
    text_file("two, longer")
    with pytest.raises(ValueError, match="has changed since"):
        list(source)


def test_the_hash_knows_content_division_and_names(config, text_file):
    def of(**fields):
        return open_source(config(source="text", path=path, **fields)).hash

    path = text_file("a\n\nb")
    first = of()
    assert of() == of(validation=0.5, split_seed=3) == first
    assert len({first, of(documents="blank_line"), of(separator="b"), of(block_size=2)}) == 4
    os.utime(path, (1, 1))
    assert of() == first
    text_file("a\n\nc")
    assert of() != first


# --- jsonl --------------------------------------------------------------------------------------------


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_fields_are_detected_or_named(config, text_file):
    path = text_file(jsonl({"text": "a"}, {"text": "b", "more": 1}), "a.jsonl")
    source = open_source(config(source="jsonl", path=path))
    assert [document.parts for document in source] == [(("a", True, False),), (("b", True, False),)]
    assert names(source) == ["a.jsonl:1", "a.jsonl:2"]
    path = text_file(jsonl({"prompt": "p", "completion": "c"}), "b.jsonl")
    assert next(iter(open_source(config(source="jsonl", path=path)))).parts == (
        ("p\n", False, False),
        ("c", True, False),
    )
    path = text_file(jsonl({"question": "q", "answer": "a"}), "c.jsonl")
    source = open_source(config(source="jsonl", path=path, fields=["question", "answer"], between=""))
    assert next(iter(source)).parts == (("q", False, False), ("a", True, False))
    assert source.describe(1) == "c.jsonl, 1 documents (question → answer)"


def test_blank_lines_and_empty_documents_are_counted(config, text_file):
    path = text_file(jsonl({"text": ""}) + "\n \n" + jsonl({"text": "a"}), "a.jsonl")
    source = open_source(config(source="jsonl", path=path))
    for _ in range(2):
        assert names(source) == ["a.jsonl:4"]
        assert source.skipped == {"empty documents": 1, "blank lines": 2}
    path = text_file(jsonl({"prompt": "p", "completion": " "}, {"prompt": "", "completion": "c"}), "b.jsonl")
    source = open_source(config(source="jsonl", path=path))
    assert names(source) == ["b.jsonl:2"]
    assert source.skipped == {"empty completions": 1}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "a"', "not JSON"),
        (b'["text"]', "a JSON list, not an object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"txt": "a"}', r"no field 'text', or null in it \(it has txt\)"),
        (b'{"text": 3}', "field 'text' is a int, not text"),
        (b'{"text": null}', "field 'text' is a NoneType"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_malformed_lines_are_named_by_file_and_line(config, text_file, line, complaint):
    path = text_file(b'{"text": "good"}\n' + line + b"\n", "bad.jsonl")
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 2: .*{complaint}"):
        list(open_source(config(source="jsonl", path=path)))


def test_unknown_fields_ask_for_names(config, text_file):
    path = text_file(jsonl({"question": "q", "answer": "a"}), "q.jsonl")
    with pytest.raises(ValueError, match=r"line 1: neither .*\(question, answer\).*data\.fields"):
        list(open_source(config(source="jsonl", path=path)))


def test_gsm8k(shared_data, config):
    path = str(shared_data / "text" / "gsm8k_train.jsonl.gz")
    source = open_source(config(source="jsonl", path=path, fields=["question", "answer"]))
    documents = list(source)
    assert len(documents) == 7473
    assert documents[0].name == "gsm8k_train.jsonl.gz:1"
    assert [target for _, target, *_ in documents[0].parts] == [False, True]
    assert source.done == source.total


def test_a_store_is_no_text(config):
    with pytest.raises(ValueError, match="tokenized already"):
        open_source(config(source="store", path="x"))
