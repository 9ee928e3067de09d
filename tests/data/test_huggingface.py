import sys

import pytest

from multipack.data.huggingface import open_dataset, records_of_dataset
from multipack.data.sources import open_source

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ROWS = [{"messages": [USER, ANSWER], "score": 1.0}, {"messages": [USER], "score": 2.0}]


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="makes a data set of Hugging Face's library")


@pytest.fixture
def saved(datasets, tmp_path):
    path = tmp_path / "set"
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


def test_a_saved_set_is_read_row_by_row(saved, config):
    source = open_source(config(source="huggingface", path=str(saved)))
    (document,) = source
    assert document.name == "set:1"
    assert "".join(part.text for part in document.parts if part.is_target) == "Hello<|im_end|>"
    assert source.skipped == {"conversations without an answer": 1}
    assert (source.done, source.total) == (2, 2)
    assert source.describe(1) == "set, 1 documents (messages, chatml)"
    assert source.hash == open_source(config(source="huggingface", path=str(saved))).hash
    assert (
        source.hash != open_source(config(source="huggingface", path=str(saved), chat_template="llama3")).hash
    )


def test_the_hash_follows_the_rows(datasets, saved, config, tmp_path):
    datasets.Dataset.from_list([*ROWS, ROWS[0]]).save_to_disk(tmp_path / "other")
    hashes = {
        open_source(config(source="huggingface", path=str(path))).hash for path in (saved, tmp_path / "other")
    }
    assert len(hashes) == 2


def test_parts_of_a_saved_set(datasets, config, tmp_path):
    parts = {
        "train": datasets.Dataset.from_list([{"text": "a"}]),
        "test": datasets.Dataset.from_list([{"text": "b"}]),
    }
    path = tmp_path / "set"
    datasets.DatasetDict(parts).save_to_disk(path)
    source = open_source(config(source="huggingface", path=str(path), part="test"))
    assert [document.parts[0].text for document in source] == ["b"]
    with pytest.raises(ValueError, match=r"data\.part='dev': .* has the parts train, test"):
        open_source(config(source="huggingface", path=str(path), part="dev"))


def test_what_is_not_there_is_named(datasets, saved, config, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"data\.part='test': .* has no parts"):
        open_source(config(source="huggingface", path=str(saved), part="test"))
    with pytest.raises(ValueError, match=r"data\.subset='x': .* was saved as one set"):
        open_source(config(source="huggingface", path=str(saved), subset="x"))
    (saved / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.path=.*set, "):
        open_source(config(source="huggingface", path=str(saved)))


def test_streams_give_the_same_records(saved, config):
    stream = open_dataset(config(source="huggingface", path=str(saved), stream=True))
    whole = open_dataset(config(source="huggingface", path=str(saved)))
    assert list(records_of_dataset(stream)) == list(records_of_dataset(whole)) == ROWS
    with pytest.raises(ValueError, match=r"data\.stream=true is for training"):
        open_source(config(source="huggingface", path=str(saved), stream=True))


def test_records_of_tables_lose_what_they_do_not_have():
    assert list(records_of_dataset([{"messages": [{"role": "user", "tool_calls": None}]}])) == [
        {"messages": [{"role": "user"}]}
    ]


def test_the_package_is_named_where_it_is_missing(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"data\.source=huggingface needs .*multipack\[huggingface\]"):
        open_source(config(source="huggingface", path="x"))
