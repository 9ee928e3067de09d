import pytest

from multipack.data.text.data_config import DataConfig

TEXT, JSONL = {"source": "text", "path": "x"}, {"source": "jsonl", "path": "x"}
STREAM = {"source": "huggingface", "path": "x", "stream": True}
REFUSALS = [
    ({"source": "jsnl"}, r"data\.source='jsnl'.*nearest: jsonl"),
    ({"documents": "blank"}, r"data\.documents='blank'.*nearest: blank_line"),
    ({"overlong": "cut"}, r"data\.overlong='cut'"),
    ({"path": "x.txt"}, r"data\.path=x\.txt.*set data=text"),
    ({"source": "mixture", "path": "x", "paths": ["x", "y"]}, r"data\.path=x.*data\.paths"),
    ({"source": "text"}, r"data\.source=text needs data\.path"),
    ({"part": "test"}, r"data\.part=test.*huggingface"),
    ({"validation": 1.0}, r"data\.validation=1\.0"),
    ({"validation": float("nan")}, r"data\.validation=nan"),
    ({**TEXT, "documents": "separator"}, r"needs data\.separator"),
    ({**TEXT, "documents": "file", "separator": "-"}, r"data\.separator.*data\.documents=file"),
    ({**TEXT, "separator": r"\n\n"}, r"data\.separator=.*backslash"),
    ({**TEXT, "block_size": -1}, r"data\.block_size=-1"),
    ({**TEXT, "block_size": 1}, r"data\.block_size=1: at least 2"),
    ({**TEXT, "block_size": 8, "documents": "file"}, r"data\.block_size=8.*data\.documents=stream"),
    ({**TEXT, "fields": ["a"]}, r"data\.fields=\['a'\].*only with jsonl"),
    ({**TEXT, "overlap": 2, "overlong": "drop"}, r"data\.overlap=2.*data\.overlong=split"),
    ({**JSONL, "block_size": 8}, r"data\.block_size=8.*data\.overlong=split"),
    ({**JSONL, "documents": "file"}, r"data\.documents=file.*text"),
    ({**JSONL, "fields": ["a", "b", "c", "d"]}, r"data\.fields.*one name"),
    ({**JSONL, "fields": ["a", "a"]}, r"data\.fields=\['a', 'a'\].*differ"),
    ({**JSONL, "fields": [["a"], "b"]}, r"data\.fields=.*texts"),
    ({**JSONL, "special_tokens": ["<s>"]}, r"data\.special_tokens.*data\.chat_template=FILE"),
    ({**JSONL, "special_tokens": ["<s>"], "chat_template": "chatml"}, "those of chatml are known"),
    ({**JSONL, "special_tokens": ["a", "a"], "chat_template": "f.jinja"}, r"data\.special_tokens.*differ"),
    ({**JSONL, "stream": True}, r"data\.stream=True.*store, huggingface"),
    ({"patience_seconds": 0.0}, r"data\.patience_seconds=0\.0"),
    ({"source": "store", "path": "x", "dedup": True}, r"data\.dedup=True.*multipack prepare"),
    ({"source": "mixture", "paths": ["x", "y"], "dedup": True}, r"data\.dedup=True.*multipack prepare"),
    ({**STREAM, "dedup": True}, r"data\.dedup=True.*data\.stream"),
    ({**STREAM, "readers": 2}, r"data\.readers=2.*data\.stream"),
    ({"weights": [1.0]}, r"data\.weights=.*data\.source=mixture"),
    ({"source": "mixture", "paths": ["x"]}, r"data\.paths=\['x'\].*two token stores"),
    ({"source": "mixture", "paths": ["x/a", "x/b/../a"]}, r"data\.paths.*each once"),
    ({"source": "mixture", "paths": ["x", "x/shard-00000"]}, r"data\.paths.*none inside another"),
    ({"source": "mixture", "paths": ["x", "y"], "weights": [1.0]}, r"data\.weights=\[1\.0\]"),
    (
        {"source": "mixture", "paths": ["x", "y"], "weights": [1.0, float("nan")]},
        r"data\.weights=\[1\.0, nan\]",
    ),
]


def test_impossible_settings_are_refused_by_name():
    for fields, complaint in REFUSALS:
        with pytest.raises(ValueError, match=complaint):
            DataConfig(**fields).check()


def test_possible_settings_are_accepted():
    for fields in (
        {},
        {**TEXT, "block_size": 2},
        {**TEXT, "separator": "\n\n", "dedup": True},
        {**JSONL, "fields": ["q", "a"], "overlap": 4},
        {"source": "huggingface", "path": "x", "part": "test", "stream": True},
        {"source": "store", "path": "x", "stream": True},
        {"source": "store", "path": "x", "block_size": 64, "readers": 2},
        {"source": "mixture", "paths": ["x", "y"], "weights": [1.0, 3.0]},
    ):
        DataConfig(**fields).check()


def test_the_division_of_text_follows_from_other_settings():
    assert DataConfig(**TEXT).division == "file"
    assert DataConfig(**TEXT, separator="-").division == "separator"
    assert DataConfig(**TEXT, block_size=8).division == "stream"
    assert DataConfig(**TEXT, documents="blank_line").division == "blank_line"
