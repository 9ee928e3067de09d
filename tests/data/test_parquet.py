import json
import sys

import pytest

from multipack.data import parquet as room
from multipack.data.sources import open_source

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}


@pytest.fixture
def write(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="writes Parquet files")
    from pyarrow import parquet

    def make(records, name="a.parquet", **options):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / name, **options)
        return str(tmp_path / name)

    return make


def test_rows_are_records_and_only_used_columns_are_read(write, config, monkeypatch):
    records = [{"text": f"t{number}", "vector": [0.5] * 50} for number in range(2500)]
    path = write(records, row_group_size=700)
    monkeypatch.setattr(room, "ROWS", 100)
    source = open_source(config(source="parquet", path=path))
    documents = list(source)
    assert [document.parts[0].text for document in documents] == [record["text"] for record in records]
    assert (documents[0].name, documents[-1].name) == ("a.parquet:1", "a.parquet:2500")
    assert (source.done, source.total, source.unit) == (2500, 2500, "rows")
    assert source._reader.columns(["text", "vector"]) == ["text"]
    assert source.describe(2500) == "a.parquet, 2,500 documents (text)"


def test_a_missing_column_is_named_beside_those_that_are_there(write, config):
    path = write([{"prompt": "p", "answer": "a", "id": 1}])
    with pytest.raises(
        ValueError, match=r"row 1: neither .*\(prompt, answer, id\); name those that are meant"
    ):
        list(open_source(config(source="parquet", path=path)))
    with pytest.raises(ValueError, match=r"no field 'reply', or null in it \(it has prompt, answer, id\)"):
        list(open_source(config(source="parquet", path=path, fields=["prompt", "reply"])))


def test_no_more_than_about_a_row_group_is_in_memory(write, config, monkeypatch):
    import pyarrow

    texts = [f"{number:09}" * 1000 for number in range(2000)]  # 18 MB in 40 row groups
    path = write(
        [{"text": text} for text in texts], row_group_size=50, compression="none", use_dictionary=False
    )
    monkeypatch.setattr(room, "ROWS", 10)
    before = pyarrow.total_allocated_bytes()
    most = 0
    for number, document in enumerate(open_source(config(source="parquet", path=path))):
        assert document.parts[0].text == texts[number]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert 0 < most < 4 * 50 * 9000


def test_chats_are_the_same_as_in_jsonl(write, config, text_file):
    records = [
        {"messages": [USER, ANSWER], "tools": None},
        {"messages": [USER, CALL, {"role": "tool", "content": "3"}, ANSWER], "tools": [{"name": "f"}]},
        {"messages": [USER]},
    ]
    lines = text_file("".join(json.dumps(record) + "\n" for record in records), "a.jsonl")
    for template in ("", "llama3"):
        table = open_source(config(source="parquet", path=write(records), chat_template=template))
        objects = open_source(config(source="jsonl", path=lines, chat_template=template))
        assert [document.parts for document in table] == [document.parts for document in objects]
        assert table.skipped == objects.skipped == {"conversations without an answer": 1}
        assert table.chat_template == objects.chat_template
        assert all(document.closed for document in table)


def test_folders_and_patterns(write, config, tmp_path):
    write([{"text": "b"}], "in/b/x.parquet")
    write([{"text": "a"}], "in/a.parquet")
    (tmp_path / "in" / "c.txt").write_text("x")
    source = open_source(config(source="parquet", path=str(tmp_path / "in")))
    assert [document.name for document in source] == ["a.parquet:1", "b/x.parquet:1"]
    assert source.skipped == {"files of other kinds": 1}
    source = open_source(config(source="parquet", path=str(tmp_path / "in/**/x.parquet")))
    assert [document.name for document in source] == ["b/x.parquet:1"]


def test_bad_files_and_rows_are_named(write, config, tmp_path):
    (tmp_path / "no.parquet").write_bytes(b"PAR1 this is none PAR1")
    with pytest.raises(ValueError, match=r"no\.parquet: not a Parquet file"):
        open_source(config(source="parquet", path=str(tmp_path / "no.parquet")))
    path = write([{"text": "a"}, {"text": None}])
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: .*'text'"):
        list(open_source(config(source="parquet", path=path)))
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: neither .*\(other, more\)"):
        list(open_source(config(source="parquet", path=write([{"other": 1, "more": 2}]))))
    content = bytearray((tmp_path / write([{"text": "x" * 9999}] * 50, compression="none")).read_bytes())
    content[4:40] = b"\xff" * 36
    (tmp_path / "broken.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.parquet, after row 0: broken Parquet file"):
        list(open_source(config(source="parquet", path=str(tmp_path / "broken.parquet"))))


def test_the_package_is_named_where_it_is_missing(config, text_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"data\.source=parquet needs .*multipack\[parquet\]"):
        open_source(config(source="parquet", path=text_file("x", "a.parquet")))
